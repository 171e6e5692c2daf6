"""Feed-forward layers: down(activation(gate(x)) * up(x)) (arXiv 2002.05202), and the plain one with relu^2 (arXiv 2109.08668)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from canter.core.errors import UnsupportedModelError
from canter.core.state_specs import SharedState, StateSpec
from canter.layers.build import Build
from canter.layers.context import StepContext
from canter.layers.linear import Linear, gate_up_linear
from canter.layers.scale import make_scale
from canter.layers.state import StateTypes

_ACTIVATION_OPS = {
    "silu": "silu_and_mul",
    "swish": "silu_and_mul",
    "gelu": "gelu_and_mul",
    "gelu_pytorch_tanh": "gelu_tanh_and_mul",
    "gelu_new": "gelu_tanh_and_mul",
}


class GatedMLP:
    """[T, hidden_size] -> [T, hidden_size]. `activation` is named as in a config; another raises `UnsupportedModelError`.

    `gate_factor` multiplies what is activated. `gate_up` and `given` are its halves, for who has something to add between them.
    """

    __slots__ = ("_activate", "_down", "_scale", "gate_up")

    def __init__(
        self, build: Build, hidden_size: int, intermediate_size: int, activation: str, bias: bool = False, gate_factor: float = 1.0
    ) -> None:
        if activation not in _ACTIVATION_OPS:
            raise UnsupportedModelError(f"Activation {activation!r} is not supported. Supported: {', '.join(_ACTIVATION_OPS)}.")
        self.gate_up = gate_up_linear(build.at("gate_up"), hidden_size, intermediate_size, bias)
        self._down = Linear(build.at("down"), intermediate_size, hidden_size, bias)
        self._scale = make_scale(build, [(gate_factor, intermediate_size), (1.0, intermediate_size)])
        self._activate = build.op(_ACTIVATION_OPS[activation])

    def __call__(self, x: Tensor, ctx: StepContext | None = None) -> Tensor:
        return self.given(self.gate_up(x))

    def given(self, gate_up: Tensor) -> Tensor:
        """Of gates and ups side by side, [T, 2 * intermediate_size]."""
        return self._down(self._activate(gate_up if self._scale is None else self._scale(gate_up)))


@dataclass(frozen=True, slots=True)
class GatedMLPArgs:
    """A `GatedMLP` as a branch of a layer; its arguments."""

    intermediate_size: int
    activation: str
    bias: bool = False
    gate_factor: float = 1.0

    def states(self, types: StateTypes) -> tuple[StateSpec | SharedState, ...]:
        return ()

    def make(self, build: Build, hidden_size: int, state_id: int) -> GatedMLP:
        return GatedMLP(build, hidden_size, self.intermediate_size, self.activation, self.bias, self.gate_factor)


@dataclass(frozen=True, slots=True)
class SquaredMLPArgs:
    """down(max(up(x), 0)^2)."""

    intermediate_size: int
    bias: bool = False

    def states(self, types: StateTypes) -> tuple[StateSpec | SharedState, ...]:
        return ()

    def make(self, build: Build, hidden_size: int, state_id: int) -> SquaredMLP:
        return SquaredMLP(build, hidden_size, self)


class SquaredMLP:
    """[T, hidden_size] -> [T, hidden_size]."""

    __slots__ = ("_activate", "_down", "_up")

    def __init__(self, build: Build, hidden_size: int, args: SquaredMLPArgs) -> None:
        self._up = Linear(build.at("up"), hidden_size, args.intermediate_size, args.bias)
        self._down = Linear(build.at("down"), args.intermediate_size, hidden_size, args.bias)
        self._activate = build.op("relu_squared")

    def __call__(self, x: Tensor, ctx: StepContext) -> Tensor:
        return self._down(self._activate(self._up(x)))
