"""Weights from a checkpoint's layouts into the panels that the compiled module computes with (csrc/gemm/format.h)."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from canter import _native
from canter.kernels.dispatch import FORCE_VARIABLE
from canter.kernels.native.layout import TYPE_CODES

FORMATS = frozenset(_native.formats())
"""Names of packed formats: f32, bf16, i8, w4, and GGUF types in lower case."""

PANEL_OUTPUTS = 16
"""Outputs of a panel: slices of a matrix that are packed by themselves begin at multiples of it."""

SOURCE_TYPES = {"F32": 0, "BF16": 1, "F16": 2}
"""Types of floats that `pack_floats` reads, by their GGUF names."""

RowIndex = npt.NDArray[np.int64]


def serves(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether matrices are packed for a device and a type of activations: where the compiled module multiplies."""
    return torch.device(device).type == "cpu" and dtype in TYPE_CODES and os.environ.get(FORCE_VARIABLE) in (None, "", "native")


def packed_bytes(fmt: str, outputs: int, width: int, group: int = 0) -> int:
    """Bytes of `[outputs, width]` in a format. Raises `ValueError` for a width or group that it can't hold."""
    return _native.packed_bytes(fmt, outputs, width, group)


def holds(fmt: str, width: int, group: int = 0) -> bool:
    """Whether a format can hold rows of this width."""
    try:
        _native.packed_bytes(fmt, PANEL_OUTPUTS, width, group)
    except ValueError:
        return False
    return True


def pack_floats(fmt: str, data: npt.NDArray[np.uint8], type_name: str, width: int, rows: RowIndex | None, out: Tensor) -> None:
    """Rows of floats of `type_name` (see `SOURCE_TYPES`), lying one after another in `data` (uint8, 1-D), into f32, bf16 or i8
    panels (i8: a scale of amax / 127 for each row).

    Output n is row `rows[n]`, or n where that is None. `out` (uint8) has exactly the bytes of the panels.
    """
    itemsize = 4 if type_name == "F32" else 2
    outputs = _outputs(data.nbytes, width * itemsize, rows)
    if data.ctypes.data % itemsize:
        data = data.copy()
    _check(fmt, outputs, width, 0, out)
    code = SOURCE_TYPES[type_name]
    _native.pack_floats(fmt, data.ctypes.data, code, width, _address(rows), outputs, width, out.data_ptr())


def pack_blocks(fmt: str, data: npt.NDArray[np.uint8], row_bytes: int, width: int, rows: RowIndex | None, out: Tensor) -> None:
    """Rows of GGUF blocks, as they lie in the file, into panels of the same codes and scales. `rows`, `out`: as in `pack_floats`."""
    outputs = _outputs(data.nbytes, row_bytes, rows)
    _check(fmt, outputs, width, 0, out)
    _native.pack_blocks(fmt, data.ctypes.data, row_bytes, _address(rows), outputs, width, out.data_ptr())


def pack_i8(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """int8 `codes[N, K]` and a float32 scale for each row into i8 panels."""
    outputs, width = codes.shape
    fits = codes.dtype == torch.int8 and scales.dtype == torch.float32 and scales.numel() == outputs
    if not fits or not codes.is_contiguous() or not scales.is_contiguous():
        raise ValueError(f"pack_i8: {codes.dtype} {list(codes.shape)} and {scales.dtype} {list(scales.shape)} do not fit.")
    _check("i8", outputs, width, 0, out)
    _native.pack_i8(codes.data_ptr(), scales.data_ptr(), 0, outputs, width, out.data_ptr())


def pack_w4(codes: Tensor, scales: Tensor, zeros: Tensor, group: int, out: Tensor) -> None:
    """uint8 `codes[N, K]` of 0..15, with float32 scales and uint8 zeros `[N, K / group]`, into w4 panels."""
    outputs, width = codes.shape
    shape = (outputs, width // group)
    fits = codes.dtype == zeros.dtype == torch.uint8 and scales.dtype == torch.float32 and scales.shape == zeros.shape == shape
    if not fits or not (codes.is_contiguous() and scales.is_contiguous() and zeros.is_contiguous()):
        raise ValueError(f"pack_w4: codes {list(codes.shape)}, scales {list(scales.shape)}, zeros {list(zeros.shape)} do not fit {group}.")
    _check("w4", outputs, width, group, out)
    _native.pack_w4(codes.data_ptr(), scales.data_ptr(), zeros.data_ptr(), 0, outputs, width, group, out.data_ptr())


def in_slices(outputs: int, width: int, pack: Callable[[int, int, Tensor], None], fmt: str, group: int, out: Tensor) -> None:
    """Call `pack(begin, end, out of these outputs)` for slices of a matrix, so that what is made on the way stays small."""
    step = max(1, _SLICE_ELEMENTS // max(1, width) // PANEL_OUTPUTS) * PANEL_OUTPUTS
    panel = packed_bytes(fmt, PANEL_OUTPUTS, width, group)
    for begin in range(0, outputs, step):
        end = min(begin + step, outputs)
        place = begin // PANEL_OUTPUTS * panel
        pack(begin, end, out[place : place + packed_bytes(fmt, end - begin, width, group)])


_SLICE_ELEMENTS = 1 << 22


def _outputs(nbytes: int, row_bytes: int, rows: RowIndex | None) -> int:
    stored, rest = divmod(nbytes, row_bytes)
    if rest or (rows is not None and rows.size and not 0 <= rows.min() <= rows.max() < stored):
        raise ValueError(f"{nbytes} bytes are no whole rows of {row_bytes}, or a row is named that is not there.")
    return stored if rows is None else rows.size


def _address(rows: RowIndex | None) -> int:
    return 0 if rows is None else rows.ctypes.data


def _check(fmt: str, outputs: int, width: int, group: int, out: Tensor) -> None:
    expected = packed_bytes(fmt, outputs, width, group)
    if out.dtype != torch.uint8 or out.numel() != expected or not out.is_contiguous():
        raise ValueError(f"Packed {fmt} weights [{outputs}, {width}] take {expected} bytes, got {out.numel()} of {out.dtype}.")
