"""Every field of the two generation routes with values that it can't have: a 400 that names it, and a server that goes on."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from canter.core.config import EngineArgs
from canter.core.errors import InvalidRequestError
from canter.server.body import parse
from canter.server.schemas.openai import ChatRequest, CompletionRequest
from tests.server.helpers import Harness, error_of, with_harness

TEXT, NEGATIVE, HUGE = "x", -5, 10**30
SHARED = {
    "model": [5, []],
    "frequency_penalty": [3, -2.1, TEXT, True, [], "NaN"],
    "presence_penalty": [2.5, TEXT],
    "repetition_penalty": [0, -1, TEXT],
    "temperature": [-0.1, 2.1, TEXT, True, []],
    "top_p": [0, 1.1, TEXT],
    "top_k": [-2, 1.5, TEXT, "1", True],
    "min_p": [-0.1, 1.1, TEXT],
    "n": [0, -1, 129, 10**6, 1.5, TEXT],
    "seed": [2**63, -(2**63) - 1, 1.5, TEXT],
    "stop": [5, [5], [""], "", ["a"] * 65, ["a"] * 500_000],
    "stop_token_ids": [5, [-1], [260], [TEXT], [HUGE], [1] * 129, [1] * 100_000],
    "include_stop_str_in_output": [TEXT, 1],
    "ignore_eos": [TEXT, 1],
    "max_tokens": [-1, 513, HUGE, 1.5, TEXT, "1", True],
    "min_tokens": [-1, 600, HUGE, TEXT],
    "logit_bias": [5, {"x": 1}, {"1": TEXT}, {"-1": 1}, {"260": 1}, {str(i): 1 for i in range(2000)}],
    "allowed_token_ids": [[], [260], [-1], TEXT, [1] * 2000],
    "bad_words": [[""], "x", [5], ["a"] * 50_000, ["a" * 2000]],
    "prompt_logprobs": [-2, 21, 10**6, HUGE, TEXT, 1.5],
    "skip_special_tokens": [TEXT, 0],
    "spaces_between_special_tokens": [TEXT],
    "truncate_prompt_tokens": [0, -2, 513, HUGE, TEXT],
    "stream": [TEXT, 1],
    "stream_options": [TEXT, [], {"include_usage": True}, {"include_usage": TEXT}],
    "response_format": [
        TEXT, {"type": "json"}, {"type": "json_schema", "json_schema": {}}, {}, {"type": "json_schema", "json_schema": {"schema": 5}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}, {"type": "structural_tag"},
    ],
    "echo": [TEXT],
    "add_special_tokens": [TEXT],
    "return_token_ids": [TEXT],
    "return_tokens_as_token_ids": [TEXT],
    "priority": [1, -1, TEXT, 2**63, HUGE, 1.5, True],
    "cache_salt": ["", "a/b", "a@b", "a\\b", "a\0b", "x" * 129, 5],
    "request_id": [5],
    "user": [5],
    "structured_outputs": [TEXT, {}, {"regex": "["}, {"regex": "a", "choice": ["a"]}, {"json": 5}, {"pattern": "a"}],
    "guided_json": [5, TEXT, {"type": "nothing"}],
    "guided_regex": [5, "[", "a\0"],
    "guided_choice": [TEXT, [], [5]],
    "guided_grammar": [5, "a", ""],
    "guided_whitespace_pattern": [" "],
    "use_beam_search": [TEXT, 1],
    "length_penalty": [0.5, -1, 2**63, TEXT, True, []],
    "best_of": [2, -1, 2**63, TEXT, True],
    "logprob_token_ids": [[1], 5, TEXT, [-1], [260], [2**63], [TEXT], [True], [1] * 129],
    "thinking_token_budget": [5, 0, -2, 2**63, HUGE, 1.5, TEXT, True, []],
    "repetition_detection": [
        5, TEXT, True, [], {"max_pattern_size": 3}, {"max_pattern_size": -1}, {"max_pattern_size": 2**63, "min_count": 2},
        {"max_pattern_size": 3, "min_count": 1}, {"max_pattern_size": 3, "min_count": TEXT}, {"max_pattern_size": True, "min_count": 2},
        {"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}, {"max_pattern_size": 3, "min_count": 2**63},
    ],
    "truncation_side": ["middle", 5, True, []],
    "return_prompt_text": [TEXT, 1],
    "kv_transfer_params": [{"a": 1}],
    "prompt_embeds": [TEXT],
    "mm_processor_kwargs": [{"a": 1}],
    "stream_interval": [0, -1, 1025, 2**63, 1.5, TEXT, True],
    "vllm_xargs": [5, TEXT, True, [], {"a": None}, {"a": {}}, {"a": 2**63}, {"a": ["x" * 5000]}, {"a": [1] * 2000}, {"": 1}],
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT = {
    "logprobs": [TEXT, 5],
    "top_logprobs": [-2, 5, TEXT, 1.5],
    "max_completion_tokens": [0, -1, 513, HUGE, TEXT],
    "tools": [[], [TOOL], TEXT, [5], [TOOL] * 10_000],
    "tool_choice": ["auto", "required", "sometimes", {"type": "function", "function": {"name": "f"}}, 5],
    "add_generation_prompt": [TEXT],
    "continue_final_message": [True, TEXT],
    "chat_template": ["x"],
    "chat_template_kwargs": [TEXT, {"tokenize": True}, {"messages": []}, {"add_generation_prompt": True}, {"self": 1}],
    "documents": [TEXT, [5]],
    "functions": [[TOOL]],
    "function_call": ["auto"],
    "audio": [{"voice": "a"}],
    "modalities": [["text", "audio"]],
    "reasoning_effort": ["some"],
    "messages": [TEXT, [], [5], [{"role": "king", "content": "x"}], [{"content": "x"}], [{"role": "user", "content": 5}]],
}  # fmt: skip
COMPLETIONS = {"logprobs": [-2, 21, 10**6, TEXT, 1.5, True], "suffix": ["x"], "max_tokens": [0]}


def cases(*tables: dict) -> list:
    return [
        pytest.param(name, value, id=f"{name}={str(value)[:20]}") for table in tables for name, values in table.items() for value in values
    ]


@pytest.mark.parametrize(("name", "value"), cases(SHARED, CHAT))
def test_chat_refuses_by_name(name: str, value: object) -> None:
    async def body(h: Harness) -> None:
        error = error_of(await h.chat(**{name: value}), 400)
        assert name in error["message"]
        assert (error["param"] or "").split(".")[0].split("[")[0] == name
        assert len(error["message"]) < 8192
        assert not h.engine.core.seen

    with_harness(body)


@pytest.mark.parametrize(("name", "value"), cases(SHARED, COMPLETIONS))
def test_completions_refuse_by_name(name: str, value: object) -> None:
    async def body(h: Harness) -> None:
        error = error_of(await h.complete(**{name: value}), 400)
        assert name in error["message"]
        assert not h.engine.core.seen

    with_harness(body)


NEUTRAL = {
    "structured_outputs": None, "use_beam_search": False, "length_penalty": 1.0, "truncation_side": "left", "best_of": None,
    "response_format": {"type": "text"}, "stream_interval": 1, "thinking_token_budget": -1, "repetition_detection": {}, "vllm_xargs": {},
    "logprob_token_ids": [], "watermarking": False, "include_reasoning": True, "parallel_tool_calls": True, "top_k": 10**12,
}  # fmt: skip


@pytest.mark.parametrize("name", NEUTRAL)
def test_values_that_ask_for_nothing_pass(name: str) -> None:
    assert with_harness(lambda h: h.chat(**{name: NEUTRAL[name]}, max_tokens=1)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
        ({"top_logprobs": 21, "logprobs": True}, "logprobs"),
        ({"top_logprobs": 10**6, "logprobs": True}, "logprobs"),
    ],
)
def test_fields_that_contradict_each_other(fields: dict, name: str) -> None:
    assert name in error_of(with_harness(lambda h: h.chat(**fields)), 400)["message"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "audio_url", "video_url", "image_embeds", "file"])
def test_parts_that_are_no_text_are_refused(kind: str) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "look"}, {"type": kind, kind: {"url": "data:x"}}]}]
    error = error_of(with_harness(lambda h: h.http.post("/v1/chat/completions", json={"messages": messages})), 400)
    assert kind in error["message"] and error["param"] == "messages[0].content[1].type"


def test_errors_name_the_place_within_messages() -> None:
    async def body(h: Harness) -> None:
        response = await h.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}, {"role": "x"}]})
        assert error_of(response, 400)["param"] == "messages[1].role"
        response = await h.http.post("/v1/chat/completions", json={})
        assert error_of(response, 400)["message"] == "messages is required."
        bad = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{oops"}}]}
        response = await h.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}, bad]})
        assert "messages[1].tool_calls" in error_of(response, 400)["message"]

    with_harness(body)


def test_priority_needs_its_policy() -> None:
    arguments = EngineArgs(scheduling_policy="priority")
    assert with_harness(lambda h: h.chat(priority=1, max_tokens=1), engine_args=arguments).status_code == 200


def test_the_logprob_cap_is_the_servers() -> None:
    arguments = EngineArgs(max_logprobs=-1)
    body = with_harness(lambda h: h.chat(logprobs=True, top_logprobs=-1, max_tokens=1), engine_args=arguments).json()
    assert len(body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 260


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"not json", b"[1]", b'"text"', b"5", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000,
     b'{"messages": [], "temperature": NaN}', b'{"messages": [], "temperature": 1e999}', b'{"messages": "\\ud800"}'],
)  # fmt: skip
def test_bodies_that_are_no_json_object(content: bytes) -> None:
    async def body(h: Harness) -> None:
        response = await h.http.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
        error_of(response, 400)
        assert (await h.chat(max_tokens=1)).status_code == 200

    with_harness(body)


def test_a_number_that_no_machine_holds_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="temperature"):
        parse(b'{"messages": [], "temperature": 1e999}', ChatRequest)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_other_content_types(content_type: str) -> None:
    payload = json.dumps({"prompt": "a"}).encode()
    response = with_harness(lambda h: h.http.post("/v1/completions", content=payload, headers={"content-type": content_type}))
    assert "application/json" in error_of(response, 400)["message"]


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "APPLICATION/JSON", None])
def test_json_content_types(content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = with_harness(lambda h: h.http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers))
    assert response.status_code == 200


def test_bodies_are_bounded_declared_or_not() -> None:
    async def body(h: Harness) -> None:
        payload = json.dumps({"prompt": "a" * 2000}).encode()
        declared = await h.http.post("/v1/completions", content=payload)
        assert "2014" in error_of(declared, 413)["message"]
        assert declared.headers["connection"] == "close"
        sent = 0

        async def endless():
            nonlocal sent
            while True:
                sent += 100
                yield b" " * 100

        error_of(await h.http.post("/v1/completions", content=endless(), headers={"content-type": "application/json"}), 413)
        assert sent <= 2000
        assert (await h.complete("a")).status_code == 200

    with_harness(body, max_body_bytes=1000)


def test_unknown_models_routes_and_methods() -> None:
    async def body(h: Harness) -> None:
        error = error_of(await h.chat(model="other"), 404)
        assert error["param"] == "model" and "`other` does not exist" in error["message"] and "`m`" in error["message"]
        assert "/nowhere" in error_of(await h.http.get("/nowhere"), 404)["message"]
        not_allowed = await h.http.get("/v1/completions")
        assert "POST" in error_of(not_allowed, 405)["message"] and not_allowed.headers["allow"] == "POST"
        for path in ("//v1/models", "/v1/models/", "/V1/models"):
            assert (await h.http.get(path)).status_code == 404

    with_harness(body)


def test_our_own_faults_tell_nothing() -> None:
    async def body(h: Harness) -> None:
        def broken(*_, **__):
            raise RuntimeError("secret at 0xdeadbeef in /root/file.py")

        h.engine.generate = broken
        error = error_of(await h.chat(), 500)
        assert error["type"] == "InternalServerError" and "secret" not in error["message"]

    with_harness(body)


def test_long_inputs_are_not_echoed_at_length() -> None:
    response = with_harness(lambda h: h.chat(model="x" * 200_000))
    assert len(response.content) < 16_384


def test_junk_in_unknown_fields_is_not_built() -> None:
    body = b'{"prompt": "a", "junk": [' + b"[]," * 500_000 + b'1e999], "max_tokens": 2}'
    tracemalloc.start()
    try:
        assert parse(body, CompletionRequest).max_tokens == 2
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_number_may_be_written_as_a_float() -> None:
    assert parse(b'{"prompt": "a", "max_tokens": 5.0, "n": 2}', CompletionRequest).max_tokens == 5


def test_an_unsupported_value_of_any_size_is_refused() -> None:
    for value in (b"[" + b"1," * 10_000 + b"1]", b'"' + b"x" * 100 + b'"', b"1e999"):
        with pytest.raises(InvalidRequestError, match="kv_transfer_params"):
            parse(b'{"prompt": "a", "kv_transfer_params": ' + value + b"}", CompletionRequest)


@pytest.mark.parametrize("name", ["best_of", "thinking_token_budget", "stream_interval", "priority", "logprob_token_ids", "length_penalty"])
def test_null_means_the_default(name: str) -> None:
    assert with_harness(lambda h: h.complete(**{name: None})).status_code == 200


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        parse(b'{"prompt": "a", "user": "\\ud800\\n"}', CompletionRequest)
    with pytest.raises(InvalidRequestError, match="user: not valid JSON"):
        parse(b'{"prompt": "a", "user": "\xff"}', CompletionRequest)


def test_more_choices_than_the_server_could_ever_take_in() -> None:
    async def body(h: Harness) -> None:
        error = error_of(await h.complete(["a"] * 1024, n=128, max_tokens=1), 400)
        assert error["param"] == "n" and "131072" in error["message"]
        assert not h.engine.core.seen

    with_harness(body)


def test_prompts_that_can_not_fit_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(h: Harness) -> None:
        def broken(*_: object) -> None:
            raise AssertionError("the prompt was read")

        monkeypatch.setattr(h.app.state.server.text.tokenizer, "encode_batch", broken)
        assert "characters" in error_of(await h.complete("a" * 200_000), 400)["message"]
        assert "characters" in error_of(await h.chat("a" * 200_000), 400)["message"]
        assert "100000 tokens" in error_of(await h.complete([97] * 100_000), 400)["message"]

    with_harness(body)


def test_long_texts_are_encoded_where_the_interpreter_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(h: Harness) -> None:
        tokenizer = h.app.state.server.text.tokenizer
        expected = tokenizer.encode("ab" * 5000)
        monkeypatch.setattr(tokenizer, "encode", None)
        answer = await h.http.post("/tokenize", json={"prompt": "ab" * 5000})
        assert answer.json()["tokens"] == expected

    with_harness(body)
