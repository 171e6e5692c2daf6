"""What the memory of a layer is made of, where the model's arguments don't say it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateTypes:
    """`cache` is the type of keys and values, named as in `core.state_specs.CACHE_STORAGE`, `activations` that of a convolution's inputs.
    `block_size`: tokens of a block of keys and values. `hidden_size`: the model's."""

    block_size: int
    cache: str
    activations: str
    hidden_size: int
