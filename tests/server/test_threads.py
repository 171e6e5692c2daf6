"""Threads of other engines' trackers about tools, thoughts and structure, each by its number. Those of a format alone are in
`tests/text/parsing/test_traces.py`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from canter.core.structured_outputs import StructuredOutputsParams
from canter.text.thinking import ThinkingMarkers
from tests.fake_core import FakeCore, say
from tests.server.helpers import Harness, events, with_harness
from tests.server.test_tools import CALL, PARSERS, TOOLS, WEATHER, both, chat, message, respond

START, END = 258, 259
"""Tokens of the fake vocabulary that are no text, taken for a thought's markers."""
USER = [{"role": "user", "content": "hi"}]
SHAPE = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}


def wanted(path: str, **fields: Any) -> StructuredOutputsParams:
    """What the engine is told of a request's constraint, where the model is one that thinks."""

    async def body(h: Harness) -> StructuredOutputsParams:
        state = h.app.state.server
        state.text = replace(state.text, thinking=ThinkingMarkers([START], [END]))
        response = await h.http.post(path, json=fields)
        assert response.status_code == 200, response.text
        constraint = h.engine.core.seen[0].sampling.structured_outputs
        assert constraint is not None
        return constraint

    found: StructuredOutputsParams = with_harness(body, parsers=PARSERS)
    return found


@pytest.mark.parametrize("limit", range(1, 12 + len("a</think>b" + CALL)))
def test_47903_and_47137_a_call_cut_anywhere_is_the_same_whole_and_streamed(limit: int) -> None:
    found = both("a</think>b" + CALL, tools=TOOLS, max_tokens=limit)
    # A marker that is cut off in its midst is text; a whole one never is.
    assert "<tool_call>" not in (found["content"] or "") and "</think>" not in (found["reasoning"] or "")
    assert found["finish_reason"] == ("tool_calls" if limit > len(("a</think>b" + CALL).encode()) else "length")


def test_31443_and_18412_streamed_arguments_are_those_of_the_whole_answer() -> None:
    arguments = {"city": 'a "b" {c} [d] \\ é 🎉', "list": [1, True, None, {"deep": [[]]}], "empty": {}}
    text = f"</think><tool_call>{json.dumps({'name': 'weather', 'arguments': arguments}, ensure_ascii=False)}</tool_call>"
    [call] = both(text, tools=TOOLS)["calls"]
    assert json.loads(call["arguments"]) == arguments


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_json": WEATHER}, StructuredOutputsParams(json=WEATHER)),
        ({"guided_regex": "a+"}, StructuredOutputsParams(regex="a+")),
        ({"guided_choice": ["a", "b"]}, StructuredOutputsParams(choice=["a", "b"])),
        ({"guided_grammar": 'root ::= "a"'}, StructuredOutputsParams(grammar='root ::= "a"')),
    ],
)
def test_53975_the_old_names_of_constraints_constrain(fields: dict[str, Any], expected: StructuredOutputsParams) -> None:
    async def body(h: Harness) -> None:
        assert (await h.chat(**fields, max_tokens=4)).status_code == 200
        assert (await h.complete(**fields, max_tokens=4)).status_code == 200
        assert [request.sampling.structured_outputs for request in h.engine.core.seen] == [expected, expected]

    with_harness(body)


def test_44012_a_responses_format_holds_behind_the_thought() -> None:
    text = {"format": {"type": "json_schema", "name": "w", "schema": WEATHER}}
    found = wanted("/v1/responses", input="hi", max_output_tokens=4, text=text)
    assert found == StructuredOutputsParams(json=WEATHER, thought_start_ids=[START], thought_end_ids=[END])
    answer = respond('Hm.</think>{"city": "B"}', text=text).json()
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]


def test_57726_completions_are_constrained_from_their_first_token() -> None:
    found = wanted("/v1/completions", prompt="hi", max_tokens=4, response_format=SHAPE)
    assert found == StructuredOutputsParams(json=WEATHER)


def test_50948_and_13038_thoughts_are_free_and_the_answer_obeys() -> None:
    """Also 54881, 53469, 50938 and 11363. That the mask begins with the answer, thought or none, is in `tests/engine`."""
    found = wanted("/v1/chat/completions", messages=USER, max_tokens=4, response_format=SHAPE)
    assert found == StructuredOutputsParams(json=WEATHER, thought_start_ids=[START], thought_end_ids=[END])
    message = chat('Hm.</think>{"city": "B"}', response_format=SHAPE).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", '{"city": "B"}')


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat"])
def test_50948_in_every_dialect(path: str) -> None:
    shape = {"output_config": {"format": {"type": "json_schema", "schema": WEATHER}}} if path == "/v1/messages" else {"format": WEATHER}
    found = wanted(path, messages=USER, **({"max_tokens": 4} if path == "/v1/messages" else {}), **shape)
    assert found.thought_end_ids == [END]


CONTENT = 'Use <tool> or {"name": 1} or [TOOL_CALLS], or <tool_cal, and then: \n\n- a\n- b  \n'


def test_sglang_34214_content_is_complete_though_tools_are_offered() -> None:
    assert both("</think>" + CONTENT, tools=TOOLS)["content"] == CONTENT


def test_ollama_9632_and_5796_content_streams_though_tools_are_offered() -> None:
    deltas = [chunk["choices"][0]["delta"].get("content") for chunk in events(chat("</think>One two", tools=TOOLS, stream=True))]
    pieces = [delta for delta in deltas if delta]
    assert "".join(pieces) == "One two" and len(pieces) > 1


def test_ollama_12557_streamed_calls_are_whole_and_those_of_the_whole_answer() -> None:
    async def body(h: Harness) -> tuple[Any, list[Any]]:
        request = {"messages": USER, "tools": TOOLS}
        whole = await h.http.post("/api/chat", json={**request, "stream": False})
        streamed = await h.http.post("/api/chat", json=request)
        return whole.json(), [json.loads(line) for line in streamed.text.splitlines()]

    whole, lines = with_harness(body, FakeCore(say("</think>So." + CALL + CALL)), parsers=PARSERS)
    calls = [call["function"] for line in lines for call in line["message"].get("tool_calls", [])]
    assert len(calls) == 2 and calls == [call["function"] for call in whole["message"]["tool_calls"]]
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["done_reason"] == whole["done_reason"]


def test_ollama_4357_every_answer_says_why_it_ended() -> None:
    for text, limit, expected in (("</think>" + CALL, 400, "tool_calls"), ("</think>a", 400, "stop"), ("</think>abc", 10, "length")):
        assert both(text, tools=TOOLS, max_tokens=limit)["finish_reason"] == expected
        reasons = {"tool_calls": "tool_use", "stop": "end_turn", "length": "max_tokens"}
        tools = [{"name": "weather", "input_schema": WEATHER}]
        assert message(text, tools=tools, max_tokens=limit).json()["stop_reason"] == reasons[expected]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>a</think>b", "a", "b"),
        ("a</think>b", "a", "b"),
        ("<think>a", "a", None),
        ("a</think>b<think>c</think>d", "ac", "bd"),
    ],
)
def test_40816_text_around_the_markers_has_its_place(text: str, reasoning: str, content: str | None) -> None:
    found = both(text)
    assert (found["reasoning"], found["content"] or None) == (reasoning, content)


@pytest.mark.parametrize("stream", [False, True])
def test_36632_thoughts_that_nobody_asked_for_are_told_nowhere(stream: bool) -> None:
    response = chat("secret</think>b" + CALL, tools=TOOLS, include_reasoning=False, stream=stream)
    assert "secret" not in response.text if not stream else "".join(d for d in _texts(response)) == "b"


def _texts(response: Any) -> list[str]:
    """Everything that deltas say in words."""
    deltas = [chunk["choices"][0]["delta"] for chunk in events(response)]
    return [delta.get(name) or "" for delta in deltas for name in ("reasoning", "reasoning_content", "content")]


def test_14399_a_stop_string_in_a_thought_ends_nothing() -> None:
    """Also 14170, 51641 and 15188."""

    async def body(h: Harness) -> None:
        state = h.app.state.server
        state.text = replace(state.text, thinking=ThinkingMarkers([*b"<think>"], [*b"</think>"]))
        answer = (await h.chat(stop=["STOP"], max_tokens=60)).json()["choices"][0]
        assert (answer["message"]["reasoning"], answer["message"]["content"]) == ("I STOP not", "now ")
        assert answer["stop_reason"] == "STOP"

    with_harness(body, FakeCore(say("<think>I STOP not</think>now STOP here")), parsers=PARSERS)


def test_litellm_30043_and_45367_an_anthropic_stream_begins_with_a_whole_message() -> None:
    text = message("a</think>b", stream=True).text
    told = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert told[0]["type"] == "message_start"
    begun = told[0]["message"]
    assert (begun["type"], begun["role"], begun["content"], begun["stop_reason"]) == ("message", "assistant", [], None)
    assert begun["usage"]["input_tokens"] > 0
    [end] = [event for event in told if event["type"] == "message_delta"]
    assert end["usage"]["output_tokens"] == len("a</think>b") + 1
