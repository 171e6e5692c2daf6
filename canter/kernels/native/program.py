"""Step programs of the compiled module: what was recorded, with its arena laid out, to be run for any number of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from canter import _native
from canter.kernels.native import record
from canter.kernels.packed import PackedMatrix, allocate_packed
from canter.kernels.recorder import Buffer, Instruction, Recorder, RecordError, Slot, Symbol, plan_arena

_LEAST_BYTES = 1 << 21
"""Of an arena: a huge page."""

BLOCK_ROWS = 240
"""Rows for which a stretch of instructions is run at a time: enough for products at full speed, whose tiles have at most 120 rows,
and few enough that what they hand on stays in a third-level cache."""


@dataclass(frozen=True, slots=True)
class Described:
    """An instruction to the eye: its op, the elements of a row that it reads and writes, the weights that it multiplies by."""

    op: str
    reads: int
    writes: int
    weights: PackedMatrix | None


Observe = Callable[["NativeProgram", int, list[float]], None]
"""Told of a run: the program, its rows, and the seconds of each instruction."""

_observers: list[Observe] = []


@contextmanager
def observed(observe: Observe) -> Iterator[None]:
    """Meanwhile every run of every program is timed, instruction by instruction."""
    _observers.append(observe)
    try:
        yield
    finally:
        _observers.remove(observe)


def new_recorder() -> Recorder:
    """A recorder whose instructions a `NativeProgram` can run."""
    return Recorder(record.convert)


class NativeProgram:
    """The instructions of a recorder, with one symbol as the result.

    A run's intermediate results and its result lie in an arena of the program's own, which grows to the largest run: the
    tensor that `run` returns is valid until the next run.
    """

    def __init__(self, recorder: Recorder, result: Symbol) -> None:
        plan = plan_arena(recorder.instructions, [result])
        self._program = _native.Program()
        if not isinstance(result.source, Buffer) or result.source not in plan.starts:
            raise RecordError("a result that no instruction writes")
        self.row_bytes, self._block_bytes, self._block_rows = plan.row_bytes, plan.block_bytes, BLOCK_ROWS
        self._result_start, self._result = plan.starts[result.source], result
        self._result_bytes = result.strides[0] * result.dtype.itemsize
        self._arena = torch.empty(0, dtype=torch.uint8)
        self.instructions = [_described(instruction) for instruction in recorder.instructions]
        """In order."""

        def place(symbol: Symbol) -> _native.Operand:
            if isinstance(symbol.source, Slot):
                return _native.Operand.slot(symbol.source.index)
            start, offset = plan.starts[symbol.source], symbol.offset * symbol.dtype.itemsize
            if symbol.source in plan.of_blocks:
                return _native.Operand.block(start, offset)
            return _native.Operand.arena(start, offset, symbol.source.row_bytes)

        for instruction in recorder.instructions:
            instruction.emit(self._program, place)
        self._program.set_stretches(plan.stretches, plan.row_bytes, self._block_rows)

    def run(self, rows: int, slots: Sequence[int]) -> Tensor:
        """The result [rows, ...]. `slots`: addresses and sizes in the order of the recorder's slots, all of them."""
        arena = self._grown(rows)
        if _observers:
            seconds = self._program.time(arena.data_ptr(), rows, slots)
            for observe in _observers:
                observe(self, rows, seconds)
        else:
            self._program.run(arena.data_ptr(), rows, slots)
        start = self._result_start * rows
        flat = arena[start : start + rows * self._result_bytes].view(self._result.dtype)
        return flat.view(rows, *self._result.tail)

    @cached_property
    def labels(self) -> list[tuple[str, dict[str, Any]]]:
        """Each instruction's op, and what there is to say of the weights that it multiplies by."""
        return [(instruction.op, _weights_label(instruction.weights)) for instruction in self.instructions]

    @property
    def ops(self) -> list[str]:
        """The op of each instruction, in order."""
        return self._program.names()

    def _grown(self, rows: int) -> Tensor:
        """The arena, with room for so many rows. It takes memory only as it is written; tensors that look into a smaller one
        keep that alive."""
        needed = max(1, rows * self.row_bytes + min(rows, self._block_rows) * self._block_bytes)
        if self._arena.numel() < needed:
            self._arena = allocate_packed(max(needed, 2 * self._arena.numel(), _LEAST_BYTES))
        return self._arena


def _weights_label(weights: PackedMatrix | None) -> dict[str, Any]:
    if weights is None:
        return {}
    formats = ", ".join(dict.fromkeys(part.format for part in weights.parts))
    return {"weights": f"{' x '.join(map(str, weights.shape))} {formats}", "bytes": weights.nbytes}


def _described(instruction: Instruction) -> Described:
    reads, writes = (
        sum(math.prod(symbol.tail) for symbol in symbols if isinstance(symbol.source, Buffer))
        for symbols in (instruction.reads, instruction.writes)
    )
    return Described(instruction.op, reads, writes, instruction.weights)
