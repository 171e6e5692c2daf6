"""The op table and the choice of implementations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from canter.core.errors import ConfigError
from canter.kernels import bind, bindings
from canter.kernels.native import attention, dense
from canter.kernels.ops import OPS, Kernel, implementations, register_impl
from canter.kernels.reference import linear as reference


def test_every_op_has_a_native_implementation_and_a_reference() -> None:
    for name in OPS:
        assert [impl.provider for impl in implementations(name)] == ["native", "reference"]


def bound(*args: Any, **facts: Any) -> Kernel:
    """The implementation behind what `bind` returns."""
    return bind(*args, **facts).__wrapped__  # type: ignore[attr-defined, no-any-return]


def test_the_best_that_serves_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CANTER_KERNELS", raising=False)
    assert bound("linear", "cpu", torch.float32) is dense.linear
    assert bound("linear", "cpu", torch.bfloat16, weight_dtype=torch.float32) is dense.linear
    assert bound("linear", "cpu", torch.float16) is reference.linear
    assert bound("linear", "cuda", torch.float32) is reference.linear
    assert bound("paged_attention", "cpu", torch.float32, cache_dtype=torch.float16) is attention.paged_attention
    assert bound("paged_attention", "cpu", torch.float32, cache_dtype=torch.float64) is OPS["paged_attention"].reference


def test_choices_are_listed_once_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CANTER_KERNELS", raising=False)
    for _ in range(2):
        bind("softcap", "cpu", torch.float16, weight_dtype=torch.float16)
    (found,) = [b for b in bindings() if b.op == "softcap" and b.facts]
    assert (found.device, found.dtype, found.provider) == ("cpu", "float16", "reference")
    assert found.reason == "not native: dtype float16 is neither float32 nor bfloat16"


def test_environment_forces_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANTER_KERNELS", "reference")
    assert bound("linear", "cpu", torch.float32) is reference.linear
    assert bindings()[-1].reason == "not native: CANTER_KERNELS=reference"


def test_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError):
        bind("lineal", "cpu", torch.float32)
    with pytest.raises(KeyError):
        register_impl("lineal", "native", 1, reference.linear, lambda *args, **facts: None)
    monkeypatch.setenv("CANTER_KERNELS", "reference_")
    with pytest.raises(ConfigError, match="native, reference"):
        bind("linear", "cpu", torch.float32)
