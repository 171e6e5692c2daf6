"""Ollama's routes over an engine that echoes: answers, streams of lines, options, context, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from typing import Any

import httpx
import pytest

from canter.core.errors import EngineDeadError, EngineError
from canter.core.structured_outputs import StructuredOutputsParams
from canter.text.chat_template import ChatTemplate
from tests.fake_core import CONTEXT, EOS_ID, FakeCore, say
from tests.server.helpers import Harness, with_harness
from tests.server.test_app import Connection, until

USER = {"role": "user", "content": "hi"}


async def post(h: Harness, path: str, **fields: Any) -> httpx.Response:
    return await h.http.post(f"/api/{path}", json={"model": "m", **fields})


def generated(core: FakeCore | None = None, **fields: Any) -> httpx.Response:
    return with_harness(lambda h: post(h, "generate", **{"prompt": "hi", **fields}), core)


def chatted(core: FakeCore | None = None, **fields: Any) -> httpx.Response:
    return with_harness(lambda h: post(h, "chat", **{"messages": [USER], **fields}), core)


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def refused(response: httpx.Response, status: int = 400) -> str:
    """The message of a refusal, checked to wear Ollama's envelope."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    message: str = response.json()["error"]
    return message


def check_end(answer: dict[str, Any], num_prompt: int, num_generated: int) -> None:
    assert datetime.fromisoformat(answer.pop("created_at")).tzinfo is not None
    durations = {name: answer.pop(name) for name in ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")}
    assert all(type(value) is int and value >= 0 for value in durations.values())
    assert durations["load_duration"] == 0 < durations["total_duration"] < 60e9
    assert durations["eval_duration"] <= durations["total_duration"]
    assert (answer.pop("prompt_eval_count"), answer.pop("eval_count")) == (num_prompt, num_generated)


def test_a_chat_answer() -> None:
    answer = chatted(FakeCore(say("hello")), stream=False).json()
    check_end(answer, len("[user]hi\n[assistant]"), 6)
    assert answer == {"model": "m", "message": {"role": "assistant", "content": "hello"}, "done": True, "done_reason": "stop"}


def test_a_chat_streams_lines_unless_told_otherwise() -> None:
    *lines, last = lines_of(chatted(FakeCore(say("hello"))))
    assert [line["message"]["content"] for line in lines] == list("hello")
    for line in lines:
        assert set(line) == {"model", "created_at", "message", "done"} and line["done"] is False and line["message"]["role"] == "assistant"
    check_end(last, len("[user]hi\n[assistant]"), 6)
    assert last == {"model": "m", "message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "stop"}


def test_a_generated_answer_and_its_stream() -> None:
    answer = generated(FakeCore(say("hello")), stream=False).json()
    check_end(answer, len("[user]hi\n[assistant]"), 6)
    context = [*b"[user]hi\n[assistant]hello", EOS_ID]
    assert answer == {"model": "m", "response": "hello", "done": True, "done_reason": "stop", "context": context}
    *lines, last = lines_of(generated(FakeCore(say("hello"))))
    assert "".join(line["response"] for line in lines) == "hello" and not any(line["done"] for line in lines)
    check_end(last, len("[user]hi\n[assistant]"), 6)
    assert last == answer | {"response": ""}


def test_the_length_ends_it() -> None:
    assert lines_of(chatted(options={"num_predict": 3}))[-1]["done_reason"] == "length"
    assert generated(stream=False, options={"num_predict": 3}).json()["done_reason"] == "length"
    answer = generated(stream=False, options={"num_predict": -1}).json()
    assert answer["eval_count"] + answer["prompt_eval_count"] == CONTEXT


PARSERS = ("hermes", "qwen3")
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": name, "description": "", "parameters": WEATHER}} for name in ("weather", "time")]
CALLS = "".join(
    f"<tool_call>{json.dumps({'name': name, 'arguments': {'city': city}})}</tool_call>\n"
    for name, city in (("weather", "Köln"), ("time", "Rom"))
)
TOLD = [{"index": 0, "name": "weather", "arguments": {"city": "Köln"}}, {"index": 1, "name": "time", "arguments": {"city": "Rom"}}]


def said(text: str, path: str = "chat", parsers: tuple[str, str] | None = PARSERS, **fields: Any) -> httpx.Response:
    """The answer to a request for which the model writes this text."""
    body = {"prompt": "hi"} if path == "generate" else {"messages": [USER]}
    return with_harness(lambda h: post(h, path, **{**body, **fields}), FakeCore(say(text)), parsers=parsers)


def both(text: str, path: str = "chat", **fields: Any) -> dict[str, Any]:
    """What an answer says, checked to be what its stream says too; ids of calls aside."""
    answer = said(text, path, stream=False, **fields).json()
    *lines, last = lines_of(said(text, path, **fields))
    assert last["done"] and not any(line["done"] for line in lines) and last["done_reason"] == answer["done_reason"]
    messages = [line["message"] for line in (*lines, last)] if path == "chat" else [*lines, last]
    name = "content" if path == "chat" else "response"
    whole = answer["message"] if path == "chat" else answer
    assert all(message[name] or message.get("thinking") or message.get("tool_calls") for message in messages[:-1])
    assert messages[-1][name] == "" and "thinking" not in messages[-1] and "tool_calls" not in messages[-1]
    found = {
        name: "".join(message[name] for message in messages),
        "thinking": "".join(message.get("thinking", "") for message in messages) or None,
        "calls": [call["function"] for message in messages for call in message.get("tool_calls", [])],
    }
    assert found[name] == whole[name] and found["thinking"] == whole.get("thinking")
    assert found["calls"] == [call["function"] for call in whole.get("tool_calls", [])]
    assert len({call["id"] for call in whole.get("tool_calls", [])}) == len(found["calls"])
    return found | {"done_reason": answer["done_reason"]}


def test_thoughts_content_and_calls() -> None:
    found = both("<think>Hm.</think>Let me see." + CALLS, tools=TOOLS)
    assert found == {"thinking": "Hm.", "content": "Let me see.", "calls": TOLD, "done_reason": "stop"}
    assert both("<think>Hm.</think>" + CALLS, tools=TOOLS, think="high")["content"] == ""
    quiet = {"thinking": None, "content": "So.", "calls": [], "done_reason": "stop"}
    assert both("So.", think=False) == both("Hm.</think>So.", parsers=("hermes", "deepseek_r1"), think=False) == quiet
    assert both(CALLS)["content"].strip() == CALLS.strip()


def test_a_call_that_is_cut_off_is_not_told() -> None:
    found = both(CALLS, tools=TOOLS, options={"num_predict": len(CALLS.encode()) - 30})
    assert (found["calls"], found["done_reason"]) == (TOLD[:1], "length")


def test_a_stream_tells_content_at_once_though_tools_are_offered() -> None:
    lines = lines_of(said("Well, no.", tools=TOOLS))
    assert [line["message"]["content"] for line in lines[:3]] == ["W", "e", "l"]


def test_generated_texts_have_thoughts_too() -> None:
    assert both("<think>Hm.</think>So.", "generate") == {"thinking": "Hm.", "response": "So.", "calls": [], "done_reason": "stop"}
    assert both("<think>Hm.</think>So.", "generate", raw=True)["response"] == "<think>Hm.</think>So."
    assert both("<think>Hm.</think>So.", "generate", raw=True, think=True)["thinking"] == "Hm."


def test_the_template_hears_of_tools_and_thoughts() -> None:
    template = "{{ (tools or []) | length }}|{{ enable_thinking }}|{{ reasoning_effort | default('-') }}"

    def prompt(**fields: Any) -> str:
        async def body(h: Harness) -> str:
            state = h.app.state.server
            state.text = replace(state.text, chat_template=ChatTemplate(template))
            assert (await post(h, "chat", messages=[USER], **fields)).status_code == 200
            return bytes(h.engine.core.seen[0].prompt_token_ids).decode()

        return with_harness(body, FakeCore(say("x")), parsers=PARSERS)

    assert prompt(tools=TOOLS) == "2|True|-"
    assert prompt(think="low") == "0|True|low" and prompt(think=False) == "0|False|-"


@pytest.mark.parametrize("path", ["generate", "chat"])
def test_forms_reach_the_engine(path: str) -> None:
    async def body(h: Harness) -> None:
        given = {"prompt": "hi"} if path == "generate" else {"messages": [USER]}
        for form in ("json", WEATHER, {}, "", None):
            assert (await post(h, path, **given, format=form, options={"num_predict": 4})).status_code == 200
        assert [request.sampling.structured_outputs for request in h.engine.core.seen] == [
            StructuredOutputsParams(json_object=True),
            StructuredOutputsParams(json=WEATHER),
            StructuredOutputsParams(json={}),
            None,
            None,
        ]

    with_harness(body)


def test_models_that_cannot_say_so_in_ollamas_words() -> None:
    assert refused(chatted(tools=TOOLS)).startswith('"m" does not support tools')
    assert refused(chatted(think=True)).startswith('"m" does not support thinking')
    assert refused(generated(think="low")).startswith('"m" does not support thinking')

    async def capabilities(h: Harness) -> list[str]:
        return (await h.http.post("/api/show", json={"model": "m"})).json()["capabilities"]

    assert with_harness(capabilities, parsers=PARSERS) == ["completion", "tools", "thinking"]


def prompt_of(path: str, **fields: Any) -> str:
    async def body(h: Harness) -> str:
        response = await post(h, path, stream=False, options={"num_predict": 1}, **fields)
        assert response.status_code == 200, response.text
        return bytes(h.engine.core.seen[0].prompt_token_ids).decode()

    return with_harness(body)


CALL = {"function": {"name": "f", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("path", "fields", "prompt"),
    [
        ("generate", {"prompt": "hi"}, "[user]hi\n[assistant]"),
        ("generate", {"prompt": "hi", "system": "be"}, "[system]be\n[user]hi\n[assistant]"),
        ("generate", {"prompt": "hi", "raw": True, "system": ""}, "hi"),
        ("generate", {"prompt": "hi", "context": [*b"so"]}, "so[user]hi\n[assistant]"),
        (
            "generate",
            {"prompt": "hi", "context": [], "keep_alive": "5m", "template": "", "suffix": "", "images": []},
            "[user]hi\n[assistant]",
        ),
        ("chat", {"messages": [{"role": "system", "content": "be"}, USER]}, "[system]be\n[user]hi\n[assistant]"),
        ("chat", {"messages": [USER, {"role": "assistant", "content": "we"}]}, "[user]hi\n[assistant]we"),
        (
            "chat",
            {
                "messages": [
                    USER,
                    {"role": "assistant", "thinking": "t", "tool_calls": [CALL]},
                    {"role": "tool", "tool_name": "f", "content": "1"},
                ],
                "keep_alive": -1,
                "tools": [],
                "think": False,
                "format": "",
            },
            "[user]hi\n[assistant]\n[tool]1\n[assistant]",
        ),
    ],
)
def test_prompts(path: str, fields: dict, prompt: str) -> None:
    assert prompt_of(path, **fields) == prompt


def test_the_context_goes_on() -> None:
    async def body(h: Harness) -> None:
        first = (await post(h, "generate", prompt="hi", stream=False)).json()
        second = (await post(h, "generate", prompt="so", stream=False, context=first["context"])).json()
        text = [*b"[user]hi\n[assistant]hello", EOS_ID, *b"[user]so\n[assistant]"]
        assert h.engine.core.seen[1].prompt_token_ids == text
        assert second["context"] == [*text, *b"hello", EOS_ID]
        raw = (await post(h, "generate", prompt="hi", stream=False, raw=True)).json()
        assert "context" not in raw

    with_harness(body, FakeCore(say("hello")))


def test_options_reach_the_engine() -> None:
    options = {
        "num_predict": 5,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.25,
        "min_p": 0.125,
        "seed": 7,
        "stop": ["x"],
        "repeat_penalty": 1.5,
        "presence_penalty": 1,
        "frequency_penalty": 0.5,
        "repeat_last_n": -1,
        "num_ctx": 512,
        "num_gpu": 1,
        "num_thread": 2,
        "typical_p": 1.0,
        "mirostat": 0,
        "num_keep": 5,
        "penalize_newline": True,
        "use_mmap": None,
        "unknown": 5,
    }

    async def body(h: Harness) -> None:
        assert (await post(h, "chat", messages=[USER], options=options)).status_code == 200
        params = h.engine.core.seen[0].sampling
        assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (5, 0.5, 3, 0.25, 0.125, 7)
        assert (params.stop, params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (["x"], 1.5, 1, 0.5)
        assert (await post(h, "chat", messages=[USER], options={**options, "repeat_last_n": 0})).status_code == 200
        params = h.engine.core.seen[1].sampling
        assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
        assert (await post(h, "chat", messages=[USER], options={"repeat_last_n": 64, "num_predict": 4.0})).status_code == 200
        assert h.engine.core.seen[2].sampling.max_tokens == 4

    with_harness(body)


BIG = 2**63
SHARED: dict[str, list[Any]] = {
    "model": [5, True, []],
    "stream": ["x", 1, []],
    "options": [5, "x", [], True],
    "keep_alive": [[], {}, True],
    "format": ["xml", {"type": "wrong"}, 5, [], True],
    "think": [True, "high", "much", 5, []],
    "logprobs": [True, 1],
    "top_logprobs": [3],
}
GENERATE: dict[str, list[Any]] = {
    "prompt": [5, ["x"], True, {}],
    "system": [5, [], True],
    "raw": ["x", 1],
    "context": ["x", [-1], [260], [BIG], [1.5], ["a"], [True], [1] * 600, {}],
    "template": ["{{ .Prompt }}", 5],
    "suffix": ["x", 5],
    "images": [["AA"], "x"],
}
CHAT: dict[str, list[Any]] = {
    "messages": [
        "x",
        [5],
        [{}],
        [{"role": "king"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "images": ["AA"]}],
        [USER] * 20_000,
        [{"role": "assistant", "tool_calls": [{}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]}],
        True,
        {},
        5,
    ],
    "tools": [
        [{"type": "function", "function": {"name": "f"}}],
        [{"type": "search", "function": {"name": "f"}}],
        [{"type": "function", "function": {"parameters": {}}}],
        [{"function": {"name": "f", "parameters": "x"}}],
        [{"function": {"name": "f"}}] * 2,
        "x",
        5,
    ],
}
OPTIONS: dict[str, list[Any]] = {
    "num_predict": [0, BIG, 10**30, 1.5, "x", True, 513],
    "num_ctx": [0, -1, 513, BIG, "x", True],
    "temperature": [-1, 3, "x", True, [], 10**400],
    "top_k": [-2, 1.5, "x", True],
    "top_p": [0, 2, "x", True],
    "min_p": [-1, 2, "x"],
    "seed": [BIG, 1.5, "x", True],
    "stop": [5, [5], [""], ["a"] * 65],
    "repeat_penalty": [0, -1, "x", True],
    "presence_penalty": [3, "x"],
    "frequency_penalty": [-3, "x"],
    "repeat_last_n": ["x", 1.5, True],
    "typical_p": [0.5],
    "tfs_z": [0.5],
    "mirostat": [1, 2],
    "penalize_newline": [False],
}


@pytest.mark.parametrize("path", ["generate", "chat"])
def test_wrong_values_are_refused_by_name(path: str) -> None:
    base = {"prompt": "hi"} if path == "generate" else {"messages": [USER]}

    async def body(h: Harness) -> None:
        for name, values in (SHARED | (GENERATE if path == "generate" else CHAT)).items():
            for value in values:
                message = refused(await post(h, path, **{**base, name: value}))
                assert name in message and len(message) < 8192, (name, value)
        for name, values in OPTIONS.items():
            for value in values:
                assert f"options.{name}" in refused(await post(h, path, **base, options={name: value})), (name, value)
        message = refused(await post(h, path, **base, options={"repeat_last_n": 64, "repeat_penalty": 1.1}))
        assert "options.repeat_last_n" in message
        assert not h.engine.core.seen

    with_harness(body)


def test_context_and_raw_exclude_each_other() -> None:
    assert "context" in refused(generated(raw=True, context=[1]))


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"options": {"temperature": NaN}}'])
@pytest.mark.parametrize("path", ["generate", "chat", "show"])
def test_bodies_that_are_none(path: str, body: bytes) -> None:
    refused(with_harness(lambda h: h.http.post(f"/api/{path}", content=body)))


def test_nulls_mean_the_default() -> None:
    shared = dict.fromkeys([*SHARED, *OPTIONS])
    assert chatted(**shared | {"tools": None, "options": dict.fromkeys(OPTIONS)}).status_code == 200
    assert generated(**shared | dict.fromkeys(["system", "raw", "context", "template", "suffix", "images"])).status_code == 200


@pytest.mark.parametrize("path", ["generate", "chat"])
def test_a_request_without_a_prompt_asks_whether_the_model_is_there(path: str) -> None:
    async def body(h: Harness) -> None:
        answer = (await post(h, path, keep_alive=0)).json()
        assert answer["done"] is True and answer["done_reason"] == "load"
        assert answer.get("response", answer.get("message")) in ("", {"role": "assistant", "content": ""})
        assert not h.engine.core.seen

    with_harness(body)


def test_the_model_and_its_names() -> None:
    async def body(h: Harness) -> None:
        [one, two] = (await h.http.get("/api/tags")).json()["models"]
        assert (one["name"], one["model"], two["name"]) == ("m", "m", "org/m") and len(one["digest"]) == 64
        assert datetime.fromisoformat(one["modified_at"]).tzinfo is not None
        [loaded, _] = (await h.http.get("/api/ps")).json()["models"]
        assert loaded["context_length"] == CONTEXT and datetime.fromisoformat(loaded["expires_at"]).year == 9999
        shown = (await h.http.post("/api/show", json={"model": "m"})).json()
        assert shown["model_info"]["FakeForCausalLM.context_length"] == CONTEXT and "[{{ m.role }}]" in shown["template"]
        assert shown["capabilities"] == ["completion"] and shown["parameters"] == "temperature 0.5"
        assert shown["details"] == one["details"] and one["details"]["family"] == "FakeForCausalLM"
        assert (await h.http.post("/api/show", json={"name": "org/m:latest"})).status_code == 200
        assert "does not exist" in refused(await h.http.post("/api/show", json={"model": "x"}), 404)
        assert "model" in refused(await h.http.post("/api/show", json={"model": 5}))
        major, minor, _ = (await h.http.get("/api/version")).json()["version"].split(".")
        assert (int(major), int(minor)) >= (0, 6)
        answer = (await h.http.post("/api/chat", json={"model": "m:latest", "messages": [USER], "stream": False})).json()
        assert answer["model"] == "m"

    with_harness(body, served_model_name=["m", "org/m"], defaults={"temperature": 0.5})


def test_errors_wear_ollamas_envelope() -> None:
    core = FakeCore()

    async def body(h: Harness) -> None:
        refused(await post(h, "chat", messages=[USER], model="other"), 404)
        refused(await post(h, "pull", model="m"), 404)
        refused(await h.http.get("/api/chat"), 405)
        core.refuse = EngineError("broken at 0xabc")
        assert "0xabc" not in refused(await post(h, "chat", messages=[USER]), 500)

    with_harness(body, core)
    assert "API key" in refused(with_harness(lambda h: h.http.get("/api/tags"), api_key=["key"]), 401)


def test_while_it_loads() -> None:
    async def body(h: Harness) -> None:
        h.engine.info = None
        assert (await h.http.get("/api/ps")).json() == {"models": []}
        assert len((await h.http.get("/api/tags")).json()["models"]) == 1
        refused(await post(h, "chat", messages=[USER]), 503)

    with_harness(body, ready=False)


def test_an_error_in_mid_stream_is_a_line() -> None:
    async def body(h: Harness) -> None:
        payload = json.dumps({"messages": [USER], "options": {"num_predict": 400}}).encode()
        connection = Connection(h.app, "/api/chat", payload)
        await until(lambda: len(connection.sent) > 3)
        h.engine.paused = True
        h.engine.hub.fail_all(EngineDeadError("it died"))
        await connection.task
        lines = [json.loads(line) for line in b"".join(message.get("body", b"") for message in connection.sent).splitlines()]
        assert lines[-1] == {"error": "it died"} and not any(line.get("done") for line in lines)

    with_harness(body)
