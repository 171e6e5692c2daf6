"""The `openai` library."""

from __future__ import annotations

import asyncio

import openai
from checks import CAPITAL, COUNT, KEY, MODEL, URL, check, raises, run

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=120)


def ask(text: str) -> dict:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 60}


@check
def a_chat_answer():
    answer = client.chat.completions.create(**ask(CAPITAL))
    [choice] = answer.choices
    assert "Paris" in choice.message.content and choice.message.role == "assistant" and choice.finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == MODEL
    usage = answer.usage
    assert usage.prompt_tokens > 10 and usage.completion_tokens > 5
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@check
def a_stream_in_order():
    whole = client.chat.completions.create(**ask(COUNT))
    chunks = list(client.chat.completions.create(**ask(COUNT), stream=True, stream_options={"include_usage": True}))
    *parts, last = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].finish_reason is None for chunk in parts[:-1])
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert "".join(chunk.choices[0].delta.content or "" for chunk in parts) == whole.choices[0].message.content
    assert last.choices == [] and last.usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


@check
def the_stream_helper():
    with client.chat.completions.stream(**ask(CAPITAL)) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds[0] == "chunk" and "content.delta" in kinds and "content.done" in kinds
    assert "Paris" in final.choices[0].message.content and final.choices[0].finish_reason == "stop"


@check
def completions_stops_and_logprobs():
    answer = client.completions.create(model=MODEL, prompt="one, two, three,", temperature=0, max_tokens=20, stop=[" six"], logprobs=2)
    assert "four" in answer.choices[0].text and "six" not in answer.choices[0].text and answer.choices[0].finish_reason == "stop"
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens
    two = client.completions.create(model=MODEL, prompt=["a b c", "1 2 3"], temperature=0, max_tokens=5)
    assert [choice.index for choice in two.choices] == [0, 1] and {choice.finish_reason for choice in two.choices} == {"length"}


@check
def chat_logprobs_and_choices():
    answer = client.chat.completions.create(**{**ask(CAPITAL), "temperature": 1.0}, n=3, logprobs=True, top_logprobs=3, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in choice.logprobs.content)


@check
def models():
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@check
def errors():
    error = raises(openai.NotFoundError, client.chat.completions.create, **{**ask("x"), "model": "other"})
    assert error.status_code == 404 and error.param == "model" and "other" in error.message
    error = raises(openai.BadRequestError, client.chat.completions.create, **{**ask("x"), "temperature": 5})
    assert error.param == "temperature"
    error = raises(openai.BadRequestError, client.chat.completions.create, **{**ask("x"), "max_tokens": 10**6}, stream=True)
    assert "context" in error.message
    other = openai.OpenAI(base_url=f"{URL}/v1", api_key="wrong", max_retries=0)
    assert raises(openai.AuthenticationError, other.models.list).status_code == 401


@check
async def many_at_once():
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=120) as several:
        answers = await asyncio.gather(*(several.chat.completions.create(**ask(CAPITAL)) for _ in range(16)))
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert len({answer.id for answer in answers}) == 16


@check
def a_stream_that_is_left():
    stream = client.chat.completions.create(**{**ask(COUNT), "max_tokens": 1000}, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    assert client.chat.completions.create(**ask(CAPITAL)).choices[0].finish_reason == "stop"


run("openai")
