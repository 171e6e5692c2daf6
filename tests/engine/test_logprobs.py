"""Log-probabilities of the engine are log_softmax of the reference's logits, however the tokens were computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from canter.core.messages import AddRequest
from canter.core.plan import TokenLogprobs
from canter.core.sampling_params import SamplingParams
from tests.engines import VOCAB_SIZE, Oracle, Result, engine, results, tiny_checkpoint

CLOSE = 1e-4


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


def requests_with_logprobs(count: int, prompt_every: int = 2) -> list[AddRequest]:
    """All kinds of counts, some with prompt logprobs; prompts share beginnings, so that others hit the cache."""
    rng = np.random.default_rng(3)
    shared = rng.integers(3, VOCAB_SIZE, 60).tolist()
    requests = []
    for i in range(count):
        prompt = shared[: int(rng.integers(1, 60))] + rng.integers(3, VOCAB_SIZE, int(rng.integers(0, 50)) + (i > 3)).tolist()
        kinds: list[dict[str, Any]] = [
            dict(temperature=0.0),
            dict(temperature=1.3, repetition_penalty=1.4, bad_words_token_ids=[[7]]),
            dict(temperature=1.0, allowed_token_ids=[5, 6, 9, 50]),
            dict(temperature=0.7, top_k=5),
        ]
        prompt_logprobs = (0, 3, -1)[i % 3] if i % prompt_every == 0 else None
        params = SamplingParams(
            seed=i, max_tokens=int(rng.integers(1, 20)), logprobs=(0, 1, 5, -1)[i // 4 % 4], prompt_logprobs=prompt_logprobs, **kinds[i % 4]
        )
        requests.append(AddRequest(f"r{i}", prompt, params))
    return requests


def check_entry(entry: TokenLogprobs, expected: torch.Tensor, chosen: int, count: int) -> None:
    """One position against log-probabilities [V]: the chosen token, then the `count` most likely, best first."""
    count = VOCAB_SIZE if count == -1 else count
    assert entry.token_ids[0] == chosen
    assert len(entry.token_ids) == len(entry.logprobs) == count + 1
    assert torch.allclose(torch.tensor(entry.logprobs), expected[entry.token_ids], atol=CLOSE, rtol=0)
    assert len(set(entry.token_ids[1:])) == count
    assert entry.logprobs[1:] == sorted(entry.logprobs[1:], reverse=True)
    assert torch.allclose(torch.tensor(entry.logprobs[1:]), expected.sort(descending=True).values[:count], atol=CLOSE, rtol=0)
    own = expected[chosen]
    assert int((expected > own + CLOSE).sum()) < entry.rank <= int((expected > own - CLOSE).sum())
    if chosen in entry.token_ids[1:]:
        assert abs(entry.token_ids[1:].index(chosen) + 1 - entry.rank) <= int(((expected - own).abs() < CLOSE).sum()) - 1


def check(request: AddRequest, result: Result, oracle: Oracle) -> None:
    prompt, params = request.prompt_token_ids, request.sampling
    expected = torch.log_softmax(oracle.logits(prompt + result.token_ids).double(), -1).float()
    assert result.error is None and len(result.logprobs) == len(result.token_ids)
    assert params.logprobs is not None
    for i, (token_id, entry) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
        check_entry(entry, expected[len(prompt) - 1 + i], token_id, params.logprobs)
    if params.prompt_logprobs is None:
        assert result.prompt_logprobs is None
        return
    assert result.prompt_logprobs is not None
    for position, (token_id, entry) in enumerate(zip(prompt[1:], result.prompt_logprobs, strict=True)):
        check_entry(entry, expected[position], token_id, params.prompt_logprobs)


@pytest.mark.parametrize(
    "changes",
    [dict(), dict(max_num_batched_tokens=24, max_num_seqs=6, async_scheduling=False), dict(enable_prefix_caching=False, block_size=4)],
    ids=str,
)
def test_logprobs_equal_the_reference(model: Path, oracle: Oracle, changes: dict[str, Any]) -> None:
    requests = requests_with_logprobs(32)
    core = engine(model, **{"num_gpu_blocks_override": 1600, **changes})
    found = results(core, requests)
    again = results(core, [AddRequest("again-" + r.request_id, r.prompt_token_ids, r.sampling) for r in requests])
    core.shutdown()
    for request in requests:
        check(request, found[request.request_id], oracle)
        check(request, again["again-" + request.request_id], oracle)
    if changes.get("enable_prefix_caching", True):
        assert any(result.num_cached_tokens for result in again.values())


@pytest.mark.parametrize("asynchronous", [True, False])
def test_logprobs_after_preemption(model: Path, oracle: Oracle, asynchronous: bool) -> None:
    requests = requests_with_logprobs(40, prompt_every=1)
    for request in requests:
        request.sampling = request.sampling.clone(max_tokens=40)
    blocks = 16 if "llama" in model.name else 45
    core = engine(model, num_gpu_blocks_override=blocks, async_scheduling=asynchronous, max_model_len=160, max_num_batched_tokens=64)
    found = results(core, requests)
    assert core.stats().num_preemptions > 1
    core.shutdown()
    for request in requests:
        check(request, found[request.request_id], oracle)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_prompt_logprobs_of_a_prompt_that_is_preempted_half_way(model: Path, oracle: Oracle, asynchronous: bool) -> None:
    """A long prompt is computed a little in each step, and gives way to requests before it, which grow."""
    rng = np.random.default_rng(0)
    first = SamplingParams(temperature=0.0, max_tokens=60, logprobs=0)
    last = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, prompt_logprobs=2)
    requests = [AddRequest(f"f{i}", rng.integers(3, VOCAB_SIZE, 4).tolist(), first) for i in range(4)]
    requests.append(AddRequest("last", rng.integers(3, VOCAB_SIZE, 90).tolist(), last))
    # Beside four others a step has room for 5 tokens of the prompt, later for 9: what is computed again ends elsewhere.
    core = engine(
        model,
        num_gpu_blocks_override=32 if "llama" in model.name else 80,
        block_size=4,
        async_scheduling=asynchronous,
        max_model_len=100,
        max_num_batched_tokens=9,
        max_num_seqs=6,
    )
    found = results(core, requests)
    core.shutdown()
    assert found["last"].num_preemptions > 0, "the prompt was meant to be preempted"
    for request in requests:
        check(request, found[request.request_id], oracle)
