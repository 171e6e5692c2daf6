"""Self-attention over the paged cache: full or windowed, with as many key heads as the model has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from canter.core.state_specs import StateSpec, attention_spec
from canter.kernels.attention_plan import plan_attention
from canter.layers.build import Build
from canter.layers.context import StepContext
from canter.layers.linear import Linear
from canter.layers.norm import NormArgs, RMSNorm
from canter.layers.rope import RopeArgs
from canter.layers.state import StateTypes


@dataclass(frozen=True, slots=True)
class AttentionArgs:
    """`window`: tokens a query sees, itself included (0: all). `softcap`: bound of the scores by tanh (0: none).

    `rope` None leaves positions out. `qk_norm` normalises each head's queries and keys before they are rotated.
    `output_gate`: what is attended to passes a gate of its own projection (arXiv 2505.06708).
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
    output_gate: bool = False

    def state_spec(self, block_size: int, cache_dtype: str) -> StateSpec:
        """What a layer of this kind remembers."""
        return attention_spec(self.num_kv_heads, self.head_dim, cache_dtype, block_size, self.window or None)

    def states(self, types: StateTypes) -> tuple[StateSpec, ...]:
        return (self.state_spec(types.block_size, types.cache),)

    def make(self, build: Build, hidden_size: int, state_id: int) -> Attention:
        return Attention(build, state_id, hidden_size, self)


class Attention:
    """[T, hidden_size] -> [T, hidden_size]; stores this step's keys and values, then attends over all that are stored."""

    def __init__(self, build: Build, layer_id: int, hidden_size: int, args: AttentionArgs) -> None:
        heads, kv_heads, head_dim = args.num_heads, args.num_kv_heads, args.head_dim
        self._layer_id = layer_id
        sizes = {"q": heads, "k": kv_heads, "v": kv_heads, "gate": heads if args.output_gate else 0}
        self._sizes = tuple(sizes.values())
        self._heads_shape = (-1, sum(self._sizes), head_dim)
        self._width = heads * head_dim
        self._limits = (args.scale, args.window, args.softcap)
        parts = {name: count * head_dim for name, count in sizes.items() if count}
        self._qkv = Linear(build.at("qkv"), hidden_size, sum(parts.values()), args.qkv_bias, parts, groups=heads)
        self._output = Linear(build.at("output"), self._width, hidden_size, args.output_bias)
        self._q_norm = RMSNorm(build.at("q_norm"), head_dim, args.qk_norm) if args.qk_norm else None
        self._k_norm = RMSNorm(build.at("k_norm"), head_dim, args.qk_norm) if args.qk_norm else None
        self._cos_sin = build.rope(args.rope) if args.rope else None
        self._rope_dim = args.rope.dim if args.rope else 0
        self._rotary = build.op("rotary")
        self._gate: Callable[..., Tensor] | None = build.op("sigmoid_mul") if args.output_gate else None
        self._write_kv = build.op("write_kv", cache_dtype=build.cache_dtype)
        self._attend: Callable[..., Tensor] = build.op("paged_attention", cache_dtype=build.cache_dtype)

    def __call__(self, x: Tensor, ctx: StepContext) -> Tensor:
        q, k, v, gate = self._qkv(x).view(self._heads_shape).split_with_sizes(self._sizes, 1)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q), self._k_norm(k)
        if self._cos_sin is not None:
            self._rotary(q, k, ctx.positions, self._cos_sin, self._rope_dim)
        cache = ctx.caches[self._layer_id]
        group = ctx.groups[ctx.group_of_layer[self._layer_id]]
        if group.plan is None:
            group.plan = plan_attention(group.block_table, ctx.query_start_loc, ctx.seq_lens)
        k_cache, v_cache, scales = cache["k"], cache["v"], (cache.get("k_scale"), cache.get("v_scale"))
        self._write_kv(k, v, k_cache, v_cache, group.slot_mapping, *scales)
        requests = group.block_table, ctx.query_start_loc, ctx.seq_lens
        attended = self._attend(q, k_cache, v_cache, *requests, *self._limits, None, *scales, group.plan)
        attended = attended.view(-1, self._width)
        if self._gate is not None:
            attended = self._gate(attended, gate.view(-1, self._width))
        return self._output(attended)
