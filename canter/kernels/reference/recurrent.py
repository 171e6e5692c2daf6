"""Layers whose memory does not grow: short convolutions, selective state spaces, the gated delta rule, and what stands around them.

Every scan is written as its recurrence, token by token; sums are float32. The plan says which rows are whose, and where states lie.
Mamba: Gu and Dao, 2023, arXiv:2312.00752. Mamba-2: Dao and Gu, 2024, arXiv:2405.21060. Gated delta rule: Yang et al., 2024,
arXiv:2412.06464. Decay for each channel of it: Kimi Linear, 2025, arXiv:2510.26692.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from canter.kernels.recurrent_plan import RecurrentPlan

Step = Callable[[Tensor, int], Tensor]
"""A state and a row: takes the row in, and returns the new state."""


def _scan(state: Tensor, plan: RecurrentPlan, step: Step) -> None:
    """Walk every request's rows, keeping the state behind each segment where the plan wants it."""
    starts, ends, reads, writes = (tensor.tolist() for tensor in plan.tensors)
    before = state.clone()  # a slot may be another's to write
    row = 0
    for request, slot in enumerate(reads):
        now = before[slot].clone() if slot >= 0 else torch.zeros_like(before[0])
        for segment in range(starts[request], starts[request + 1]):
            while row < ends[segment]:
                now = step(now, row)
                row += 1
            if writes[segment] >= 0:
                state[writes[segment]] = now


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    plan: RecurrentPlan,
    silu: bool = False,
    gate_in: Tensor | None = None,
    gate_out: Tensor | None = None,
) -> Tensor:
    """`x[T, C]` convolved along the tokens with `weight[K, C]`, each channel by itself; the last tap falls on the token itself.

    `state[slots, K - 1, C]` holds the inputs before a request's rows, oldest first, in the type of x. `gate_in[T, C]` multiplies the
    input first, rounded to the type of x; `silu` follows the sum; `gate_out[T, C]` multiplies the result. Float32 sums, rounded once.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    taps = weight.float()

    def step(past: Tensor, t: int) -> Tensor:
        row = x[t] if gate_in is None else (x[t].float() * gate_in[t].float()).to(x.dtype)
        window = torch.cat((past, row[None]))
        total = (window.float() * taps).sum(0)
        total = total if bias is None else total + bias.float()
        total = functional.silu(total) if silu else total
        out[t] = (total if gate_out is None else total * gate_out[t].float()).to(x.dtype)
        return window[1:]

    _scan(state, plan, step)
    return out


def ssd_scan(
    x: Tensor,
    dt: Tensor | None,
    dt_bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    state: Tensor,
    plan: RecurrentPlan,
    dt_min: float = 0.0,
    dt_max: float = float("inf"),
) -> Tensor:
    """Mamba-2's scan: `h = exp(dt a) h + dt b x^T`, `y = c h + d x`, of `x[T, H, P]`: y in the type of x.

    `dt[T, H]` passes softplus with `dt_bias[H]` added, and is kept between `dt_min` and `dt_max`; None stands for 1, which makes this a
    linear attention with a constant decay (b keys, c queries, x values). `a[H]` is negative, `b`, `c` are `[T, G, N]`: head h uses
    group `h // (H / G)`. `state[slots, H, N, P]` is float32.
    """
    heads = x.shape[1]
    repeat = heads // b.shape[1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)

    def step(h: Tensor, t: int) -> Tensor:
        width = torch.ones(heads) if dt is None else dt[t].float()
        if dt is not None:
            width = functional.softplus(width if dt_bias is None else width + dt_bias.float()).clamp(dt_min, dt_max)
        row, key, query = x[t].float(), b[t].float().repeat_interleave(repeat, 0), c[t].float().repeat_interleave(repeat, 0)
        h = torch.exp(width * a.float())[:, None, None] * h + key[:, :, None] * (width[:, None] * row)[:, None, :]
        y = (query[:, :, None] * h).sum(1)
        out[t] = (y if d is None else y + d.float()[:, None] * row).to(x.dtype)
        return h

    _scan(state, plan, step)
    return out


def selective_scan(
    x: Tensor,
    dt: Tensor,
    dt_bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    gate: Tensor | None,
    state: Tensor,
    plan: RecurrentPlan,
) -> Tensor:
    """Mamba-1's scan: `h = exp(dt a) h + dt b x`, `y = c h + d x`, times `silu(gate)`, of `x[T, I]`: y in the type of x.

    `dt[T, I]` passes softplus with `dt_bias[I]` added. `a[N, I]` is negative, `b`, `c` are `[T, N]`, `gate[T, I]`.
    `state[slots, N, I]` is float32.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)

    def step(h: Tensor, t: int) -> Tensor:
        width = functional.softplus(dt[t].float() if dt_bias is None else dt[t].float() + dt_bias.float())
        row = x[t].float()
        h = torch.exp(width * a.float()) * h + b[t].float()[:, None] * (width * row)
        y = (c[t].float()[:, None] * h).sum(0)
        y = y if d is None else y + d.float() * row
        out[t] = (y if gate is None else y * functional.silu(gate[t].float())).to(x.dtype)
        return h

    _scan(state, plan, step)
    return out


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, plan: RecurrentPlan, beta_scale: float = 1.0
) -> Tensor:
    """The gated delta rule: `S = decay S`, `u = beta (v - S^T k)`, `S = S + k u^T`, `o = S^T q`; o `[T, H, V]` in the type of v.

    `q`, `k` are float32 `[T, G, K]`, normalised and scaled as the model wants; head h uses group `h // (H / G)`. `decay` is float32
    `[T, H, 1]`, or `[T, H, K]` for one for each channel. `beta[T, H]` passes the sigmoid, times `beta_scale`. `state[slots, H, K, V]` is
    float32.
    """
    repeat = v.shape[1] // q.shape[1]
    out = torch.empty_like(v, memory_format=torch.contiguous_format)

    def step(s: Tensor, t: int) -> Tensor:
        key, query = k[t].repeat_interleave(repeat, 0)[:, :, None], q[t].repeat_interleave(repeat, 0)[:, :, None]
        s = decay[t][:, :, None] * s
        u = (torch.sigmoid(beta[t].float()) * beta_scale)[:, None] * (v[t].float() - (s * key).sum(1))
        s = s + key * u[:, None, :]
        out[t] = (s * query).sum(1).to(v.dtype)
        return s

    _scan(state, plan, step)
    return out


def l2_norm(x: Tensor, eps: float, scale: float = 1.0) -> Tensor:
    """`x[T, H, D] / sqrt(sum(x^2) + eps) * scale`, head by head, in float32."""
    wide = x.float()
    normed: Tensor = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps) * scale
    return normed


def decay_gate(x: Tensor, a: Tensor, bias: Tensor, lower_bound: float = 0.0) -> Tensor:
    """How much of a state stays: `exp(a softplus(x + bias))` of `x[T, H, D]` with `a[H]` negative and `bias[H, D]`, in float32.

    With a `lower_bound` below zero: `exp(lower_bound sigmoid(-a (x + bias)))`.
    """
    wide, factor = x.float() + bias.float(), a.float()[:, None]
    if lower_bound:
        return torch.exp(lower_bound * torch.sigmoid(-factor * wide))
    return torch.exp(factor * functional.softplus(wide))


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, gate_first: bool = False, sigmoid: bool = False
) -> Tensor:
    """RMS norm of `x[T, W]` over groups of `group`, times `weight[W]`, or `[group]` for all groups alike, and a gate.

    The gate is silu, or `sigmoid`, of `gate[T, W]`; it multiplies the result, or with `gate_first` what is normalised. In float32,
    rounded once.
    """
    factor = torch.sigmoid(gate.float()) if sigmoid else functional.silu(gate.float())
    wide = x.float() * factor if gate_first else x.float()
    runs = wide.unflatten(-1, (-1, group))
    normed: Tensor = (runs * torch.rsqrt(runs.square().mean(-1, keepdim=True) + eps) * weight.float().view(-1, group)).flatten(-2)
    return (normed if gate_first else normed * factor).to(x.dtype)
