"""Seeds and streams: what a request's random numbers are drawn with. The numbers: `kernels/reference/random.py`."""

from __future__ import annotations

from enum import IntEnum

from canter.kernels.reference.random import (
    GOLDEN,
    gumbel,
    mix64,
    negative_gumbel,
    position_keys,
    random_bits,
    signed,
    token_salts,
    uniform,
)

__all__ = [
    "Stream",
    "derive_seed",
    "gumbel",
    "negative_gumbel",
    "position_keys",
    "random_bits",
    "seed_key",
    "token_salts",
    "uniform",
]


class Stream(IntEnum):
    """What a number is drawn for. Draws of one position that must be independent use different streams."""

    SAMPLE = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3


def derive_seed(engine_seed: int, counter: int) -> int:
    """The 64-bit seed of the `counter`-th request that brought none."""
    return mix64(mix64(engine_seed) + counter * GOLDEN)


def seed_key(seed: int) -> int:
    """What `position_keys` takes for a seed: mixed, so that neighbouring seeds share nothing; as a signed int64."""
    return signed(mix64(seed + GOLDEN), 64)
