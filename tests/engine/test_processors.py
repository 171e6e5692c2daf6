"""Logits processors, thinking budgets and repetition detection through the whole engine, alone and in company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canter.core.errors import ConfigError, InvalidRequestError
from canter.core.messages import AddRequest
from canter.core.sampling_params import RepetitionDetection, SamplingParams
from canter.engine.core import EngineCore
from canter.runner.sampling.plugins import Plugins
from tests.engines import VOCAB_SIZE, LateDevice, engine, mixed_requests, results, run, tiny_checkpoint

NAMES = ["tests.plugins:Shift", "ngram-ban", "tests.plugins:Force", "tests.plugins:Broken"]
OPTIONS: list[dict[str, Any]] = [
    dict(thinking_token_budget=4, thinking_start_ids=[9], thinking_end_ids=[8], logit_bias={9: 30.0}),
    dict(thinking_token_budget=3, thinking_start_ids=[9], thinking_end_ids=[7, 7, 8], temperature=0.0),
    dict(thinking_token_budget=0, thinking_start_ids=[9], thinking_end_ids=[8]),
    dict(extra_args={"shift": 1}),
    dict(extra_args={"shift": 1, "ngram_size": 2, "window_size": 30}, temperature=0.0),
    dict(extra_args={"ngram_size": 1, "whitelist_token_ids": [5]}, allowed_token_ids=list(range(5, 50))),
    dict(extra_args={"force": 12, "force_from": 5}),
    dict(repetition_detection=RepetitionDetection(max_pattern_size=3, min_count=2), allowed_token_ids=[20, 21, 22]),
    dict(repetition_detection=RepetitionDetection(max_pattern_size=2, min_count=3), temperature=0.0, logit_bias={30: 100.0}),
    dict(logprobs=0, logprob_token_ids=[5, 6]),
    dict(),
]


def make_requests(count: int = 44) -> list[AddRequest]:
    rng = np.random.default_rng(5)
    requests = []
    for i, base in enumerate(mixed_requests(count, max_tokens=20)):
        options = {"temperature": 1.0, "seed": 50 + i, "max_tokens": 20, "eos_token_ids": [2], **OPTIONS[i % len(OPTIONS)]}
        thought = [9, *rng.integers(10, VOCAB_SIZE, 3).tolist()] if i % 2 and "thinking_token_budget" in options else []
        requests.append(AddRequest(base.request_id, base.prompt_token_ids + thought, SamplingParams(**options)))
    return requests


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama")


def loaded(model: Path, **changes: Any) -> EngineCore:
    return engine(model, logits_processors=NAMES, **changes)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    core = loaded(model, enable_prefix_caching=False, async_scheduling=False)
    tokens = run(core, make_requests(), together=False)
    core.shutdown()
    return tokens


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(async_scheduling=False, max_num_seqs=5),
        dict(max_num_batched_tokens=20, max_num_seqs=7, long_prefill_token_threshold=5),
        dict(num_gpu_blocks_override=20, max_model_len=150, max_num_batched_tokens=128),
    ],
    ids=str,
)
def test_company_changes_nothing(model: Path, expected: dict[str, list[int]], changes: dict[str, Any]) -> None:
    core = loaded(model, **changes)
    assert run(core, make_requests()) == expected
    assert ("num_gpu_blocks_override" in changes) == (core.stats().num_preemptions > 0)
    assert core.stats().num_free_blocks == core.stats().num_blocks
    core.shutdown()


def test_with_a_late_device(model: Path, expected: dict[str, list[int]]) -> None:
    core = loaded(model, device=LateDevice())
    assert run(core, make_requests()) == expected
    core.shutdown()


def test_each_option_did_something(expected: dict[str, list[int]]) -> None:
    outputs = list(expected.values())
    thoughts = [out for i, out in enumerate(outputs) if i % len(OPTIONS) == 1 and i % 2]
    assert thoughts and all(out[:3] == [7, 7, 8] for out in thoughts), "the prompt had used the budget of 3 up"
    assert any(9 in out and 8 in out[out.index(9) + 1 : out.index(9) + 6] for out in outputs[0 :: len(OPTIONS)])
    assert all(set(out[5:]) <= {12} for out in outputs[6 :: len(OPTIONS)])
    for out in outputs[5 :: len(OPTIONS)]:
        others = [token for token in out if token != 5]
        assert len(set(others)) == len(others)
    assert all(out == [30, 30, 30] for out in outputs[8 :: len(OPTIONS)])


def test_repetition_is_a_reason_of_its_own(model: Path) -> None:
    core = loaded(model)
    found = results(core, make_requests())
    core.shutdown()
    assert {(r.finish_reason, r.stop_reason) for i, r in enumerate(found.values()) if i % len(OPTIONS) == 8} == {
        ("repetition", "repetition_detected")
    }


def request(name: str, **args: Any) -> AddRequest:
    return AddRequest(name, [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=6, extra_args=args or None))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_processor_that_raises_fails_its_request_alone(model: Path, asynchronous: bool) -> None:
    core = loaded(model, async_scheduling=asynchronous)
    plain, fine = [request("plain")], [request("fine", broken=99), request("shifted", shift=1)]
    bad = [
        request("apply", broken=2),
        request("first", broken=0),
        request("add", broken="add"),
        request("refused", refused=3),
        request("shape", shape=1),
        request("nan", nan=4),
    ]
    alone = {r.request_id: run(core, [r])[r.request_id] for r in plain + fine}
    assert alone["fine"] == [7] * 6
    for _ in range(2):  # rows and state are as before
        found = results(core, bad[:3] + fine + plain + bad[3:] + [request("remove", broken="remove")])
        assert {name: found[name].token_ids for name in alone} == alone
        assert found["remove"].finish_reason == "length"
        errors = {r.request_id: found[r.request_id] for r in bad}
        assert {result.finish_reason for result in errors.values()} == {"error"}
        assert {name: len(result.token_ids) for name, result in errors.items()} == {
            "apply": 2, "first": 0, "add": 0, "refused": 3, "shape": 1, "nan": 4,
        }  # fmt: skip
        assert errors["apply"].error == "The logits processor Broken failed on this request (RuntimeError)."
        assert errors["refused"].error == "This one is not wanted."
        assert "not numbers" in (errors["nan"].error or "")
    assert core.stats().num_free_blocks == core.stats().num_blocks
    core.shutdown()


def test_what_no_processor_reads_is_refused_when_it_comes(model: Path) -> None:
    core = engine(model)
    with pytest.raises(InvalidRequestError, match=r"vllm_xargs.shift"):
        core.add_request(request("a", shift=1))
    core.shutdown()
    core = loaded(model)
    for args in ({"shift": 1, "other": 2}, {"force": "x"}, {"window_size": 5}):
        with pytest.raises(InvalidRequestError, match="vllm_xargs"):
            core.add_request(request("a", **args))
    assert not core.has_work()
    core.shutdown()
    with pytest.raises(ConfigError, match="can't be loaded"):
        engine(model, logits_processors=["tests.plugins:Nothing"])


def test_one_that_applies_to_everyone_leaves_greedy_requests_alone_where_it_says_so(model: Path) -> None:
    plain = engine(model)
    greedy = run(plain, [request("g")])
    plain.shutdown()
    core = engine(model, logits_processors=["tests.plugins:Everyone"])
    found = run(core, [request("g"), AddRequest("s", [5, 6, 7], SamplingParams(temperature=1.0, max_tokens=6))])
    core.shutdown()
    assert found == {**greedy, "s": [11] * 6}


def test_requests_that_ask_for_none_are_as_without(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither their tokens nor their path through the sampler know of the processors that are loaded."""
    plain = engine(model)
    expected = run(plain, mixed_requests(20))
    plain.shutdown()
    core = loaded(model)
    monkeypatch.setattr(Plugins, "apply", None)
    assert run(core, mixed_requests(20)) == expected
    core.shutdown()


def test_named_logprobs_are_those_of_the_whole_vocabulary(model: Path) -> None:
    core = engine(model)
    named = SamplingParams(temperature=1.0, seed=4, max_tokens=5, logprob_token_ids=[9, 3, 100])
    whole = named.clone(logprob_token_ids=None, logprobs=-1)
    found = results(
        core, [AddRequest("n", [5, 6], named), AddRequest("w", [5, 6], whole), AddRequest("k", [5, 6], whole.clone(logprobs=2))]
    )
    core.shutdown()
    assert found["n"].token_ids == found["w"].token_ids
    for mine, all_of_them in zip(found["n"].logprobs, found["w"].logprobs, strict=True):
        assert mine.token_ids[1:] == [9, 3, 100] and mine.rank == all_of_them.rank
        known = dict(zip(all_of_them.token_ids, all_of_them.logprobs, strict=True))
        assert mine.logprobs[0] == all_of_them.logprobs[0]
        assert mine.logprobs[1:] == pytest.approx([known[t] for t in (9, 3, 100)], abs=2e-6)
    assert [len(position.token_ids) for position in found["k"].logprobs] == [3] * 5
