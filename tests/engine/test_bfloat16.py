"""In bfloat16, where every sum rounds, tokens and log-probabilities are still the same bits in any company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from canter.core.messages import AddRequest
from canter.core.sampling_params import SamplingParams
from tests.engines import Result, engine, mixed_requests, results, tiny_checkpoint
from tests.weights import gguf_file


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), request.param, seed=3)


def all_requests() -> list[AddRequest]:
    requests = mixed_requests(40, seed=11)
    long = SamplingParams(temperature=1.0, max_tokens=70)  # they outgrow a cache that had room for their prompts
    requests[:0] = [AddRequest(f"long{i}", [5 + i] * 3, long.clone(seed=i)) for i in range(6)]
    for request in requests:
        request.sampling = request.sampling.clone(logprobs=3)
    requests[1].sampling = requests[1].sampling.clone(prompt_logprobs=2)
    return requests


def alone(model: Path | str, requests: list[AddRequest], **changes: Any) -> dict[str, Result]:
    core = engine(model, enable_prefix_caching=False, async_scheduling=False, **changes)
    found: dict[str, Result] = {}
    for request in requests:
        found |= results(core, [request])
    core.shutdown()
    return found


def told(found: dict[str, Result]) -> dict[str, Any]:
    """What must not depend on company."""
    return {name: (r.token_ids, r.logprobs, r.prompt_logprobs, r.finish_reason, r.error) for name, r in found.items()}


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Any]:
    found = told(alone(model, all_requests(), dtype="bfloat16"))
    single = told(alone(model, all_requests()[:8], dtype="float32"))
    assert any(found[name][1] != single[name][1] for name in single), "bfloat16 was meant to round"
    return found


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(num_threads=2),
        dict(max_num_batched_tokens=64, long_prefill_token_threshold=7, max_num_seqs=9),
        pytest.param(dict(max_num_batched_tokens=64, long_prefill_token_threshold=1, max_num_seqs=40), marks=pytest.mark.slow),
        dict(block_size=4, num_gpu_blocks_override=1600),
        dict(block_size=32),
        pytest.param(dict(block_size=5, num_gpu_blocks_override=1600, max_num_batched_tokens=77), marks=pytest.mark.slow),
        dict(max_model_len=150, num_gpu_blocks_override="few", max_num_batched_tokens=64),
    ],
    ids=str,
)
def test_same_bits(model: Path, expected: dict[str, Any], changes: dict[str, Any]) -> None:
    few = changes.get("num_gpu_blocks_override") == "few"
    if few:
        changes = {**changes, "num_gpu_blocks_override": 20 if "llama" in model.name else 40}
    core = engine(model, dtype="bfloat16", **changes)
    assert told(results(core, all_requests())) == expected
    again = results(core, [AddRequest("again-" + r.request_id, r.prompt_token_ids, r.sampling) for r in all_requests()])
    assert {name.removeprefix("again-"): value for name, value in told(again).items()} == expected
    assert any(result.num_cached_tokens for result in again.values())
    assert not few or core.stats().num_preemptions > 0
    core.shutdown()


def test_cached_values_of_another_type(model: Path) -> None:
    """float32 activations over half and 8-bit caches."""
    requests = all_requests()[6:18]
    for cache_dtype in ("bfloat16", "float16", "fp8", "int8_per_token_head"):
        want = alone(model, requests, kv_cache_dtype=cache_dtype)
        core = engine(model, kv_cache_dtype=cache_dtype, max_num_batched_tokens=70)
        found = results(core, requests)
        core.shutdown()
        assert {name: r.token_ids for name, r in found.items()} == {name: r.token_ids for name, r in want.items()}


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2-135m.gguf", "gemma3-270m.gguf"])
def test_same_bits_of_a_real_model(name: str) -> None:
    path = gguf_file(name)
    generator = torch.Generator().manual_seed(1)
    requests = []
    for i in range(10):
        length = 3 + 23 * (i % 4)
        prompt = torch.randint(1000, 9000, (length,), generator=generator).tolist()
        params = SamplingParams(temperature=(0.0, 0.8)[i % 2], seed=i, max_tokens=8, ignore_eos=True, logprobs=1)
        requests.append(AddRequest(f"r{i}", prompt, params))
    settings: dict[str, Any] = dict(dtype="bfloat16", max_model_len=512, num_gpu_blocks_override=400)
    expected = told(alone(path, requests, **settings, num_threads=1))
    for changes in (dict(num_threads=2), dict(num_threads=1, max_num_batched_tokens=33, max_num_seqs=11, block_size=32)):
        core = engine(path, **{**settings, **changes})
        assert told(results(core, requests)) == expected
        core.shutdown()
