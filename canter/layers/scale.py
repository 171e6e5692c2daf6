"""Constant factors that a model multiplies activations by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from canter.layers.build import Build

Scale = Callable[[Tensor], Tensor]


def make_scale(build: Build, sections: Sequence[tuple[float, int]]) -> Scale | None:
    """What multiplies [T, N] column by column: (factor, width) of neighbouring sections. None where all factors are 1."""
    if all(factor == 1.0 for factor, _ in sections):
        return None
    factors = torch.cat([torch.full((width,), factor) for factor, width in sections]).to(build.device)
    scale_columns: Callable[..., Tensor] = build.op("scale_columns")
    return lambda x: scale_columns(x, factors)
