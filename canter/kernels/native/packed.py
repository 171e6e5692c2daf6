"""Packed weights: their memory, how tensors become panels, and the products and look-ups over them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter import _native
from canter.kernels.native.layout import contiguous, require, type_code
from canter.kernels.packed import ALIGNMENT, BlockRows, PackedMatrix, PackedPart, allocate_packed

PANEL = 16
"""Outputs of a panel: parts may be packed in slices that begin at multiples of it."""

FORMATS = tuple(_native.formats())
"""Names of the weight formats."""

_SOURCE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def packed_bytes(format: str, outputs: int, width: int, group: int = 0) -> int:
    """Bytes of a packed part. Raises `ValueError` for an unknown format or sizes that it can't hold."""
    return int(_native.packed_bytes(format, outputs, width, group))


def allocate_part(format: str, outputs: int, width: int, group: int = 0) -> PackedPart:
    """A part whose data is still to be packed."""
    return PackedPart(format, outputs, width, group, allocate_packed(packed_bytes(format, outputs, width, group)))


def native_matrix(matrix: PackedMatrix) -> Any:
    """The compiled module's matrix over the parts' memory, after a check that the memory suffices."""
    for part in matrix.parts:
        expected = packed_bytes(part.format, part.outputs, part.width, part.group)
        if part.data.dtype != torch.uint8 or not part.data.is_contiguous() or part.data.numel() != expected:
            found = f"{part.data.numel()} {str(part.data.dtype).removeprefix('torch.')}"
            raise ValueError(f"packed {part.format} weights: expected {expected} contiguous bytes, got {found}.")
        if part.data.data_ptr() % ALIGNMENT:
            raise ValueError(f"packed weights must be aligned to {ALIGNMENT} bytes.")
    return _native.Matrix([(part.format, part.data.data_ptr(), part.outputs, part.width, part.group) for part in matrix.parts])


def _row_index(row_index: Tensor | None, rows: int, outputs: int) -> Tensor | None:
    """The rows of the source that become the outputs, checked."""
    if row_index is None:
        if rows < outputs:
            raise ValueError(f"pack: {rows} rows can't fill {outputs} outputs.")
        return None
    index = contiguous(row_index, torch.int64)
    if index.shape != (outputs,):
        raise ValueError(f"pack: expected a row for each of {outputs} outputs, got {list(index.shape)}.")
    if outputs and not 0 <= int(index.min()) <= int(index.max()) < rows:
        raise ValueError(f"pack: rows must be in [0, {rows}).")
    return index


def _slice(part: PackedPart, first: int, outputs: int | None) -> tuple[int, int]:
    """How many outputs are packed, and the address of the first one's panel."""
    count = part.outputs - first if outputs is None else outputs
    whole = first + count == part.outputs or count % PANEL == 0
    if first % PANEL or count < 0 or not 0 <= first <= first + count <= part.outputs or not whole:
        raise ValueError(f"pack: outputs [{first}, {first + count}) of {part.outputs} are not whole panels of {PANEL}.")
    panel_bytes = packed_bytes(part.format, PANEL, part.width, part.group)
    return count, part.data.data_ptr() + first // PANEL * panel_bytes


def pack_floats(part: PackedPart, source: Tensor, row_index: Tensor | None = None, first: int = 0, outputs: int | None = None) -> None:
    """Pack rows of `source[R, K]` (float32, bfloat16 or float16; rows contiguous) into outputs [first, first + outputs) of an
    f32, bf16 or q8_0 part, rounded to it. `row_index[n]` is the row that becomes output first + n; without it, rows follow in order.
    """
    count, dest = _slice(part, first, outputs)
    if source.dtype not in _SOURCE_TYPES or source.dim() != 2 or source.shape[1] != part.width or source.device.type != "cpu":
        raise ValueError(f"pack: expected floats [R, {part.width}] on the CPU, got {list(source.shape)} {source.dtype} on {source.device}.")
    if source.stride(1) != 1 and source.shape[1] > 1:
        source = source.contiguous()
    index = _row_index(row_index, source.shape[0], count)
    index_at = 0 if index is None else index.data_ptr()
    code = _SOURCE_TYPES[source.dtype]
    _native.pack_floats(part.format, source.data_ptr(), code, source.stride(0), index_at, count, part.width, dest)


def pack_blocks(part: PackedPart, source: np.ndarray, row_index: Tensor | None = None, first: int = 0, outputs: int | None = None) -> None:
    """Pack GGUF blocks `source[R, bytes of a row]` (uint8, contiguous rows) of the part's own type."""
    count, dest = _slice(part, first, outputs)
    if source.dtype != np.uint8 or source.ndim != 2 or (source.size and source.strides[1] != 1):
        raise ValueError(f"pack: expected rows of bytes, got {list(source.shape)} {source.dtype}.")
    elements, size = _BLOCK_SIZES.get(part.format, (0, 0))
    if not elements or part.width % elements or source.shape[1] != part.width // elements * size:
        raise ValueError(f"pack: rows of {source.shape[1]} bytes are not {part.width} elements of {part.format}.")
    index = _row_index(row_index, source.shape[0], count)
    index_at = 0 if index is None else index.data_ptr()
    _native.pack_blocks(part.format, source.ctypes.data, source.strides[0], index_at, count, part.width, dest)


_BLOCK_SIZES = {
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q8_0": (32, 34),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
}
"""Elements and bytes of a GGUF block."""


def pack_i8(
    part: PackedPart, codes: Tensor, scales: Tensor, row_index: Tensor | None = None, first: int = 0, outputs: int | None = None
) -> None:
    """Pack `codes[R, K]` (int8) with `scales[R]`, a factor for each row, into an i8 part."""
    count, dest = _slice(part, first, outputs)
    codes, scales = contiguous(codes, torch.int8), contiguous(scales, torch.float32)
    fits = part.format == "i8" and codes.dim() == 2 and codes.shape[1] == part.width and scales.shape == codes.shape[:1]
    require(fits, "pack_i8", f"codes [R, {part.width}] and scales [R] for an i8 part", codes, scales)
    index = _row_index(row_index, codes.shape[0], count)
    index_at = 0 if index is None else index.data_ptr()
    _native.pack_i8(codes.data_ptr(), scales.data_ptr(), index_at, count, part.width, dest)


def pack_w4(
    part: PackedPart,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    row_index: Tensor | None = None,
    first: int = 0,
    outputs: int | None = None,
) -> None:
    """Pack `codes[R, K]` (uint8, 0 to 15) into a w4 part: a weight is (code - zero) * scale, with `scales` and `zeros` (uint8)
    `[R, K / group]`.
    """
    count, dest = _slice(part, first, outputs)
    codes, scales, zeros = contiguous(codes, torch.uint8), contiguous(scales, torch.float32), contiguous(zeros, torch.uint8)
    grouped = (codes.shape[0], part.width // max(1, part.group))
    fits = part.format == "w4" and codes.dim() == 2 and codes.shape[1] == part.width and scales.shape == grouped == zeros.shape
    require(fits, "pack_w4", f"codes [R, {part.width}], scales and zeros [R, K / {part.group}] for a w4 part", codes, scales, zeros)
    if codes.numel() and int(codes.max()) > 15:
        raise ValueError("pack_w4: codes must be in [0, 15].")
    index = _row_index(row_index, codes.shape[0], count)
    index_at = 0 if index is None else index.data_ptr()
    _native.pack_w4(codes.data_ptr(), scales.data_ptr(), zeros.data_ptr(), index_at, count, part.width, part.group, dest)


def unpack(matrix: PackedMatrix) -> Tensor:
    """The weights as float32 `[N, K]`."""
    out = torch.empty(matrix.shape)
    _native.unpack_rows(matrix.native, 0, matrix.shape[0], out.data_ptr())
    return out


def matmul(x: Tensor, weight: PackedMatrix, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """`x[T, K]` times the matrix transposed, plus `bias[N]`: `[T, N]`, in the type of x unless `out_dtype` names another."""
    outputs, width = weight.shape
    fits = x.dim() == 2 and x.shape[1] == width and (bias is None or bias.shape == (outputs,))
    require(fits, "linear", f"x [T, {width}], bias [{outputs}] or None", x, bias)
    if x.stride(1) != 1 and width > 1:
        x = x.contiguous()
    out = torch.empty((x.shape[0], outputs), dtype=out_dtype or x.dtype)
    bias_at, bias_type = 0, 0
    if bias is not None:
        bias = bias.contiguous()
        bias_at, bias_type = bias.data_ptr(), type_code("linear", bias)
    x_type, out_type = type_code("linear", x), type_code("linear", out)
    _native.matmul(weight.native, x.data_ptr(), x_type, x.stride(0), bias_at, bias_type, out.data_ptr(), out_type, outputs, x.shape[0])
    return out


def embedding(token_ids: Tensor, weight: PackedMatrix | BlockRows, scale: float, dtype: torch.dtype) -> Tensor:
    """Rows of the table for `token_ids[T]`, in the given type, times the scale rounded to it."""
    require(token_ids.dim() == 1, "embedding", "ids [T]", token_ids)
    ids = contiguous(token_ids, torch.int64)
    vocab, width = weight.shape
    out = torch.empty((ids.shape[0], width), dtype=dtype)
    if scale != 1.0:
        scale = torch.tensor(scale, dtype=dtype).item()
    code = type_code("embedding", out)
    if isinstance(weight, PackedMatrix):
        _native.embedding_packed(weight.native, ids.data_ptr(), out.data_ptr(), code, ids.shape[0], scale)
    else:
        data = weight.data
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous or weight.row_bytes * vocab != data.nbytes:
            raise ValueError(f"embedding: {data.shape} {data.dtype} are not the bytes of {vocab} rows.")
        places = data.ctypes.data, weight.row_bytes, ids.data_ptr(), out.data_ptr()
        _native.embedding_blocks(weight.type_name, *places, code, ids.shape[0], vocab, width, scale)
    return out
