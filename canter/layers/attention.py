"""Self-attention over the paged cache: full, windowed, chunked or by distance, with as many key heads as the model has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from canter.core.state_specs import SharedState, StateKind, StateSpec, attention_spec
from canter.kernels.attention_plan import plan_attention
from canter.layers.build import Build
from canter.layers.context import AttentionContext, StepContext
from canter.layers.linear import Linear
from canter.layers.norm import NormArgs, RMSNorm
from canter.layers.rope import QueryGrowth, RopeArgs
from canter.layers.state import StateTypes


@dataclass(frozen=True, slots=True)
class AttentionArgs:
    """`window`: tokens a query sees, itself included (0: all); with `sees_prompt` those of its request's prompt too. `chunk`: a query
    sees nothing before the last multiple of so many tokens (0: all). `softcap`: bound of the scores by tanh (0: none).

    `rope` None leaves positions out; `slopes`, one a head, take them from distances instead (ALiBi). `growth`: how queries grow with
    their position. `qk_norm` normalises each head's queries and keys before they are rotated, or where `norms_rotated` after that;
    `v_norm` does it to values, without weights. `sinks`: each head has a learned score that only takes weight away. `values_are_keys`:
    values are the keys as projected, before they are normalised and rotated. `shares`: the layer before this one whose keys and values
    are read, instead of own ones. `output_gate`: what is attended to passes a gate of its own
    projection (arXiv 2505.06708).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeArgs | None
    window: int = 0
    softcap: float = 0.0
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: NormArgs | None = None
    norms_rotated: bool = False
    v_norm: NormArgs | None = None
    chunk: int = 0
    sees_prompt: bool = False
    slopes: tuple[float, ...] = ()
    growth: QueryGrowth | None = None
    sinks: bool = False
    values_are_keys: bool = False
    shares: int | None = None
    output_gate: bool = False

    def state_spec(self, block_size: int, cache_dtype: str) -> StateSpec | SharedState:
        """What a layer of this kind remembers."""
        if self.shares is not None:
            return SharedState(self.shares)
        kind = StateKind.CHUNKED_LOCAL if self.chunk else StateKind.PROMPT_WINDOW if self.sees_prompt else None
        return attention_spec(self.num_kv_heads, self.head_dim, cache_dtype, block_size, self.chunk or self.window or None, kind=kind)

    def states(self, types: StateTypes) -> tuple[StateSpec | SharedState, ...]:
        return (self.state_spec(types.block_size, types.cache),)

    def make(self, build: Build, hidden_size: int, state_id: int) -> Attention:
        return Attention(build, state_id, hidden_size, self)


class CachedAttention:
    """What attention does between its projections: stores this step's keys and values, then attends over all that are stored.

    Queries [T, heads, D], keys and values [T, kv_heads, D], at their positions -> [T, heads * D].
    """

    def __init__(self, build: Build, layer_id: int, args: AttentionArgs) -> None:
        self._args, self._layer_id = args, layer_id
        self._width = args.num_heads * args.head_dim
        self._limits = (args.scale, args.window, args.softcap)
        self._sinks = build.parameter("sinks", (args.num_heads,), dtype=torch.float32) if args.sinks else None
        self._slopes = torch.tensor(args.slopes, dtype=torch.float32, device=build.device) if args.slopes else None
        self._write_kv = build.op("write_kv", cache_dtype=build.cache_dtype)
        self._attend: Callable[..., Tensor] = build.op("paged_attention", cache_dtype=build.cache_dtype)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, ctx: StepContext) -> Tensor:
        cache = ctx.caches[self._layer_id]
        group = ctx.attention(self._layer_id)
        if group.plan is None:
            group.plan = plan_attention(group.block_table, ctx.query_start_loc, ctx.seq_lens)
        k_cache, v_cache, scales = cache["k"], cache["v"], (cache.get("k_scale"), cache.get("v_scale"))
        if self._args.shares is None:
            self._write_kv(k, v, k_cache, v_cache, group.slot_mapping, *scales)
        requests = group.block_table, ctx.query_start_loc, ctx.seq_lens
        options = self._options(group)
        attended = self._attend(q, k_cache, v_cache, *requests, *self._limits, self._sinks, *scales, group.plan, **options)
        return attended.view(-1, self._width)

    def _options(self, group: AttentionContext) -> dict[str, object]:
        """What calls are told of a mask that not every layer has."""
        options: dict[str, object] = {}
        if self._args.chunk:
            options["chunk"] = self._args.chunk
        if self._args.sees_prompt:
            options["prompt_lens"] = group.prompt_lens
        if self._slopes is not None:
            options["slopes"] = self._slopes
        return options


class Attention:
    """[T, hidden_size] -> [T, hidden_size]; stores this step's keys and values, then attends over all that are stored."""

    def __init__(self, build: Build, layer_id: int, hidden_size: int, args: AttentionArgs) -> None:
        heads, kv_heads, head_dim = args.num_heads, args.num_kv_heads, args.head_dim
        if args.shares is not None:
            kv_heads = 0
        self._args = args
        self._owns_keys = args.shares is None
        gates = heads if args.output_gate else 0
        sizes = {"q": heads, "k": kv_heads, "v": 0 if args.values_are_keys else kv_heads, "gate": gates}
        self._sizes = tuple(sizes.values())
        self._heads_shape = (-1, sum(self._sizes), head_dim)
        self._width = heads * head_dim
        parts = {name: count * head_dim for name, count in sizes.items() if count}
        # Checkpoints that store parts together do so for each query head with its gate, or for each key head with its queries.
        groups = heads if args.output_gate else max(1, kv_heads)
        self._qkv = Linear(build.at("qkv"), hidden_size, sum(parts.values()), args.qkv_bias, parts, groups=groups)
        self._output = Linear(build.at("output"), self._width, hidden_size, args.output_bias)
        self._q_norm = RMSNorm(build.at("q_norm"), head_dim, args.qk_norm) if args.qk_norm else None
        self._k_norm = RMSNorm(build.at("k_norm"), head_dim, args.qk_norm) if args.qk_norm and self._owns_keys else None
        self._v_norm = RMSNorm(build.at("v_norm"), head_dim, args.v_norm) if args.v_norm and self._owns_keys else None
        self._cos_sin = build.rope(args.rope) if args.rope else None
        self._rope_dim = args.rope.dim if args.rope else 0
        self._growth = build.growth(args.growth, head_dim) if args.growth else None
        is_interleaved = args.rope is not None and args.rope.interleaved
        self._rotary_options = (True,) if is_interleaved else ()
        self._rotary: Callable[..., None] = build.op("rotary")
        self._gate: Callable[..., Tensor] | None = build.op("sigmoid_mul") if args.output_gate else None
        self._attend = CachedAttention(build, layer_id, args)

    def __call__(self, x: Tensor, ctx: StepContext) -> Tensor:
        q, k, v, gate = self._qkv(x).view(self._heads_shape).split_with_sizes(self._sizes, 1)
        if self._owns_keys and self._args.values_are_keys:
            v = k
        if self._v_norm is not None:
            v = self._v_norm(v)
        q, k = self._place(q, k, ctx.positions)
        attended = self._attend(q, k, v, ctx)
        if self._gate is not None:
            attended = self._gate(attended, gate.view(-1, self._width))
        return self._output(attended)

    def _place(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys normalised and brought to their positions."""
        if not self._args.norms_rotated:
            q, k = self._normed(q, k)
        if self._cos_sin is not None:
            self._rotary(q, k, positions, self._cos_sin, self._rope_dim, *self._rotary_options)
        if self._args.norms_rotated:
            q, k = self._normed(q, k)
        if self._growth is not None:
            q, none = q.split_with_sizes((self._args.num_heads, 0), 1)
            self._rotary(q, none, positions, self._growth, self._args.head_dim)
        return q, k

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q = q if self._q_norm is None else self._q_norm(q)
        return q, k if self._k_norm is None else self._k_norm(k)
