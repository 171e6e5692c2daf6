"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), half-split pairing: element i turns with element i + rot_dim / 2."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, rot_dim: int) -> None:
    """Turn the first `rot_dim` elements of every head of `q[T, Hq, D]` and `k[T, Hk, D]`, in place.

    `positions[T]` (int64) choose rows of `cos_sin[max_pos, rot_dim]` (float32, cosines then sines). Computed in
    float32, rounded once. Raises `IndexError` for a position outside the table.
    """
    if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < cos_sin.shape[0]:
        raise IndexError(f"rotary: positions must be in [0, {cos_sin.shape[0]}).")
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, -1)  # [T, 1, rot_dim / 2]
    for heads in (q, k):
        first, second = heads[..., :rot_dim].float().chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        heads[..., :rot_dim] = turned.to(heads.dtype)
