"""Render, generate and derender: apart they say what the ordinary routes say at once."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from typing import Any

import httpx
import pytest

from canter.core.config import EngineArgs
from canter.server.traffic import ID_MARK
from canter.text.thinking import ThinkingMarkers
from tests.fake_core import CONTEXT, EOS_ID, FakeCore, say
from tests.server.helpers import Harness, error_of, events, with_harness

OPEN = {"enable_scale_out": True}
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict] = {
    "/v1/chat/completions/render": {"messages": MESSAGES},
    "/v1/completions/render": {"prompt": "hi"},
    "/v1/responses/render": {"input": "hi"},
    "/v1/messages/render": {"messages": MESSAGES, "max_tokens": 5},
    "/inference/v1/generate": {"token_ids": [104, 105]},
    "/inference/v1/abort_requests": {"request_ids": []},
    "/v1/chat/completions/derender": {"generate_response": {"request_id": "r", "choices": []}},
    "/v1/completions/derender": {"generate_responses": [{"request_id": "r", "choices": []}]},
}


async def post(h: Harness, path: str, **body: Any) -> httpx.Response:
    return await h.http.post(path, json=body)


async def ok(h: Harness, path: str, **body: Any) -> Any:
    response = await post(h, path, **body)
    assert response.status_code == 200, response.text
    return response.json()


def without(body: dict, *names: str) -> dict:
    return {name: value for name, value in body.items() if name not in names}


@pytest.mark.parametrize("path", BODIES)
def test_the_routes_are_closed_unless_opened(path: str) -> None:
    response = with_harness(lambda h: post(h, path, **BODIES[path]))
    error = response.json()["error"]
    assert response.status_code == 403 and "--enable-scale-out" in error["message"]
    assert error["type"] == ("permission_error" if path.startswith("/v1/messages") else "PermissionDeniedError")
    assert with_harness(lambda h: post(h, path, **BODIES[path]), FakeCore(say("a")), **OPEN).status_code == 200


def test_a_rendered_chat_runs_nothing_and_settles_every_parameter() -> None:
    async def body(h: Harness) -> None:
        answer = await ok(h, "/v1/chat/completions/render", messages=MESSAGES, top_k=5, logprobs=True, top_logprobs=2, cache_salt="s")
        assert bytes(answer["token_ids"]).decode() == "[user]hi\n[assistant]"
        sampling = answer["sampling_params"]
        assert (sampling["temperature"], sampling["top_k"], sampling["logprobs"]) == (0.7, 5, 2)
        assert sampling["max_tokens"] == CONTEXT - len(answer["token_ids"])
        assert answer["model"] == "m" and answer["cache_salt"] == "s" and answer["request_id"].startswith("chatcmpl-")
        assert not h.engine.core.seen

    with_harness(body, defaults={"temperature": 0.7}, **OPEN)


def test_rendered_completions_are_a_list() -> None:
    async def body(h: Harness) -> None:
        answer = await ok(h, "/v1/completions/render", prompt=["ab", "c"], max_tokens=3)
        assert [item["token_ids"] for item in answer] == [[97, 98], [99]]
        assert len({item["request_id"] for item in answer}) == 2

    with_harness(body, **OPEN)


def test_a_rendered_response_goes_on_from_a_stored_one() -> None:
    async def body(h: Harness) -> None:
        first = await ok(h, "/v1/responses", input="one")
        answer = await ok(h, "/v1/responses/render", input="two", previous_response_id=first["id"], instructions="S")
        assert bytes(answer["token_ids"]).decode() == "[system]S\n[user]one\n[assistant]ok\n[user]two\n[assistant]"
        error_of(await post(h, "/v1/responses/render", input="x", previous_response_id="resp_x"), 404)

    with_harness(body, FakeCore(say("ok")), **OPEN)


def test_a_rendered_message_is_what_anthropics_route_runs() -> None:
    path = "/v1/messages/render"
    given: dict[str, Any] = {"max_tokens": 7, "messages": MESSAGES, "system": "S", "stop_sequences": ["x"], "top_k": 4, "stream": True}

    async def body(h: Harness) -> None:
        answer = await ok(h, path, **given)
        assert bytes(answer["token_ids"]).decode() == "[system]S\n[user]hi\n[assistant]"
        assert (answer["sampling_params"]["max_tokens"], answer["sampling_params"]["stop"]) == (7, ["x"])
        assert answer["request_id"].startswith("msg-") and answer["stream"] is True and answer["stream_options"] is None
        await post(h, "/inference/v1/generate", **answer)
        await post(h, "/v1/messages", **given)
        apart, whole = h.engine.core.seen
        assert (apart.prompt_token_ids, apart.sampling.top_k) == (whole.prompt_token_ids, 4)
        refused = await post(h, path, messages=MESSAGES)
        assert refused.status_code == 400 and refused.json()["type"] == "error" and "max_tokens" in refused.json()["error"]["message"]

    with_harness(body, **OPEN)


def test_constraints_are_rendered_too() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

    async def body(h: Harness) -> None:
        for path, given in (
            ("/v1/chat/completions", {"messages": MESSAGES, "structured_outputs": {"regex": "a+"}}),
            ("/v1/chat/completions", {"messages": MESSAGES, "tools": [tool], "tool_choice": "required"}),
            ("/v1/completions", {"prompt": "hi", "response_format": {"type": "json_object"}}),
        ):
            rendered = await ok(h, f"{path}/render", **given)
            await ok(h, "/inference/v1/generate", **(rendered[0] if isinstance(rendered, list) else rendered))
            await ok(h, path, **given)
            *_, apart, whole = h.engine.core.seen
            assert apart.sampling.structured_outputs == whole.sampling.structured_outputs is not None

    with_harness(body, FakeCore(say("aa")), **OPEN)


def test_a_constraint_behind_a_thought_is_not_rendered() -> None:
    async def body(h: Harness) -> None:
        state = h.app.state.server
        state.text = dataclasses.replace(state.text, thinking=ThinkingMarkers([5], [6]))
        given = {"messages": MESSAGES, "structured_outputs": {"regex": "a+"}}
        assert (await post(h, "/v1/chat/completions", **given)).status_code == 200
        error = error_of(await post(h, "/v1/chat/completions/render", **given), 400)
        assert error["param"] == "structured_outputs" and "thought" in error["message"]

    with_harness(body, FakeCore(say("aa")), parsers=(None, "qwen3"), **OPEN)


CASES: list[dict] = [
    {},
    {"max_tokens": 4},
    {"stop": ["o w"]},
    {"stop": ["o w"], "include_stop_str_in_output": True},
    {"stop_token_ids": [ord("w")]},
    {"n": 2, "temperature": 0.5},
    {"skip_special_tokens": False},
]


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("logprobs", [False, True])
def test_chat_in_three_steps_is_chat(options: dict, logprobs: bool) -> None:
    chat: dict[str, Any] = {"messages": MESSAGES, **options, **({"logprobs": True, "top_logprobs": 2} if logprobs else {})}

    async def body(h: Harness) -> None:
        whole = await ok(h, "/v1/chat/completions", **chat)
        rendered = await ok(h, "/v1/chat/completions/render", **chat)
        generated = await ok(h, "/inference/v1/generate", **rendered)
        prompt = rendered["token_ids"]
        apart = await ok(h, "/v1/chat/completions/derender", generate_response=generated, chat_request=chat, prompt_token_ids=prompt)
        assert without(apart, "id", "created") == without(whole, "id", "created")
        assert apart["id"] == generated["request_id"]
        # And as a stream, one choice at a time.
        if "n" in options:
            return
        chunks = events(await post(h, "/inference/v1/generate", **{**rendered, "stream": True, "stream_options": {"include_usage": True}}))
        state, text, entries, finish = None, "", [], None
        for chunk in chunks:
            assert chunk["output_mode"] == "tokens"
            fields = {"generate_chunk": chunk, "stream_state": state, "chat_request": chat, "prompt_token_ids": prompt}
            answer = await ok(h, "/v1/chat/completions/derender", stream=True, **fields)
            state = answer["stream_state"]
            for choice in answer["chunk"]["choices"]:
                text += choice["delta"].get("content", "")
                entries += (choice["logprobs"] or {"content": []})["content"]
                finish = choice["finish_reason"] or finish
        assert answer["chunk"]["usage"] == whole["usage"]
        [choice] = whole["choices"]
        assert (text, finish) == (choice["message"]["content"], choice["finish_reason"])
        assert entries == (choice["logprobs"] or {"content": []})["content"]

    with_harness(body, FakeCore(say("hellö worldwide")), **OPEN)


@pytest.mark.parametrize("options", [*CASES, {"logprobs": 2}, {"prompt_logprobs": 1}], ids=str)
def test_completions_in_three_steps_are_completions(options: dict) -> None:
    given: dict[str, Any] = {"prompt": ["ab", "cde"], "max_tokens": 30, **options}

    async def body(h: Harness) -> None:
        whole = await ok(h, "/v1/completions", **given)
        rendered = await ok(h, "/v1/completions/render", **given)
        generated = [await ok(h, "/inference/v1/generate", **item) for item in rendered]
        apart = await ok(
            h, "/v1/completions/derender", generate_responses=generated, completion_request=given, prompt_tokens=[2, 3],
            prompt_token_ids=[item["token_ids"] for item in rendered],
        )  # fmt: skip
        assert without(apart, "id", "created", "choices") == without(whole, "id", "created", "choices")
        for mine, theirs in zip(apart["choices"], whole["choices"], strict=True):
            assert mine == {name: value for name, value in theirs.items() if value is not None or name != "prompt_logprobs"}

    with_harness(body, FakeCore(say("hellö worldwide")), **OPEN)


def test_a_completion_chunk_knows_where_its_text_stands() -> None:
    async def body(h: Harness) -> None:
        chunks = events(await post(h, "/inference/v1/generate", token_ids=[97], stream=True, sampling_params={"logprobs": 1}))
        state, offsets = None, []
        for chunk in chunks:
            answer = await ok(h, "/v1/completions/derender", stream=True, generate_chunk=chunk, stream_state=state)
            state = answer["stream_state"]
            offsets += answer["chunk"]["choices"][0]["logprobs"]["text_offset"]
        assert offsets == [0, 1, 2, 3]

    with_harness(body, FakeCore(say("abc")), **OPEN)


def test_generate_answers_ids() -> None:
    async def body(h: Harness) -> None:
        answer = await ok(h, "/inference/v1/generate", token_ids=[97, 98], sampling_params={"logprobs": 1}, return_token_ids=True)
        assert answer.pop("request_id").startswith("generate-tokens-") and answer.pop("created") > 0
        [choice] = answer["choices"]
        assert choice.pop("logprobs")["content"][0] == {
            "token_id": 104, "logprob": -0.5, "rank": 1, "top_logprobs": [{"token_id": 104, "logprob": -0.5, "rank": 1}],
        }  # fmt: skip
        assert choice == {"index": 0, "token_ids": [104, 105, EOS_ID], "finish_reason": "stop", "stop_reason": None}
        assert answer["prompt_token_ids"] == [97, 98] and answer["output_mode"] == "tokens"
        assert answer["usage"]["total_tokens"] == 5
        text = await ok(h, "/inference/v1/generate", token_ids=[97], sampling_params={"logprobs": 0}, output_mode="text")
        assert text["choices"][0]["text"] == "hi"
        assert [entry["token"] for entry in text["choices"][0]["logprobs"]["content"]] == ["h", "i", "<eos>"]

    with_harness(body, FakeCore(say("hi")), **OPEN)


def test_requests_are_aborted_by_the_id_that_they_show() -> None:
    async def body(h: Harness) -> None:
        h.engine.paused = True
        asking = [asyncio.create_task(post(h, "/inference/v1/generate", token_ids=[97], request_id="x")) for _ in range(2)]
        other = asyncio.create_task(post(h, "/v1/completions", prompt="a", max_tokens=2))
        while len(h.engine.core.requests) < 3:
            await asyncio.sleep(0.001)
        assert (await post(h, "/inference/v1/abort_requests", request_ids=["generate-tokens-x", "nobody"])).content == b""
        for answer in await asyncio.gather(*asking):
            assert answer.json()["request_id"] == "generate-tokens-x" and answer.json()["choices"][0]["finish_reason"] == "abort"
        [left] = h.engine.core.requests
        await post(h, "/inference/v1/abort_requests", request_ids=[left.partition(ID_MARK)[0]])
        assert (await other).json()["choices"][0]["finish_reason"] == "abort"
        assert h.app.state.server.traffic.num_live == 0

    with_harness(body, **OPEN)


def test_a_client_that_leaves_ends_its_request() -> None:
    async def body(h: Harness) -> None:
        h.engine.paused = True
        asking = asyncio.create_task(post(h, "/inference/v1/generate", token_ids=[97]))
        while not h.engine.core.requests:
            await asyncio.sleep(0.001)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        while not h.engine.core.aborted:
            await asyncio.sleep(0.001)
        assert h.app.state.server.traffic.num_live == 0

    with_harness(body, **OPEN)


HUGE = 10**30
LOGPROB = {"token_id": 97, "logprob": -1.0, "rank": 1, "top_logprobs": []}


def given(**choice: Any) -> dict:
    return {"request_id": "r", "choices": [{"index": 0, "token_ids": [97], **choice}]}


WRONG: list[tuple[str, dict, str]] = [
    ("/inference/v1/generate", {"token_ids": value}, "token_ids")
    for value in ([], [-1], [260], [2**63], [HUGE], [1.5], ["x"], [True], [None], "x", 5, [[1]])
]
WRONG += [
    ("/inference/v1/generate", {"token_ids": [97], name: value}, name)
    for name, values in {
        "sampling_params": ["x", [], 5],
        "request_id": [5],
        "model": [5],
        "stream": ["x", 1],
        "stream_options": ["x", {}],
        "return_token_ids": ["x"],
        "output_mode": ["x", 5],
        "cache_salt": ["", 5],
        "priority": [1, "x", HUGE],
        "features": [{}],
        "kv_transfer_params": [{}],
        "content_parts": [[{}]],
    }.items()
    for value in values
]
WRONG += [
    ("/inference/v1/generate", {"token_ids": [97], "sampling_params": {name: value}}, f"sampling_params.{name}")
    for name, values in {
        "temperature": [-1, 3, "x", True],
        "max_tokens": [0, -1, 1.5, "x"],
        "n": [0, 129, "x"],
        "seed": [2**63],
        "logprobs": ["x"],
        "structured_outputs": [{}, "x"],
        "detokenize": ["x"],
        "cache_salt": ["x"],
    }.items()
    for value in values
    if name not in ("temperature", "n", "seed") or not isinstance(value, (int, float)) or isinstance(value, bool)
]
WRONG += [
    ("/inference/v1/generate", {"token_ids": [97], "sampling_params": {"temperature": 3}}, "temperature"),
    ("/inference/v1/generate", {"token_ids": [97], "sampling_params": {"seed": 2**63}}, "seed"),
    ("/inference/v1/generate", {"token_ids": [97], "sampling_params": {"structured_outputs": {"regex": "["}}},
     "sampling_params.structured_outputs.regex"),
    ("/inference/v1/generate", {"token_ids": [97], "sampling_params": {"prompt_logprobs": 1}, "stream": True},
     "sampling_params.prompt_logprobs"),
    ("/inference/v1/generate", {"token_ids": [97], "sampling_params": {"detokenize": False}, "output_mode": "text"}, "output_mode"),
    ("/inference/v1/generate", {"token_ids": [97] * CONTEXT}, "prompt"),
    ("/inference/v1/abort_requests", {}, "request_ids"),
    ("/inference/v1/abort_requests", {"request_ids": "x"}, "request_ids"),
    ("/inference/v1/abort_requests", {"request_ids": [5]}, "request_ids"),
    ("/inference/v1/abort_requests", {"request_ids": ["x"] * 5000}, "request_ids"),
    ("/v1/chat/completions/render", {"messages": MESSAGES, "echo": True}, "echo"),
    ("/v1/chat/completions/render", {"messages": MESSAGES, "return_token_offsets": True}, "return_token_offsets"),
    ("/v1/completions/render", {"prompt": "x", "temperature": 9}, "temperature"),
    ("/v1/responses/render", {"input": "x", "background": True}, "background"),
    ("/v1/chat/completions/derender", {}, "generate_response"),
    ("/v1/chat/completions/derender", {"stream": True}, "generate_chunk"),
    ("/v1/chat/completions/derender", {"generate_response": {}}, "generate_response.request_id"),
    ("/v1/chat/completions/derender", {"generate_response": {**given(), "output_mode": "text"}}, "generate_response.output_mode"),
    ("/v1/chat/completions/derender", {"generate_response": {"request_id": "r", "choices": [{"index": 0}] * 129}},
     "generate_response.choices"),
    ("/v1/chat/completions/derender", {"generate_response": given(), "prompt_tokens": -1}, "prompt_tokens"),
    ("/v1/chat/completions/derender", {"generate_response": given(), "prompt_tokens": HUGE}, "prompt_tokens"),
    ("/v1/chat/completions/derender", {"generate_response": given(), "prompt_token_ids": [260]}, "prompt_token_ids"),
    ("/v1/chat/completions/derender", {"generate_response": given(), "chat_request": {}}, "chat_request.messages"),
    ("/v1/chat/completions/derender", {"generate_response": given(), "chat_request": {"messages": MESSAGES, "guided_json": 5}},
     "chat_request.guided_json"),
    ("/v1/chat/completions/derender", {"stream": True, "generate_chunk": given(), "stream_state": {"output_token_ids": [97] * CONTEXT}},
     "stream_state.output_token_ids"),
    ("/v1/chat/completions/derender", {"stream": True, "generate_chunk": {"request_id": "r", "choices": [{"index": 0}] * 2}},
     "generate_chunk.choices"),
    ("/v1/completions/derender", {}, "generate_responses"),
    ("/v1/completions/derender", {"generate_responses": []}, "generate_responses"),
    ("/v1/completions/derender", {"generate_responses": [given()] * 1025}, "generate_responses"),
    ("/v1/completions/derender", {"generate_responses": [given()], "prompt_tokens": [1, 2]}, "prompt_tokens"),
    ("/v1/completions/derender", {"generate_responses": [given()], "prompt_token_ids": [5]}, "prompt_token_ids"),
]  # fmt: skip
for choice, name in [
    ({"token_ids": [-1]}, "token_ids"),
    ({"token_ids": [260]}, "token_ids"),
    ({"token_ids": [97] * (CONTEXT + 1)}, "token_ids"),
    ({"logprobs": {"content": []}}, "logprobs"),
    ({"logprobs": {"content": [{**LOGPROB, "token_id": 98}]}}, "logprobs"),
    ({"logprobs": {"content": [{**LOGPROB, "top_logprobs": [LOGPROB] * 22}]}}, "logprobs"),
    ({"logprobs": {"content": [{**LOGPROB, "top_logprobs": [{**LOGPROB, "token_id": 260}]}]}}, "logprobs"),
]:
    WRONG.append(("/v1/chat/completions/derender", {"generate_response": given(**choice)}, f"generate_response.choices[0].{name}"))
    WRONG.append(("/v1/completions/derender", {"generate_responses": [given(**choice)]}, f"generate_responses[0].choices[0].{name}"))


@pytest.mark.parametrize(
    ("path", "fields", "name"), [pytest.param(*case, id=f"{case[0].split('/')[-1]}-{case[2]}-{str(case[1])[-24:]}") for case in WRONG]
)
def test_wrong_values_are_refused_by_name(path: str, fields: dict, name: str) -> None:
    async def body(h: Harness) -> None:
        error = error_of(await post(h, path, **fields), 400)
        assert re.sub(r"\[(\d+|\.\.\.)\](\[\d+\])*$", "", error["param"] or "") == name, error
        assert not h.engine.core.seen

    with_harness(body, **OPEN)


def test_numbers_that_are_none() -> None:
    content = json.dumps({"token_ids": [97]})[:-1]
    for value in ("NaN", "Infinity", "1e999"):
        body = content + f', "sampling_params": {{"temperature": {value}}}}}'
        error_of(with_harness(lambda h, body=body: h.http.post("/inference/v1/generate", content=body), **OPEN), 400)


def test_null_means_the_default() -> None:
    names = ("sampling_params", "request_id", "model", "stream", "stream_options", "output_mode", "cache_salt", "priority", "features")
    answer = with_harness(lambda h: post(h, "/inference/v1/generate", token_ids=[97], **dict.fromkeys(names)), FakeCore(say("a")), **OPEN)
    assert answer.status_code == 200


def test_a_priority_may_come_in_the_header() -> None:
    async def body(h: Harness) -> None:
        sent = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}}
        for fields in ({}, {"priority": 5}):
            answer = await h.http.post("/inference/v1/generate", json=sent | fields, headers={"X-Vllm-Priority": "-3"})
            assert answer.status_code == 200, answer.text
        assert [request.priority for request in h.engine.core.seen] == [-3, 5]
        answer = await h.http.post("/inference/v1/generate", json=sent, headers={"X-Vllm-Priority": "x"})
        assert error_of(answer, 400)["param"] == "priority"

    with_harness(body, engine_args=EngineArgs(scheduling_policy="priority"), **OPEN)
