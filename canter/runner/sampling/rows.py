"""Walking over rows of a `[num_logits, vocab]` tensor in pieces that stay in a CPU core's cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

CHUNK_ELEMENTS = 1 << 16
"""Elements of a piece on the CPU: 256 KiB of float32, about a core's second-level cache."""

BLOCK = 64
"""Elements whose maximum `first_argmax` takes at once."""


def upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A host array on `device`, without waiting for the device. On the CPU it shares memory with `array`."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def host_reads(device: torch.device) -> bool:
    """Whether the host may look at a tensor of `device` without waiting, as it may where device and host are one."""
    return device.type == "cpu"


def chunks(num_rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover `num_rows` rows of `width` elements: cache-sized on the CPU, one for all elsewhere."""
    step = max(1, CHUNK_ELEMENTS // width) if host_reads(device) else max(1, num_rows)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def take_rows(matrix: Tensor, index: IntArray) -> Tensor:
    """Rows `index` (ascending, distinct) of `matrix`: a view where they are neighbours, a copy otherwise."""
    if len(index) and index[-1] - index[0] + 1 == len(index):
        return matrix[int(index[0]) : int(index[-1]) + 1]
    return matrix[upload(index, matrix.device)]


def edit_rows(matrix: Tensor, index: IntArray) -> Iterator[tuple[Tensor, slice]]:
    """Yield (rows, slice of `index` they stand for) to be changed in place; what is a copy is written back."""
    for part in chunks(len(index), matrix.shape[1], matrix.device):
        rows = take_rows(matrix, index[part])
        yield rows, part
        if rows.data_ptr() != matrix.data_ptr() + int(index[part.start]) * matrix.stride(0) * matrix.element_size():
            matrix.index_copy_(0, upload(index[part], matrix.device), rows)


def first_argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value of each row and the lowest column that holds it; NaN counts as larger than all.

    x: [N, W] -> values [N], columns [N] int64. On the CPU maxima of blocks are taken first, which vectorises where
    `torch.argmax` does not.
    """
    num_rows, width = x.shape
    if not host_reads(x.device) or width % BLOCK or width < 4 * BLOCK:
        columns = x.argmax(-1, keepdim=True)
        return x.gather(1, columns).squeeze(1), columns.squeeze(1)
    num_blocks = width // BLOCK
    maxima = x.view(num_rows, num_blocks, BLOCK).amax(-1)
    best = maxima.argmax(-1)  # [N] block of each row
    at = best if num_rows == 1 else best + torch.arange(0, num_rows * num_blocks, num_blocks, device=x.device)
    inside = x.view(-1, BLOCK).index_select(0, at).argmax(-1)
    return maxima.view(-1).index_select(0, at), best.mul_(BLOCK).add_(inside)


def sort_candidates(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Order each row by value, highest first, equal values by id, lowest first.

    values: [N, W] float32; ids: [N, W] int64, below 2^31. One sort of integers that hold both: the bits of a float,
    with the magnitude of negative ones flipped, order as the float does.
    """
    plain = values + 0.0  # -0.0 becomes 0.0, so that equal values have equal bits
    bits = plain.view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (ordered << 32) | (0x7FFFFFFF - ids)
    order = keys.argsort(-1, descending=True)
    return plain.gather(1, order), ids.gather(1, order)
