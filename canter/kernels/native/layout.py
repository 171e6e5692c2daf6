"""Checks between torch tensors and the raw addresses that the compiled module takes."""

from __future__ import annotations

import torch
from torch import Tensor

TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
"""Types that the compiled module knows."""


def require(holds: bool, op: str, expected: str, *tensors: Tensor | None) -> None:
    """Raise `ValueError` with the shapes and types found, unless the condition holds."""
    if not holds:
        found = ", ".join("None" if t is None else f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)
        raise ValueError(f"{op}: expected {expected}; got {found}.")


def type_code(op: str, tensor: Tensor) -> int:
    """The compiled module's number for a tensor's type. Raises `ValueError` for other types and devices."""
    code = TYPE_CODES.get(tensor.dtype)
    if code is None or tensor.device.type != "cpu":
        raise ValueError(f"{op}: expected float32 or bfloat16 on the CPU, got {tensor.dtype} on {tensor.device}.")
    return code


def has_packed_rows(x: Tensor) -> bool:
    """Whether every `x[t]` of `x[T, H, D]` is one contiguous run; tokens may lie any distance apart."""
    return x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)


def packed_rows(x: Tensor) -> Tensor:
    """`x[T, H, D]` itself when its rows are packed, as views into a fused projection are; otherwise a contiguous copy."""
    return x if has_packed_rows(x) else x.contiguous()


def has_packed_blocks(cache: Tensor) -> bool:
    """Whether every `cache[b]` is one contiguous run; blocks may lie any distance apart."""
    expected = 1
    for size, stride in zip(cache.shape[:0:-1], cache.stride()[:0:-1], strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def contiguous(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x of the given type in one run: itself where it is so already."""
    return x.to(dtype).contiguous()
