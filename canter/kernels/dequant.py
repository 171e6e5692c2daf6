"""GGUF blocks to tensors: by the compiled module where it knows the type, else by the reference in `checkpoint`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from canter.checkpoint import gguf_quants
from canter.kernels.native import dequant as native


def dequantize(data: np.ndarray, type_name: str, num_elements: int, out: Tensor) -> None:
    """Decode `num_elements` values of GGUF type `type_name` from `data` (uint8, 1-D) into `out`, in its order and type.

    Raises `CheckpointError` for an unknown type or a wrong number of bytes.
    """
    if native.accepts(type_name, out):
        native.dequantize(np.ascontiguousarray(data), type_name, num_elements, out)
    else:
        out.copy_(torch.from_numpy(gguf_quants.dequantize(data, type_name, num_elements)).view(out.shape))
