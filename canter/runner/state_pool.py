"""The tensors behind the block ids: every state pool's storage, and each layer's view of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from canter.core.state_specs import StateLayout
from canter.device import Device


class StatePool:
    """Storage for `num_blocks[p]` blocks in pool p.

    `caches[layer]` maps a field's name to its tensor `[num_blocks, *field.shape]`; layers that use the same storage
    slot of a pool share tensors, and never blocks. Memory starts as zeros and is touched only where it is written.
    """

    def __init__(self, layout: StateLayout, num_blocks: Sequence[int], device: Device) -> None:
        self.num_blocks = tuple(num_blocks)
        storage = [
            [
                {f.name: device.zeros((num_blocks[pool.pool_id], *f.shape), getattr(torch, f.dtype)) for f in pool.fields}
                for _ in range(pool.num_slots)
            ]
            for pool in layout.pools
        ]
        slots = layout.slot_of_layer()
        num_layers = max(slots, default=-1) + 1
        self.group_of_layer = [slots[layer][0] if layer in slots else -1 for layer in range(num_layers)]
        self.caches: list[dict[str, torch.Tensor]] = [
            storage[slots[layer][1]][slots[layer][2]] if layer in slots else {} for layer in range(num_layers)
        ]
