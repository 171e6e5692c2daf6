"""Native matrix product, embedding, normalisation and activations. Meaning: `canter.kernels.reference`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from canter import _native
from canter.kernels.native import packed
from canter.kernels.native.layout import contiguous, has_packed_rows, require, type_code
from canter.kernels.packed import BlockRows, PackedMatrix

_SILU, _GELU_TANH, _GELU = 0, 1, 2

POINTWISE = {"silu": 0, "relu_squared": 1, "scale_columns": 2, "sigmoid_mul": 3, "silu_mul": 4, "weighted_sum": 5}
POINTWISE |= {"gelu_tanh": 6, "gelu": 7, "gelu_tanh_mul": 8}
"""The compiled module's numbers of what is done to elements one by one."""


def linear(x: Tensor, weight: Tensor | PackedMatrix, bias: Tensor | None) -> Tensor:
    """As the reference, for packed weights: matrices are packed wherever this implementation serves (`packing.serves`)."""
    if isinstance(weight, Tensor):
        raise ValueError(f"linear: expected packed weights, got a tensor {list(weight.shape)}.")
    return packed.matmul(x, weight, bias)


def known_ids(token_ids: Tensor, limit: int) -> Tensor:
    """As the reference."""
    require(token_ids.dim() == 1, "known_ids", "ids [T]", token_ids)
    ids = contiguous(token_ids, torch.int64)
    out = torch.empty_like(ids)
    _native.known_ids(ids.data_ptr(), out.data_ptr(), ids.shape[0], limit)
    return out


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


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """As the reference."""
    fits = x.dim() == 2 and weight.shape == x.shape[1:] and (bias is None or (bias.shape == weight.shape and bias.dtype == weight.dtype))
    require(fits, "layer_norm", "x [T, H], weight [H] and bias [H] of its type or None", x, weight, bias)
    x, weight = x.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    out = torch.empty_like(x)
    places = x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()
    _native.layer_norm(*places, type_code("layer_norm", x), type_code("layer_norm", weight), x.shape[0], x.shape[1], eps)
    return out


def sparse_relu(x: Tensor, deviations: float) -> Tensor:
    """As the reference."""
    require(x.dim() == 2, "sparse_relu", "x [T, N]", x)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    sizes = x.shape[0], x.shape[1], x.stride(0)
    _native.sparse_relu(x.data_ptr(), out.data_ptr(), type_code("sparse_relu", x), *sizes, deviations)
    return out


MAX_STREAMS = 16
"""Streams that the compiled module's ops on them take."""


def mix_streams(x: Tensor, coefs: Tensor, scale: float) -> Tensor:
    """As the reference."""
    streams = math.isqrt(coefs.shape[1])
    fits = x.dim() == coefs.dim() == 2 and x.shape[0] == coefs.shape[0] and x.dtype == coefs.dtype
    fits = fits and 1 <= streams <= MAX_STREAMS and streams * streams == coefs.shape[1] and x.shape[1] % streams == 0
    require(fits, "mix_streams", f"x [T, S * H] and coefs [T, S * S] of one type, S at most {MAX_STREAMS}", x, coefs)
    x, coefs = x.contiguous(), coefs.contiguous()
    out = torch.empty_like(x)
    sizes = x.shape[0], streams, x.shape[1] // streams
    _native.mix_streams(x.data_ptr(), coefs.data_ptr(), out.data_ptr(), type_code("mix_streams", x), *sizes, scale)
    return out


def add_to_streams(x: Tensor, row: Tensor, coefs: Tensor | None, scale: float = 1.0, offset: float = 0.0, first: int = 0) -> Tensor:
    """As the reference."""
    width = row.shape[1]
    streams = x.shape[1] // max(1, width)
    fits = x.dim() == row.dim() == 2 and x.shape == (row.shape[0], streams * width) and x.dtype == row.dtype and 1 <= streams <= MAX_STREAMS
    fits = fits and (coefs is None or (coefs.shape == (x.shape[0], streams) and coefs.dtype == x.dtype))
    wanted = f"x [T, S * H], row [T, H] and coefs [T, S] or None of one type, S at most {MAX_STREAMS}"
    require(fits, "add_to_streams", wanted, x, row, coefs)
    x, row = x.contiguous(), row if row.stride(1) == 1 else row.contiguous()
    coefs = None if coefs is None else coefs.contiguous()
    out = torch.empty_like(x)
    places = x.data_ptr(), row.data_ptr(), 0 if coefs is None else coefs.data_ptr(), out.data_ptr()
    sizes = type_code("add_to_streams", x), x.shape[0], streams, width, row.stride(0)
    _native.add_to_streams(*places, *sizes, scale, offset, first)
    return out


def match_streams(row: Tensor, x: Tensor) -> Tensor:
    """As the reference."""
    width = row.shape[1]
    fits = x.dim() == row.dim() == 2 and x.shape[0] == row.shape[0] and x.shape[1] % max(1, width) == 0 and x.dtype == row.dtype
    require(fits, "match_streams", "row [T, H] and x [T, N * H] of one type", row, x)
    x, row = x.contiguous(), row if row.stride(1) == 1 else row.contiguous()
    out = torch.empty((x.shape[0], x.shape[1] + width), dtype=x.dtype)
    sizes = type_code("match_streams", x), x.shape[0], out.shape[1] // max(1, width), width, row.stride(0)
    _native.match_streams(row.data_ptr(), x.data_ptr(), out.data_ptr(), *sizes)
    return out


def concat(x: Tensor, y: Tensor) -> Tensor:
    """As the reference."""
    fits = x.dim() == y.dim() and x.dim() in (2, 3) and x.shape[:-1] == y.shape[:-1] and x.dtype == y.dtype
    require(fits, "concat", "x [T, N] and y [T, M], or x [T, H, N] and y [T, H, M], of one type", x, y)
    x, y = (z if has_even_pieces(z.shape, z.stride()) else z.contiguous() for z in (x, y))
    size = x.element_size()
    out = torch.empty((*x.shape[:-1], x.shape[-1] + y.shape[-1]), dtype=x.dtype)
    widths = x.shape[-1] * size, y.shape[-1] * size, x.stride(-2) * size, y.stride(-2) * size
    _native.concat(x.data_ptr(), y.data_ptr(), out.data_ptr(), math.prod(x.shape[:-1]), *widths)
    return out


def has_even_pieces(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether rows [T, N], or the heads of all rows [T, H, N], are runs that lie equally far apart."""
    return (strides[-1] == 1 or shape[-1] == 1) and (len(strides) == 2 or strides[0] == shape[1] * strides[1])


def head_strides(weight: Tensor) -> tuple[int, int] | None:
    """How far outputs and inputs of matrices [H, N, K] lie apart, one of them in one run; None where neither or the matrices don't."""
    _, outputs, width = weight.shape
    fits = weight.stride() in ((outputs * width, width, 1), (outputs * width, 1, outputs))
    return (weight.stride(1), weight.stride(2)) if fits else None


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """As the reference."""
    fits = x.dim() == weight.dim() == 3 and weight.shape[0] == x.shape[1] and weight.shape[2] == x.shape[2] and weight.dtype == x.dtype
    require(fits, "head_linear", "x [T, H, K] and weight [H, N, K] of one type", x, weight)
    x, strides = x if x.stride(2) == 1 else x.contiguous(), head_strides(weight)
    if strides is None:
        weight = weight.contiguous()
        strides = weight.stride(1), weight.stride(2)
    rows, heads, width = x.shape
    out = torch.empty((rows, heads, weight.shape[1]), dtype=x.dtype)
    sizes = rows, heads, width, weight.shape[1], x.stride(0), x.stride(1), *strides
    _native.head_linear(x.data_ptr(), weight.data_ptr(), out.data_ptr(), type_code("head_linear", x), *sizes)
    return out


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


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """As the reference."""
    return _gated("gelu_and_mul", gate_up, _GELU)


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


def gelu(x: Tensor) -> Tensor:
    """As the reference."""
    return _pointwise("gelu", x)


def gelu_tanh(x: Tensor) -> Tensor:
    """As the reference."""
    return _pointwise("gelu_tanh", x)


def gelu_tanh_mul(x: Tensor, gate: Tensor) -> Tensor:
    """As the reference."""
    return _pointwise("gelu_tanh_mul", x, gate)


def weighted_sum(x: Tensor, y: Tensor, a: float, b: float) -> Tensor:
    """As the reference."""
    return _pointwise("weighted_sum", x, y, a=a, b=b)


def softcap(x: Tensor, cap: float) -> Tensor:
    """As the reference."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _native.softcap(x.data_ptr(), out.data_ptr(), type_code("softcap", x), x.numel(), cap)
    return out
