"""What the engine and the worker of xgrammar tell each other.

Three sockets and a piece of shared memory. Over the first the worker's parent gets the vocabulary, says that it is ready, and is sent the
others whenever it shall fork a worker. Over the second go steps, over the third compilations, which so hold no step up. The memory holds
the masks of a step, and what is being worked on: when nothing comes back, that is who is to blame.
"""

from __future__ import annotations

import mmap

import msgspec
import numpy as np
import numpy.typing as npt

from canter.core.grammar import MaskArray
from canter.structured.xgrammar_constraints import Job

HEADER_BYTES = 4096
MASKS = 64
"""Masks that a step fills at most; more make several steps."""
MOVES, MATCHER, IS_COMPILING = range(3)
"""Words of the header: a count that goes up with every piece of a step's work; the matcher that a step is at, or 0; whether it is
compiling that one's grammar."""
NUM_WORDS = 3


class Tokens(msgspec.Struct, array_like=True):
    """A `core.vocabulary.Vocabulary` as xgrammar needs it. Without bytes: what is never written as text."""

    size: int
    token_bytes: list[bytes]
    eos_token_ids: list[int]


class Ready(msgspec.Struct, array_like=True):
    """`error`: why there won't be any worker; empty if there is nothing wrong."""

    error: str = ""


class Visit(msgspec.Struct, array_like=True):
    """What a step does with a matcher: begin it, take tokens back, accept others, fill a mask (`line` of the shared ones, or -1)."""

    matcher: int
    begin: Job | None
    rollback: int
    token_ids: list[int]
    line: int


class Step(msgspec.Struct, array_like=True):
    """`released`: matchers that nobody needs any more."""

    visits: list[Visit]
    released: list[int]


class Visited(msgspec.Struct, array_like=True):
    """How many tokens were accepted, and whether the output may end there. `error`: why this matcher can't go on. `seconds` of the
    processor that it took, without what a grammar took to compile."""

    taken: int
    may_end: bool
    error: str = ""
    seconds: float = 0.0


class Compiled(msgspec.Struct, array_like=True):
    """`error`: what is wrong with the constraint."""

    error: str = ""


def memory_bytes(width: int) -> int:
    return HEADER_BYTES + 4 * width * MASKS


def views(memory: mmap.mmap, width: int) -> tuple[npt.NDArray[np.int64], MaskArray]:
    """The header, and the masks `[MASKS, width]`."""
    header = np.frombuffer(memory, np.int64, NUM_WORDS)
    return header, np.frombuffer(memory, np.int32, width * MASKS, HEADER_BYTES).reshape(MASKS, width)
