"""Rows of a `[num_logits, vocab]` tensor, chosen by the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]


def upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A host array on `device`, without waiting for the device. On the CPU it shares memory with `array`."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def take_rows(matrix: Tensor, index: IntArray) -> Tensor:
    """Rows `index` (ascending, distinct) of `matrix`: a view where they are neighbours, a copy otherwise."""
    if len(index) and index[-1] - index[0] + 1 == len(index):
        return matrix[int(index[0]) : int(index[-1]) + 1]
    return matrix[upload(index, matrix.device)]
