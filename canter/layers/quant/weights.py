"""The weights of one matrix as a checkpoint holds them, and how they become what is computed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from canter.checkpoint.gguf_quants import BLOCK_LAYOUT
from canter.checkpoint.tensors import StoredTensor
from canter.core.errors import UnsupportedModelError
from canter.kernels.dequant import dequantize
from canter.kernels.native import packed, packing
from canter.kernels.packed import PackedPart

_TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_GGUF_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class PackOptions:
    """What matrices may be packed as. `dtype`: the model's type, for floats. `keep_codes`: quantised weights stay so where there is
    a kernel for them. `int8`: floats are rounded to blocks of int8."""

    dtype: torch.dtype
    keep_codes: bool = True
    int8: bool = False


class MatrixWeights(Protocol):
    """The weights [outputs, width] of one matrix, or of one part of a fused one; still in the file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def packed_format(self, options: PackOptions) -> tuple[str, int]:
        """(format, elements that share a scale or 0) that holds them best."""
        ...

    def pack(self, part: PackedPart) -> None:
        """Fill a part of that format."""
        ...

    def fill(self, out: Tensor) -> None:
        """Fill a dense tensor of `shape`, of any float type and device."""
        ...


class Scheme(Protocol):
    """One way of quantising a checkpoint's matrices."""

    def member(self, name: str) -> tuple[str, str] | None:
        """(name of the weight, role in it) of a stored tensor that is one of several for a weight; None for all others."""
        ...

    def weights(self, name: str, members: Mapping[str, StoredTensor]) -> MatrixWeights:
        """The weight `name` from its members by role. Raises `CheckpointError` when they do not fit together."""
        ...

    def passes_over(self, stored: StoredTensor) -> bool:
        """Whether a tensor that the model has no place for means nothing."""
        ...


def float_name(options: PackOptions) -> str:
    """The packed format of floats that are not rounded to int8."""
    return "bf16" if options.dtype == torch.bfloat16 else "f32"


class StoredWeights:
    """One tensor of floats or GGUF blocks."""

    __slots__ = ("stored",)

    def __init__(self, stored: StoredTensor) -> None:
        if stored.block_type is None:
            supported = ", ".join(_TORCH_DTYPES)
            raise UnsupportedModelError(f"Tensor {stored.name!r}: type {stored.dtype} is not supported. Supported: {supported}.")
        self.stored = stored

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def type_name(self) -> str:
        return self.stored.block_type or ""

    @property
    def _is_float(self) -> bool:
        return self.type_name in _GGUF_FLOATS

    @property
    def can_be_looked_up(self) -> bool:
        """Whether rows can be used where they lie in the file."""
        return self.stored.transform is None and len(self.shape) == 2

    def packed_format(self, options: PackOptions) -> tuple[str, int]:
        name = self.type_name.lower()
        is_block = not self._is_float and name in packed.FORMATS
        if options.keep_codes and is_block and self.stored.has_stored_values and packing.holds(name, self.shape[-1]):
            return name, 0
        if options.int8 and self._is_float:
            return "q8_0", 0  # as a GGUF file would hold them
        # bfloat16 weights stay so beside float32 activations: the products are the same and half the bytes are read.
        return ("bf16" if name == "bf16" and self.stored.has_stored_values else float_name(options)), 0

    def pack(self, part: PackedPart) -> None:
        stored = self.stored
        rows = None if stored.row_index is None else torch.from_numpy(stored.row_index)
        if not stored.has_stored_values:
            packed.pack_floats(part, read_tensor(stored).contiguous())
        elif part.format == self.type_name.lower() and not self._is_float:
            packed.pack_blocks(part, stored.data.reshape(-1, self._row_bytes()), rows)
        elif self._is_float:
            packed.pack_floats(part, view(stored, _GGUF_FLOATS[self.type_name]), rows)
        elif rows is not None:
            packed.pack_floats(part, self._decoded(0, self.shape[0]), rows)
        else:
            for begin, end in packing.slices(*self.shape):
                packed.pack_floats(part, self._decoded(begin, end), None, begin, end - begin)

    def _decoded(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end) as they are stored, in float32."""
        values = torch.empty((end - begin, self.shape[-1]), dtype=torch.float32)
        data = self.stored.data[begin * self._row_bytes() : end * self._row_bytes()]
        dequantize(data, self.type_name, values.numel(), values)
        return values

    def _row_bytes(self) -> int:
        elements, nbytes = BLOCK_LAYOUT[self.type_name]
        return self.shape[-1] // elements * nbytes

    def fill(self, out: Tensor) -> None:
        stored = self.stored
        with torch.no_grad():
            if stored.dtype.startswith("gguf:") and stored.transform is None and out.device.type == "cpu":
                dequantize(stored.data, self.type_name, stored.num_elements, out)
            else:
                out.copy_(read_tensor(stored))


class SelectedRows:
    """Rows of another matrix, in an order of their own. Quantised ones are dequantised."""

    __slots__ = ("_rows", "_weights")

    def __init__(self, weights: MatrixWeights, rows: Tensor) -> None:
        self._weights, self._rows = weights, rows

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._rows.shape[0], *self._weights.shape[1:])

    def packed_format(self, options: PackOptions) -> tuple[str, int]:
        fmt, group = self._weights.packed_format(options)
        holds_floats = fmt in ("bf16", "f32") or (options.int8 and fmt == "q8_0")
        return (fmt, group) if holds_floats else (float_name(options), 0)

    def pack(self, part: PackedPart) -> None:
        packed.pack_floats(part, self._all(), self._rows)

    def fill(self, out: Tensor) -> None:
        out.copy_(self._all()[self._rows])

    def _all(self) -> Tensor:
        values = torch.empty(self._weights.shape)
        self._weights.fill(values)
        return values


def read_tensor(stored: StoredTensor) -> Tensor:
    """A stored tensor of floats in host memory: as stored (sharing its memory, never to be written), or float32 if it is a GGUF
    tensor or has a transform."""
    if stored.dtype.startswith("gguf:"):
        values = torch.empty(stored.shape, dtype=torch.float32)
        dequantize(stored.data, stored.block_type or "", stored.num_elements, values)
    else:
        dtype = _TORCH_DTYPES.get(stored.dtype)
        if dtype is None:
            supported = ", ".join(_TORCH_DTYPES)
            raise UnsupportedModelError(f"Tensor {stored.name!r}: type {stored.dtype} is not supported. Supported: {supported}.")
        values = view(stored, dtype)
    if stored.transform is None:
        return values
    return torch.from_numpy(np.ascontiguousarray(stored.transform(values.float().numpy())))


def view(stored: StoredTensor, dtype: torch.dtype) -> Tensor:
    """The bytes of a tensor as elements of `dtype`, never to be written."""
    data = stored.data
    if data.ctypes.data % dtype.itemsize:
        data = data.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the map is read-only; so is every use of this tensor
        flat = torch.from_numpy(data)
    return flat.view(dtype).view(stored.shape)
