"""The tensors behind the block ids: every state pool's storage, and each layer's view of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from canter.core.state_specs import PoolSpec, StateLayout
from canter.device import Device


def _storage(pool: PoolSpec, num_blocks: int, device: Device) -> list[dict[str, torch.Tensor]]:
    """The tensors of each slot. Where blocks are many and small, what all slots keep of one lies together, so that a page holds it."""
    if not pool.grows:
        return [{f.name: device.zeros((num_blocks, *f.shape), getattr(torch, f.dtype)) for f in pool.fields} for _ in range(pool.num_slots)]
    memory = device.zeros((num_blocks, pool.block_bytes), torch.uint8)
    return [
        {
            f.name: memory.narrow(1, start, f.num_bytes).view(getattr(torch, f.dtype)).view(-1, *f.shape)
            for f, start in zip(pool.fields, pool.field_starts(slot), strict=True)
        }
        for slot in range(pool.num_slots)
    ]


class StatePool:
    """Storage for `num_blocks[p]` blocks in pool p.

    `caches[layer]` maps a field's name to its tensor `[num_blocks, *field.shape]`; layers that use the same storage
    slot of a pool share tensors, and never blocks. Memory starts as zeros and is touched only where it is written.
    """

    def __init__(self, layout: StateLayout, num_blocks: Sequence[int], device: Device) -> None:
        self.num_blocks = tuple(num_blocks)
        storage = [_storage(pool, num_blocks[pool.pool_id], device) for pool in layout.pools]
        slots = layout.slot_of_layer()
        num_layers = max(slots, default=-1) + 1
        self.group_of_layer = [slots[layer][0] if layer in slots else -1 for layer in range(num_layers)]
        self.caches: list[dict[str, torch.Tensor]] = [
            storage[slots[layer][1]][slots[layer][2]] if layer in slots else {} for layer in range(num_layers)
        ]
