"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), in both pairings that models use."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, rot_dim: int, interleaved: bool = False) -> None:
    """Turn the first `rot_dim` elements of every head of `q[T, Hq, D]` and `k[T, Hk, D]`, in place.

    Element i turns with element i + rot_dim / 2, or where `interleaved` element 2 i with 2 i + 1.
    `positions[T]` (int64) choose rows of `cos_sin[max_pos, rot_dim]` (float32, cosines then sines). Computed in
    float32, rounded once. Raises `IndexError` for a position outside the table.
    """
    if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < cos_sin.shape[0]:
        raise IndexError(f"rotary: positions must be in [0, {cos_sin.shape[0]}).")
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, -1)  # [T, 1, rot_dim / 2]
    for heads in (q, k):
        whole = heads[..., :rot_dim].float()
        first, second = (whole[..., 0::2], whole[..., 1::2]) if interleaved else whole.chunk(2, -1)
        pairs = first * cos - second * sin, second * cos + first * sin
        heads[..., :rot_dim] = (torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)).to(heads.dtype)
