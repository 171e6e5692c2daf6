"""RMS normalisation (arXiv 1910.07467), alone or together with the residual addition before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from canter.layers.build import Build


@dataclass(frozen=True, slots=True)
class NormArgs:
    """`plus_one`: scale by 1 + weight. `cast_first`: round to the activations' type before that scaling, not after it.

    `weighted` False: no scaling; the norm has no parameter.
    """

    eps: float
    plus_one: bool = False
    cast_first: bool = True
    weighted: bool = True


class RMSNorm:
    """x / sqrt(mean(x^2) + eps), scaled, over the last dimension. `weights` False: scaled by nothing."""

    __slots__ = ("_add_rms_norm", "_args", "_rms_norm", "weight")

    def __init__(self, build: Build, size: int, args: NormArgs) -> None:
        self.weight = build.parameter("weight", (size,)) if args.weighted else torch.ones(size, dtype=build.dtype, device=build.device)
        self._args = (args.eps, args.plus_one, args.cast_first)
        self._rms_norm: Callable[..., Tensor] = build.op("rms_norm", weight_dtype=self.weight.dtype)
        self._add_rms_norm: Callable[..., tuple[Tensor, Tensor]] = build.op("add_rms_norm", weight_dtype=self.weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self._rms_norm(x, self.weight, *self._args)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        return self._add_rms_norm(x, residual, self.weight, *self._args)
