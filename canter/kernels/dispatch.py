"""Choose the implementation of each op, once, when a model is built."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

import torch

from canter.core.errors import ConfigError
from canter.kernels.ops import OPS, Impl, Kernel, implementations
from canter.kernels.recorder import RecordError, Symbol

FORCE_VARIABLE = "CANTER_KERNELS"
"""Environment variable for debugging: the only provider to use, for example `reference`."""


@dataclass(frozen=True, slots=True)
class Binding:
    """One choice: which provider serves an op under these facts, and why the better ones do not.

    `recorded`: whether its calls can be part of a step program.
    """

    op: str
    device: str
    dtype: str
    facts: tuple[tuple[str, str], ...]
    provider: str
    reason: str
    recorded: bool


_bindings: dict[Binding, None] = {}


def bind(op: str, device: str, dtype: torch.dtype, **facts: Any) -> Kernel:
    """The best implementation of an op for a device ("cpu", "cuda") and a type of activations.

    `facts` tell implementations what else they may need to know: `weight_dtype` (linear, embedding, norms) and `cache_dtype`
    (write_kv, paged_attention), each the activations' own when left out. Given a `Symbol` as its first argument, what is
    returned records the call instead of making it. Raises `KeyError` for an unknown op and
    `ConfigError` when `CANTER_KERNELS` names a provider that has no part in it.
    """
    forced = os.environ.get(FORCE_VARIABLE)
    known = {impl.provider for name in OPS for impl in implementations(name)}
    if forced and forced not in known:
        raise ConfigError(f"{FORCE_VARIABLE} must be one of {', '.join(sorted(known))}, got {forced!r}.")
    chosen, reason = _choose(op, device, dtype, facts, forced)
    named = tuple(sorted((key, str(value)) for key, value in facts.items()))
    _bindings[Binding(op, device, str(dtype).removeprefix("torch."), named, chosen.provider, reason, chosen.record is not None)] = None
    return _recordable(chosen)


def _recordable(impl: Impl) -> Kernel:
    """The implementation, or where it is given a symbol its recorder. The implementation itself is `__wrapped__`."""
    fn, record = impl.fn, impl.record

    @functools.wraps(fn)
    def call(first: Any, *args: Any, **named: Any) -> Any:
        if type(first) is not Symbol:
            return fn(first, *args, **named)
        if record is None:
            raise RecordError(f"{impl.op} by {impl.provider} can't be recorded")
        return record(first, *args, **named)

    return call


def _choose(op: str, device: str, dtype: torch.dtype, facts: dict[str, Any], forced: str | None) -> tuple[Impl, str]:
    """The first implementation that serves, with what kept the ones before it from serving."""
    *better, reference = implementations(op)
    passed_over: list[str] = []
    for impl in better:
        why = f"{FORCE_VARIABLE}={forced}" if forced and impl.provider != forced else impl.rejects(device, dtype, **facts)
        if why is None:
            return impl, "; ".join(passed_over) or "best available"
        passed_over.append(f"not {impl.provider}: {why}")
    return reference, "; ".join(passed_over) or "the only one"


def bindings() -> list[Binding]:
    """Every choice made so far in this process, in order, each once."""
    return list(_bindings)
