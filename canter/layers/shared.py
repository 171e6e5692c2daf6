"""A block of attention and feed-forward whose weights are used at several depths (Zamba2, arXiv 2411.15242)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from canter.layers.attention import AttentionArgs, CachedAttention
from canter.layers.build import Build
from canter.layers.context import StepContext
from canter.layers.linear import Linear
from canter.layers.mlp import GatedMLP
from canter.layers.norm import NormArgs, RMSNorm


@dataclass(frozen=True, slots=True)
class SharedBlockArgs:
    """`attention` sees twice the model's width: what the layers below give, and the embeddings again. `adapter_rank`: of what each use
    adds to the shared projections of the feed-forward, and where `adapts_attention` to those of queries, keys and values."""

    attention: AttentionArgs
    intermediate_size: int
    activation: str
    mlp_bias: bool
    norm: NormArgs
    adapter_rank: int
    adapts_attention: bool


class SharedBlock:
    """The weights that all uses of a block have in common."""

    def __init__(self, build: Build, hidden_size: int, args: SharedBlockArgs) -> None:
        attention = args.attention
        parts = {"q": attention.num_heads, "k": attention.num_kv_heads, "v": attention.num_kv_heads}
        self.args, self.hidden_size, self.build = args, hidden_size, build
        self.widths = {name: heads * attention.head_dim for name, heads in parts.items()}
        self.norm = RMSNorm(build.at("attention_norm"), 2 * hidden_size, args.norm)
        self.qkv = Linear(build.at("attention.qkv"), 2 * hidden_size, sum(self.widths.values()), parts=self.widths)
        self.output = Linear(build.at("attention.output"), self.widths["q"], hidden_size)
        self.mlp_norm = RMSNorm(build.at("mlp_norm"), hidden_size, args.norm)
        self.mlp = GatedMLP(build.at("mlp"), hidden_size, args.intermediate_size, args.activation, args.mlp_bias)
        self.cos_sin = build.rope(attention.rope) if attention.rope else None
        self.rotary: Callable[..., None] = build.op("rotary")


class SharedBlockUse:
    """[T, hidden_size] twice, what the layers below give and the embeddings -> [T, hidden_size]: one use of a block, with memory, adapters
    and a last projection of its own.

    The adapters of use `number` have their place with the block's weights, `build` is that of the projection.
    """

    def __init__(self, build: Build, state_id: int, block: SharedBlock, number: int) -> None:
        args, size, place = block.args, block.hidden_size, block.build.at(f"uses.{number}")
        self._block, self._rank = block, args.adapter_rank
        self._attend = CachedAttention(build, state_id, args.attention)
        self._attention_adapters: list[Linear] = []
        if args.adapts_attention:
            ranks = dict.fromkeys(block.widths, args.adapter_rank)
            self._attention_down = Linear(place.at("attention_down"), 2 * size, sum(ranks.values()), parts=ranks)
            self._attention_adapters = [Linear(place.at(f"{name}_up"), args.adapter_rank, width) for name, width in block.widths.items()]
        self._mlp_down = Linear(place.at("mlp_down"), size, args.adapter_rank)
        self._mlp_up = Linear(place.at("mlp_up"), args.adapter_rank, 2 * args.intermediate_size)
        self._output = Linear(build, size, size)
        self._concat: Callable[..., Tensor] = build.op("concat")
        self._weighted_sum: Callable[..., Tensor] = build.op("weighted_sum")

    def __call__(self, x: Tensor, embedded: Tensor, ctx: StepContext) -> Tensor:
        block = self._block
        attended = block.output(self._attend(*self._project(block.norm(self._concat(x, embedded)), ctx), ctx))
        normed = block.mlp_norm(attended)
        return self._output(block.mlp.given(self._weighted_sum(block.mlp.gate_up(normed), self._mlp_up(self._mlp_down(normed)), 1.0, 1.0)))

    def _project(self, x: Tensor, ctx: StepContext) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, adapted and at their positions: [T, heads, D]."""
        block, attention = self._block, self._block.args.attention
        parts = block.qkv(x).split_with_sizes(tuple(block.widths.values()), 1)
        if self._attention_adapters:
            lows = self._attention_down(x).split_with_sizes((self._rank,) * 3, 1)
            parts = tuple(
                self._weighted_sum(part, up(low), 1.0, 1.0) for part, up, low in zip(parts, self._attention_adapters, lows, strict=True)
            )
        q, k, v = (part.view(-1, part.shape[1] // attention.head_dim, attention.head_dim) for part in parts)
        if block.cos_sin is not None and attention.rope is not None:
            block.rotary(q, k, ctx.positions, block.cos_sin, attention.rope.dim)
        return q, k, v
