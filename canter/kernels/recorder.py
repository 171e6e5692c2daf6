"""Recording: a model's forward, run once on symbols instead of tensors, leaves the list of op calls that it makes.

A `Symbol` stands for a tensor whose first dimension, the step's rows, is unknown. It can do what layers do to tensors
between ops: views and splits of what lies behind the rows. An op bound by `dispatch.bind` that is given one records an
instruction (what its implementation registered as `record`) and returns symbols of its results. Everything else raises
`RecordError`, and the caller runs eagerly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from canter.kernels.packed import PackedMatrix


class RecordError(Exception):
    """Something that a recording can't hold. The message says what, for the log."""


class Rows:
    """The unknown number of rows. No arithmetic, no comparison: what a model decides by it can't be recorded."""

    def __repr__(self) -> str:
        return "rows"


@dataclass(eq=False, slots=True)
class Buffer:
    """`row_bytes` for each row, in the arena of a run."""

    row_bytes: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor that comes with each run: metadata of the step."""

    index: int
    name: str


class Symbol:
    """A tensor [rows, *shape]. `strides` of all its dimensions and `offset` count elements; what lies behind a buffer's
    row lies `offset` elements into it."""

    __slots__ = ("dtype", "offset", "recorder", "rows", "source", "strides", "tail")

    def __init__(
        self,
        recorder: Recorder,
        source: Buffer | Slot,
        dtype: torch.dtype,
        tail: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
    ) -> None:
        self.recorder, self.source, self.dtype, self.tail, self.offset = recorder, source, dtype, tail, offset
        self.rows = recorder.rows
        self.strides = strides or (math.prod(tail), *_dense_strides(tail))

    @property
    def shape(self) -> tuple[Any, ...]:
        return (self.rows, *self.tail)

    @property
    def name(self) -> str:
        """Of the slot that it comes in."""
        if not isinstance(self.source, Slot):
            raise RecordError("metadata that the model computes")
        return self.source.name

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def dim(self) -> int:
        return 1 + len(self.tail)

    def size(self, dim: int) -> Any:
        return self.shape[dim]

    def is_contiguous(self) -> bool:
        return self.strides == (math.prod(self.tail), *_dense_strides(self.tail))

    def view(self, *shape: Any) -> Symbol:
        """Another shape behind the rows, which are -1 or `shape[0]` of a symbol."""
        rows, *tail = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)) else shape
        if rows is not self.rows and rows != -1:
            raise RecordError(f"view{tuple(shape)} changes the rows")
        if any(not isinstance(size, int) or size < 0 for size in tail) or math.prod(tail) != math.prod(self.tail):
            raise RecordError(f"view{tuple(shape)} of [rows, {', '.join(map(str, self.tail))}]")
        if tuple(self.strides[1:]) != _dense_strides(self.tail):
            raise RecordError("view of a tensor whose rows do not lie in one run")
        return self._alias(tuple(tail), (self.strides[0], *_dense_strides(tail)), self.offset)

    reshape = view

    def split_with_sizes(self, sizes: Sequence[int], dim: int = 0) -> tuple[Symbol, ...]:
        """Parts along a dimension behind the rows."""
        dim = dim % self.dim()
        if dim == 0 or sum(sizes) != self.tail[dim - 1]:
            raise RecordError(f"split of [rows, {', '.join(map(str, self.tail))}] into {list(sizes)} along {dim}")
        parts, start = [], 0
        for size in sizes:
            tail = (*self.tail[: dim - 1], size, *self.tail[dim:])
            parts.append(self._alias(tail, self.strides, self.offset + start * self.strides[dim]))
            start += size
        return tuple(parts)

    split = split_with_sizes

    def float(self) -> Symbol:
        return self.to(torch.float32)

    def to(self, dtype: torch.dtype) -> Symbol:
        """Itself where the type is that already; otherwise a conversion is recorded."""
        if dtype == self.dtype:
            return self
        return self.recorder.convert(self, dtype)

    def contiguous(self) -> Symbol:
        if not self.is_contiguous():
            raise RecordError("a contiguous copy")
        return self

    def _alias(self, tail: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Symbol:
        return Symbol(self.recorder, self.source, self.dtype, tail, strides, offset)

    def __getattr__(self, name: str) -> NoReturn:
        raise RecordError(f"Tensor.{name}")

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise RecordError(f"torch function {getattr(func, '__name__', func)}")


def _refuse(name: str) -> Callable[..., NoReturn]:
    def method(*args: Any) -> NoReturn:
        raise RecordError(f"Tensor.{name}")

    return method


for _name in (
    *("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv", "itruediv", "floordiv", "mod", "pow"),
    *("matmul", "rmatmul", "neg", "abs", "and", "or", "xor", "invert", "lt", "le", "gt", "ge", "eq", "ne"),
    *("bool", "int", "float", "index", "len", "iter", "contains", "getitem", "setitem"),
):
    setattr(Symbol, f"__{_name}__", _refuse(f"__{_name}__"))
    setattr(Rows, f"__{_name}__", _refuse(f"shape[0].__{_name}__"))
Symbol.__hash__ = object.__hash__  # type: ignore[method-assign]
Rows.__hash__ = object.__hash__  # type: ignore[method-assign]


def _dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


@dataclass(frozen=True, slots=True)
class Instruction:
    """One recorded call. `reads` and `writes` are the symbols that it uses; `emit` adds it to a provider's program, given
    the place of each buffer. `weights`: the matrix that it multiplies by, for those who measure. `by_row`: a row of what it
    writes depends on the same row of what it reads and on nothing else of the run, so that it may be run for some rows at a time."""

    op: str
    reads: tuple[Symbol, ...]
    writes: tuple[Symbol, ...]
    emit: Callable[[Any, Callable[[Symbol], Any]], None]
    weights: PackedMatrix | None = None
    by_row: bool = False

    @property
    def buffers(self) -> list[Buffer]:
        """What it uses of the arena."""
        return [symbol.source for symbol in (*self.reads, *self.writes) if isinstance(symbol.source, Buffer)]

    @property
    def fits_blocks(self) -> bool:
        """Whether it may be run for some rows at a time: what lies in slots would have to be told so."""
        return self.by_row and len(self.buffers) == len(self.reads) + len(self.writes)


class Recorder:
    """Collects the instructions of one recording, all over the same rows, and lays out their arena.

    `convert` records a change of type: what `Symbol.to` calls.
    """

    def __init__(self, convert: Callable[[Symbol, torch.dtype], Symbol]) -> None:
        self.rows = Rows()
        self.convert = convert
        self.instructions: list[Instruction] = []
        self.slots: list[Slot] = []
        self.constants: list[torch.Tensor] = []
        """What instructions hold addresses of."""
        self.kept: list[Any] = []
        """What else must live as long as they are used: its memory can't move."""

    def slot(self, name: str) -> Slot:
        """The slot of a name, made at its first mention."""
        for slot in self.slots:
            if slot.name == name:
                return slot
        self.slots.append(Slot(len(self.slots), name))
        return self.slots[-1]

    def given(self, name: str, dtype: torch.dtype, *tail: int) -> Symbol:
        """A contiguous tensor [rows, *tail] that comes with each run."""
        return Symbol(self, self.slot(name), dtype, tail)

    def new(self, dtype: torch.dtype, *tail: int) -> Symbol:
        """A contiguous tensor [rows, *tail] in the arena."""
        return Symbol(self, Buffer(math.prod(tail) * dtype.itemsize), dtype, tail)

    def bind(self, tensor: torch.Tensor) -> int:
        """The address of a tensor that is the same in every run."""
        self.constants.append(tensor)
        return tensor.data_ptr()

    def bind_array(self, array: np.ndarray) -> int:
        """The address of an array, such as a file's memory map."""
        self.kept.append(array)
        return int(array.ctypes.data)

    def add(
        self,
        op: str,
        reads: Sequence[Symbol],
        writes: Sequence[Symbol],
        emit: Callable[..., None],
        weights: PackedMatrix | None = None,
        by_row: bool = False,
    ) -> None:
        self.instructions.append(Instruction(op, tuple(reads), tuple(writes), emit, weights, by_row))


ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """Where each buffer begins, in bytes per row. `stretches`: (begin, end) of runs of instructions that are done for a block of rows
    at a time. Buffers that only one of them uses hold the rows of a block, `block_bytes` for each; they count from behind all
    others, which hold the rows of the run, `row_bytes` for each."""

    starts: dict[Buffer, int]
    row_bytes: int
    stretches: list[tuple[int, int]]
    of_blocks: set[Buffer]
    block_bytes: int


def plan_arena(instructions: Sequence[Instruction], results: Sequence[Symbol]) -> ArenaPlan:
    """Lay an arena out.

    A buffer lives from the instruction that first names it to the last that does, results to the end; two that live at
    once never overlap. Starts are multiples of 64, so that buffers are aligned for any number of rows.
    """
    lives: dict[Buffer, tuple[int, int]] = {}
    for at, instruction in enumerate(instructions):
        for buffer in instruction.buffers:
            lives[buffer] = (lives.get(buffer, (at, at))[0], at)
    for symbol in results:
        if isinstance(symbol.source, Buffer):
            lives[symbol.source] = (lives[symbol.source][0], len(instructions))
    stretches = _stretches(instructions)
    within = {at: stretch for stretch, (begin, end) in enumerate(stretches) for at in range(begin, end)}
    of_blocks = {buffer for buffer, (first, last) in lives.items() if first in within and within[first] == within.get(last)}
    # A stretch uses its buffers over and over, one block after the other: those of all rows live as long as it takes, but for
    # one that takes another's place row by row.
    whole = {
        buffer: (stretches[within[first]][0] if first in within else first, stretches[within[last]][1] - 1 if last in within else last)
        for buffer, (first, last) in lives.items()
        if buffer not in of_blocks
    }
    starts, row_bytes = _laid_out(whole, lives)
    inside, block_bytes = _laid_out({buffer: life for buffer, life in lives.items() if buffer in of_blocks}, lives)
    return ArenaPlan(starts | inside, row_bytes, stretches, of_blocks, block_bytes)


def _stretches(instructions: Sequence[Instruction]) -> list[tuple[int, int]]:
    """(begin, end) of each run of at least two instructions that fit blocks."""
    found, begin = [], 0
    for at in range(len(instructions) + 1):
        if at == len(instructions) or not instructions[at].fits_blocks:
            if at - begin > 1:
                found.append((begin, at))
            begin = at + 1
    return found


def _laid_out(lives: Mapping[Buffer, tuple[int, int]], by_row: Mapping[Buffer, tuple[int, int]]) -> tuple[dict[Buffer, int], int]:
    """Where each buffer begins, and how much all take. They come in the order of their first instruction.

    `by_row`: how long each row lives. A row of a buffer may lie where the same row of another has lain, in rows of the same length:
    of those that still come, none is touched.
    """
    starts: dict[Buffer, int] = {}
    total = 0
    for buffer, (first, _) in lives.items():
        size, born = _room(buffer), by_row[buffer][0]
        alive = [other for other in starts if lives[other][1] >= first]
        left = {other for other in alive if other.row_bytes == buffer.row_bytes and by_row[other][1] < born}
        kept = [(starts[other], starts[other] + _room(other)) for other in alive if other not in left]
        places = sorted(starts[other] for other in left)
        start = next((at for at in places if all(end <= at or begin >= at + size for begin, end in kept)), None)
        if start is None:
            start = 0
            for begin, end in sorted((starts[other], starts[other] + _room(other)) for other in alive):
                if start + size <= begin:
                    break
                start = max(start, end)
        starts[buffer] = start
        total = max(total, start + size)
    return starts, total


def _room(buffer: Buffer) -> int:
    return -(-buffer.row_bytes // ALIGNMENT) * ALIGNMENT
