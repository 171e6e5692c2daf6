"""The native ops of a step, as spans of a recording: what each took, and at what speed weights were read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from canter.core.timeline import Timeline
from canter.kernels.native.program import NativeProgram, observed

T = TypeVar("T")


def with_ops(timeline: Timeline, work: Callable[[], T]) -> Callable[[], T]:
    """`work`, with a span for each instruction of the programs that it runs. Without a recording it is `work` itself."""
    if not timeline.is_on:
        return work

    def recorded() -> T:
        thread = threading.get_ident()

        def add(program: NativeProgram, rows: int, seconds: list[float]) -> None:
            if threading.get_ident() != thread:  # another engine of this process
                return
            timeline.add_parts(program.labels, seconds)
            read = [(i.weights.nbytes, taken) for i, taken in zip(program.instructions, seconds, strict=True) if i.weights is not None]
            if read:
                timeline.count("weights", gb_a_second=sum(size for size, _ in read) / max(sum(taken for _, taken in read), 1e-9) / 1e9)

        with observed(add):
            return work()

    return recorded
