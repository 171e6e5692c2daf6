"""Every native implementation gives what its reference gives, on the op table's own inputs, under every instruction set."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from canter.kernels.inputs import Case
from canter.kernels.ops import OPS, Impl, implementations

DTYPES = (torch.float32, torch.bfloat16)


def copy(args: Case) -> list[Any]:
    """A deep copy that keeps strides and what lies in the same memory: views stay views."""
    storages: dict[int, torch.UntypedStorage] = {}

    def same(arg: torch.Tensor) -> torch.Tensor:
        storage = arg.untyped_storage()
        copied = storages.setdefault(storage.data_ptr(), storage.clone())
        return torch.empty(0, dtype=arg.dtype).set_(copied, arg.storage_offset(), arg.shape, arg.stride())

    return [same(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]


def outputs(impl: Impl, args: Case) -> list[torch.Tensor]:
    """What a call returns and what it changed in place."""
    given = copy(args)
    result = impl.fn(*given)
    returned = [] if result is None else list(result) if isinstance(result, tuple) else [result]
    return returned + [given[i] for i in OPS[impl.op].mutates if given[i] is not None]


def native_impl(op: str) -> Impl:
    (impl,) = [impl for impl in implementations(op) if impl.provider == "native"]
    return impl


@lru_cache(maxsize=1)
def references(op: str, dtype: torch.dtype) -> list[tuple[Case, list[torch.Tensor]]]:
    """Inputs and what the reference makes of them: the same under every instruction set."""
    return [(args, outputs(implementations(op)[-1], args)) for args in OPS[op].inputs(torch.Generator().manual_seed(7), dtype)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_native_agrees_with_the_reference(op: str, dtype: torch.dtype, isa: str) -> None:
    rtol, atol = OPS[op].tolerance[dtype]
    impl = native_impl(op)
    assert impl.rejects("cpu", dtype) is None
    for args, expected in references(op, dtype):
        found = outputs(impl, args)
        assert len(expected) == len(found) > 0
        for want, got in zip(expected, found, strict=True):
            torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("op", OPS)
def test_native_leaves_its_other_arguments_alone(op: str) -> None:
    args = OPS[op].inputs(torch.Generator().manual_seed(3), torch.float32)[-1]
    given = copy(args)
    native_impl(op).fn(*given)
    for i, (before, after) in enumerate(zip(args, given, strict=True)):
        if isinstance(before, torch.Tensor) and i not in OPS[op].mutates:
            torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
