"""The gated feed-forward layer: down(activation(gate(x)) * up(x)) (arXiv 2002.05202)."""

from __future__ import annotations

from torch import Tensor

from canter.core.errors import UnsupportedModelError
from canter.layers.build import Build
from canter.layers.linear import Linear, gate_up_linear

_ACTIVATION_OPS = {
    "silu": "silu_and_mul",
    "swish": "silu_and_mul",
    "gelu_pytorch_tanh": "gelu_tanh_and_mul",
    "gelu_new": "gelu_tanh_and_mul",
}


class GatedMLP:
    """[T, hidden_size] -> [T, hidden_size]. `activation` is named as in a config; another raises `UnsupportedModelError`."""

    __slots__ = ("_activate", "_down", "_gate_up")

    def __init__(self, build: Build, hidden_size: int, intermediate_size: int, activation: str, bias: bool = False) -> None:
        if activation not in _ACTIVATION_OPS:
            raise UnsupportedModelError(f"Activation {activation!r} is not supported. Supported: {', '.join(_ACTIVATION_OPS)}.")
        self._gate_up = gate_up_linear(build.at("gate_up"), hidden_size, intermediate_size, bias)
        self._down = Linear(build.at("down"), intermediate_size, hidden_size, bias)
        self._activate = build.op(_ACTIVATION_OPS[activation])

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._activate(self._gate_up(x)))
