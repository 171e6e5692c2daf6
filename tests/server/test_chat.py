from __future__ import annotations

import asyncio
import json

import pytest

from canter.core.config import EngineArgs
from canter.core.errors import EngineDeadError, EngineError
from tests.fake_core import EOS_ID, FakeCore, say
from tests.server.helpers import Harness, error_of, events, with_harness

PROMPT = "[user]hi\n[assistant]"


def chat(core: FakeCore | None = None, harness: dict | None = None, **fields):
    return with_harness(lambda h: h.chat(**fields), core, **(harness or {}))


def test_an_answer_has_every_field() -> None:
    body = chat(FakeCore(say("hello")), model="m").json()
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 0
    assert body == {
        "object": "chat.completion",
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "hello",
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "tool_calls": [],
                    "reasoning": None,
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {"prompt_tokens": len(PROMPT), "total_tokens": len(PROMPT) + 6, "completion_tokens": 6, "prompt_tokens_details": None},
        "service_tier": None,
        "system_fingerprint": None,
        "prompt_logprobs": None,
        "kv_transfer_params": None,
    }


def test_a_stream_has_one_role_chunk_one_finish_chunk_and_no_empty_ones() -> None:
    chunks = events(chat(FakeCore(say("hello")), stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "hello"
    assert all(delta.get("content") for delta in deltas[1:-1])
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert finishes[-1] == "stop" and not any(finishes[:-1])
    assert chunks[-1]["choices"][0]["stop_reason"] is None
    assert all("stop_reason" not in chunk["choices"][0] for chunk in chunks[:-1])
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_stream_and_answer_say_the_same() -> None:
    options = {
        "n": 3,
        "temperature": 0.5,
        "max_tokens": 40,
        "stop": ["lo w"],
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    whole = chat(FakeCore(say("hello wörld")), **options).json()
    chunks = events(chat(FakeCore(say("hello wörld")), stream=True, **options))
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"] == "hel"
        assert [t for c in own for t in c.get("token_ids", [])] == choice["token_ids"]
        assert [e for c in own if c["logprobs"] for e in c["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert sum("role" in c["delta"] for c in own) == 1
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]] == ["stop"]
        assert own[-1]["stop_reason"] == choice["stop_reason"] == "lo w"


def test_usage_comes_at_the_end_when_asked_for() -> None:
    chunks = events(chat(FakeCore(say("abc")), stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    expected = {"prompt_tokens": len(PROMPT), "total_tokens": len(PROMPT) + 4, "completion_tokens": 4, "prompt_tokens_details": None}
    assert chunks[-1]["usage"] == expected
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_usage_may_run_along() -> None:
    chunks = events(chat(FakeCore(say("abc")), stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0 and counts[-1] == 4 and counts == sorted(counts)


@pytest.mark.parametrize("n", [1, 2])
def test_chunks_of_text_alone_are_what_the_schema_makes_of_them(n: int) -> None:
    """They are put together from parts that are encoded once; with a running usage every chunk is encoded whole."""
    name = 'm"content":"" \\"'
    along = {"stream": True, "n": n, "temperature": 1.0, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    core, harness = lambda: FakeCore(say('say "hé\u4e16\x00", \\')), {"served_model_name": [name]}
    whole = events(chat(core(), harness, **along))[:-1]
    parts = events(chat(core(), harness, **along | {"stream_options": None}))
    for chunk in (*whole, *parts):
        assert chunk["model"] == name and chunk.pop("id") and chunk.pop("created")
    for chunk in whole:
        del chunk["usage"]
    assert [list(chunk) for chunk in parts] == [list(chunk) for chunk in whole]
    assert parts == whole and sum("content" in chunk["choices"][0]["delta"] for chunk in parts) > 10 * n


def test_usage_may_be_forced_and_tell_of_the_cache() -> None:
    options = {"enable_force_include_usage": True, "enable_prompt_tokens_details": True}
    chunks = events(chat(FakeCore(say("abc")), options, stream=True))
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": len(PROMPT) // 16 * 16}


def test_logprobs_show_bytes_and_the_best_tokens() -> None:
    body = chat(FakeCore(say("é", then_eos=False)), max_tokens=2, logprobs=True, top_logprobs=2).json()
    first, second = body["choices"][0]["logprobs"]["content"]
    assert first["bytes"] == [195] and second["bytes"] == [169]
    assert first["token"] == "�"
    assert first["logprob"] == -0.5
    assert [(top["bytes"], top["logprob"]) for top in first["top_logprobs"]] == [([195], -0.5), ([196], -1.5)]


def test_logprobs_without_top_list_only_the_token() -> None:
    body = chat(FakeCore(say("a", then_eos=False)), max_tokens=1, logprobs=True).json()
    assert body["choices"][0]["logprobs"]["content"] == [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]


def test_tokens_may_be_shown_as_ids() -> None:
    body = chat(FakeCore(say("a")), max_tokens=1, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True).json()
    [entry] = body["choices"][0]["logprobs"]["content"]
    assert entry["token"] == entry["top_logprobs"][0]["token"] == "token_id:97"


def test_token_ids_are_returned_when_asked_for() -> None:
    body = chat(FakeCore(say("ab")), return_token_ids=True).json()
    assert body["prompt_token_ids"] == list(PROMPT.encode())
    assert body["choices"][0]["token_ids"] == [97, 98, EOS_ID]
    chunks = events(chat(FakeCore(say("ab")), return_token_ids=True, stream=True))
    assert chunks[0]["prompt_token_ids"] == list(PROMPT.encode())
    assert sum("prompt_token_ids" in chunk for chunk in chunks) == 1


def test_prompt_logprobs() -> None:
    positions = chat(FakeCore(say("a")), prompt_logprobs=1).json()["prompt_logprobs"]
    assert positions[0] is None and len(positions) == len(PROMPT)
    assert positions[1] == {str(ord("u")): {"logprob": -0.5, "rank": 1, "decoded_token": "u"}}


def test_a_length_stop_is_told() -> None:
    assert chat(max_tokens=3).json()["choices"][0]["finish_reason"] == "length"


def test_a_stop_token_is_told() -> None:
    choice = chat(FakeCore(say("abc")), stop_token_ids=[98]).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["message"]["content"]) == ("stop", 98, "a")


def test_max_completion_tokens_goes_before_max_tokens() -> None:
    assert chat(max_tokens=9, max_completion_tokens=2).json()["usage"]["completion_tokens"] == 2


def test_without_max_tokens_the_rest_of_the_context_is_used() -> None:
    assert chat().json()["usage"]["total_tokens"] == 512


def test_the_models_defaults_apply_below_the_users_values() -> None:
    async def body(h: Harness) -> None:
        await h.chat()
        await h.chat(temperature=0.9, max_tokens=7)
        first, second = (request.sampling for request in h.engine.core.seen)
        assert (first.temperature, first.top_k, first.max_tokens) == (0.3, 5, 4)
        assert (second.temperature, second.top_k, second.max_tokens) == (0.9, 5, 7)

    with_harness(body, defaults={"temperature": 0.3, "top_k": 5, "max_tokens": 4})


def test_every_sampling_field_reaches_the_engine() -> None:
    fields = {
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2, "temperature": 0.7, "top_p": 0.8, "top_k": 4,
        "min_p": 0.1,
        "seed": 3,
        "stop": ["x"], "stop_token_ids": [5], "ignore_eos": True, "max_tokens": 6, "min_tokens": 2, "skip_special_tokens": False,
        "spaces_between_special_tokens": False, "include_stop_str_in_output": True, "allowed_token_ids": [1, 2], "bad_words": ["b"],
    }  # fmt: skip

    async def body(h: Harness) -> None:
        response = await h.chat(**fields, logit_bias={"7": 200, "8": -1})
        assert response.status_code == 200, response.text
        sampling = h.engine.core.seen[0].sampling
        assert {name: getattr(sampling, name) for name in fields} == fields
        assert sampling.logit_bias == {7: 100.0, 8: -1.0}
        assert sampling.bad_words_token_ids == [[98], [32, 98]]
        assert sampling.eos_token_ids == [EOS_ID]

    with_harness(body)


def test_null_means_default_and_unknown_fields_are_ignored() -> None:
    nulls = dict.fromkeys(
        ["model", "temperature", "top_p", "stream", "stop", "n", "tools", "tool_choice", "response_format", "logprobs", "top_logprobs",
         "stream_options", "echo", "user", "priority", "structured_outputs", "add_generation_prompt", "max_tokens"]
    )  # fmt: skip
    response = chat(FakeCore(say("ok")), **nulls, drop_params=True, metadata={"a": 1}, service_tier="auto", store=False)
    assert response.json()["choices"][0]["message"]["content"] == "ok"


def test_whole_numbers_may_come_as_floats() -> None:
    assert chat(max_tokens=3.0, seed=1.0).json()["usage"]["completion_tokens"] == 3


def prompt_of(messages: list, **fields) -> str:
    async def body(h: Harness) -> str:
        response = await h.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1, **fields})
        assert response.status_code == 200, response.text
        return bytes(h.engine.core.seen[0].prompt_token_ids).decode()

    return with_harness(body)


def test_messages_of_all_roles_and_forms_reach_the_template() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "system", "content": "be"},
        {"role": "developer", "content": "good"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "assistant", "content": "fine", "tool_calls": [], "reasoning_content": "hm"},
    ]
    expected = "[system]be\n[developer]good\n[user]one\ntwo\n[assistant]\n[tool]1\n[assistant]fine\n[assistant]"
    assert prompt_of(messages) == expected


def test_the_template_takes_options() -> None:
    messages = [{"role": "user", "content": "a"}]
    assert prompt_of(messages, add_generation_prompt=False) == "[user]a\n"
    assert prompt_of(messages, chat_template_kwargs={"mood": "glad"}) == "[user]a\nglad[assistant]"
    assert prompt_of(messages, documents=[{"text": "d"}]) == "[user]a\n1 documents\n[assistant]"
    open_end = [*messages, {"role": "assistant", "content": "well"}]
    assert prompt_of(open_end, add_generation_prompt=False, continue_final_message=True) == "[user]a\n[assistant]well"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert prompt_of(messages, tools=tools, tool_choice="none") == "[user]a\n[assistant]"
    assert prompt_of(messages, tool_choice="none") == "[user]a\n[assistant]"


def test_a_template_of_the_request_needs_trust() -> None:
    assert error_of(chat(chat_template="x"), 400)["param"] == "chat_template"

    async def body(h: Harness) -> None:
        await h.chat(chat_template="{{ messages[0].content }}!", max_tokens=1)
        assert bytes(h.engine.core.seen[0].prompt_token_ids) == b"hi!"

    with_harness(body, trust_request_chat_template=True)


def test_echo_repeats_the_message_that_is_continued() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "well"}]
    fields = {"messages": messages, "echo": True, "continue_final_message": True, "add_generation_prompt": False}

    async def body(h: Harness) -> None:
        whole = await h.http.post("/v1/chat/completions", json=fields)
        assert whole.json()["choices"][0]["message"]["content"] == "well, yes"
        chunks = events(await h.http.post("/v1/chat/completions", json={**fields, "stream": True}))
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "well, yes"

    with_harness(body, FakeCore(say(", yes")))


def test_truncation_keeps_the_end_of_the_prompt() -> None:
    async def body(h: Harness) -> None:
        await h.chat(truncate_prompt_tokens=4, max_tokens=1)
        await h.chat("x" * 600, truncate_prompt_tokens=-1, max_tokens=12)
        first, second = (bytes(request.prompt_token_ids) for request in h.engine.core.seen)
        assert first == b"ant]"
        assert len(second) == 500 and second.endswith(b"x\n[assistant]")

    with_harness(body)


def test_cache_salt_and_priority_reach_the_engine() -> None:
    async def body(h: Harness) -> None:
        await h.chat(cache_salt="mine", priority=-3, max_tokens=1)
        [request] = h.engine.core.seen
        assert (request.cache_salt, request.priority) == ("mine", -3)

    with_harness(body, engine_args=EngineArgs(scheduling_policy="priority"))


def test_ids_are_the_clients_where_it_gives_one() -> None:
    async def body(h: Harness) -> None:
        payload = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        headers = {"X-Request-Id": "abc"}
        first = await h.http.post("/v1/chat/completions", json=payload, headers=headers)
        second = await h.http.post("/v1/chat/completions", json={**payload, "request_id": "mine"}, headers=headers)
        third = await h.http.post("/v1/chat/completions", json=payload, headers={"X-Request-Id": "a\tb\x1b[31m"})
        assert first.json()["id"] == "chatcmpl-abc"
        assert second.json()["id"] == "chatcmpl-mine"
        assert "\x1b" not in third.json()["id"]
        assert len({request.request_id for request in h.engine.core.seen}) == 3

    with_harness(body)


def test_two_requests_of_one_id_are_both_served() -> None:
    async def body(h: Harness) -> None:
        responses = await asyncio.gather(*(h.chat(request_id="same", max_tokens=20) for _ in range(2)))
        assert [response.status_code for response in responses] == [200, 200]

    with_harness(body)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_error_before_the_first_token_is_an_http_error(stream: bool) -> None:
    core = FakeCore()
    core.refuse = EngineError("the step failed at 0x7f00 in /root/secret/file.py\nTraceback")
    message = error_of(chat(core, stream=stream), 500)["message"]
    assert message == "the step failed at <address> in <path>"


def test_an_error_after_the_first_token_is_an_event_then_done() -> None:
    async def body(h: Harness) -> None:
        def die(*_) -> list:
            h.engine.core.step = lambda: []
            h.engine.hub.fail_all(EngineDeadError("The engine process ended."))
            return []

        steps = 0
        original = h.engine.core.step

        def step() -> list:
            nonlocal steps
            steps += 1
            return original() if steps < 3 else die()

        h.engine.core.step = step
        chunks = events(await h.chat(stream=True))
        assert chunks[-1] == {
            "error": {"message": "The engine process ended.", "type": "ServiceUnavailableError", "param": None, "code": 503}
        }
        assert chunks[1]["choices"][0]["delta"]["content"]

    with_harness(body)


def test_chunks_are_valid_json_with_any_text() -> None:
    text = 'line\nbreak "quote" \\ \u2028 \x00 é 🙂'
    chunks = events(chat(FakeCore(say(text)), stream=True))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == text
    assert json.dumps(chunks)
