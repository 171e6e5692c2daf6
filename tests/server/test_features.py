"""What the two generation routes do with vLLM's further fields: the engine gets them, or the answer shows them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from canter.core.config import EngineArgs
from canter.core.errors import ConfigError, InvalidRequestError
from canter.core.sampling_params import RepetitionDetection
from canter.server.args import ServerArgs
from canter.server.serve import run_server
from canter.text.thinking import ThinkingMarkers
from tests.fake_core import FakeCore, say
from tests.server.helpers import Harness, error_of, events, with_harness

BY_PRIORITY = EngineArgs(scheduling_policy="priority")


def seen(fields: dict[str, Any], **options: Any) -> list[Any]:
    """The sampling parameters that the engine gets from both routes."""

    async def body(h: Harness) -> list[Any]:
        h.app.state.server.text = dataclasses.replace(h.app.state.server.text, thinking=ThinkingMarkers([258], [259]))
        for ask in (h.chat, h.complete):
            response = await ask(max_tokens=2, **fields)
            assert response.status_code == 200, response.text
        return [request.sampling for request in h.engine.core.seen]

    return with_harness(body, **options)


def test_the_engine_gets_what_it_must_honour() -> None:
    for params in seen({"thinking_token_budget": 7}):
        assert (params.thinking_token_budget, params.thinking_start_ids, params.thinking_end_ids) == (7, [258], [259])
    for params in seen({"repetition_detection": {"max_pattern_size": 4, "min_pattern_size": None, "min_count": 3}}):
        assert params.repetition_detection == RepetitionDetection(max_pattern_size=4, min_count=3)
    for params in seen({"vllm_xargs": {"ngram_size": 3, "whitelist_token_ids": [1, 2], "name": "x"}}):
        assert params.extra_args == {"ngram_size": 3, "whitelist_token_ids": [1, 2], "name": "x"}
    for params in seen({}):
        assert params.thinking_token_budget is None and not params.thinking_end_ids and params.extra_args is None


def test_what_only_the_engine_can_refuse_is_an_ordinary_error_streamed_or_not() -> None:
    async def body(h: Harness) -> None:
        h.engine.core.refuse = InvalidRequestError("vllm_xargs.x is read by no logits processor.", "vllm_xargs")
        for stream in (False, True):
            for ask in (h.chat, h.complete):
                assert "vllm_xargs.x" in error_of(await ask(vllm_xargs={"x": 1}, stream=stream), 400)["message"]
        assert h.engine.hub.num_live == 0

    with_harness(body)


def test_a_thinking_budget_needs_a_model_that_thinks() -> None:
    async def body(h: Harness) -> None:
        error = error_of(await h.chat(thinking_token_budget=5), 400)
        assert error["param"] == "thinking_token_budget" and "--reasoning-config" in error["message"]

    with_harness(body)


def test_priorities_come_in_the_body_or_in_the_header() -> None:
    async def body(h: Harness) -> None:
        header = {"X-Vllm-Priority": "-3"}
        for fields in ({}, {"priority": None}, {"priority": 5}, {"priority": 0}):
            answer = await h.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **fields}, headers=header)
            assert answer.status_code == 200
        assert [request.priority for request in h.engine.core.seen] == [-3, -3, 5, 0]
        for value in ("x", "", "1.5", "9" * 30, "NaN", "true"):
            answer = await h.http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Vllm-Priority": value})
            assert error_of(answer, 400)["param"] == "priority"
        answer = await h.http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Vllm-Priority": "9999999999"})
        assert error_of(answer, 400)["param"] == "priority"

    with_harness(body, engine_args=BY_PRIORITY)
    refused = with_harness(lambda h: h.http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Vllm-Priority": "1"}))
    assert "--scheduling-policy priority" in error_of(refused, 400)["message"]


def test_best_of() -> None:
    async def body(h: Harness) -> None:
        assert (await h.complete(best_of=1)).status_code == 200
        assert (await h.complete(best_of=2, n=2)).status_code == 200, "the best two of two are both"
        assert "vLLM" in error_of(await h.complete(best_of=3, n=2), 400)["message"]

    with_harness(body)


def test_stream_interval_gathers_tokens_and_loses_none() -> None:
    async def body(h: Harness) -> None:
        chunks = events(await h.complete("abc", max_tokens=10, stream=True, stream_interval=4, logprobs=0, return_token_ids=True))
        sizes = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks]
        assert sizes == [1, 4, 4, 1], "the first token goes out at once, and the last has nothing to wait for"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abcabcabca"
        assert [len(chunk["choices"][0]["logprobs"]["tokens"]) for chunk in chunks] == sizes
        chat = events(await h.chat("abc", max_tokens=10, stream=True, stream_interval=100))
        assert len([chunk for chunk in chat if chunk["choices"][0]["delta"].get("content")]) == 2
        assert chat[-1]["choices"][0]["finish_reason"] == "length"

    with_harness(body)


def test_truncation_keeps_the_side_that_is_asked_for() -> None:
    async def body(h: Harness) -> None:
        kept = []
        for fields in ({}, {"truncation_side": "left"}, {"truncation_side": "right"}, {"truncation_side": None}):
            answer = (await h.complete("abcdef", max_tokens=1, truncate_prompt_tokens=2, return_prompt_text=True, **fields)).json()
            kept.append(answer["choices"][0]["prompt_text"])
        assert kept == ["ef", "ef", "ab", "ef"]
        whole = await h.complete([97] * 600, max_tokens=10, truncate_prompt_tokens=-1, return_token_ids=True)
        assert len(whole.json()["choices"][0]["prompt_token_ids"]) == 502

    with_harness(body)


def test_the_prompts_text_is_told_once() -> None:
    async def body(h: Harness) -> None:
        chat = (await h.chat("hi", max_tokens=1, return_prompt_text=True)).json()
        assert chat["prompt_text"] == "[user]hi\n[assistant]"
        chunks = events(await h.chat("hi", max_tokens=3, n=2, seed=1, stream=True, return_prompt_text=True))
        assert [chunk.get("prompt_text") for chunk in chunks if "prompt_text" in chunk] == ["[user]hi\n[assistant]"]
        chunks = events(await h.complete([104, 105], max_tokens=3, stream=True, return_prompt_text=True))
        assert [chunk["choices"][0].get("prompt_text") for chunk in chunks] == ["hi", None, None]
        assert "prompt_text" not in (await h.chat("hi", max_tokens=1)).json()

    with_harness(body)


def test_named_logprobs() -> None:
    async def body(h: Harness) -> None:
        answer = (await h.chat("x", max_tokens=1, logprobs=True, logprob_token_ids=[100, 91, 98])).json()
        entry = answer["choices"][0]["logprobs"]["content"][0]
        assert entry["token"] == "["
        assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [("d", -2.0), ("[", -0.5), ("b", -4.0)]
        answer = (await h.complete("x", max_tokens=1, logprobs=0, logprob_token_ids=[100, 98])).json()
        assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"x": -0.5, "d": -2.0, "b": -3.0}]
        for fields in ({"logprobs": True, "top_logprobs": 2}, {"logprobs": False}):
            assert error_of(await h.chat(logprob_token_ids=[5], **fields), 400)["param"] == "logprob_token_ids"
        assert error_of(await h.complete(logprob_token_ids=[5], logprobs=3), 400)["param"] == "logprob_token_ids"

    with_harness(body)


TIMES = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}


def test_timing_in_answers_and_in_the_last_chunk() -> None:
    async def body(h: Harness) -> None:
        for ask in (h.chat, h.complete):
            metrics = (await ask("abc", max_tokens=5)).json()["metrics"]
            assert set(metrics) == TIMES and all(value is not None and value >= 0 for value in metrics.values())
            several = (await ask("abc", max_tokens=5, n=2, seed=1)).json()["metrics"]
            assert several["mean_itl_ms"] is None and several["tokens_per_second"] > 0
            one = (await ask("abc", max_tokens=1)).json()["metrics"]
            assert one["mean_itl_ms"] is None and one["generation_time_ms"] == 0
            chunks = events(await ask("abc", max_tokens=4, n=2, seed=1, stream=True))
            assert ["metrics" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
            assert set(chunks[-1]["metrics"]) == TIMES
            chunks = events(await ask("abc", max_tokens=4, stream=True, stream_options={"include_usage": True}))
            assert ["metrics" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True] and chunks[-1]["choices"] == []
        chunks = events(await h.complete(["abc", "d"], max_tokens=4, stream=True))
        assert ["metrics" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        beams = (await h.complete("abc", max_tokens=3, n=2, use_beam_search=True)).json()["metrics"]
        assert beams["time_to_first_token_ms"] >= 0 and beams["tokens_per_second"] > 0

    with_harness(body, enable_per_request_metrics=True)


def test_no_timing_unless_the_server_gives_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "metrics" not in with_harness(lambda h: h.chat(max_tokens=1)).json()
    args = EngineArgs(disable_log_stats=True)
    assert run_server(args, ServerArgs(enable_per_request_metrics=True, host="127.0.0.1", port=0)) == 1
    assert "disable_log_stats" in capsys.readouterr().err


def test_an_adapters_name_is_answered_like_any_unknown_models() -> None:
    async def body(h: Harness) -> None:
        adapter, other = error_of(await h.chat(model="my-lora"), 404), error_of(await h.chat(model="whatever"), 404)
        assert adapter["message"].replace("my-lora", "whatever") == other["message"] and adapter["param"] == "model"

    with_harness(body)


@pytest.mark.parametrize("name", ["enable_lora", "lora_modules", "max_loras", "max_cpu_loras", "lora_dtype", "fully_sharded_loras"])
def test_adapters_are_refused_in_plain_words(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"Canter has no {name}, which is vLLM's: Canter has no LoRA adapters\."):
        EngineArgs.parse(**{name: True})


def test_a_final_message_goes_on() -> None:
    async def body(h: Harness) -> None:
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
        fields = {"messages": messages, "max_tokens": 2, "continue_final_message": True, "add_generation_prompt": False}
        answer = (await h.http.post("/v1/chat/completions", json={**fields, "return_prompt_text": True})).json()
        assert answer["prompt_text"] == "[user]hi\n[assistant]well"
        echoed = (await h.http.post("/v1/chat/completions", json={**fields, "echo": True})).json()
        assert echoed["choices"][0]["message"]["content"].startswith("well")

    with_harness(body, FakeCore(say("!")))


def test_echo_with_logprobs_is_streamed_whole() -> None:
    async def body(h: Harness) -> None:
        fields = {"max_tokens": 3, "echo": True, "logprobs": 1, "n": 2, "seed": 1}
        whole = (await h.complete("abc", **fields)).json()["choices"]
        streamed: dict[int, dict[str, list]] = {}
        for chunk in events(await h.complete("abc", stream=True, **fields)):
            [choice] = chunk["choices"]
            parts = streamed.setdefault(choice["index"], {})
            for name, values in (choice["logprobs"] or {}).items():
                parts.setdefault(name, []).extend(values)
        assert [streamed[choice["index"]] for choice in whole] == [choice["logprobs"] for choice in whole]
        assert whole[0]["logprobs"]["token_logprobs"][0] is None and len(whole[0]["logprobs"]["tokens"]) == 6

    with_harness(body)
