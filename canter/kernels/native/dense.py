"""Native matrix product, embedding, normalisation and activations. Meaning: `canter.kernels.reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from canter import _native
from canter.kernels.native import packed
from canter.kernels.native.layout import contiguous, require, type_code
from canter.kernels.packed import BlockRows, PackedMatrix

_SILU, _GELU_TANH = 0, 1


def linear(x: Tensor, weight: Tensor | PackedMatrix, bias: Tensor | None) -> Tensor:
    """As the reference; x and weight float32 or bfloat16, in any combination. The weight is used as it lies in memory."""
    if isinstance(weight, PackedMatrix):
        return packed.matmul(x, weight, bias)
    fits = x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[1] and weight.is_contiguous()
    fits = fits and (bias is None or (bias.dim() == 1 and bias.shape[0] == weight.shape[0]))
    require(fits, "linear", "x [T, K], contiguous weight [N, K], bias [N] or None", x, weight, bias)
    x = x.contiguous()
    rows, width = x.shape
    outputs = weight.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype)
    bias_at, bias_type = 0, 0
    if bias is not None:
        bias = bias.contiguous()
        bias_at, bias_type = bias.data_ptr(), type_code("linear", bias)
    types = type_code("linear", x), type_code("linear", weight)
    _native.linear(x.data_ptr(), types[0], weight.data_ptr(), types[1], bias_at, bias_type, out.data_ptr(), rows, outputs, width)
    return out


def embedding(
    token_ids: Tensor, weight: Tensor | PackedMatrix | BlockRows, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """As the reference."""
    if not isinstance(weight, Tensor):
        return packed.embedding(token_ids, weight, scale, dtype)
    require(
        token_ids.dim() == 1 and weight.dim() == 2 and weight.is_contiguous(),
        "embedding",
        "ids [T], contiguous weight [V, H]",
        token_ids,
        weight,
    )
    ids = contiguous(token_ids, torch.int64)
    out = torch.empty((ids.shape[0], weight.shape[1]), dtype=weight.dtype)
    if scale != 1.0:
        scale = torch.tensor(scale, dtype=weight.dtype).item()
    code = type_code("embedding", weight)
    _native.embedding(ids.data_ptr(), weight.data_ptr(), out.data_ptr(), code, ids.shape[0], weight.shape[0], weight.shape[1], scale)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False, cast_first: bool = True) -> Tensor:
    """As the reference."""
    width = x.shape[-1]
    require(weight.shape == (width,), "rms_norm", "x [..., H] and weight [H]", x, weight)
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    rows = x.numel() // max(1, width)
    types = type_code("rms_norm", x), type_code("rms_norm", weight)
    _native.rms_norm(x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), 0, *types, rows, width, eps, plus_one, cast_first)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool = False, cast_first: bool = True
) -> tuple[Tensor, Tensor]:
    """As the reference."""
    width = x.shape[-1]
    fits = weight.shape == (width,) and residual.shape == x.shape and residual.dtype == x.dtype
    require(fits, "add_rms_norm", "x and residual [..., H] of one type and weight [H]", x, residual, weight)
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    rows = x.numel() // max(1, width)
    types = type_code("add_rms_norm", x), type_code("add_rms_norm", weight)
    places = x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr()
    _native.rms_norm(*places, *types, rows, width, eps, plus_one, cast_first)
    return out, total


def _gated(op: str, gate_up: Tensor, activation: int) -> Tensor:
    require(gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, op, "[T, 2 I]", gate_up)
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype)
    _native.gated(gate_up.data_ptr(), out.data_ptr(), type_code(op, gate_up), activation, rows, width)
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """As the reference."""
    return _gated("silu_and_mul", gate_up, _SILU)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """As the reference."""
    return _gated("gelu_tanh_and_mul", gate_up, _GELU_TANH)


def softcap(x: Tensor, cap: float) -> Tensor:
    """As the reference."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _native.softcap(x.data_ptr(), out.data_ptr(), type_code("softcap", x), x.numel(), cap)
    return out
