"""From the tensors of a checkpoint to the parameters of a model: the rules, and the loop that applies them.

Tensors stream one by one, each straight into its place, so the peak is the model and one tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor

from canter.checkpoint.tensors import StoredTensor, TensorSource
from canter.core.errors import CheckpointError, UnsupportedModelError
from canter.kernels.dequant import dequantize
from canter.layers.build import Parameter

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) after each tensor."""

_TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_GGUF_PREFIX = "gguf:"
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class Rule:
    """Checkpoint tensor `source` fills parameter `target`, or one `part` of it; `{i}` in both stands for the layer.

    `tied`: when the model has no such parameter, because another lends its weights, the tensor is passed over; without
    it such a tensor is an error.
    """

    source: str
    target: str
    part: str | None = None
    tied: bool = False


@dataclass(frozen=True, slots=True)
class WeightMap:
    """How a family's checkpoints name things.

    `renames`: (leading text, what replaces it), the first that fits, before the rules are looked up. `skip`: patterns
    (`*`, `?`) of names, as stored, that hold nothing for this model.
    """

    rules: tuple[Rule, ...]
    renames: tuple[tuple[str, str], ...] = ()
    skip: tuple[str, ...] = ()

    def rename(self, name: str) -> str:
        for old, new in self.renames:
            if name.startswith(old):
                return new + name[len(old) :]
        return name

    def skips(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.skip)


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a tensor goes: None for a tied tensor, which goes nowhere."""

    target: Tensor | None


def load_weights(
    parameters: Mapping[str, Parameter], weights: WeightMap, num_layers: int, source: TensorSource, progress: Progress | None = None
) -> None:
    """Fill every parameter from a checkpoint, converting to the parameter's type.

    Raises `CheckpointError` for a tensor that is missing, unexpected, of the wrong shape or given twice: names it, what
    was expected and what was found.
    """
    slots = _expand(parameters, weights, num_layers)
    total = sum(source.get(name).nbytes for name in source.names())
    filled: dict[str, str] = {}
    done = 0
    for stored in source:
        name = weights.rename(stored.name)
        if not weights.skips(stored.name):
            slot = slots.get(name)
            if slot is None:
                raise CheckpointError(f"Unexpected tensor {stored.name!r} of shape {list(stored.shape)}: the model has no place for it.")
            if name in filled:
                raise CheckpointError(f"Tensors {filled[name]!r} and {stored.name!r} both give {name!r}; expected one of them.")
            filled[name] = stored.name
            if slot.target is not None:
                _copy(stored, slot.target)
        done += stored.nbytes
        if progress is not None:
            progress(done, total)
    _require_all({name: slot.target for name, slot in slots.items() if slot.target is not None}, filled)


def _expand(parameters: Mapping[str, Parameter], weights: WeightMap, num_layers: int) -> dict[str, _Slot]:
    """Checkpoint name -> its slot, for the parameters that the model has."""
    slots: dict[str, _Slot] = {}
    covered: set[tuple[str, str | None]] = set()
    for source, target, rule in _unrolled(weights.rules, num_layers):
        parameter = parameters.get(target)
        if parameter is not None:
            slots[source] = _Slot(parameter.part(rule.part))
            covered.update([(target, rule.part)] if rule.part else [(target, part) for part in (None, *parameter.parts)])
        elif rule.tied:
            slots[source] = _Slot(None)
    for name, parameter in parameters.items():
        for part in parameter.parts or (None,):
            if (name, part) not in covered:
                raise CheckpointError(f"No rule fills {name!r}" + (f", part {part!r}." if part else "."))
    return slots


def _unrolled(rules: tuple[Rule, ...], num_layers: int) -> Iterator[tuple[str, str, Rule]]:
    for rule in rules:
        if "{i}" not in rule.source:
            yield rule.source, rule.target, rule
            continue
        for i in range(num_layers):
            yield rule.source.replace("{i}", str(i)), rule.target.replace("{i}", str(i)), rule


def _require_all(expected: Mapping[str, Tensor], filled: Mapping[str, str]) -> None:
    missing = [name for name in expected if name not in filled]
    if missing:
        named = ", ".join(f"{name!r} of shape {list(expected[name].shape)}" for name in missing[:_MAX_NAMED])
        more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        raise CheckpointError(f"The checkpoint lacks {named}{more}: expected {len(expected)} tensors, found {len(filled)} of them.")


def _copy(stored: StoredTensor, target: Tensor) -> None:
    """Bring a stored tensor to its place and type."""
    if tuple(stored.shape) != tuple(target.shape):
        raise CheckpointError(f"Tensor {stored.name!r}: expected shape {list(target.shape)}, found {list(stored.shape)}.")
    with torch.no_grad():
        if stored.dtype.startswith(_GGUF_PREFIX) and stored.transform is None and target.device.type == "cpu":
            _dequantize(stored, target)
        else:
            target.copy_(read_tensor(stored))


def read_tensor(stored: StoredTensor) -> Tensor:
    """A stored tensor in host memory: as stored (sharing its memory, never to be written), or float32 if it is a GGUF tensor
    or has a transform."""
    if stored.dtype.startswith(_GGUF_PREFIX):
        values = torch.empty(stored.shape, dtype=torch.float32)
        _dequantize(stored, values)
    else:
        values = _view(stored)
    if stored.transform is None:
        return values
    return torch.from_numpy(np.ascontiguousarray(stored.transform(values.float().numpy())))


def _dequantize(stored: StoredTensor, out: Tensor) -> None:
    dequantize(stored.data, stored.dtype.removeprefix(_GGUF_PREFIX), stored.num_elements, out)


def _view(stored: StoredTensor) -> Tensor:
    """The bytes of an unquantised tensor as what they are."""
    dtype = _TORCH_DTYPES.get(stored.dtype)
    if dtype is None:
        raise UnsupportedModelError(f"Tensor {stored.name!r}: type {stored.dtype} is not supported. Supported: {', '.join(_TORCH_DTYPES)}.")
    data = stored.data
    if data.ctypes.data % dtype.itemsize:
        data = data.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the map is read-only; so is every use of this tensor
        flat = torch.from_numpy(data)
    return flat.view(dtype).view(stored.shape)
