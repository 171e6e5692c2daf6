"""Weights as the native kernels read them: packed matrices, and tables of rows that stay in their file."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
ALIGNMENT = 64
"""Bytes that the data of a part is aligned to."""


def allocate_packed(nbytes: int) -> Tensor:
    """Zeroed bytes for packed weights, aligned to 64, on huge pages where the system grants them: weights are read through once
    a step, and every small page would cost a look-up.
    """
    if nbytes < _HUGE_PAGE:
        room = torch.zeros(nbytes + ALIGNMENT, dtype=torch.uint8)
        begin = -room.data_ptr() % ALIGNMENT
        return room[begin : begin + nbytes]
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    room = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
    begin = -room.data_ptr() % _HUGE_PAGE
    return room[begin : begin + nbytes]


@dataclass(frozen=True, eq=False)
class PackedPart:
    """Outputs of one format. `data` is uint8, 1-D and aligned to 64 bytes; `group`: elements that share a scale (w4), else 0."""

    format: str
    outputs: int
    width: int
    group: int
    data: Tensor


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A weight matrix `[N, K]`: parts of equal width whose outputs lie side by side."""

    parts: tuple[PackedPart, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and width, as a dense weight's."""
        return sum(part.outputs for part in self.parts), self.parts[0].width

    @property
    def nbytes(self) -> int:
        """Bytes that the parts take."""
        return sum(part.data.numel() for part in self.parts)

    @property
    def num_elements(self) -> int:
        """Weights, whatever they take."""
        outputs, width = self.shape
        return outputs * width

    @cached_property
    def native(self) -> Any:
        """The compiled module's view of the parts. Raises `ValueError` for parts that do not fit their formats."""
        return packer().native_matrix(self)

    def unpack(self) -> Tensor:
        """The weights as float32 `[N, K]`: what their codes and scales mean."""
        return packer().unpack(self)


class Packer(Protocol):
    """Who knows how panels look inside: `canter.kernels.native.packed`."""

    def native_matrix(self, matrix: PackedMatrix) -> Any:
        """What the kernels take for the matrix."""

    def unpack(self, matrix: PackedMatrix) -> Tensor:
        """The weights as float32 `[N, K]`."""

    def allocate_part(self, format: str, outputs: int, width: int, group: int = 0) -> PackedPart:
        """A part whose data is still to be packed."""

    def pack_floats(
        self, part: PackedPart, source: Tensor, row_index: Tensor | None = None, first: int = 0, outputs: int | None = None
    ) -> None:
        """Rows of floats into an f32, bf16 or q8_0 part."""

    def pack_blocks(
        self, part: PackedPart, source: np.ndarray, row_index: Tensor | None = None, first: int = 0, outputs: int | None = None
    ) -> None:
        """Rows of GGUF blocks into a part of their type."""

    def pack_i8(
        self, part: PackedPart, codes: Tensor, scales: Tensor, row_index: Tensor | None = None, first: int = 0, outputs: int | None = None
    ) -> None:
        """Codes of eight bits with a scale for each row into an i8 part."""

    def pack_w4(
        self,
        part: PackedPart,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor,
        row_index: Tensor | None = None,
        first: int = 0,
        outputs: int | None = None,
    ) -> None:
        """Codes of four bits with grouped scales and zeros into a w4 part."""


_packer: list[Packer] = []


def register_packer(packer: Packer) -> None:
    """Name the module that packs: kernels register themselves, nothing here imports them."""
    _packer[:] = [packer]


def packer() -> Packer:
    """The registered packer."""
    return _packer[0]


@dataclass(frozen=True, eq=False)
class BlockRows:
    """Rows of a table as they lie in a file: blocks of a GGUF type (F32, F16 and BF16 too), a row after the other.

    `data` is uint8, 1-D and contiguous, as a memory map is; `shape` is `[rows, width]` in elements.
    """

    type_name: str
    data: np.ndarray
    shape: tuple[int, int]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.data.nbytes // max(1, self.shape[0])

    @property
    def is_mapped(self) -> bool:
        """Whether the data is a memory map's, and can't be written: then its pages may go back to the system at any time."""
        owner: Any = self.data
        while isinstance(owner, np.ndarray) and owner.base is not None:
            owner = owner.base
        return isinstance(owner, memoryview) and owner.readonly and isinstance(owner.obj, mmap.mmap)
