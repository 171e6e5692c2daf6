"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): all heads read keys and values out of one short row a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from canter.core.errors import UnsupportedModelError
from canter.core.state_specs import CACHE_STORAGE, StateSpec, mla_spec
from canter.kernels.attention_plan import plan_attention
from canter.layers.build import Build
from canter.layers.context import StepContext
from canter.layers.linear import Linear
from canter.layers.norm import NormArgs, RMSNorm
from canter.layers.state import StateTypes

_SCALED = "int8_per_token_head"


@dataclass(frozen=True, slots=True)
class LatentAttentionArgs:
    """A token's row is its normed latent, `latent_dim` wide, and behind it `shared_dim` elements of a key that all heads share. A head's
    keys are `key_dim` elements of its own, made of the latent, and the shared ones; its values, `value_dim` wide, are made of the latent.

    `query_rank`: queries come through a normed row of that width (0: straight from the input). There are no positions.
    """

    num_heads: int
    key_dim: int
    shared_dim: int
    value_dim: int
    latent_dim: int
    query_rank: int
    norm: NormArgs

    def states(self, types: StateTypes) -> tuple[StateSpec, ...]:
        if types.cache == _SCALED:
            raise UnsupportedModelError(f"kv_cache_dtype {_SCALED} is not supported by latent attention: its rows have no scales.")
        return (mla_spec(self.latent_dim, self.shared_dim, CACHE_STORAGE[types.cache], types.block_size),)

    def make(self, build: Build, hidden_size: int, state_id: int) -> LatentAttention:
        return LatentAttention(build, hidden_size, state_id, self)


class LatentAttention:
    """[T, hidden_size] -> [T, hidden_size]; stores this step's rows, then attends over all that are stored.

    What makes keys and values of latents is applied to queries and to what they attend to instead: a step reads each row once for all
    heads, as if there were one key head whose values are the first part of its keys.
    """

    def __init__(self, build: Build, hidden_size: int, state_id: int, args: LatentAttentionArgs) -> None:
        heads, rank = args.num_heads, args.query_rank
        self._args, self._state_id = args, state_id
        self._query_dim, self._row_dim = args.key_dim + args.shared_dim, args.latent_dim + args.shared_dim
        self._query_down = Linear(build.at("query_down"), hidden_size, rank) if rank else None
        self._query_norm = RMSNorm(build.at("query_norm"), rank, args.norm) if rank else None
        self._query = Linear(build.at("query_up" if rank else "query"), rank or hidden_size, heads * self._query_dim)
        self._row = Linear(build.at("row"), hidden_size, self._row_dim)
        self._norm = RMSNorm(build.at("norm"), args.latent_dim, args.norm)
        parts = {"k": heads * args.key_dim, "v": heads * args.value_dim}
        weight = build.parameter("heads.weight", (sum(parts.values()), args.latent_dim), parts, groups=heads)
        keys, values = weight.split_with_sizes(list(parts.values()))
        self._to_latent = keys.view(heads, args.key_dim, args.latent_dim).transpose(1, 2)
        self._to_values = values.view(heads, args.value_dim, args.latent_dim)
        self._output = Linear(build.at("output"), parts["v"], hidden_size)
        self._concat: Callable[..., Tensor] = build.op("concat")
        self._head_linear: Callable[..., Tensor] = build.op("head_linear")
        self._write: Callable[..., None] = build.op("write_kv", cache_dtype=build.cache_dtype)
        self._attend: Callable[..., Tensor] = build.op("paged_attention", cache_dtype=build.cache_dtype)

    def __call__(self, x: Tensor, ctx: StepContext) -> Tensor:
        args = self._args
        row = self._row(x)
        latent, shared = row.split_with_sizes((args.latent_dim, args.shared_dim), 1)
        # One head: norms read heads where they lie in a fused projection.
        row = self._concat(self._norm(latent.view(-1, 1, args.latent_dim)).view(-1, args.latent_dim), shared)
        self._store(row.view(-1, 1, self._row_dim), ctx)
        attended = self._attended(self._queries(x), ctx)
        return self._output(self._head_linear(attended, self._to_values).view(-1, args.num_heads * args.value_dim))

    def _queries(self, x: Tensor) -> Tensor:
        """[T, heads, latent_dim + shared_dim]."""
        args = self._args
        if self._query_down is not None and self._query_norm is not None:
            x = self._query_norm(self._query_down(x))
        own, shared = self._query(x).view(-1, args.num_heads, self._query_dim).split_with_sizes((args.key_dim, args.shared_dim), 2)
        return self._concat(self._head_linear(own, self._to_latent), shared)

    def _cache(self, ctx: StepContext) -> tuple[Tensor, Tensor]:
        """The same memory as keys [NB, 1, D, BS, 1] and as values [NB, 1, BS, D]: what is stored as keys is stored."""
        cache = ctx.caches[self._state_id]["latent"]
        return cache.transpose(1, 2)[:, None, :, :, None], cache[:, None]

    def _store(self, rows: Tensor, ctx: StepContext) -> None:
        keys, values = self._cache(ctx)
        nothing, _ = rows.split_with_sizes((0, self._row_dim), 2)
        self._write(rows, nothing, keys, values[..., :0], ctx.attention(self._state_id).slot_mapping)

    def _attended(self, q: Tensor, ctx: StepContext) -> Tensor:
        """[T, heads, latent_dim]."""
        keys, values = self._cache(ctx)
        group = ctx.attention(self._state_id)
        if group.plan is None:
            group.plan = plan_attention(group.block_table, ctx.query_start_loc, ctx.seq_lens)
        requests = group.block_table, ctx.query_start_loc, ctx.seq_lens
        scale = self._query_dim**-0.5
        return self._attend(q, keys, values[..., : self._args.latent_dim], *requests, scale, 0, 0.0, plan=group.plan)
