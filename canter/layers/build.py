"""`Build`: what a layer needs to be made. It allocates parameters under dotted names and binds ops for a device and a type.

Layers and models are plain classes, not `torch.nn.Module`: a step then costs attribute look-ups and op calls only (no
hooks, no parameter dictionaries behind `__getattr__`), every parameter is known by one name in one flat dictionary, and
nothing can be trained by accident.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from canter.kernels.dispatch import bind
from canter.layers.rope import RopeArgs, rope_table


@dataclass(frozen=True, slots=True)
class Parameter:
    """Weights that a checkpoint fills. `parts`: name -> (first row, end row) of the matrices that one fused matrix holds."""

    tensor: Tensor
    parts: Mapping[str, tuple[int, int]]

    def part(self, name: str | None) -> Tensor:
        """The rows of one part, or everything for None: a view."""
        if name is None:
            return self.tensor
        first, end = self.parts[name]
        return self.tensor[first:end]


class Build:
    """Makes layers for one device, one type of weights and activations, and requests of at most `max_model_len` tokens.

    `cache_dtype` is the type of cached keys and values (None: the activations'). `parameters` collects every parameter
    by its full name; `at` gives the same build under a longer name.
    """

    def __init__(self, device: torch.device | str, dtype: torch.dtype, max_model_len: int, cache_dtype: torch.dtype | None = None) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self.cache_dtype = cache_dtype or dtype
        self.max_model_len = max_model_len
        self.parameters: dict[str, Parameter] = {}
        self._prefix = ""
        self._ropes: dict[RopeArgs, Tensor] = {}

    def at(self, name: str) -> Build:
        """The same build for the layer `name` of this one."""
        child = Build(self.device, self.dtype, self.max_model_len, self.cache_dtype)
        child.parameters, child._ropes = self.parameters, self._ropes
        child._prefix = f"{self._prefix}{name}."
        return child

    def parameter(self, name: str, shape: tuple[int, ...], parts: Mapping[str, int] | None = None) -> Tensor:
        """Allocate, without filling, a parameter of the build's type. `parts`: rows of each matrix in a fused one, in order."""
        ranges: dict[str, tuple[int, int]] = {}
        start = 0
        for part, rows in (parts or {}).items():
            ranges[part] = (start, start + rows)
            start += rows
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.parameters[self._prefix + name] = Parameter(tensor, ranges)
        return tensor

    def op(self, name: str, **facts: Any) -> Callable[..., Any]:
        """The best implementation of an op here. `facts` are what else is known of its calls (`weight_dtype`, `cache_dtype`)."""
        return bind(name, self.device.type, self.dtype, **facts)

    def rope(self, args: RopeArgs) -> Tensor:
        """The rotary table of `args`, [max_model_len, dim] float32; layers with equal args share it."""
        if args not in self._ropes:
            self._ropes[args] = rope_table(args, self.max_model_len, self.device)
        return self._ropes[args]
