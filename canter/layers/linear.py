"""Linear maps: x W^T + b."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from canter.layers.build import Build, Value


class Linear:
    """[T, in_features] -> [T, out_features].

    With `parts`, several maps of the same input in one matrix, their outputs side by side in that order: name -> width. `groups`: as
    those of `Matrix`.
    """

    __slots__ = ("_linear", "_matrix", "bias")

    def __init__(
        self,
        build: Build,
        in_features: int,
        out_features: int,
        bias: bool = False,
        parts: Mapping[str, int] | None = None,
        groups: int = 1,
    ) -> None:
        self._matrix = build.matrix("weight", (out_features, in_features), parts, groups=groups)
        self.bias = build.parameter("bias", (out_features,), parts, groups=groups) if bias else None
        self._linear: Callable[..., Tensor] = build.op("linear", weight_dtype=build.dtype)

    @property
    def weight(self) -> Value:
        """The weights, once they are loaded."""
        return self._matrix.value

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self._matrix.value, self.bias)


def gate_up_linear(build: Build, hidden_size: int, intermediate_size: int, bias: bool) -> Linear:
    """The two inputs of a gated MLP from one matrix: [T, 2 * intermediate_size], parts "gate", "up"."""
    return Linear(build, hidden_size, 2 * intermediate_size, bias, {"gate": intermediate_size, "up": intermediate_size})
