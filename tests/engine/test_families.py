"""Every family through the whole engine, with a cache so small that requests are preempted, against transformers' logits."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from canter.checkpoint.model_config import read_model_config
from canter.checkpoint.resolve import resolve
from canter.core.messages import AddRequest
from canter.core.sampling_params import SamplingParams
from canter.core.state_specs import SnapshotMode, place_snapshots, plan_layout
from canter.models.registry import get_model_class
from canter.runner.memory import cache_bytes
from canter.scheduler.cache.coordinator import CacheCoordinator
from canter.scheduler.cache.managers import CacheLimits
from tests.engines import engine, run
from tests.models.families import FAMILIES, Family, build_oracle, save_oracle

NEAR_TIE = 1e-4
NUM_REQUESTS = 6
PROMPT_TOKENS = 3
"""Fewer than any block or window holds: whatever a layer remembers, a request that goes on needs more of it than it began with."""
NEW_TOKENS = 27
MODEL_LENGTH = PROMPT_TOKENS + NEW_TOKENS
"""Ropes that follow the length served (dynamic, longrope) are then those of a whole sequence in transformers."""
STEP_TOKENS = 48
STATE_TOKENS = 16
"""Tokens from one place where recurrent states are kept to the next: a request that passes one holds two for a step."""


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_tokens_after_preemption_are_those_of_transformers(family: Family, block_size: int, tmp_path: Path) -> None:
    path = save_oracle(family, tmp_path)
    generator = torch.Generator().manual_seed(11)
    prompts = torch.randint(3, 131, (NUM_REQUESTS, PROMPT_TOKENS), generator=generator)
    core = engine(
        path,
        block_size=block_size,
        max_num_seqs=NUM_REQUESTS,
        max_model_len=MODEL_LENGTH,
        max_num_batched_tokens=STEP_TOKENS,
        mamba_block_size=STATE_TOKENS,
        **memory_that_is_too_small(path, block_size),
    )
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = run(core, [AddRequest(str(i), prompt.tolist(), params) for i, prompt in enumerate(prompts)])
    assert core.stats().num_preemptions > 0, "the cache was meant to be too small"
    core.shutdown()
    sequences = torch.cat((prompts, torch.tensor([outputs[str(i)] for i in range(NUM_REQUESTS)])), 1)
    oracle = copy.deepcopy(build_oracle(family))  # others use it too, and dynamic ropes remember the longest sequence seen
    with torch.inference_mode():
        logits = oracle(input_ids=sequences, use_cache=False).logits.float()[:, PROMPT_TOKENS - 1 : -1]
    chosen = logits.gather(2, sequences[:, PROMPT_TOKENS:, None]).squeeze(2)
    assert float((logits.amax(2) - chosen).max()) < NEAR_TIE


def memory_that_is_too_small(path: Path, block_size: int) -> dict[str, int | None]:
    """What grows with a request has room for one to its end; where nothing does, there is room for the states of a few that begin."""
    config = read_model_config(resolve(str(path)))
    model = get_model_class(config.architecture)
    specs = model.state_specs(model.Args.from_hf(config.hf), block_size, "float32", "float32")
    layout = plan_layout(place_snapshots(specs, SnapshotMode.ALIGN, STATE_TOKENS))
    if any(pool.grows for pool in layout.pools):
        cache = CacheCoordinator(layout, [2] * len(layout.pools), CacheLimits(MODEL_LENGTH, STEP_TOKENS))
        return {"num_gpu_blocks_override": 1 + max(cache.max_blocks(MODEL_LENGTH))}
    return {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": cache_bytes(layout, [3] * len(layout.pools))}
