"""`/v1/responses` as the `openai` client sees it: a server process over a fake engine process."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import wait_for
from tests.server.test_serve import Process, server


@pytest.fixture(scope="module")
def shared() -> Iterator[Process]:
    with server("--delay", "0.005", api_key=["secret"]) as process:
        yield process


@pytest.fixture(scope="module")
def client(shared: Process) -> openai.OpenAI:
    """Strict: an answer that lacks a field, or has a wrong type, raises."""
    return openai.OpenAI(base_url=shared.url + "/v1", api_key="secret", max_retries=0, timeout=30, _strict_response_validation=True)


def test_create_and_retrieve(client: openai.OpenAI) -> None:
    made = client.responses.create(model="m", input="hi", max_output_tokens=8, metadata={"a": "b"})
    assert made.status == "incomplete" and made.incomplete_details.reason == "max_output_tokens"
    assert len(made.output_text) == 8 and made.usage.output_tokens == 8 and made.metadata == {"a": "b"}
    assert client.responses.retrieve(made.id) == made
    items = client.responses.input_items.list(made.id).data
    assert [(item.role, item.content[0].text) for item in items] == [("user", "hi")]
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_the_accumulated_stream_is_the_stored_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model="m", input="hello", max_output_tokens=20, extra_body={"stop": ["ell"]}) as stream:
        seen = list(stream)
        final = stream.get_final_response()
    assert [event.type for event in seen[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert [event.type for event in seen[-4:]] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert {event.type for event in seen[4:-4]} == {"response.output_text.delta"}
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    deltas = [event for event in seen if event.type == "response.output_text.delta"]
    assert deltas[-1].snapshot == "".join(event.delta for event in deltas) == final.output_text
    assert client.responses.retrieve(final.id).output_text == final.output_text


def test_raw_events_are_those_of_the_helper(client: openai.OpenAI) -> None:
    raw = client.responses.create(model="m", input="hello", max_output_tokens=20, extra_body={"stop": ["ell"]}, stream=True)
    with client.responses.stream(model="m", input="hello", max_output_tokens=20, extra_body={"stop": ["ell"]}) as stream:
        assert kinds(raw) == kinds(stream)


def kinds(events: Iterable[Any]) -> list[str]:
    """Types of events; how many deltas a text comes in is a matter of time."""
    return [kind for kind, _ in itertools.groupby(event.type for event in events)]


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    first = client.responses.create(model="m", input="one", max_output_tokens=4)
    second = client.responses.create(model="m", input="two", max_output_tokens=4, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > 2 * first.usage.input_tokens - 10
    by_hand = client.responses.create(
        model="m", input=[{"role": "user", "content": "one"}, *first.output, {"role": "user", "content": "two"}]
    )
    assert by_hand.usage.input_tokens == second.usage.input_tokens
    texts = [item.content[0].text for item in client.responses.input_items.list(second.id, order="asc")]
    assert texts == ["one", first.output_text, "two"]


def test_the_background_is_polled(client: openai.OpenAI) -> None:
    made = client.responses.create(model="m", input="hi", max_output_tokens=30, background=True)
    assert made.status == "queued" and made.background
    wait_for(lambda: client.responses.retrieve(made.id).status not in ("queued", "in_progress"), 20, "the response to end")
    done = client.responses.retrieve(made.id)
    assert done.status == "incomplete" and len(done.output_text) == 30


def test_the_background_outlives_its_reader_and_is_read_from_where_it_left(client: openai.OpenAI) -> None:
    stream = client.responses.create(model="m", input="hi", max_output_tokens=60, background=True, stream=True)
    seen = [next(iter(stream)) for _ in range(6)]
    response_id = seen[0].response.id
    stream.close()
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number))
    assert [event.sequence_number for event in seen + rest] == list(range(len(seen) + len(rest)))
    assert rest[-1].type == "response.incomplete" and len(rest[-1].response.output_text) == 60
    with client.responses.stream(response_id=response_id, starting_after=10) as again:
        assert [event.type for event in again] == [event.type for event in (seen + rest)[11:]]


def test_cancelling(client: openai.OpenAI, shared: Process) -> None:
    made = client.responses.create(model="m", input="hi", max_output_tokens=450, background=True)
    wait_for(lambda: client.responses.retrieve(made.id).output_text, 20, "some text")
    cancelled = client.responses.cancel(made.id)
    assert cancelled.status == "cancelled" and 0 < len(cancelled.output_text) < 450
    assert client.responses.cancel(made.id) == cancelled
    shared_idle(shared)


def shared_idle(process: Process) -> None:
    def idle() -> bool:
        text = httpx.get(process.url + "/metrics").text
        lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
        return all(line.endswith(" 0.0") for line in lines)

    wait_for(idle, 20, "no request to run")


def test_a_foreground_stream_ends_with_its_client(client: openai.OpenAI, shared: Process) -> None:
    stream = client.responses.create(model="m", input="hi", max_output_tokens=450, stream=True)
    response_id = next(iter(stream)).response.id
    stream.close()
    shared_idle(shared)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response_id)


def test_logprobs(client: openai.OpenAI) -> None:
    made = client.responses.create(
        model="m", input="hi", max_output_tokens=3, include=["message.output_text.logprobs"], top_logprobs=2, temperature=0
    )
    [part] = made.output[0].content
    assert [entry.token for entry in part.logprobs] == list(part.text)
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model="m", input="hi", temperature=9)
    assert error.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="hi")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="m", input="hi", previous_response_id="resp_gone")
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="m", input="hi", tools=[{"type": "web_search"}])
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").responses.retrieve("resp_x")
