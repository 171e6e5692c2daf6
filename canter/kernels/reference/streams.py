"""Rows side by side, and several residual streams that lie so (AltUp, arXiv 2301.13310): mixed, added to, brought to one magnitude.

Streams of `[T, S * H]` lie one behind the other in a row. Computed in float32, rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_SQUARE = 1e-5
"""Of a stream that `match_streams` scales: a row of zeros stays one."""


def mix_streams(x: Tensor, coefs: Tensor, scale: float) -> Tensor:
    """`x[T, S * H]` with `scale * coefs[T, S * S]`: stream o becomes x_o plus the sum over i of coefficient `o * S + i` times x_i."""
    streams = round(coefs.shape[1] ** 0.5)
    wide = x.float().unflatten(1, (streams, -1))
    mixed = wide + (coefs.float() * scale).unflatten(1, (streams, streams)) @ wide
    rounded: Tensor = mixed.flatten(1).to(x.dtype)
    return rounded


def add_to_streams(x: Tensor, row: Tensor, coefs: Tensor | None, scale: float = 1.0, offset: float = 0.0, first: int = 0) -> Tensor:
    """`x[T, S * H]` with `row[T, H]` added to every stream from `first` on, times `scale * coefs[T, S] + offset`; once without coefs."""
    streams = x.shape[1] // row.shape[1]
    factors = torch.ones(x.shape[0], streams) if coefs is None else coefs.float() * scale + offset
    factors[:, :first] = 0
    total = x.float().unflatten(1, (streams, -1)) + factors.unsqueeze(2) * row.float().unsqueeze(1)
    rounded: Tensor = total.flatten(1).to(x.dtype)
    return rounded


def match_streams(row: Tensor, x: Tensor) -> Tensor:
    """`row[T, H]` as the first of S streams; the others are those of `x[T, (S - 1) * H]`, brought to its root mean square: `[T, S * H]`."""
    wide = x.float().unflatten(1, (-1, row.shape[1]))
    target = row.float().square().mean(1).sqrt()
    found = wide.square().mean(2).clamp(min=LEAST_SQUARE).sqrt()
    matched = wide * (target[:, None] / found).unsqueeze(2)
    return torch.cat((row, matched.flatten(1).to(x.dtype)), 1)


def concat(x: Tensor, y: Tensor) -> Tensor:
    """Rows of `x[T, N]` and `y[T, M]` side by side: `[T, N + M]`; or those of each head, `[T, H, N]` and `[T, H, M]`."""
    return torch.cat((x, y), -1)
