"""`Build`: what a layer needs to be made. It allocates parameters under dotted names and binds ops for a device and a type.

Layers and models are plain classes, not `torch.nn.Module`: a step then costs attribute look-ups and op calls only (no
hooks, no parameter dictionaries behind `__getattr__`), every parameter is known by one name in one flat dictionary, and
nothing can be trained by accident.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from canter.kernels.dispatch import bind
from canter.kernels.native import packing
from canter.kernels.packed import BlockRows, PackedMatrix
from canter.layers.rope import QueryGrowth, RopeArgs, growth_table, rope_table

_moves = [0]
"""One number: how often weights or caches have moved."""


def weights_moved() -> None:
    """Say that weights or caches have moved. Whoever puts them elsewhere in memory, or others in their place, calls it between
    two steps: programs that were bound to the old places are recorded again. Setting `Matrix.value` does so by itself."""
    _moves[0] += 1


def num_moves() -> int:
    """How often weights or caches have moved in this process: what is bound to them holds while it stays the same."""
    return _moves[0]


Use = Literal["product", "lookup", "output"]
"""What layers do with a matrix. output: a product, but only for tokens that are to be followed by another."""
Value = Tensor | PackedMatrix | BlockRows


def _ranges(parts: Mapping[str, int] | None) -> dict[str, tuple[int, int]]:
    ranges: dict[str, tuple[int, int]] = {}
    start = 0
    for part, rows in (parts or {}).items():
        ranges[part] = (start, start + rows)
        start += rows
    return ranges


@dataclass(frozen=True, slots=True)
class Parameter:
    """A dense tensor that a checkpoint fills: a norm, a bias. `parts`: name -> (first row, end row) of what one tensor holds together,
    rows being counted along `dim`. `groups`: as those of `Matrix`."""

    tensor: Tensor
    parts: Mapping[str, tuple[int, int]]
    dim: int = 0
    groups: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def part(self, name: str | None) -> Tensor:
        """The rows of one part, or everything for None: a view."""
        if name is None:
            return self.tensor
        first, end = self.parts[name]
        return self.tensor.narrow(self.dim, first, end - first)

    def part_shape(self, name: str | None) -> tuple[int, ...]:
        return tuple(self.part(name).shape)


class Matrix:
    """A weight matrix [outputs, width] that a checkpoint fills, in the form in which it is computed.

    Loading sets `value`: a dense tensor, a packed matrix whose parts keep the formats that they are stored in, or the rows of a
    file where it is only looked up. `uses`: what layers do with it. `parts`: as those of `Parameter`. `groups`: heads or the like, each
    of which has rows in every part; checkpoints may store the parts group by group.
    """

    __slots__ = ("_value", "groups", "parts", "shape", "uses")

    _value: Value

    def __init__(self, shape: tuple[int, int], parts: Mapping[str, tuple[int, int]], use: Use, groups: int = 1) -> None:
        self.shape = shape
        self.parts = parts
        self.groups = groups
        self.uses: set[Use] = {use}

    @property
    def value(self) -> Value:
        """The weights, once they are loaded."""
        return self._value

    @value.setter
    def value(self, value: Value) -> None:
        self._value = value
        weights_moved()

    @property
    def nbytes(self) -> int:
        """Bytes of memory; none for rows that stay in a file."""
        return 0 if isinstance(self.value, BlockRows) else self.value.nbytes

    def part_shape(self, name: str | None) -> tuple[int, ...]:
        """The shape of one part, or of everything for None."""
        first, end = self.parts[name] if name is not None else (0, self.shape[0])
        return (end - first, *self.shape[1:])


class Build:
    """Makes layers for one device, one type of weights and activations, and requests of at most `max_model_len` tokens.

    `cache_dtype` is the type of cached keys and values (None: the activations'). `parameters` collects every parameter
    by its full name; `at` gives the same build under a longer name. `packed`: whether matrices are packed for kernels that
    compute them in the format they are stored in, instead of being dense tensors of the build's type.
    """

    def __init__(self, device: torch.device | str, dtype: torch.dtype, max_model_len: int, cache_dtype: torch.dtype | None = None) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self.cache_dtype = cache_dtype or dtype
        self.max_model_len = max_model_len
        self.packed = packing.serves(self.device, dtype)
        self.parameters: dict[str, Parameter | Matrix] = {}
        self._prefix = ""
        self._ropes: dict[RopeArgs, Tensor] = {}
        self._growths: dict[tuple[QueryGrowth, int], Tensor] = {}

    def at(self, name: str) -> Build:
        """The same build for the layer `name` of this one."""
        child = Build(self.device, self.dtype, self.max_model_len, self.cache_dtype)
        child.parameters, child._ropes, child._growths = self.parameters, self._ropes, self._growths
        child._prefix = f"{self._prefix}{name}."
        return child

    def parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        parts: Mapping[str, int] | None = None,
        *,
        dtype: torch.dtype | None = None,
        dim: int = 0,
        groups: int = 1,
    ) -> Tensor:
        """Allocate, without filling, a parameter of the build's type, unless `dtype` names another.

        `parts`: rows of each matrix in a fused one, in order, along `dim`; `groups` as those of `Matrix`.
        """
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.parameters[self._prefix + name] = Parameter(tensor, _ranges(parts), dim, groups)
        return tensor

    def matrix(
        self, name: str, shape: tuple[int, int], parts: Mapping[str, int] | None = None, use: Use = "product", groups: int = 1
    ) -> Matrix:
        """Declare a weight matrix, which loading allocates and fills. `use`: what its layer does with it."""
        matrix = Matrix(shape, _ranges(parts), use, groups)
        self.parameters[self._prefix + name] = matrix
        return matrix

    def op(self, name: str, **facts: Any) -> Callable[..., Any]:
        """The best implementation of an op here. `facts` are what else is known of its calls (`weight_dtype`, `cache_dtype`)."""
        return bind(name, self.device.type, self.dtype, **facts)

    def rope(self, args: RopeArgs) -> Tensor:
        """The rotary table of `args`, [max_model_len, dim] float32; layers with equal args share it."""
        if args not in self._ropes:
            self._ropes[args] = rope_table(args, self.max_model_len, self.device)
        return self._ropes[args]

    def growth(self, args: QueryGrowth, head_dim: int) -> Tensor:
        """The table by which queries grow, [max_model_len, head_dim] float32; layers with equal args share it."""
        key = args, head_dim
        if key not in self._growths:
            self._growths[key] = growth_table(args, head_dim, self.max_model_len, self.device)
        return self._growths[key]
