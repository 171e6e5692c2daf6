"""Matrix products and embedding lookup."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from canter.checkpoint import gguf_quants
from canter.kernels.packed import BlockRows, PackedMatrix

_RUN = {"f32": 0, "bf16": 0, "w4": 16}
"""Elements of x that share a scale, by the format of the weights; 0 where x stays as it is."""

_QUANTISED_RUN = 32

_LEAST = 2.4e-35
"""Runs whose magnitudes are all below it are as good as zero: 127 over them would overflow."""


def linear(x: Tensor, weight: Tensor | PackedMatrix, bias: Tensor | None) -> Tensor:
    """`x[T, K]` times `weight[N, K]` transposed, plus `bias[N]`: `[T, N]` in the type of x, accumulated in float32.

    x and weight may be of different types. Quantised weights of a `PackedMatrix` meet an x that is rounded to int8: runs of
    32 elements (w4: 16) share a scale of their greatest magnitude over 127.
    """
    if isinstance(weight, PackedMatrix):
        columns = weight.unpack().split([part.outputs for part in weight.parts])
        parts = [
            functional.linear(round_runs(x.float(), _RUN.get(part.format, _QUANTISED_RUN)), column)
            for part, column in zip(weight.parts, columns, strict=True)
        ]
        product = torch.cat(parts, 1)
        return (product if bias is None else product + bias.float()).to(x.dtype)
    product = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return product.to(x.dtype)


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x[T, H, K]` times `weight[H, N, K]` transposed, head by head: `[T, H, N]` in the type of x, accumulated in float32."""
    product: Tensor = torch.einsum("thk,hnk->thn", x.float(), weight.float())
    return product.to(x.dtype).contiguous()


def round_runs(x: Tensor, run: int) -> Tensor:
    """x as int8 codes times a scale for each run of elements of a row; 0 leaves x alone."""
    if run == 0 or x.numel() == 0:
        return x
    runs = functional.pad(x, (0, -x.shape[1] % run)).unflatten(1, (-1, run))
    highest = runs.abs().amax(-1, keepdim=True)
    usable = ~(highest <= _LEAST)  # a value that is not finite makes all of its run NaN
    most = torch.full_like(highest, 127)  # torch would multiply by the reciprocal of a tensor that divides a number
    codes = torch.where(usable, runs * (most / highest), 0).round()
    scale = torch.where(usable, highest / most, 0)
    rounded: Tensor = (codes * scale).flatten(1)[:, : x.shape[1]]
    return rounded


def known_ids(token_ids: Tensor, limit: int) -> Tensor:
    """`token_ids[T]` (int64) with 0 for those from `limit` on: rows of a table that is shorter than the vocabulary."""
    return torch.where(token_ids < limit, token_ids, 0)


def embedding(
    token_ids: Tensor, weight: Tensor | PackedMatrix | BlockRows, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Rows of `weight[V, H]` for `token_ids[T]` (int64), times scale: `[T, H]` in the weight's type; in `dtype` where the table
    is packed or lies in a file.

    The scale is rounded to the type before it multiplies, as Gemma does. Raises `IndexError` for an id outside the table.
    """
    if token_ids.numel() and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < weight.shape[0]:
        raise IndexError(f"embedding: token ids must be in [0, {weight.shape[0]}).")
    if isinstance(weight, PackedMatrix):
        weight = weight.unpack().to(dtype)
    elif isinstance(weight, BlockRows):
        count = weight.shape[0] * weight.shape[1]
        weight = torch.from_numpy(gguf_quants.dequantize(weight.data, weight.type_name, count)).view(weight.shape).to(dtype)
    rows = weight[token_ids]
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=weight.dtype, device=weight.device)
