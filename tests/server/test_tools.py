"""Thoughts and tool calls in every dialect that has them: whole and streamed answers say the same."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from canter.core.structured_outputs import StructuredOutputsParams
from canter.server.tools import ToolUse, choose, forced_output
from canter.text.parsing.answer import gather
from canter.text.parsing.events import CallArguments, CallEnd, CallStart, ContentText, ReasoningText
from canter.text.parsing.options import Tool
from tests.fake_core import FakeCore, say
from tests.server.helpers import Harness, error_of, events, with_harness

PARSERS = ("hermes", "deepseek_r1")
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": WEATHER}} for name in ("weather", "time")]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
SECOND = '\n<tool_call>\n{"name": "time", "arguments": {"city": "Rom"}}\n</tool_call>'


def chat(text: str, parsers: tuple[str | None, str | None] = PARSERS, server: dict | None = None, **fields: Any) -> httpx.Response:
    """A chat whose answer is this text."""
    return with_harness(lambda h: h.chat(**{"max_tokens": 400, **fields}), FakeCore(say(text)), parsers=parsers, **(server or {}))


def streamed(response: httpx.Response) -> dict[str, Any]:
    """What the chunks of a stream add up to, checked for their form."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    finishes = []
    for chunk in events(response):
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content", "")
            message["reasoning"] += delta.get("reasoning", "")
            for call in delta.get("tool_calls", []):
                if call["index"] == len(message["tool_calls"]):
                    assert call["type"] == "function" and call["function"]["name"] and call["id"]
                    message["tool_calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                else:
                    assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                message["tool_calls"][call["index"]]["arguments"] += call["function"].get("arguments", "")
            if choice["finish_reason"] is not None:
                finishes.append(choice["finish_reason"])
    [message["finish_reason"]] = finishes
    return message


def both(text: str, **fields: Any) -> dict[str, Any]:
    """The message of an answer, checked to be that of a stream too; ids of calls aside."""
    answer = chat(text, **fields).json()
    [choice] = answer["choices"]
    message = choice["message"]
    stream = streamed(chat(text, stream=True, **fields))
    calls = [call["function"] for call in message["tool_calls"]]
    assert [{"name": call["name"], "arguments": call["arguments"]} for call in stream["tool_calls"]] == calls
    assert (stream["content"], stream["reasoning"]) == (message["content"] or "", message["reasoning"] or "")
    assert stream["finish_reason"] == choice["finish_reason"]
    return {**message, "calls": calls, "finish_reason": choice["finish_reason"], "usage": answer["usage"]}


def test_thoughts_content_and_calls() -> None:
    found = both("Hm.</think>Let me see." + CALL + SECOND, tools=TOOLS)
    assert (found["reasoning"], found["content"], found["finish_reason"]) == ("Hm.", "Let me see.", "tool_calls")
    assert [(call["name"], json.loads(call["arguments"])) for call in found["calls"]] == [
        ("weather", {"city": "Köln"}),
        ("time", {"city": "Rom"}),
    ]
    assert set(found["usage"]["completion_tokens_details"]) == {"reasoning_tokens"}


def test_a_call_alone_has_no_content() -> None:
    assert both("</think>" + CALL, tools=TOOLS)["content"] is None


@pytest.mark.parametrize(("parsers", "text"), [(("hermes", None), CALL), (PARSERS, "</think>" + CALL)])
def test_what_looks_like_a_call_is_content_where_no_tools_are(parsers: tuple[str, str | None], text: str) -> None:
    found = both(text, parsers=parsers)
    assert (found["content"], found["finish_reason"], found["calls"]) == (CALL, "stop", [])


def test_only_one_call_where_they_may_not_be_parallel() -> None:
    found = both("</think>" + CALL + SECOND, tools=TOOLS, parallel_tool_calls=False)
    assert [call["name"] for call in found["calls"]] == ["weather"]


def test_tool_choice_none_shows_no_calls() -> None:
    found = both("a</think>b" + CALL, tools=TOOLS, tool_choice="none")
    assert found["calls"] == [] and found["finish_reason"] == "stop"


def test_a_call_that_is_cut_off_ends_with_length() -> None:
    found = both("</think>" + CALL, tools=TOOLS, max_tokens=60)
    assert found["finish_reason"] == "length"
    assert [call["name"] for call in found["calls"]] == ["weather"] and '{"city": "K'.startswith(found["calls"][0]["arguments"][:11])


def test_a_named_function_ends_with_stop_and_obeys_its_schema() -> None:
    choice = {"type": "function", "function": {"name": "time"}}
    found = both('{"city": "Bonn"}', parsers=None, tools=TOOLS, tool_choice=choice)
    assert (found["calls"], found["finish_reason"]) == ([{"name": "time", "arguments": '{"city": "Bonn"}'}], "stop")


def test_required_calls_are_a_list() -> None:
    calls = [{"name": "weather", "parameters": {"city": "Bonn"}}, {"name": "time", "parameters": {"city": "Rom"}}]
    found = both(json.dumps(calls), parsers=None, tools=TOOLS, tool_choice="required")
    assert [(call["name"], json.loads(call["arguments"])) for call in found["calls"]] == [
        ("weather", {"city": "Bonn"}),
        ("time", {"city": "Rom"}),
    ]
    assert found["finish_reason"] == "tool_calls"


def test_thoughts_can_be_left_out_or_told_twice() -> None:
    assert chat("Hm.</think>b", include_reasoning=False).json()["choices"][0]["message"]["reasoning"] is None
    message = chat("Hm.</think>b", server={"enable_reasoning_content": True}).json()["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Hm."
    chunks = events(chat("Hm.</think>b", server={"enable_reasoning_content": True}, stream=True))
    told = [chunk["choices"][0]["delta"] for chunk in chunks if "reasoning" in chunk["choices"][0]["delta"]]
    assert told and all(delta["reasoning"] == delta["reasoning_content"] for delta in told)


def test_every_choice_is_read_for_itself() -> None:
    answer = chat("a</think>b" + CALL, n=3, tools=TOOLS).json()
    assert [(c["message"]["reasoning"], c["message"]["content"], len(c["message"]["tool_calls"])) for c in answer["choices"]] == [
        ("a", "b", 1)
    ] * 3
    assert len({c["message"]["tool_calls"][0]["id"] for c in answer["choices"]}) == 3


def test_logprobs_and_ids_come_once_for_each_token() -> None:
    chunks = events(chat("a</think>b" + CALL, stream=True, tools=TOOLS, logprobs=True, return_token_ids=True))
    choices = [chunk["choices"][0] for chunk in chunks]
    ids = [i for choice in choices for i in choice.get("token_ids", [])]
    whole = chat("a</think>b" + CALL, tools=TOOLS, logprobs=True, return_token_ids=True).json()["choices"][0]
    assert ids == whole["token_ids"]
    assert sum(len(c["logprobs"]["content"]) for c in choices if c["logprobs"]) == len(ids) == len(whole["logprobs"]["content"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "wrong"}}}], "tool_choice": "required"}, "tools"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict, param: str) -> None:
    error = error_of(chat("x", **fields), 400)
    assert error["param"] == param or error["param"].startswith(param)


def test_constraints_reach_the_engine() -> None:
    async def body(h: Harness) -> None:
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": WEATHER}}
        assert (await h.chat(response_format=schema, max_tokens=4)).status_code == 200
        assert (await h.complete(guided_regex="a+", max_tokens=4)).status_code == 200
        assert (await h.complete(structured_outputs={"choice": ["a", "b"]}, max_tokens=4)).status_code == 200
        wanted = [request.sampling.structured_outputs for request in h.engine.core.seen]
        assert wanted == [
            StructuredOutputsParams(json=WEATHER),
            StructuredOutputsParams(regex="a+"),
            StructuredOutputsParams(choice=["a", "b"]),
        ]

    with_harness(body)


def test_references_within_a_functions_schema_still_lead_there() -> None:
    parameters = {"properties": {"next": {"$ref": "#"}, "x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "integer"}}}
    forced = forced_output(ToolUse((Tool("f", parameters), Tool("g", parameters)), "required", parallel=False))
    assert forced is not None and isinstance(forced.json, str)
    schema = json.loads(forced.json)
    for i in range(2):
        moved = schema["$defs"][f"function{i}"]
        assert moved["properties"]["next"]["$ref"] == f"#/$defs/function{i}"
        assert moved["properties"]["x"]["$ref"] == f"#/$defs/function{i}/$defs/x"
    assert schema["maxItems"] == 1


def test_the_choice_among_tools() -> None:
    assert choose(None, None, None).choice == "none"
    assert choose(TOOLS, None, None).choice == "auto"
    assert choose(TOOLS, "none", False) == ToolUse((Tool("weather", WEATHER), Tool("time", WEATHER)), "none", None, False)


def test_the_sum_of_events() -> None:
    answer = gather(
        [
            ReasoningText("a"),
            ContentText("b"),
            CallStart(0, "i", "f"),
            CallArguments(0, "{"),
            CallArguments(0, "}"),
            CallEnd(0),
            ContentText("c"),
        ]
    )
    assert (answer.reasoning, answer.content) == ("a", "bc")
    assert [(call.name, call.arguments, call.complete) for call in answer.calls] == [("f", "{}", True)]


# --- Anthropic ---------------------------------------------------------------------------------------------------------

ANTHROPIC_TOOLS = [{"name": name, "input_schema": WEATHER} for name in ("weather", "time")]


def message(text: str, parsers: tuple[str | None, str | None] | None = PARSERS, **fields: Any) -> httpx.Response:
    body = {"max_tokens": 400, "messages": [{"role": "user", "content": "hi"}], **fields}
    return with_harness(lambda h: h.http.post("/v1/messages", json=body), FakeCore(say(text)), parsers=parsers)


def test_anthropic_blocks() -> None:
    text = "Hm.</think>Let me see." + CALL + SECOND
    answer = message(text, tools=ANTHROPIC_TOOLS).json()
    kinds = [block["type"] for block in answer["content"]]
    assert (kinds, answer["stop_reason"]) == (["thinking", "text", "tool_use", "tool_use"], "tool_use")
    assert [block["input"] for block in answer["content"][2:]] == [{"city": "Köln"}, {"city": "Rom"}]
    told = [
        json.loads(line[6:]) for line in message(text, tools=ANTHROPIC_TOOLS, stream=True).text.splitlines() if line.startswith("data: ")
    ]
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in told:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            is_open = True
            blocks.append({**event["content_block"], "partial": ""})
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(blocks) - 1
            delta = event["delta"]
            for name in ("text", "thinking"):
                blocks[-1][name] = blocks[-1].get(name, "") + delta.get(name, "")
            blocks[-1]["partial"] += delta.get("partial_json", "")
        elif event["type"] == "content_block_stop":
            assert is_open and event["index"] == len(blocks) - 1
            is_open = False
    assert not is_open and [block["type"] for block in blocks] == kinds
    assert (blocks[0]["thinking"], blocks[1]["text"]) == ("Hm.", "Let me see.")
    assert [json.loads(block["partial"]) for block in blocks[2:]] == [{"city": "Köln"}, {"city": "Rom"}]
    assert next(event for event in told if event["type"] == "message_delta")["delta"]["stop_reason"] == "tool_use"


def test_anthropic_forced_tools_and_forms() -> None:
    choice = {"type": "tool", "name": "time"}
    answer = message('{"city": "Bonn"}', parsers=None, tools=ANTHROPIC_TOOLS, tool_choice=choice).json()
    assert answer["content"][0]["name"] == "time" and answer["content"][0]["input"] == {"city": "Bonn"}
    assert answer["stop_reason"] == "tool_use"
    shape = {"format": {"type": "json_schema", "schema": WEATHER}}
    assert message('{"city": "B"}', parsers=None, output_config=shape).json()["content"][0]["text"] == '{"city": "B"}'
    wrong = message("x", tools=ANTHROPIC_TOOLS, tool_choice={"type": "any"}, output_config=shape)
    assert wrong.status_code == 400 and "excludes output_config" in wrong.text


# --- Responses ---------------------------------------------------------------------------------------------------------

RESPONSES_TOOLS = [
    {"type": "function", "name": "weather", "parameters": WEATHER},
    {"type": "namespace", "name": "clock", "tools": [{"type": "function", "name": "time", "parameters": WEATHER}]},
    {"type": "custom", "name": "run"},
]


def respond(said: str, parsers: tuple[str | None, str | None] | None = PARSERS, **fields: Any) -> httpx.Response:
    body = {"input": "hi", "max_output_tokens": 450, **fields}
    return with_harness(lambda h: h.http.post("/v1/responses", json=body), FakeCore(say(said)), parsers=parsers)


def test_responses_items_and_their_events() -> None:
    calls = [("weather", {"city": "Bonn"}), ("clock__time", {"city": "Rom"}), ("run", {"input": "print(1)"})]
    text = "Hm.</think>So." + "".join(f"\n<tool_call>{json.dumps({'name': n, 'arguments': a})}</tool_call>" for n, a in calls)
    answer = respond(text, tools=RESPONSES_TOOLS).json()
    output = answer["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call", "custom_tool_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}] and output[1]["content"][0]["text"] == "So."
    assert (output[2]["name"], json.loads(output[2]["arguments"])) == ("weather", {"city": "Bonn"})
    assert (output[3]["namespace"], output[3]["name"]) == ("clock", "time") and output[4]["input"] == "print(1)"
    assert answer["status"] == "completed"

    told = [
        json.loads(line[6:]) for line in respond(text, tools=RESPONSES_TOOLS, stream=True).text.splitlines() if line.startswith("data: ")
    ]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    last = told[-1]["response"]["output"]
    strip = ("id", "call_id")
    assert [{k: v for k, v in item.items() if k not in strip} for item in last] == [
        {k: v for k, v in item.items() if k not in strip} for item in output
    ]
    order = [(event["type"].removeprefix("response."), event["output_index"]) for event in told if "output_index" in event]
    assert [kind for kind, index in order if index == 0 and not kind.endswith("delta")] == [
        "output_item.added", "content_part.added", "reasoning_text.done", "content_part.done", "output_item.done"
    ]  # fmt: skip
    assert [kind for kind, index in order if index == 4] == [
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"
    ]  # fmt: skip
    arguments = "".join(e["delta"] for e in told if e["type"] == "response.function_call_arguments.delta" and e["output_index"] == 2)
    assert json.loads(arguments) == {"city": "Bonn"}
    assert [index for _, index in order] == sorted(index for _, index in order)


def test_a_conversation_goes_on_behind_calls() -> None:
    async def body(h: Harness) -> None:
        fields = {"tools": RESPONSES_TOOLS, "max_output_tokens": 200}
        first = (await h.http.post("/v1/responses", json={"input": "hi", **fields})).json()
        call = next(item for item in first["output"] if item["type"] == "function_call")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        again = {"input": [result], "previous_response_id": first["id"], **fields}
        assert (await h.http.post("/v1/responses", json=again)).status_code == 200
        items = (await h.http.get(f"/v1/responses/{first['id']}")).json()["output"]
        assert [item["type"] for item in items] == ["reasoning", "function_call"]

    with_harness(body, FakeCore(say("a</think>" + CALL)), parsers=PARSERS)


def test_responses_forms() -> None:
    shape = {"format": {"type": "json_schema", "name": "w", "schema": WEATHER}}
    answer = respond('{"city": "B"}', parsers=None, text=shape).json()
    assert answer["output"][0]["content"][0]["text"] == '{"city": "B"}'
    assert answer["text"]["format"] == {"type": "json_schema", "name": "w", "schema": WEATHER}
    choice = {"type": "function", "name": "weather"}
    [item] = respond('{"city": "B"}', parsers=None, tools=RESPONSES_TOOLS, tool_choice=choice).json()["output"]
    assert (item["type"], item["name"], item["status"]) == ("function_call", "weather", "completed")


def strict_tools(**parameters: Any) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {"city": {"enum": ["Rom"]}, **parameters}, "required": ["city"]}
    return [{"type": "function", "function": {"name": "weather", "parameters": schema, "strict": True}}, TOOLS[1]]


def test_strict_functions_bind_calls_that_the_model_chooses_to_make() -> None:
    async def go(h: Harness) -> None:
        assert (await h.chat(tools=TOOLS)).status_code == 200
        assert (await h.chat(tools=strict_tools())).status_code == 200
        assert (await h.chat(tools=strict_tools(), response_format={"type": "json_object"})).status_code == 200
        assert (await h.chat(tools=strict_tools(), tool_choice="none")).status_code == 200
        free, strict, shaped, none = [request.sampling.structured_outputs for request in h.engine.core.seen]
        assert free is None and none is None
        assert strict is not None and isinstance(strict.structural_tag, str)
        tag = json.loads(strict.structural_tag)["format"]
        assert [one["content"]["json_schema"].get("required") for one in tag["tags"]] == [["city"], None]
        assert shaped is not None and shaped.json_object  # what is asked for by name

    with_harness(go, FakeCore(say("Text." + CALL)), parsers=("hermes", None))


def test_a_strict_function_that_cannot_be_held_to_is_refused_by_name() -> None:
    error = error_of(chat("", tools=strict_tools(days={"not": {"type": "string"}})), 400)
    assert error["param"] == "tools" and error["message"].startswith("tools can't be served")


# --- Metrics -----------------------------------------------------------------------------------------------------------


def test_what_was_read_for_calls_is_counted() -> None:
    """As vLLM counts: choices of whole answers, pieces of streams."""

    async def body(h: Harness) -> dict[tuple[str, str, str], float]:
        assert (await h.chat(n=2, tools=TOOLS)).status_code == 200
        assert (await h.chat(stream=True, tools=TOOLS)).status_code == 200
        assert (await h.chat()).status_code == (await h.chat(tools=TOOLS, tool_choice="none")).status_code == 200
        answer = {"input": "hi", "tools": RESPONSES_TOOLS, "max_output_tokens": 3}
        assert (await h.http.post("/v1/responses", json=answer)).status_code == 200
        spoken = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "stream": False}
        assert (await h.http.post("/api/chat", json=spoken)).status_code == 200
        counted = {}
        for line in (await h.http.get("/metrics")).text.splitlines():
            if line.startswith("vllm:tool_call_parser_invocations_total{"):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
                assert labels.pop("model_name") == "m"
                counted[labels["request_type"], labels["mode"], labels["outcome"]] = float(line.rpartition(" ")[2])
        return counted

    text = "</think>" + CALL
    counted = with_harness(body, FakeCore(say(text)), parsers=PARSERS)
    assert len(counted) == 12
    streamed_pieces = counted["chat_completions", "streaming", "tool_call"], counted["chat_completions", "streaming", "no_tool_call"]
    # Pieces that wait for a busy reader are joined.
    assert 2 <= sum(streamed_pieces) <= len(text.encode()) + 1 and streamed_pieces[0] >= 1
    assert counted["chat_completions", "non_streaming", "tool_call"] == 2
    assert counted["responses", "non_streaming", "no_tool_call"] == counted["other", "non_streaming", "tool_call"] == 1
    assert counted["chat_completions", "non_streaming", "no_tool_call"] == counted["other", "streaming", "tool_call"] == 0
