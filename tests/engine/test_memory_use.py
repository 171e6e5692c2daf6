"""What a long request takes of the cache is what the specs of its layers say: counted in blocks, and in pages that are there."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
import torch
import transformers

from canter.core.messages import AddRequest
from canter.core.sampling_params import SamplingParams
from canter.core.state_specs import StateKind
from canter.engine.core import EngineCore
from canter.runner.model_runner import ModelRunner
from tests.engines import engine

NUM_TOKENS = 24_576
CHUNK = 64
"""Tokens of a step: windows hold on to so many more while a prompt is computed."""
HUGE_PAGE = 1 << 21
COMMON = dict(
    vocab_size=131, hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=40_000,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip


def config_of(name: str) -> transformers.PretrainedConfig:
    if name == "hybrid":
        layers = ["conv", "full_attention", "conv", "conv", "full_attention"]
        return transformers.Lfm2Config(**COMMON, num_hidden_layers=5, layer_types=layers, block_auto_adjust_ff_dim=False)
    layers = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    return transformers.Gemma3TextConfig(
        **COMMON, head_dim=64, num_hidden_layers=4, sliding_window=1000, layer_types=layers, query_pre_attn_scalar=16
    )


def resident(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's storage that are in memory. The system may give whole huge pages."""
    storage = tensor.untyped_storage()
    start = storage.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    num_pages = -(-(storage.data_ptr() + storage.nbytes() - start) // mmap.PAGESIZE)
    pages = (ctypes.c_ubyte * num_pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(num_pages * mmap.PAGESIZE), pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.mark.parametrize("name", ["hybrid", "sliding"])
def test_a_long_request_takes_what_its_specs_say(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config_of(name)).save_pretrained(tmp_path)
    core: EngineCore = engine(
        tmp_path,
        num_gpu_blocks_override=None,
        max_num_seqs=1,
        max_num_batched_tokens=CHUNK,
        enable_prefix_caching=False,
        structured_outputs_config={"disable_jump_forward": True},
    )
    runner, cache = core._runner, core._scheduler.cache
    assert isinstance(runner, ModelRunner)
    storages = {t.untyped_storage().data_ptr(): t for layer in runner._pool.caches for t in layer.values()}
    before = sum(map(resident, storages.values()))
    prompt = torch.randint(3, 131, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    core.add_request(AddRequest("long", prompt, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)))
    while core._scheduler.stats().num_scheduled_tokens < NUM_TOKENS + 8:
        core.step()

    said = used = 0
    for group, manager in zip(runner._groups, cache.managers, strict=True):
        spec = group.spec
        assert spec.kind in (StateKind.FULL, StateKind.SLIDING_WINDOW, StateKind.RECURRENT)
        tokens = spec.block_size if spec.kind is StateKind.RECURRENT else min(NUM_TOKENS, spec.window or NUM_TOKENS)
        said += len(group.layer_ids) * spec.block_bytes * -(-tokens // spec.block_size)
        (request,) = core._scheduler._requests.values()
        held = sum(1 for block in request.cache.tables[group.group_id].blocks if block)
        used += held * len(group.layer_ids) * spec.block_bytes
        assert held <= manager.max_blocks(NUM_TOKENS + 64)
    assert used == pytest.approx(said, rel=0.02)
    grown = sum(map(resident, storages.values())) - before
    assert said * 0.98 - HUGE_PAGE <= grown <= said * 1.02 + HUGE_PAGE * len(storages)
    core.shutdown()
