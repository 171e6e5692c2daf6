"""Matrices of integer codes with scales: what AWQ, GPTQ and compressed-tensors checkpoints come down to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from canter.checkpoint.tensors import StoredTensor
from canter.core.errors import CheckpointError
from canter.kernels.native import packed, packing
from canter.kernels.packed import PackedPart
from canter.layers.quant.weights import PackOptions, float_name, view

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

MAX_CODE = 15


class FourBit:
    """4-bit codes 0..15: weight[n, k] = (code - zeros[n, g]) * scales[n, g] with g = k // group, or `group_of[k]` where given.

    `codes(begin, end)` gives the rows [begin, end) as uint8; `scales` (float32) and `zeros` (uint8) are [outputs, groups].
    """

    __slots__ = ("_codes", "_group_of", "_scales", "_zeros", "group", "shape")

    def __init__(
        self, shape: tuple[int, int], codes: Callable[[int, int], Tensor], scales: Tensor, zeros: Tensor, group_of: Tensor | None = None
    ) -> None:
        self.shape = shape
        self.group = shape[1] // scales.shape[1]
        self._codes, self._scales, self._zeros, self._group_of = codes, scales, zeros, group_of

    def packed_format(self, options: PackOptions) -> tuple[str, int]:
        if options.keep_codes and self._group_of is None and packing.holds("w4", self.shape[1], self.group):
            return "w4", self.group
        return float_name(options), 0

    def pack(self, part: PackedPart) -> None:
        for begin, end in packing.slices(*self.shape):
            if part.format == "w4":
                grids = self._scales[begin:end], self._zeros[begin:end]
                packed.pack_w4(part, self._codes(begin, end), *grids, None, begin, end - begin)
            else:
                packed.pack_floats(part, self._values(begin, end), None, begin, end - begin)

    def fill(self, out: Tensor) -> None:
        out.copy_(self._values(0, self.shape[0]))

    def _values(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end) as float32."""
        codes, scales, zeros = self._codes(begin, end).float(), self._scales[begin:end], self._zeros[begin:end].float()
        if self._group_of is not None:
            return ((codes - zeros[:, self._group_of]) * scales[:, self._group_of]).contiguous()
        grouped = codes.view(end - begin, -1, self.group)
        return ((grouped - zeros[..., None]) * scales[..., None]).view(end - begin, -1)


class EightBit:
    """int8 codes with one float32 scale for each output: weight[n, k] = codes[n, k] * scales[n]."""

    __slots__ = ("_codes", "_scales", "shape")

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.shape: tuple[int, int] = (codes.shape[0], codes.shape[1])
        self._codes, self._scales = codes, scales

    def packed_format(self, options: PackOptions) -> tuple[str, int]:
        return ("i8" if options.keep_codes and packing.holds("i8", self.shape[1]) else float_name(options)), 0

    def pack(self, part: PackedPart) -> None:
        if part.format == "i8":
            packed.pack_i8(part, self._codes, self._scales)
            return
        for begin, end in packing.slices(*self.shape):
            packed.pack_floats(part, self._values(begin, end), None, begin, end - begin)

    def fill(self, out: Tensor) -> None:
        out.copy_(self._values(0, self.shape[0]))

    def _values(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end) as float32."""
        return self._codes[begin:end].float() * self._scales[begin:end, None]


def integers(stored: StoredTensor, *dtypes: str) -> Tensor:
    """A stored tensor that must be of one of the named integer types."""
    if stored.dtype not in dtypes:
        raise CheckpointError(f"Tensor {stored.name!r}: expected {' or '.join(dtypes)}, found {stored.dtype}.")
    return view(stored, getattr(torch, stored.dtype))


def floats_of(stored: StoredTensor) -> Tensor:
    """A stored tensor of floats, as float32."""
    dtype = _DTYPES.get(stored.dtype)
    if dtype is None:
        raise CheckpointError(f"Tensor {stored.name!r}: expected floats, found {stored.dtype}.")
    return view(stored, dtype).float().contiguous()


def expect_shape(stored: StoredTensor, shape: tuple[int, ...]) -> None:
    """Raise `CheckpointError` unless a stored tensor has this shape."""
    if stored.shape != shape:
        raise CheckpointError(f"Tensor {stored.name!r}: expected shape {list(shape)}, found {list(stored.shape)}.")


def groups_of(stored: StoredTensor, width: int, num_groups: int) -> Tensor | None:
    """The group of each element of a row, from a `g_idx` tensor; None where groups are neighbours, as without it."""
    expect_shape(stored, (width,))
    given = integers(stored, "int32").long()
    if given.numel() and not 0 <= int(given.min()) <= int(given.max()) < num_groups:
        found = f"{int(given.min())} to {int(given.max())}"
        raise CheckpointError(f"Tensor {stored.name!r}: expected groups in [0, {num_groups}), found {found}.")
    return None if torch.equal(given, torch.arange(width) // (width // num_groups)) else given


def require_groups(name: str, width: int, num_groups: int) -> None:
    """Raise `CheckpointError` unless `num_groups` equal groups make up a row."""
    if num_groups < 1 or width % num_groups:
        raise CheckpointError(f"Weight {name!r}: {width} elements a row can't have {num_groups} groups of one size.")


def nibbles(packed: Tensor) -> Tensor:
    """int32 words [..., W] to their eight 4-bit fields each, lowest first: uint8 [..., 8 W]."""
    pairs = packed.contiguous().view(torch.uint8)
    return torch.stack((pairs & MAX_CODE, pairs >> 4), -1).flatten(-2)


def number(config: Any, key: str, default: int) -> int:
    """An integer of a quantization_config."""
    value = config.get(key, default)
    if type(value) is not int:
        raise CheckpointError(f"quantization_config: key {key!r}: expected an integer, found {value!r:.80}.")
    return value
