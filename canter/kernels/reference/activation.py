"""Gated activations and soft capping: computed in float32 or better, rounded once."""

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


def softcap(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)` in the type of x, computed in float32."""
    return (torch.tanh(x.float() / cap) * cap).to(x.dtype)
