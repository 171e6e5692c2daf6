"""Native matrix product, embedding, normalisation and activations. Meaning: `canter.kernels.reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from canter import _native
from canter.kernels.native import packed
from canter.kernels.native.layout import has_packed_rows, require, type_code
from canter.kernels.packed import BlockRows, PackedMatrix

_SILU, _GELU_TANH = 0, 1

POINTWISE = {"silu": 0, "relu_squared": 1, "scale_columns": 2, "sigmoid_mul": 3, "silu_mul": 4, "weighted_sum": 5}
"""The compiled module's numbers of what is done to elements one by one."""


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


def _pointwise(op: str, x: Tensor, y: Tensor | None = None, factors: Tensor | None = None, a: float = 1.0, b: float = 1.0) -> Tensor:
    fits = x.dim() == 2 and (y is None or (y.shape == x.shape and y.dtype == x.dtype))
    fits = fits and (factors is None or (factors.shape == x.shape[1:] and factors.dtype == torch.float32))
    require(fits, op, "x and y [T, N] of one type, factors [N] float32", x, y, factors)
    x, y = (z if z.stride(1) == 1 else z.contiguous() for z in (x, x if y is None else y))
    factors = None if factors is None else factors.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    rows, width = x.shape
    places = x.data_ptr(), y.data_ptr(), 0 if factors is None else factors.data_ptr(), out.data_ptr(), type_code(op, x)
    _native.pointwise(POINTWISE[op], *places, rows, width, x.stride(0), y.stride(0), a, b)
    return out


def silu(x: Tensor) -> Tensor:
    """As the reference."""
    return _pointwise("silu", x)


def relu_squared(x: Tensor) -> Tensor:
    """As the reference."""
    return _pointwise("relu_squared", x)


def scale_columns(x: Tensor, factors: Tensor) -> Tensor:
    """As the reference."""
    return _pointwise("scale_columns", x, factors=factors)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """As the reference."""
    return _pointwise("sigmoid_mul", x, gate)


def silu_mul(x: Tensor, gate: Tensor) -> Tensor:
    """As the reference."""
    return _pointwise("silu_mul", x, gate)


def weighted_sum(x: Tensor, y: Tensor, a: float, b: float) -> Tensor:
    """As the reference."""
    return _pointwise("weighted_sum", x, y, a=a, b=b)


def softcap(x: Tensor, cap: float) -> Tensor:
    """As the reference."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _native.softcap(x.data_ptr(), out.data_ptr(), type_code("softcap", x), x.numel(), cap)
    return out
