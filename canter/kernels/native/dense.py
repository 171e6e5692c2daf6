"""Native matrix product, embedding, normalisation and activations. Meaning: `canter.kernels.reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from canter import _native
from canter.kernels.native import packed
from canter.kernels.native.layout import has_packed_rows, require, type_code
from canter.kernels.packed import BlockRows, PackedMatrix

_SILU, _GELU_TANH = 0, 1


def linear(x: Tensor, weight: Tensor | PackedMatrix, bias: Tensor | None) -> Tensor:
    """As the reference, for packed weights: matrices are packed wherever this implementation serves (`packing.serves`)."""
    if isinstance(weight, Tensor):
        raise ValueError(f"linear: expected packed weights, got a tensor {list(weight.shape)}.")
    return packed.matmul(x, weight, bias)


def embedding(
    token_ids: Tensor, weight: Tensor | PackedMatrix | BlockRows, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """As the reference, for packed tables and those of a file."""
    if isinstance(weight, Tensor):
        raise ValueError(f"embedding: expected a packed table or rows of a file, got a tensor {list(weight.shape)}.")
    return packed.embedding(token_ids, weight, scale, dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False, cast_first: bool = True) -> Tensor:
    """As the reference."""
    width = x.shape[-1]
    require(weight.shape == (width,), "rms_norm", "x [..., H] and weight [H]", x, weight)
    weight = weight.contiguous()
    group, stride = 1, width
    if x.dim() == 3 and has_packed_rows(x):  # heads in a fused projection are read where they lie
        group, stride = x.shape[1], x.stride(0)
    else:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    rows = x.numel() // max(1, width)
    sizes = type_code("rms_norm", x), type_code("rms_norm", weight), rows, width, group, stride
    _native.rms_norm(x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), 0, *sizes, eps, plus_one, cast_first)
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
    _native.rms_norm(*places, *types, rows, width, 1, width, eps, plus_one, cast_first)
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
