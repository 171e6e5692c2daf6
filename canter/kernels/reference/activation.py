"""Activations, gates, sums and soft capping, element by element: computed in float32 or better, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `gate_up[T, 2I]`, the gate half first: `[T, I]`."""
    gate, up = gate_up.float().chunk(2, -1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` of `gate_up[T, 2I]` with the tanh form of GELU, the gate half first: `[T, I]`."""
    # In float64: 1 + tanh cancels for gates far below zero, and float32 would leave noise there.
    gate, up = gate_up.double().chunk(2, -1)
    return (functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` of `gate_up[T, 2I]` with `gelu(x) = x Phi(x)`, the gate half first: `[T, I]`."""
    gate, up = gate_up.double().chunk(2, -1)
    return (functional.gelu(gate) * up).to(gate_up.dtype)


def silu(x: Tensor) -> Tensor:
    """`x * sigmoid(x)` of `x[T, N]`."""
    return functional.silu(x.float()).to(x.dtype)


def relu_squared(x: Tensor) -> Tensor:
    """`max(x, 0)^2` of `x[T, N]`."""
    return functional.relu(x.float()).square().to(x.dtype)


def scale_columns(x: Tensor, factors: Tensor) -> Tensor:
    """`x[T, N]` times `factors[N]`, float32."""
    return (x.float() * factors).to(x.dtype)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """`x * sigmoid(gate)` of two `[T, N]`."""
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)


def silu_mul(x: Tensor, gate: Tensor) -> Tensor:
    """`x * silu(gate)` of two `[T, N]`."""
    return (x.float() * functional.silu(gate.float())).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """`x Phi(x)` of `x[T, N]`, Phi being the normal distribution."""
    return functional.gelu(x.double()).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh form of GELU of `x[T, N]`."""
    return functional.gelu(x.double(), approximate="tanh").to(x.dtype)


def gelu_tanh_mul(x: Tensor, gate: Tensor) -> Tensor:
    """`x * gelu(gate)` of two `[T, N]`, with the tanh form of GELU."""
    return (x.double() * functional.gelu(gate.double(), approximate="tanh")).to(x.dtype)


def weighted_sum(x: Tensor, y: Tensor, a: float, b: float) -> Tensor:
    """`a x + b y` of two `[T, N]`."""
    return (x.float() * a + y.float() * b).to(x.dtype)


def softcap(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)` in the type of x, computed in float32."""
    return (torch.tanh(x.float() / cap) * cap).to(x.dtype)
