"""The memory behind the block ids."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from canter.core.state_specs import CACHE_STORAGE, attention_spec, plan_layout
from canter.device.cpu import CpuDevice
from canter.runner.state_pool import StatePool


@pytest.mark.parametrize("num_blocks", [5, 700])
@pytest.mark.parametrize("cache_dtype", CACHE_STORAGE)
def test_tensors_of_a_block_lie_together_and_never_overlap(cache_dtype: str, num_blocks: int) -> None:
    layout = plan_layout({i: attention_spec(2, 36, cache_dtype, 16, 64 if i % 3 else None) for i in range(6)})
    pool = StatePool(layout, [num_blocks] * len(layout.pools), CpuDevice(1, asynchronous=False))
    tensors = {t.data_ptr(): t for cache in pool.caches for t in cache.values()}
    assert len(tensors) == sum(p.num_slots * len(p.fields) for p in layout.pools)
    for tensor in tensors.values():
        assert tensor.shape[0] == num_blocks and tensor.data_ptr() % 16 == 0
        assert tensor[0].is_contiguous() and not tensor[:, 0].contiguous().view(torch.uint8).any()
    (spec,) = layout.pools
    assert {tensor.stride(0) * tensor.element_size() for tensor in tensors.values()} == {spec.block_bytes}
    begins = sorted((t[b].data_ptr(), t[b].nbytes) for t in tensors.values() for b in range(num_blocks))
    assert all(at + size <= following for (at, size), (following, _) in pairwise(begins))


def test_a_field_shared_by_layers_is_one_tensor() -> None:
    layout = plan_layout({i: attention_spec(2, 64, "float16", 16, 512 if i % 3 else None) for i in range(6)})
    pool = StatePool(layout, [9], CpuDevice(1, asynchronous=False))
    slots = layout.slot_of_layer()
    for layer, (_, _, slot) in slots.items():
        (first,) = {min(other for other in slots if slots[other][2] == slot)}
        assert pool.caches[layer]["k"] is pool.caches[first]["k"]
