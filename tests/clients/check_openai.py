"""The `openai` library."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import openai
from checks import ASK, CAPITAL, CITY, COUNT, FUNCTIONS, KEY, MODEL, URL, check, raises, run, shown_how
from pydantic import BaseModel, Field

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


TOOLS = [{"type": "function", "function": {"name": name, "description": f"the {name} of a city", "parameters": CITY}} for name in FUNCTIONS]


def summed(chunks) -> list[list[str]]:
    """Name and arguments of each call of a stream."""
    calls: list[list[str]] = []
    for chunk in chunks:
        for part in chunk.choices[0].delta.tool_calls or ():
            if part.index == len(calls):
                assert part.id and part.type == "function"
                calls.append([part.function.name, ""])
            calls[part.index][1] += part.function.arguments or ""
    return calls


@check
def calls_that_must_be():
    for choice in ("required", {"type": "function", "function": {"name": "time"}}):
        body = {**ask(ASK), "max_tokens": 120, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        [found] = client.chat.completions.create(**body).choices
        [call] = found.message.tool_calls
        assert set(json.loads(call.function.arguments)) == {"city"} and found.finish_reason == (
            "tool_calls" if choice == "required" else "stop"
        )
        assert summed(client.chat.completions.create(**body, stream=True)) == [[call.function.name, call.function.arguments]]
    assert call.function.name == "time"


@check
def calls_that_the_model_chooses():
    body = {**ask(ASK), "messages": shown_how(), "tools": TOOLS}
    [found] = client.chat.completions.create(**body).choices
    [call] = found.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    assert found.finish_reason == "tool_calls" and found.message.content is None
    assert summed(client.chat.completions.create(**body, stream=True)) == [["weather", call.function.arguments]]
    with client.chat.completions.stream(**body) as stream:
        kinds = {event.type for event in stream}
        [final] = stream.get_final_completion().choices
    assert "tool_calls.function.arguments.delta" in kinds and final.message.tool_calls[0].function.arguments == call.function.arguments
    [plain] = client.chat.completions.create(**ask(CAPITAL), tools=TOOLS).choices
    assert "Paris" in plain.message.content and plain.finish_reason == "stop" and not plain.message.tool_calls


class Place(BaseModel):
    """A city and its country."""

    city: Annotated[str, Field(max_length=20)]
    country: Annotated[str, Field(max_length=20)]


@check
def answers_parsed_into_classes():
    body = {**ask(CAPITAL), "max_tokens": 120}
    answer = client.chat.completions.parse(**body, response_format=Place)
    assert isinstance(answer.choices[0].message.parsed, Place)
    tool = openai.pydantic_function_tool(Place, name="place")
    answer = client.chat.completions.parse(**body, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Place)


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
