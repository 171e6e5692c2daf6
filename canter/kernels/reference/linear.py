"""Matrix products and embedding lookup."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x[T, K]` times `weight[N, K]` transposed, plus `bias[N]`: `[T, N]` in the type of x, accumulated in float32.

    x and weight may be of different types.
    """
    product = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return product.to(x.dtype)


def embedding(token_ids: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """Rows of `weight[V, H]` for `token_ids[T]` (int64), times scale: `[T, H]` in the weight's type.

    The scale is rounded to the weight's type before it multiplies, as Gemma does. Raises `IndexError` for an id
    outside the table.
    """
    if token_ids.numel() and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < weight.shape[0]:
        raise IndexError(f"embedding: token ids must be in [0, {weight.shape[0]}).")
    rows = weight[token_ids]
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=weight.dtype, device=weight.device)
