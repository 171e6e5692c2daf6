"""What goes wrong stays with the request it went wrong for, and nothing is left behind."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from canter.core.errors import EngineDeadError, InvalidRequestError, QueueFullError
from canter.core.messages import AddRequest
from canter.core.sampling_params import SamplingParams
from canter.engine.core import EngineCore
from tests.engines import VOCAB_SIZE, LateDevice, Result, engine, mixed_requests, model_runner, results, run, tiny_checkpoint


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), request.param, seed=6)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    core = engine(model, async_scheduling=False)
    tokens = run(core, mixed_requests(32))
    core.shutdown()
    return tokens


def assert_empty(core: EngineCore) -> None:
    """Nothing of any request is left, in the scheduler or in the runner; cached prefixes don't count."""
    while core.has_work():
        core.step()
    stats = core.stats()
    assert stats.num_free_blocks == stats.num_blocks and stats.num_running == stats.num_waiting == 0
    core._scheduler.check_invariants()
    runner: Any = model_runner(core)
    assert len(runner._table) == 0 and len(runner._table._free_rows) == runner._table.max_num_rows
    assert runner._sampler._made_seeds == {} and runner._prompt_logprobs._progress == {}
    states = runner._sampler.states
    assert not states.features.any()
    assert all(entry is None for kind in (states.allowed, states.bias, states.stops, states.bad_words) for entry in kind)


@pytest.mark.parametrize("settings", [dict(), dict(async_scheduling=False), dict(late=True)], ids=str)
@pytest.mark.parametrize("place", ["forward", "logits", "sample"])
def test_a_kernel_that_fails_fails_its_step_and_no_more(
    model: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], place: str
) -> None:
    device = LateDevice() if settings.get("late") else None
    core = engine(model, device=device, max_num_seqs=8, max_num_batched_tokens=40, **{k: v for k, v in settings.items() if k != "late"})
    runner: Any = model_runner(core)
    owner = runner._sampler if place == "sample" else runner._steps
    real: Callable[..., Any] = getattr(owner, place)
    calls = itertools.count()

    def failing(*args: Any) -> Any:
        if next(calls) in (3, 17, 18, 40):
            raise ValueError("a kernel broke")
        return real(*args)

    monkeypatch.setattr(owner, place, failing)
    found = results(core, mixed_requests(32))
    failed = {name: result for name, result in found.items() if result.finish_reason == "error"}
    assert 0 < len(failed) < len(found)
    assert all(result.error == "The engine failed in a step (ValueError)." for result in failed.values())
    for name, result in found.items():
        assert result.token_ids == expected[name][: len(result.token_ids)]
        assert name in failed or result.token_ids == expected[name]
    assert_empty(core)
    assert run(core, mixed_requests(32)) == expected
    core.shutdown()


def test_a_failure_in_the_middle_of_a_layer(model: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some layers have written this step's keys and values, others not: nobody may find them in the cache."""
    core = engine(model, max_num_batched_tokens=50, max_num_seqs=32, enforce_eager=True)
    layer = model_runner(core)._steps._model._layers[1]  # type: ignore[attr-defined]
    real, calls = layer._mlp, itertools.count()

    def failing(x: torch.Tensor) -> torch.Tensor:
        if next(calls) % 7 == 3:
            raise RuntimeError("a kernel broke")
        return real(x)  # type: ignore[no-any-return]

    monkeypatch.setattr(layer, "_mlp", failing)
    results(core, mixed_requests(32))
    assert next(calls) > 3
    monkeypatch.setattr(layer, "_mlp", real)
    assert run(core, mixed_requests(32)) == expected
    assert_empty(core)
    core.shutdown()


def test_logits_that_are_not_numbers_end_their_request_alone(model: Path, expected: dict[str, list[int]], monkeypatch: Any) -> None:
    core = engine(model)
    runner: Any = model_runner(core)
    real = runner._steps.logits

    def broken(hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = real(hidden, indices)
        if logits.shape[0] == 32:
            logits[5, 7] = float("nan")
            logits[9, 3] = float("inf")
        return logits

    monkeypatch.setattr(runner._steps, "logits", broken)
    found = results(core, mixed_requests(32))
    failed = [name for name, result in found.items() if result.error]
    assert 1 <= len(failed) <= 2 and "not numbers" in str(found[failed[0]].error)
    assert all(result.token_ids == expected[name] for name, result in found.items() if name not in failed)
    assert_empty(core)
    core.shutdown()


def test_a_request_that_may_say_nothing_ends_with_an_error(model: Path, expected: dict[str, list[int]]) -> None:
    requests = mixed_requests(32)
    late = SamplingParams(
        temperature=0.0, max_tokens=9, allowed_token_ids=[20, 2], bad_words_token_ids=[[20, 20, 20]], min_tokens=9, eos_token_ids=[2]
    )
    requests.insert(3, AddRequest("at once", [5, 6], SamplingParams(allowed_token_ids=[9], bad_words_token_ids=[[9]])))
    requests.insert(9, AddRequest("later", [5, 6], late))
    core = engine(model)
    found = results(core, requests)
    assert found["at once"].token_ids == [] and found["later"].token_ids == [20, 20]
    for name in ("at once", "later"):
        assert found[name].finish_reason == "error" and "No token may follow" in str(found[name].error)
    assert {name: result.token_ids for name, result in found.items() if name in expected} == expected
    assert_empty(core)
    core.shutdown()


def test_refused_requests_leave_nothing(model: Path) -> None:
    core = engine(model, max_num_queued_reqs=2, max_model_len=64)
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    for prompt, match in [([], "empty"), ([VOCAB_SIZE], "got 131"), ([3, -2], "got -2"), ([5] * 64, "64 tokens"), ([5] * 99, "99 tokens")]:
        with pytest.raises(InvalidRequestError, match=match):
            core.add_request(AddRequest("a", prompt, greedy))
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        core.add_request(AddRequest("a", [5], SamplingParams(stop_token_ids=[VOCAB_SIZE])))
    with pytest.raises(InvalidRequestError, match="one sequence"):
        core.add_request(AddRequest("a", [5], SamplingParams(n=2)))
    core.add_request(AddRequest("a", [5], greedy))
    with pytest.raises(InvalidRequestError, match="unique"):
        core.add_request(AddRequest("a", [5], greedy))
    core.add_request(AddRequest("b", [5] * 63, greedy))
    with pytest.raises(QueueFullError):
        core.add_request(AddRequest("c", [5], greedy))
    found: dict[str, Result] = {"a": Result(), "b": Result()}
    while core.has_work():
        for delta in core.step():
            found[delta.request_id].take(delta)
    assert len(found["a"].token_ids) == 4 and (len(found["b"].token_ids), found["b"].finish_reason) == (1, "length")
    assert_empty(core)
    core.shutdown()
    core.shutdown()
    with pytest.raises(EngineDeadError):
        core.add_request(AddRequest("d", [5], greedy))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_requests_aborted_at_any_moment(model: Path, asynchronous: bool) -> None:
    """Waiting, running, preempted; their ids are used again at once, with prompt logprobs, which must be whole."""
    rng = np.random.default_rng(5)
    blocks = 12 if "llama" in model.name else 40
    core = engine(model, num_gpu_blocks_override=blocks, max_model_len=100, max_num_batched_tokens=64, async_scheduling=asynchronous)
    scheduler = core._scheduler
    prompts = {f"r{i}": rng.integers(3, VOCAB_SIZE, int(rng.integers(20, 40))).tolist() for i in range(12)}
    alive: dict[str, Result] = {}
    num_aborted_while_preempted = num_finished = 0
    for _ in range(400):
        for name in prompts.keys() - alive.keys():
            alive[name] = Result()
            params = SamplingParams(temperature=1.0, max_tokens=60, prompt_logprobs=1)
            core.add_request(AddRequest(name, prompts[name], params))
        for delta in core.step():
            result = alive[delta.request_id]
            result.take(delta)
            if delta.new_token_ids and result.prompt_logprobs is not None:
                assert [e.token_ids[0] for e in result.prompt_logprobs] == prompts[delta.request_id][1:]
            if delta.finish_reason is not None:
                num_finished += delta.finish_reason != "abort"
                del alive[delta.request_id]
        preempted = [r.request_id for r in scheduler._waiting if r.num_preemptions and r.request_id in alive]
        victims = preempted[:1] if rng.random() < 0.5 else sorted(alive)[:1] if rng.random() < 0.1 else []
        num_aborted_while_preempted += victims == preempted[:1] != []
        core.abort(victims)
        for delta in [] if not victims else core.step():
            alive[delta.request_id].take(delta)
            if delta.finish_reason is not None:
                num_finished += delta.finish_reason != "abort"
                del alive[delta.request_id]
    core.abort(list(alive))
    assert num_aborted_while_preempted > 5 and num_finished > 5
    assert_empty(core)
    core.shutdown()


def short_requests(count: int, start: int) -> Iterator[AddRequest]:
    rng = np.random.default_rng(start)
    kinds: list[dict[str, Any]] = [
        dict(temperature=0.0),
        dict(temperature=1.0),
        dict(temperature=1.0, repetition_penalty=1.2, bad_words_token_ids=[[5], [6, 7]]),
        dict(temperature=1.0, logprobs=2, prompt_logprobs=1),
        dict(temperature=1.0, allowed_token_ids=[9, 10, 11], logit_bias={9: 1.0}, min_tokens=1, stop_token_ids=[12]),
    ]
    for i in range(start, start + count):
        prompt = rng.integers(3, VOCAB_SIZE, int(rng.integers(1, 40))).tolist()
        yield AddRequest(f"r{i}", prompt, SamplingParams(max_tokens=1 + i % 3, **kinds[i % len(kinds)]))


@pytest.mark.slow
def test_two_thousand_requests_leave_nothing(model: Path) -> None:
    """After each batch of requests there are as many objects as after the one before, once the cache has filled up."""
    core = engine(model, num_gpu_blocks_override=60 if "gemma3" in model.name else 40)
    counts = []
    for start in range(0, 2000, 250):
        results(core, list(short_requests(250, start)))
        assert_empty(core)
        assert sum(len(pool.index) for pool in core._scheduler.cache.pools) <= core.stats().num_blocks
        assert not core._scheduler._requests and not core._scheduler._flights
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert max(counts[3:]) - min(counts[3:]) < 100, counts
    core.shutdown()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_priorities_under_a_cache_that_is_too_small(model: Path, asynchronous: bool) -> None:
    """Urgent requests end first, everybody ends, and nobody's tokens change."""
    rng = np.random.default_rng(2)
    requests = [
        AddRequest(
            f"r{i}", rng.integers(3, VOCAB_SIZE, 20).tolist(), SamplingParams(temperature=1.0, seed=i, max_tokens=50), priority=i % 4
        )
        for i in range(24)
    ]
    roomy = engine(model, max_model_len=100, async_scheduling=False)
    expected = run(roomy, requests)
    roomy.shutdown()
    blocks = 18 if "llama" in model.name else 44
    core = engine(
        model,
        num_gpu_blocks_override=blocks,
        max_model_len=100,
        max_num_batched_tokens=64,
        scheduling_policy="priority",
        async_scheduling=asynchronous,
    )
    found: dict[str, Result] = {request.request_id: Result() for request in requests}
    ended: list[str] = []
    for request in sorted(requests, key=lambda r: -r.priority):
        core.add_request(request)
    while core.has_work():
        for delta in core.step():
            found[delta.request_id].take(delta)
            if delta.finish_reason is not None:
                ended.append(delta.request_id)
    assert {name: result.token_ids for name, result in found.items()} == expected
    places = {p: [ended.index(r.request_id) for r in requests if r.priority == p] for p in range(4)}
    means = [float(np.mean(places[p])) for p in range(4)]
    assert means == sorted(means)
    assert ended[0] == "r0" and found["r0"].num_preemptions == 0, "the first of the most urgent gives way to nobody"
    assert core.stats().num_preemptions > 0
    assert_empty(core)
    core.shutdown()
