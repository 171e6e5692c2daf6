"""The decoder-only transformer that most families are: one description, one stack of layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from canter.core.state_specs import SharedState, StateSpec
from canter.layers.attention import Attention, AttentionArgs
from canter.layers.build import Build
from canter.layers.context import StepContext
from canter.layers.embedding import Embedding, OutputHead
from canter.layers.mlp import GatedMLP
from canter.layers.norm import NormArgs, RMSNorm


@dataclass(frozen=True, slots=True)
class DecoderArgs:
    """Everything that tells one decoder-only transformer from another.

    `attention`: one entry a layer. `branch_norms`: each branch's output is normalised too, before it is added (Gemma 2
    and 3). `embed_scale` multiplies the embeddings; `logit_softcap` bounds the logits by tanh (0: none).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention: tuple[AttentionArgs, ...]
    norm: NormArgs
    tied_output: bool
    activation: str = "silu"
    mlp_bias: bool = False
    branch_norms: bool = False
    embed_scale: float = 1.0
    logit_softcap: float = 0.0

    @property
    def num_layers(self) -> int:
        return len(self.attention)


def attention_states(args: DecoderArgs, block_size: int, cache_dtype: str) -> Mapping[int, StateSpec | SharedState]:
    """layer id -> what its attention remembers."""
    return {layer_id: attention.state_spec(block_size, cache_dtype) for layer_id, attention in enumerate(args.attention)}


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Takes and returns (norm(x), x): the norm that opens the next layer is computed together with this one's last
    addition. `next_norm` is that norm.
    """

    def __init__(self, build: Build, layer_id: int, args: DecoderArgs, next_norm: RMSNorm) -> None:
        self._attention = Attention(build.at("attention"), layer_id, args.hidden_size, args.attention[layer_id])
        self._mlp = GatedMLP(build.at("mlp"), args.hidden_size, args.intermediate_size, args.activation, args.mlp_bias)
        self._mlp_norm = RMSNorm(build.at("mlp_norm"), args.hidden_size, args.norm)
        self._next_norm = next_norm
        self._after_attention = self._after_mlp = None
        if args.branch_norms:
            self._after_attention = RMSNorm(build.at("after_attention_norm"), args.hidden_size, args.norm)
            self._after_mlp = RMSNorm(build.at("after_mlp_norm"), args.hidden_size, args.norm)

    def __call__(self, normed: Tensor, residual: Tensor, ctx: StepContext) -> tuple[Tensor, Tensor]:
        branch = self._attention(normed, ctx)
        if self._after_attention is not None:
            branch = self._after_attention(branch)
        normed, residual = self._mlp_norm.add(branch, residual)
        branch = self._mlp(normed)
        if self._after_mlp is not None:
            branch = self._after_mlp(branch)
        return self._next_norm.add(branch, residual)


class Decoder:
    """Token ids to hidden states to logits. The base of the families' models, which add how checkpoints name things."""

    def __init__(self, args: DecoderArgs, build: Build) -> None:
        self.args = args
        self.parameters = build.parameters
        self._embed = Embedding(build.at("embed"), args.vocab_size, args.hidden_size, args.embed_scale)
        norms = [RMSNorm(build.at(f"layers.{i}.attention_norm"), args.hidden_size, args.norm) for i in range(args.num_layers)]
        norms.append(RMSNorm(build.at("norm"), args.hidden_size, args.norm))
        self._first_norm = norms[0]
        self._layers = [DecoderLayer(build.at(f"layers.{i}"), i, args, norms[i + 1]) for i in range(args.num_layers)]
        tied = self._embed if args.tied_output else None
        self._head = OutputHead(build.at("head"), args.vocab_size, args.hidden_size, tied, args.logit_softcap)

    def forward(self, token_ids: Tensor, ctx: StepContext) -> Tensor:
        """[T] int64 token ids -> [T, hidden_size], after the last norm. Writes the caches of `ctx`."""
        residual = self._embed(token_ids)
        normed = self._first_norm(residual)
        for layer in self._layers:
            normed, residual = layer(normed, residual, ctx)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size], rows of what `forward` returns -> [N, vocab_size] float32."""
        return self._head(hidden)

    @staticmethod
    def state_specs(args: DecoderArgs, block_size: int, cache_dtype: str, dtype: str) -> Mapping[int, StateSpec | SharedState]:
        """layer id -> what it remembers. Needs no weights."""
        return attention_states(args, block_size, cache_dtype)
