"""The same requests give the same tokens whatever else goes on: company, cache, chunks, preemption, lateness."""

from __future__ import annotations

from pathlib import Path

import pytest

from canter.core.messages import AddRequest
from tests.engines import LateDevice, engine, mixed_requests, run, tiny_checkpoint

SCARCE: dict[str, dict[str, object]] = {
    "llama": {"num_gpu_blocks_override": 20},
    "gemma3": {"num_gpu_blocks_override": 60},
    "lfm2": {"num_gpu_blocks_override": 20},
    "zamba2": {"num_gpu_blocks_override": 20},
    # Nothing grows with a request's length, but one that passes a place where its state is kept holds two for a step.
    "mamba2": {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 18, "mamba_block_size": 16},
}
"""Family -> a cache in which some of the requests can begin, but not all of these go on."""


@pytest.fixture(scope="module", params=SCARCE)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def requests() -> list[AddRequest]:
    return mixed_requests(64)


@pytest.fixture(scope="module")
def expected(model: Path, requests: list[AddRequest]) -> dict[str, list[int]]:
    """Each request alone, step by step, with nothing reused and nothing ahead of its time."""
    core = engine(model, enable_prefix_caching=False, async_scheduling=False)
    tokens = run(core, requests, together=False)
    core.shutdown()
    assert len({tuple(t) for t in tokens.values()}) > 50, "the requests must differ, or the test shows nothing"
    return tokens


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(enable_prefix_caching=False),
        dict(async_scheduling=False),
        dict(max_num_batched_tokens=64),
        dict(max_num_batched_tokens=64, max_num_seqs=5, long_prefill_token_threshold=7),
        dict(max_prefill_slowdown=1.5),
        dict(block_size=4, num_gpu_blocks_override=1600),
        dict(num_threads=2),
        dict(mamba_block_size=16),
        dict(mamba_block_size=32, mamba_cache_mode="all"),
        dict(mamba_cache_mode="none", max_num_batched_tokens=64),
    ],
    ids=lambda c: ",".join(f"{k}={v}" for k, v in c.items()) or "default",
)
def test_all_at_once(model: Path, requests: list[AddRequest], expected: dict[str, list[int]], changes: dict[str, object]) -> None:
    core = engine(model, **changes)
    assert run(core, requests) == expected
    stats = core.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_free_blocks == stats.num_blocks
    core.shutdown()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_with_preemption(model: Path, requests: list[AddRequest], expected: dict[str, list[int]], asynchronous: bool) -> None:
    core = engine(model, **SCARCE[model.name], async_scheduling=asynchronous, max_model_len=150, max_num_batched_tokens=128)
    assert run(core, requests) == expected
    assert core.stats().num_preemptions > 0, "the cache was meant to be too small"
    assert core.stats().num_free_blocks == core.stats().num_blocks
    core.shutdown()


def test_with_a_late_device(model: Path, requests: list[AddRequest], expected: dict[str, list[int]]) -> None:
    device = LateDevice()
    core = engine(model, device=device)
    assert run(core, requests) == expected
    assert device.most_queued >= 4, "two steps, of a forward and a sampling each, were meant to wait at once"
    core.shutdown()


def test_a_second_time_from_the_prefix_cache(model: Path, requests: list[AddRequest], expected: dict[str, list[int]]) -> None:
    core = engine(model, mamba_block_size=16)
    first = run(core, requests)
    again = run(core, [AddRequest(f"again-{r.request_id}", r.prompt_token_ids, r.sampling) for r in requests])
    assert first == expected
    assert {k.removeprefix("again-"): v for k, v in again.items()} == expected
    assert core.stats().prefix_hits > 0
    core.shutdown()
