"""Responses from the bundled model, over the `openai` client."""

from __future__ import annotations

import openai
import pytest

from tests.e2e.conftest import Server, wait_for

pytestmark = pytest.mark.real


@pytest.fixture
def client(bundled_server: Server) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{bundled_server.url}/v1", api_key="unused", max_retries=0, timeout=120, _strict_response_validation=True
    )


def test_answer_stream_background_and_chat_say_the_same(client: openai.OpenAI, bundled_server: Server) -> None:
    question = "What is the capital of France? Answer in one sentence."
    options = dict(model="smol", input=question, temperature=0, max_output_tokens=40)
    whole = client.responses.create(**options)
    assert "Paris" in whole.output_text and whole.status == "completed"
    with client.responses.stream(**options) as stream:
        streamed = stream.get_final_response()
    background = client.responses.create(**options, background=True)
    wait_for(lambda: client.responses.retrieve(background.id).status == "completed", 60, "the response to end")
    chat = client.chat.completions.create(model="smol", messages=[{"role": "user", "content": question}], temperature=0, max_tokens=40)
    assert whole.output_text == streamed.output_text == chat.choices[0].message.content
    assert client.responses.retrieve(background.id).output_text == whole.output_text
    assert whole.usage.output_tokens == streamed.usage.output_tokens == chat.usage.completion_tokens
    bundled_server.wait_idle()


def test_a_conversation_goes_on_as_if_it_were_sent_whole(client: openai.OpenAI) -> None:
    options = dict(model="smol", temperature=0, max_output_tokens=30)
    first = client.responses.create(input="My name is Ada. Say hello to me.", **options)
    second = client.responses.create(input="What is my name?", previous_response_id=first.id, **options)
    turns = [
        {"role": "user", "content": "My name is Ada. Say hello to me."},
        *first.output,
        {"role": "user", "content": "What is my name?"},
    ]
    whole = client.responses.create(input=turns, **options)
    assert second.output_text == whole.output_text and second.usage.input_tokens == whole.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_cancelling_frees_the_engine(client: openai.OpenAI, bundled_server: Server) -> None:
    made = client.responses.create(
        model="smol", input="Tell me a story.", max_output_tokens=1500, background=True, extra_body={"ignore_eos": True}
    )
    wait_for(lambda: client.responses.retrieve(made.id).output_text, 60, "some text")
    cancelled = client.responses.cancel(made.id)
    assert cancelled.status == "cancelled" and cancelled.usage.output_tokens < 1500
    bundled_server.wait_idle()
