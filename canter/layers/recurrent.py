"""Layers that keep a state of fixed size instead of keys and values: Mamba, Mamba-2, gated delta rule, linear attention, short convolution.

All of them read and write the slots that the step's `RecurrentPlan` names. States of scans are float32, those of convolutions of the
activations' type. What is float32 in a published model (decays, biases of step widths, norms of gates) is so here, whatever the type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from canter.core.state_specs import StateSpec, recurrent_spec
from canter.layers.build import Build
from canter.layers.context import StepContext
from canter.layers.linear import Linear
from canter.layers.norm import NormArgs, RMSNorm
from canter.layers.scale import make_scale
from canter.layers.state import StateTypes

Convolve = Callable[[Tensor, StepContext], Tensor]


class CausalConv:
    """A depthwise convolution over the last `taps` tokens, which keeps the inputs before a step in the field `conv` of its state.

    `parts`: channels of what checkpoints may store apart: name -> width.
    """

    def __init__(
        self, build: Build, state_id: int, channels: int, taps: int, bias: bool, silu: bool, parts: dict[str, int] | None = None
    ) -> None:
        self._state_id, self._silu = state_id, silu
        self._weight = build.parameter("weight", (taps, channels), parts, dtype=torch.float32, dim=1)
        self._bias = build.parameter("bias", (channels,), dtype=torch.float32) if bias else None
        self._conv: Callable[..., Tensor] = build.op("causal_conv")

    def __call__(self, x: Tensor, ctx: StepContext, gate_in: Tensor | None = None, gate_out: Tensor | None = None) -> Tensor:
        state, plan = ctx.caches[self._state_id]["conv"], ctx.recurrent_plan(self._state_id)
        return self._conv(x, self._weight, self._bias, state, plan, self._silu, gate_in, gate_out)


def _spec(types: StateTypes, taps: int, channels: int, *state: int) -> StateSpec:
    fields: dict[str, tuple[tuple[int, ...], str]] = {"conv": ((taps - 1, channels), types.activations)} if taps else {}
    if state:
        fields["state"] = (state, "float32")
    return recurrent_spec(fields)


@dataclass(frozen=True, slots=True)
class Mamba1Args:
    """`width`: channels, each with `state_size` values of state. `rank`: of the step widths. `norm`: of step widths, B and C, where they
    are normalised."""

    width: int
    state_size: int
    rank: int
    taps: int
    bias: bool = False
    conv_bias: bool = True
    norm: NormArgs | None = None

    def states(self, types: StateTypes) -> tuple[StateSpec, ...]:
        return (_spec(types, self.taps, self.width, self.state_size, self.width),)

    def make(self, build: Build, hidden_size: int, state_id: int) -> Mamba1:
        return Mamba1(build, hidden_size, state_id, self)


class Mamba1:
    """[T, hidden_size] -> [T, hidden_size] (Gu and Dao, 2023, arXiv:2312.00752)."""

    def __init__(self, build: Build, hidden_size: int, state_id: int, args: Mamba1Args) -> None:
        width, depth = args.width, args.state_size
        self._state_id, self._sizes = state_id, (args.rank, depth, depth)
        self._halves = (width, width)
        self._input = Linear(build.at("input"), hidden_size, 2 * width, args.bias)
        self._conv = CausalConv(build.at("conv"), state_id, width, args.taps, args.conv_bias, silu=True)
        self._select = Linear(build.at("select"), width, sum(self._sizes))
        self._step = Linear(build.at("step"), args.rank, width)
        self._step_bias = build.parameter("step_bias", (width,), dtype=torch.float32)
        self._a = build.parameter("a", (depth, width), dtype=torch.float32)
        self._d = build.parameter("d", (width,), dtype=torch.float32)
        self._norms: list[RMSNorm] = []
        if args.norm is not None:
            names = zip(("step_norm", "b_norm", "c_norm"), self._sizes, strict=True)
            self._norms = [RMSNorm(build.at(name), size, args.norm) for name, size in names]
        self._output = Linear(build.at("output"), width, hidden_size, args.bias)
        self._scan: Callable[..., Tensor] = build.op("selective_scan")

    def __call__(self, x: Tensor, ctx: StepContext) -> Tensor:
        x, gate = self._input(x).split_with_sizes(self._halves, 1)
        x = self._conv(x, ctx)
        step, b, c = self._select(x).split_with_sizes(self._sizes, 1)
        if self._norms:
            # One head each: norms read heads where they lie in a fused projection.
            normed = (norm(y.view(-1, 1, n)).view(-1, n) for norm, y, n in zip(self._norms, (step, b, c), self._sizes, strict=True))
            step, b, c = normed
        state, plan = ctx.caches[self._state_id]["state"], ctx.recurrent_plan(self._state_id)
        return self._output(self._scan(x, self._step(step), self._step_bias, self._a, b, c, self._d, gate, state, plan))


@dataclass(frozen=True, slots=True)
class Mamba2Args:
    """`norm_eps` None: the gate multiplies what is not normalised; otherwise it does so before the norm, or with `norm_first` after it.
    Channels of a group are normalised by themselves. `step_limits`: bounds of the step widths. `factors` multiply the
    projections of gate, x, B, C and step."""

    num_heads: int
    head_dim: int
    groups: int
    state_size: int
    taps: int
    norm_eps: float | None
    norm_first: bool = False
    bias: bool = False
    output_bias: bool = False
    conv_bias: bool = True
    step_limits: tuple[float, float] = (0.0, float("inf"))
    factors: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: x, B and C."""
        return self.width + 2 * self.groups * self.state_size

    def states(self, types: StateTypes) -> tuple[StateSpec, ...]:
        return (_spec(types, self.taps, self.channels, self.num_heads, self.state_size, self.head_dim),)

    def make(self, build: Build, hidden_size: int, state_id: int) -> Mamba2:
        return Mamba2(build, hidden_size, state_id, self)


class Mamba2:
    """[T, hidden_size] -> [T, hidden_size] (Dao and Gu, 2024, arXiv:2405.21060)."""

    def __init__(self, build: Build, hidden_size: int, state_id: int, args: Mamba2Args) -> None:
        self._state_id, self._limits = state_id, args.step_limits
        width, shared = args.width, args.groups * args.state_size
        self._width, self._heads, self._groups = width, (-1, args.num_heads, args.head_dim), (-1, args.groups, args.state_size)
        self._sizes, self._conv_sizes = (width, args.channels, args.num_heads), (width, shared, shared)
        self._input = Linear(build.at("input"), hidden_size, sum(self._sizes), args.bias)
        sizes = (width, width, shared, shared, args.num_heads)
        self._scale = make_scale(build, list(zip(args.factors, sizes, strict=True)))
        self._conv = CausalConv(build.at("conv"), state_id, args.channels, args.taps, args.conv_bias, silu=True)
        self._step_bias, self._a, self._d = (
            build.parameter(name, (args.num_heads,), dtype=torch.float32) for name in ("step_bias", "a", "d")
        )
        self._norm_weight, self._norm = None, (args.norm_eps or 0.0, width // args.groups, not args.norm_first)
        if args.norm_eps is not None:
            self._norm_weight = build.parameter("norm.weight", (width,), dtype=torch.float32)
        self._output = Linear(build.at("output"), width, hidden_size, args.output_bias)
        self._scan: Callable[..., Tensor] = build.op("ssd_scan")
        self._gate: Callable[..., Tensor] = build.op("silu_mul" if args.norm_eps is None else "gated_rms_norm")

    def __call__(self, x: Tensor, ctx: StepContext) -> Tensor:
        projected = self._input(x)
        if self._scale is not None:
            projected = self._scale(projected)
        gate, xbc, step = projected.split_with_sizes(self._sizes, 1)
        x, b, c = self._conv(xbc, ctx).split_with_sizes(self._conv_sizes, 1)
        state, plan = ctx.caches[self._state_id]["state"], ctx.recurrent_plan(self._state_id)
        x, b, c = x.view(self._heads), b.view(self._groups), c.view(self._groups)
        y = self._scan(x, step, self._step_bias, self._a, b, c, self._d, state, plan, *self._limits).view(-1, self._width)
        y = self._gate(y, gate) if self._norm_weight is None else self._gate(y, gate, self._norm_weight, *self._norm)
        return self._output(y)


@dataclass(frozen=True, slots=True)
class ShortConvArgs:
    """`taps`: tokens that an output depends on."""

    taps: int
    bias: bool = False

    def states(self, types: StateTypes) -> tuple[StateSpec, ...]:
        return (_spec(types, self.taps, types.hidden_size),)

    def make(self, build: Build, hidden_size: int, state_id: int) -> ShortConv:
        return ShortConv(build, hidden_size, state_id, self)


class ShortConv:
    """[T, hidden_size] -> [T, hidden_size]: c * conv(b * x), the three from one projection (LFM2, arXiv:2511.23404)."""

    def __init__(self, build: Build, hidden_size: int, state_id: int, args: ShortConvArgs) -> None:
        self._sizes = (hidden_size, hidden_size, hidden_size)
        self._input = Linear(build.at("input"), hidden_size, 3 * hidden_size, args.bias)
        self._conv = CausalConv(build.at("conv"), state_id, hidden_size, args.taps, args.bias, silu=False)
        self._output = Linear(build.at("output"), hidden_size, hidden_size, args.bias)

    def __call__(self, x: Tensor, ctx: StepContext) -> Tensor:
        b, c, x = self._input(x).split_with_sizes(self._sizes, 1)
        return self._output(self._conv(x, ctx, b, c))


@dataclass(frozen=True, slots=True)
class DeltaArgs:
    """`key_heads` of `key_dim`, `value_heads` of `value_dim`: value heads that follow each other share a key head. `gate_rank` 0: one
    decay a head, and a gate as wide as the values, through silu. Otherwise one decay for each channel of a key, and a gate through
    sigmoid, both from projections of that rank (Kimi Delta Attention)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float
    gate_rank: int = 0

    @property
    def widths(self) -> dict[str, int]:
        """Of what is convolved: queries, keys, values."""
        keys = self.key_heads * self.key_dim
        return {"q": keys, "k": keys, "v": self.value_heads * self.value_dim}

    def states(self, types: StateTypes) -> tuple[StateSpec, ...]:
        return (_spec(types, self.taps, sum(self.widths.values()), self.value_heads, self.key_dim, self.value_dim),)

    def make(self, build: Build, hidden_size: int, state_id: int) -> GatedDelta:
        return GatedDelta(build, hidden_size, state_id, self)


_L2_EPS = 1e-6


class GatedDelta:
    """[T, hidden_size] -> [T, hidden_size] (Yang et al., 2024, arXiv:2412.06464; Kimi Linear, 2025, arXiv:2510.26692)."""

    def __init__(self, build: Build, hidden_size: int, state_id: int, args: DeltaArgs) -> None:
        self._args, self._state_id = args, state_id
        rank, heads, widths = args.gate_rank, args.value_heads, args.widths
        self._width = widths["v"]
        parts = widths | {"gate": rank or self._width, "beta": heads, "decay": rank or heads}
        self._qkv_sizes, self._sizes = tuple(widths.values()), (sum(widths.values()), *list(parts.values())[3:])
        self._input = Linear(build.at("input"), hidden_size, sum(parts.values()), parts=parts, groups=args.key_heads)
        self._conv = CausalConv(build.at("conv"), state_id, sum(widths.values()), args.taps, bias=False, silu=True, parts=widths)
        self._decay_shape = (heads, args.key_dim if rank else 1)
        decays = heads * self._decay_shape[1]
        self._decay_up = Linear(build.at("decay"), rank, decays) if rank else None
        self._gate_up = Linear(build.at("gate"), rank, self._width) if rank else None
        self._a = build.parameter("a", (heads,), dtype=torch.float32)
        self._decay_bias = build.parameter("decay_bias", (decays,), dtype=torch.float32).view(self._decay_shape)
        self._norm_weight = build.parameter("norm.weight", (args.value_dim,), dtype=torch.float32)
        self._output = Linear(build.at("output"), self._width, hidden_size)
        self._l2_norm: Callable[..., Tensor] = build.op("l2_norm")
        self._decay_gate: Callable[..., Tensor] = build.op("decay_gate")
        self._delta: Callable[..., Tensor] = build.op("gated_delta")
        self._norm: Callable[..., Tensor] = build.op("gated_rms_norm")

    def __call__(self, x: Tensor, ctx: StepContext) -> Tensor:
        args = self._args
        qkv, gate, beta, decay = self._input(x).split_with_sizes(self._sizes, 1)
        q, k, v = self._conv(qkv, ctx).split_with_sizes(self._qkv_sizes, 1)
        keys = (-1, args.key_heads, args.key_dim)
        q, k = self._l2_norm(q.view(keys), _L2_EPS, args.key_dim**-0.5), self._l2_norm(k.view(keys), _L2_EPS)
        if self._decay_up is not None and self._gate_up is not None:
            decay, gate = self._decay_up(decay), self._gate_up(gate)
        stays = self._decay_gate(decay.view(-1, *self._decay_shape), self._a, self._decay_bias)
        state, plan = ctx.caches[self._state_id]["state"], ctx.recurrent_plan(self._state_id)
        y = self._delta(q, k, v.view(-1, args.value_heads, args.value_dim), stays, beta, state, plan)
        y = self._norm(y.view(-1, self._width), gate, self._norm_weight, args.eps, args.value_dim, False, args.gate_rank > 0)
        return self._output(y)


@dataclass(frozen=True, slots=True)
class LightningArgs:
    """Linear attention in which what a head remembers fades by `exp(-slopes[h])` a token. `eps`: of the norm of the output."""

    head_dim: int
    slopes: tuple[float, ...]
    eps: float

    @property
    def width(self) -> int:
        return self.head_dim * len(self.slopes)

    def states(self, types: StateTypes) -> tuple[StateSpec, ...]:
        return (_spec(types, 0, 0, len(self.slopes), self.head_dim, self.head_dim),)

    def make(self, build: Build, hidden_size: int, state_id: int) -> Lightning:
        return Lightning(build, hidden_size, state_id, self)


class Lightning:
    """[T, hidden_size] -> [T, hidden_size] (Qin et al., 2024, arXiv:2405.17381; MiniMax-01, 2025, arXiv:2501.08313)."""

    def __init__(self, build: Build, hidden_size: int, state_id: int, args: LightningArgs) -> None:
        width, heads = args.width, len(args.slopes)
        self._state_id, self._width, self._eps = state_id, width, args.eps
        self._heads, self._parts = (-1, heads, args.head_dim), (width, width, width)
        self._qkv = Linear(build.at("qkv"), hidden_size, 3 * width, parts={"q": width, "k": width, "v": width}, groups=heads)
        self._gate = Linear(build.at("gate"), hidden_size, width)
        self._a = -torch.tensor(args.slopes, dtype=torch.float32, device=build.device)
        self._norm_weight = build.parameter("norm.weight", (width,), dtype=torch.float32)
        self._output = Linear(build.at("output"), width, hidden_size)
        self._silu: Callable[..., Tensor] = build.op("silu")
        self._scan: Callable[..., Tensor] = build.op("ssd_scan")
        self._norm: Callable[..., Tensor] = build.op("gated_rms_norm")

    def __call__(self, x: Tensor, ctx: StepContext) -> Tensor:
        q, k, v = (part.view(self._heads) for part in self._silu(self._qkv(x)).split_with_sizes(self._parts, 1))
        state, plan = ctx.caches[self._state_id]["state"], ctx.recurrent_plan(self._state_id)
        y = self._scan(v, None, None, self._a, k, q, None, state, plan).view(-1, self._width)
        return self._output(self._norm(y, self._gate(x), self._norm_weight, self._eps, self._width, False, True))
