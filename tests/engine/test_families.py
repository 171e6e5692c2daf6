"""Every family through the whole engine, with a cache so small that requests are preempted, against transformers' logits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from canter.core.messages import AddRequest
from canter.core.sampling_params import SamplingParams
from canter.core.state_specs import StateKind
from canter.engine.core import EngineCore
from tests.engines import engine, run
from tests.models.families import FAMILIES, Family, build_oracle, save_oracle

NEAR_TIE = 1e-4
NUM_REQUESTS = 6
PROMPT_TOKENS = 12
NEW_TOKENS = 18
MODEL_LENGTH = PROMPT_TOKENS + NEW_TOKENS
"""Ropes that follow the length served (dynamic, longrope) are then those of a whole sequence in transformers."""


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_tokens_after_preemption_are_those_of_transformers(family: Family, block_size: int, tmp_path: Path) -> None:
    path = save_oracle(family, tmp_path)
    generator = torch.Generator().manual_seed(11)
    prompts = torch.randint(3, 131, (NUM_REQUESTS, PROMPT_TOKENS), generator=generator)
    # Two requests fit to their ends; six begin.
    core = small_engine(path, block_size, NUM_REQUESTS, kv_cache_memory_bytes=bytes_of_two_requests(path, block_size))
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = run(core, [AddRequest(str(i), prompt.tolist(), params) for i, prompt in enumerate(prompts)])
    # Requests of a model that only has windows hold no more at their end than at their start, and states have memory of their own.
    specs = [manager.group.spec for manager in core._scheduler.cache.managers]
    never = all(spec.window for spec in specs) or any(spec.kind is StateKind.RECURRENT for spec in specs)
    assert never or core.stats().num_preemptions > 0, "the cache was meant to be too small"
    core.shutdown()
    sequences = torch.cat((prompts, torch.tensor([outputs[str(i)] for i in range(NUM_REQUESTS)])), 1)
    oracle = copy.deepcopy(build_oracle(family))  # others use it too, and dynamic ropes remember the longest sequence seen
    with torch.inference_mode():
        logits = oracle(input_ids=sequences, use_cache=False).logits.float()[:, PROMPT_TOKENS - 1 : -1]
    chosen = logits.gather(2, sequences[:, PROMPT_TOKENS:, None]).squeeze(2)
    assert float((logits.amax(2) - chosen).max()) < NEAR_TIE


def small_engine(path: Path, block_size: int, max_num_seqs: int, **changes: Any) -> EngineCore:
    sizes = {"max_model_len": MODEL_LENGTH, "max_num_batched_tokens": 48, "num_gpu_blocks_override": None}
    return engine(path, block_size=block_size, max_num_seqs=max_num_seqs, **sizes, **changes)


def bytes_of_two_requests(path: Path, block_size: int) -> int:
    """Cache memory of an engine that is made for two requests."""
    core = small_engine(path, block_size, max_num_seqs=2, structured_outputs_config={"disable_jump_forward": True})
    tensors = {t.data_ptr(): t.nbytes for cache in core._runner._pool.caches for t in cache.values()}  # type: ignore[attr-defined]
    core.shutdown()
    return sum(tensors.values())
