"""`/v1/messages` and `/v1/messages/count_tokens` over an engine that echoes: answers, streams, history, refusals."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from canter.core.errors import EngineDeadError, EngineError, QueueFullError
from canter.server import sse
from tests.fake_core import FakeCore, say
from tests.server.helpers import Harness, with_harness
from tests.server.test_app import Connection, samples, until

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}


async def ask(h: Harness, messages: list[Any] | None = None, **fields: Any) -> httpx.Response:
    body = {"model": "m", "max_tokens": 50, "messages": messages or [USER], **fields}
    return await h.http.post("/v1/messages", json=body, headers={"anthropic-version": "2023-06-01", "anthropic-beta": "x"})


def asked(messages: list[Any] | None = None, core: FakeCore | None = None, **fields: Any) -> httpx.Response:
    return with_harness(lambda h: ask(h, messages, **fields), core)


def prompt_of(*messages: Any, **fields: Any) -> str:
    """The text that the engine gets to see."""

    async def body(h: Harness) -> str:
        response = await ask(h, list(messages), **{"max_tokens": 1, **fields})
        assert response.status_code == 200, response.text
        return bytes(h.engine.core.seen[0].prompt_token_ids).decode()

    return with_harness(body)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each checked to be named as its data says."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    result = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        result.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {result[-1]['type']}"
    assert response.text.endswith("\n\n")
    return result


def refused(response: httpx.Response, status: int = 400, kind: str = "invalid_request_error") -> str:
    """The message of a refusal, checked to wear Anthropic's envelope."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error" and body["request_id"]
    assert set(body["error"]) == {"type", "message"} and body["error"]["type"] == kind
    message: str = body["error"]["message"]
    return message


def test_an_answer() -> None:
    answer = asked(core=FakeCore(say("hello"))).json()
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message", "role": "assistant", "model": "m", "content": [{"type": "text", "text": "hello"}], "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 4, "output_tokens": 6, "cache_read_input_tokens": 16, "cache_creation_input_tokens": 0},
    }  # fmt: skip


def test_a_stream_tells_the_same_in_order() -> None:
    events = events_of(asked(core=FakeCore(say("hello")), stream=True))
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[3:-3] == ["content_block_delta"] * 5
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    message = events[0]["message"]
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None, "stop_sequence": None,
        "usage": {"input_tokens": 4, "output_tokens": 0, "cache_read_input_tokens": 16, "cache_creation_input_tokens": 0},
    }  # fmt: skip
    assert events[2] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert all(event["index"] == 0 and event["delta"]["type"] == "text_delta" for event in events[3:-3])
    assert "".join(event["delta"]["text"] for event in events[3:-3]) == "hello"
    assert events[-3] == {"type": "content_block_stop", "index": 0}
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"] == {"input_tokens": 4, "output_tokens": 6, "cache_read_input_tokens": 16, "cache_creation_input_tokens": 0}


@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "text"),
    [
        ({}, "end_turn", None, "hello there"),
        ({"max_tokens": 3}, "max_tokens", None, "hel"),
        ({"stop_sequences": ["zzz", " the"]}, "stop_sequence", " the", "hello"),
        ({"max_tokens": 9, "stop_sequences": ["there"]}, "max_tokens", None, "hello the"),
    ],
)
def test_why_it_ended(fields: dict, reason: str, sequence: str | None, text: str) -> None:
    answer = asked(core=FakeCore(say("hello there")), **fields).json()
    events = events_of(asked(core=FakeCore(say("hello there")), stream=True, **fields))
    assert (answer["stop_reason"], answer["stop_sequence"], answer["content"][0]["text"]) == (reason, sequence, text)
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert events[-2]["usage"] == answer["usage"]
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == text


def test_an_answer_of_nothing_is_an_empty_block() -> None:
    assert asked(core=FakeCore(say(""))).json()["content"] == [{"type": "text", "text": ""}]
    kinds = [event["type"] for event in events_of(asked(core=FakeCore(say("")), stream=True))]
    assert kinds == ["message_start", "ping", "content_block_start", "content_block_stop", "message_delta", "message_stop"]


def test_sampling_reaches_the_engine() -> None:
    async def body(h: Harness) -> None:
        await ask(h, max_tokens=7, temperature=0.5, top_k=3, top_p=0.25, stop_sequences=["x"], cache_salt="s")
        [request] = h.engine.core.seen
        params = request.sampling
        assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.stop) == (7, 0.5, 3, 0.25, ["x"])
        assert request.cache_salt == "s"

    with_harness(body)


TEXT = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "citations": None}


@pytest.mark.parametrize(
    ("messages", "fields", "prompt"),
    [
        ([USER], {"system": "be"}, "[system]be\n[user]hi\n[assistant]"),
        ([USER], {"system": [TEXT, TEXT]}, "[system]a\na\n[user]hi\n[assistant]"),
        ([USER], {"system": ""}, "[user]hi\n[assistant]"),
        ([{"role": "user", "content": [TEXT]}], {}, "[user]a\n[assistant]"),
        ([{"role": "user", "content": [TEXT, {"type": "text", "text": "b"}]}], {}, "[user]a\nb\n[assistant]"),
        ([USER, USER], {}, "[user]hi\nhi\n[assistant]"),
        ([USER, {"role": "system", "content": "be"}], {}, "[user]hi\n[system]be\n[assistant]"),
        ([USER, {"role": "assistant", "content": "well"}], {}, "[user]hi\n[assistant]well"),
        (
            [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}, TEXT]}, USER],
            {},
            "[user]hi\n[assistant]a\n[user]hi\n[assistant]",
        ),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}],
                }
            ],
            {},
            "[user]T\nd\n[assistant]",
        ),
        (
            [{"role": "user", "content": [{"type": "document", "source": {"type": "content", "content": [TEXT]}}]}],
            {},
            "[user]a\n[assistant]",
        ),
        ([USER], {"chat_template_kwargs": {"mood": "!"}}, "[user]hi\n![assistant]"),
        (
            [USER],
            {"metadata": {"user_id": "u"}, "service_tier": "auto", "context_management": {"edits": []}, "tools": [], "thinking": None},
            "[user]hi\n[assistant]",
        ),
        ([USER], {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}, "stop_sequences": None}, "[user]hi\n[assistant]"),
        ([USER], {"thinking": {"type": "adaptive"}, "tool_choice": {"type": "none"}, "tools": [TOOL]}, "[user]hi\n[assistant]"),
    ],
)
def test_conversations_become_prompts(messages: list, fields: dict, prompt: str) -> None:
    assert prompt_of(*messages, **fields) == prompt


HISTORY = [
    USER,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "which?", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look"},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "one"},
            {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "bad"}], "is_error": True},
            {"type": "tool_result", "tool_use_id": "t3"},
            {"type": "text", "text": "go on"},
        ],
    },
]


def test_tools_and_thoughts_of_the_history() -> None:
    seen: list[dict[str, Any]] = []

    async def body(h: Harness) -> None:
        template = h.app.state.server.text.chat_template
        render = template.render

        def watch(messages: Any, **options: Any) -> str:
            seen.extend(messages)
            return render(messages, **options)

        template.render = watch
        try:
            assert (await ask(h, HISTORY, max_tokens=1)).status_code == 200
        finally:
            del template.render

    with_harness(body)
    assert seen[1] == {
        "role": "assistant", "content": "I look", "reasoning": "which?",
        "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
            {"id": "t2", "type": "function", "function": {"name": "g", "arguments": {}}},
        ],
    }  # fmt: skip
    assert seen[2:] == [
        {"role": "tool", "tool_call_id": "t1", "name": "f", "content": "one"},
        {"role": "tool", "tool_call_id": "t2", "name": "g", "content": "Error:\nbad"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "go on"},
    ]


def test_counting() -> None:
    async def body(h: Harness) -> None:
        async def count(**fields: Any) -> httpx.Response:
            return await h.http.post("/v1/messages/count_tokens", json={"model": "m", "messages": [USER], **fields})

        answer = await count(system="be")
        assert answer.json() == {"input_tokens": len("[system]be\n[user]hi\n[assistant]")}
        assert (await count(tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 2048})).json()["input_tokens"] == 20
        assert (await count(messages=[{"role": "user", "content": "x" * 9000}])).json()["input_tokens"] > 9000
        assert "model" in refused(await count(model="other"), 404, "not_found_error")
        assert "messages" in refused(await count(messages=[]))
        assert not h.engine.core.seen

    with_harness(body)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
BIG = 2**63
BAD: dict[str, list[Any]] = {
    "max_tokens": [0, -1, BIG, 10**30, 1.5, "x", True, [], 513],
    "messages": [
        "x",
        [],
        [5],
        [{}],
        [{"role": "user"}],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": 5}],
        {},
        5,
        True,
        [{"role": "user", "content": [5]}],
        [{"role": "user", "content": [{}]}],
        [{"role": "user", "content": [IMAGE]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}],
        [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}],
        [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}],
        [{"role": "user", "content": [{"type": "document"}]}],
        [{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": "x"}}]}],
        [{"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "x"}, "citations": {"enabled": True}}]}],
        [{"role": "user", "content": [{"type": "document", "source": {"type": "content"}}]}],
        [{"role": "user", "content": [{"type": "document", "source": {"type": "content", "content": [IMAGE]}}]}],
        [{"role": "user", "content": [TEXT] * 20_000}],
        [USER] * 20_000,
        [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}],
        [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {}}]}, USER],
        [{"role": "assistant", "content": [{"type": "thinking"}]}, USER],
        [USER, {"role": "assistant", "content": []}],
        [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}],
    ],
    "system": [5, [5], [IMAGE], True, {}, [{"type": "text"}]],
    "stop_sequences": [5, "x", [5], [""], ["a"] * 65, ["a" * 100_000]],
    "stream": ["x", 1, []],
    "temperature": [-0.1, 2.1, "x", True, [], "NaN", 10**400],
    "top_k": [-2, 1.5, "x", True, []],
    "top_p": [0, -1, 1.1, "x", True],
    "cache_salt": ["", "a/b", "x" * 129, 5],
    "model": [5, True, []],
    "tools": [
        "x",
        [5],
        [{}],
        [{"name": 5}],
        [TOOL],
        [{**TOOL, "name": "a b"}],
        [{**TOOL, "name": "x" * 129}],
        [{"name": "f"}],
        [{"type": "web_search_20250305", "name": "web_search"}],
        [TOOL] * 1025,
        [{**TOOL, "input_schema": 5}],
    ],
    "tool_choice": [
        "auto",
        5,
        {},
        {"type": "x"},
        {"type": "auto"},
        {"type": "any"},
        {"type": "tool", "name": "f"},
        {"type": "none", "name": 5},
    ],
    "thinking": [
        "x",
        5,
        {},
        {"type": "x"},
        {"type": "enabled"},
        {"type": "enabled", "budget_tokens": 1023},
        {"type": "enabled", "budget_tokens": 2048},
        {"type": "enabled", "budget_tokens": BIG},
        {"type": "enabled", "budget_tokens": -5},
        {"type": "enabled", "budget_tokens": True},
    ],
    "output_config": [
        "x",
        {"effort": "some"},
        {"effort": 5},
        {"format": {"type": "json_object"}},
        {"format": {"type": "json_schema"}},
        {"format": 5},
    ],
    "chat_template_kwargs": ["x", 5, {"messages": []}, {"tokenize": True}],
    "vllm_xargs": [{"a": 1}],
    "container": ["x"],
    "mcp_servers": [[{"type": "url", "url": "x", "name": "y"}]],
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_values_are_refused_by_name(name: str) -> None:
    async def body(h: Harness) -> None:
        for value in BAD[name]:
            message = refused(await ask(h, **{name: value}) if name != "messages" else await post(h, value))
            assert name in message and len(message) < 8192, value
        assert not h.engine.core.seen

    async def post(h: Harness, value: object) -> httpx.Response:
        return await h.http.post("/v1/messages", json={"max_tokens": 5, "messages": value})

    with_harness(body)


def test_more_than_one_field_at_once() -> None:
    async def body(h: Harness) -> None:
        thinking = {"type": "enabled", "budget_tokens": 2000}
        assert "thinking.budget_tokens must be" in refused(await ask(h, max_tokens=1500, thinking=thinking))
        assert "tool_choice.name" in refused(await ask(h, tools=[TOOL], tool_choice={"type": "tool", "name": "g"}))
        assert "--tool-call-parser" in refused(await ask(h, tools=[TOOL]))

    with_harness(body)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"messages": [], "max_tokens": NaN}', b'{"max_tokens": 1, "messages": ' + b"[" * 100_000]
)
def test_bodies_that_are_none(body: bytes) -> None:
    refused(with_harness(lambda h: h.http.post("/v1/messages", content=body)))


def test_nulls_mean_the_default() -> None:
    nulls = dict.fromkeys(
        [
            "system",
            "stop_sequences",
            "stream",
            "temperature",
            "top_k",
            "top_p",
            "cache_salt",
            "tools",
            "tool_choice",
            "thinking",
            "output_config",
            "chat_template_kwargs",
            "metadata",
            "vllm_xargs",
            "container",
            "mcp_servers",
            "model",
        ]
    )
    assert asked(**nulls).status_code == 200
    assert "max_tokens" in refused(asked(max_tokens=None))


def test_errors_wear_anthropics_envelope() -> None:
    core = FakeCore()

    async def body(h: Harness) -> None:
        assert "does not exist" in refused(await ask(h, model="other"), 404, "not_found_error")
        refused(await h.http.get("/v1/messages"), 405)
        refused(await h.http.post("/v1/messages/batches", json={}), 404, "not_found_error")
        refused(await ask(h, [{"role": "user", "content": "x" * 100_000}]), 413, "request_too_large")
        core.refuse = QueueFullError("full")
        response = await ask(h, stream=True)
        refused(response, 503, "overloaded_error")
        assert int(response.headers["retry-after"]) >= 1
        core.refuse = EngineError("broken at 0xabc")
        assert "0xabc" not in refused(await ask(h), 500, "api_error")
        h.app.state.server.draining = True
        refused(await ask(h), 503, "overloaded_error")

    with_harness(body, core, max_body_bytes=50_000)


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), ({"x-api-key": "no"}, 401), ({"x-api-key": "key"}, 200), ({"Authorization": "Bearer key"}, 200)],
)
def test_keys(headers: dict, status: int) -> None:
    response = with_harness(
        lambda h: h.http.post("/v1/messages", json={"max_tokens": 1, "messages": [USER]}, headers=headers), api_key=["key"]
    )
    assert response.status_code == status
    if status == 401:
        refused(response, 401, "authentication_error")


def test_an_error_in_mid_stream_is_an_event() -> None:
    async def body(h: Harness) -> None:
        payload = json.dumps({"max_tokens": 400, "messages": [USER], "stream": True}).encode()
        gate = asyncio.Event()
        gate.set()
        h.engine.paused = False
        connection = Connection(h.app, "/v1/messages", payload, gate)
        await until(lambda: len(connection.sent) > 4)
        h.engine.paused = True
        h.engine.hub.fail_all(EngineDeadError("it died at 0xabc"))
        await connection.task
        text = b"".join(message.get("body", b"") for message in connection.sent).decode()
        *_, last = [block for block in text.split("\n\n") if block]
        name, data = last.split("\n")
        error = json.loads(data.removeprefix("data: "))
        assert name == "event: error" and error["type"] == "error"
        assert error["error"]["type"] == "overloaded_error" and "0xabc" not in error["error"]["message"]
        assert error["request_id"]
        assert "message_stop" not in text and connection.sent[-1].get("more_body", False) is False

    with_harness(body)


def test_pings_keep_a_quiet_stream_alive(monkeypatch) -> None:
    monkeypatch.setattr(sse, "PING_SECONDS", 0.001)

    async def body(h: Harness) -> None:
        payload = json.dumps({"max_tokens": 5, "messages": [USER], "stream": True}).encode()
        connection = Connection(h.app, "/v1/messages", payload)
        await until(lambda: len(connection.sent) > 1)
        h.engine.paused = True
        while sum(b"event: ping" in message.get("body", b"") for message in connection.sent) < 4:
            await asyncio.sleep(0.001)
        h.engine.resume()
        await connection.task
        assert b"message_stop" in connection.sent[-2]["body"] and connection.sent[-1]["body"] == b""

    with_harness(body)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(stream: bool) -> None:
    async def body(h: Harness) -> None:
        payload = json.dumps({"max_tokens": 400, "messages": [USER], "stream": stream}).encode()
        connection = Connection(h.app, "/v1/messages", payload)
        await until(lambda: h.engine.core.requests)
        connection.gone.set()
        await connection.task
        assert len(h.engine.core.aborted) == 1 and not h.engine.core.requests and h.engine.hub.num_live == 0
        got = samples((await h.http.get("/metrics")).text)
        assert got['vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"}'] == 1

    with_harness(body)


def test_answers_and_errors_tell_the_request_id() -> None:
    async def body(h: Harness) -> None:
        for sent in ({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "model": "m"}, {"max_tokens": "x"}):
            answer = await h.http.post("/v1/messages", json=sent, headers={"X-Request-Id": "mine"})
            assert answer.headers["request-id"] == "mine"
            made = [(await h.http.post("/v1/messages", json=sent)).headers["request-id"] for _ in range(2)]
            assert made[0] and made[1] and made[0] != made[1]
        assert "request-id" not in (await h.chat()).headers

    with_harness(body)
