"""The `ollama` library."""

from __future__ import annotations

import asyncio
import json

import ollama
from checks import CAPITAL, CITY, COUNT, FUNCTIONS, KEY, MODEL, URL, check, raises, run, shown_how

HEADERS = {"Authorization": f"Bearer {KEY}"}
client = ollama.Client(host=URL, headers=HEADERS, timeout=120)
GREEDY = {"temperature": 0, "num_predict": 60}


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def check_counts(end) -> None:
    assert end.done and end.total_duration >= end.eval_duration > 0 and end.prompt_eval_duration > 0 and end.load_duration == 0
    assert end.prompt_eval_count > 10 and end.eval_count > 5


@check
def a_chat_answer():
    answer = client.chat(MODEL, messages=user(CAPITAL), options=GREEDY)
    assert "Paris" in answer.message.content and answer.message.role == "assistant" and answer.done_reason == "stop"
    assert answer.model == MODEL and answer.created_at
    check_counts(answer)


@check
def a_chat_stream_in_order():
    whole = client.chat(MODEL, messages=user(COUNT), options=GREEDY)
    *parts, last = client.chat(MODEL, messages=user(COUNT), options=GREEDY, stream=True, keep_alive="5m")
    assert len(parts) > 5 and not any(part.done for part in parts) and last.message.content == ""
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert (last.done_reason, last.eval_count) == (whole.done_reason, whole.eval_count)
    check_counts(last)


@check
def generating_goes_on_from_the_context():
    first = client.generate(MODEL, "My name is Robert. Say hello to me.", system="You are brief.", options=GREEDY)
    assert first.response and len(first.context) == first.prompt_eval_count + first.eval_count
    second = client.generate(MODEL, "What is my name?", context=first.context, options=GREEDY)
    assert second.response and second.prompt_eval_count > len(first.context)
    assert second.context[: len(first.context)] == first.context


@check
def raw_texts_and_lengths():
    *parts, last = client.generate(MODEL, "one, two, three,", raw=True, stream=True, options={"temperature": 0, "num_predict": 6})
    assert "four" in "".join(part.response for part in parts)
    assert last.done_reason == "length" and last.eval_count == 6 and last.context is None
    answer = client.generate(MODEL, "one, two, three,", raw=True, options={"temperature": 0, "num_predict": 60, "stop": [" six"]})
    assert answer.done_reason == "stop" and "six" not in answer.response


@check
def the_model():
    [listed] = client.list().models
    assert listed.model == MODEL and len(listed.digest) == 64
    shown = client.show(MODEL)
    assert "completion" in shown.capabilities and "<|im_start|>" in shown.template
    assert any(name.endswith(".context_length") and value == 2048 for name, value in shown.modelinfo.items())
    [loaded] = client.ps().models
    assert loaded.model == MODEL and loaded.context_length == 2048
    assert client.generate(MODEL).done_reason == "load"
    assert "Paris" in client.chat(f"{MODEL}:latest", messages=user(CAPITAL), options=GREEDY).message.content


TOOLS = [{"type": "function", "function": {"name": name, "description": f"the {name} of a city", "parameters": CITY}} for name in FUNCTIONS]


@check
def calls():
    assert "tools" in client.show(MODEL).capabilities
    answer = client.chat(MODEL, messages=shown_how(), tools=TOOLS, options=GREEDY)
    [call] = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Paris"})
    assert answer.message.content == "" and answer.done_reason == "stop"
    parts = list(client.chat(MODEL, messages=shown_how(), tools=TOOLS, options=GREEDY, stream=True))
    assert [call.function for part in parts for call in part.message.tool_calls or ()] == [call.function]
    result = {"role": "tool", "tool_name": "weather", "content": "rain"}
    assert client.chat(MODEL, messages=[*shown_how(), answer.message, result], tools=TOOLS, options=GREEDY).done


@check
def calls_of_a_python_function():
    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: Where.
        """
        return f"rain in {city}"

    [call] = client.chat(MODEL, messages=shown_how(), tools=[weather], options=GREEDY).message.tool_calls
    assert weather(**call.function.arguments) == "rain in Paris"


@check
def forms():
    options = {"temperature": 0, "num_predict": 120}
    answer = client.chat(MODEL, messages=user(CAPITAL), format=CITY, options=options)
    assert set(json.loads(answer.message.content)) == {"city"}
    parts = client.generate(MODEL, CAPITAL, format=CITY, options=options, stream=True)
    assert set(json.loads("".join(part.response for part in parts))) == {"city"}
    assert client.chat(MODEL, messages=user(CAPITAL), format="json", options=options).message.content.startswith("{")


@check
def errors():
    error = raises(ollama.ResponseError, client.chat, "other", messages=user("x"))
    assert error.status_code == 404 and "other" in error.error
    error = raises(ollama.ResponseError, client.chat, MODEL, messages=user("x"), think=True)
    assert error.status_code == 400 and "does not support thinking" in error.error
    error = raises(ollama.ResponseError, client.chat, MODEL, messages=user("x"), options={"mirostat": 2})
    assert error.status_code == 400 and "options.mirostat" in error.error
    error = raises(ollama.ResponseError, lambda: list(client.generate(MODEL, "x", stream=True, options={"temperature": -1})))
    assert error.status_code == 400 and "options.temperature" in error.error
    error = raises(ollama.ResponseError, ollama.Client(host=URL, headers={"Authorization": "Bearer wrong"}).list)
    assert error.status_code == 401
    assert raises(ollama.ResponseError, client.embed, MODEL, "x").status_code == 404


@check
async def many_at_once():
    several = ollama.AsyncClient(host=URL, headers=HEADERS, timeout=120)
    answers = await asyncio.gather(*(several.chat(MODEL, messages=user(CAPITAL), options=GREEDY) for _ in range(16)))
    assert len({answer.message.content for answer in answers}) == 1


run("ollama")
