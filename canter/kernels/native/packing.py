"""Whether matrices are packed, and into what: the questions that loading asks before anything is packed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from canter.kernels.dispatch import FORCE_VARIABLE
from canter.kernels.native.layout import TYPE_CODES
from canter.kernels.native.packed import PANEL, packed_bytes

_SLICE_ELEMENTS = 1 << 22


def serves(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether matrices are packed for a device and a type of activations: where the compiled module multiplies."""
    return torch.device(device).type == "cpu" and dtype in TYPE_CODES and os.environ.get(FORCE_VARIABLE) in (None, "", "native")


def holds(fmt: str, width: int, group: int = 0) -> bool:
    """Whether a format can hold rows of this width."""
    try:
        packed_bytes(fmt, PANEL, width, group)
    except ValueError:
        return False
    return True


def slices(outputs: int, width: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of runs of whole panels: packed one by one, what is made on the way stays small."""
    step = max(1, _SLICE_ELEMENTS // max(1, width) // PANEL) * PANEL
    for begin in range(0, outputs, step):
        yield begin, min(begin + step, outputs)
