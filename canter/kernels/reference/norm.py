"""Normalisation by the root mean square (Zhang and Sennrich, 2019, arXiv:1910.07467), in the two roundings that models use, and by
mean and variance (Ba, Kiros and Hinton, 2016, arXiv:1607.06450)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


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


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`(x - mean) / sqrt(variance + eps) * weight[H] + bias[H]` of `x[T, H]`, in its type; computed in float32, rounded once."""
    return functional.layer_norm(x.float(), weight.shape, weight.float(), None if bias is None else bias.float(), eps).to(x.dtype)


def sparse_relu(x: Tensor, deviations: float) -> Tensor:
    """`max(0, x - cut)` of `x[T, N]`, the cut being a row's mean and so many of its standard deviations."""
    wide = x.float()
    mean = wide.mean(1, keepdim=True)
    cut = mean + (wide - mean).square().mean(1, keepdim=True).sqrt() * deviations
    return functional.relu(wide - cut).to(x.dtype)
