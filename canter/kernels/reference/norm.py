"""Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467) in the two roundings that models use."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False, cast_first: bool = True) -> Tensor:
    """`x[..., H] / sqrt(mean(x^2) + eps)` times `weight[H]`, in the type of x; the reduction is in float32.

    `plus_one` multiplies by 1 + weight. `cast_first` rounds the normalised value to the type of x before it is
    multiplied (Llama); otherwise the product is float32 and rounded once (Gemma).
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if cast_first:
        factor = 1 + weight if plus_one else weight
        return (normed.to(x.dtype).float() * factor.float()).to(x.dtype)
    factor = weight.float()
    return (normed * (1 + factor if plus_one else factor)).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool = False, cast_first: bool = True
) -> tuple[Tensor, Tensor]:
    """Add, then normalise: returns `(rms_norm(x + residual), x + residual)`; the sum is rounded to the type of x."""
    total = x + residual
    return rms_norm(total, weight, eps, plus_one, cast_first), total
