"""The tensors behind the block ids: every state pool's storage, and each layer's view of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from canter.core.state_specs import PoolSpec, StateLayout
from canter.device import Device

_LINE = 64
"""Bytes of a cache line: where fields begin."""
_APART = 32 * _LINE
"""Large blocks are an odd number of these: else a layer's share of every block would fall on the same few sets of the caches."""


def _padded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


def _block_stride(num_bytes: int) -> int:
    """Bytes from a block to the next."""
    unit = _APART if num_bytes >= 32 * _APART else _LINE
    return _padded(num_bytes, unit) + (unit if _padded(num_bytes, unit) // unit % 2 == 0 else 0)


def _storage(pool: PoolSpec, num_blocks: int, device: Device) -> list[dict[str, torch.Tensor]]:
    """The tensors of each slot. What all slots keep of a block lies together, so that a page holds whole blocks, even a large one."""
    places = []
    end = 0
    for _ in range(pool.num_slots):
        for field in pool.fields:
            places.append(end)
            end += _padded(field.num_bytes, _LINE)
    memory = device.zeros((num_blocks, _block_stride(end)), torch.uint8)
    each = iter(places)
    return [
        {f.name: memory.narrow(1, next(each), f.num_bytes).view(getattr(torch, f.dtype)).view(-1, *f.shape) for f in pool.fields}
        for _ in range(pool.num_slots)
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
