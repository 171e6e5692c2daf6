"""Native decoding of GGUF blocks."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from canter import _native
from canter.core.errors import CheckpointError
from canter.kernels.native.layout import TYPE_CODES

QUANT_TYPES = frozenset(_native.quant_types())
"""GGUF type names that the compiled module decodes."""


def accepts(type_name: str, out: Tensor) -> bool:
    """Whether `dequantize` can decode this type into this tensor."""
    return type_name in QUANT_TYPES and out.dtype in TYPE_CODES and out.device.type == "cpu" and out.is_contiguous()


def dequantize(data: np.ndarray, type_name: str, num_elements: int, out: Tensor) -> None:
    """Decode GGUF blocks `data` (uint8, 1-D, contiguous) into `out` (float32 or bfloat16, contiguous, num_elements of them).

    Values are those of float32 arithmetic, then rounded to the nearest of out's type, ties to even. Raises
    `CheckpointError` when the bytes are not as many as the elements take.
    """
    if not accepts(type_name, out) or out.numel() != num_elements or data.dtype != np.uint8 or not data.flags.c_contiguous:
        raise ValueError(f"dequantize: {type_name} from {data.dtype} into {list(out.shape)} {out.dtype} on {out.device}: not supported.")
    try:
        _native.dequantize(type_name, data.ctypes.data, data.nbytes, num_elements, out.data_ptr(), TYPE_CODES[out.dtype])
    except ValueError as error:
        raise CheckpointError(str(error)) from None
