"""The older decoder: layer norms, an MLP without a gate, positions by distance. What MPT and BLOOM are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from canter.core.errors import UnsupportedModelError
from canter.core.state_specs import SharedState, StateSpec
from canter.layers.attention import Attention, AttentionArgs
from canter.layers.build import Build
from canter.layers.context import StepContext
from canter.layers.embedding import Embedding, OutputHead
from canter.layers.linear import Linear

_ACTIVATION_OPS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class PlainDecoderArgs:
    """`attention`: one entry a layer. `norm_bias`, `mlp_bias`: what has biases. `embed_norm`: embeddings are normalised first."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention: tuple[AttentionArgs, ...]
    eps: float
    tied_output: bool
    activation: str
    norm_bias: bool
    mlp_bias: bool
    embed_norm: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.attention)


def alibi_slopes(num_heads: int, most: int = 8) -> tuple[float, ...]:
    """What a head's scores lose for each position of distance (arXiv 2108.12409): 2^(-most i / n) of head i, n being `num_heads` where
    that is a power of two."""
    return tuple(2.0 ** (-most * i / num_heads) for i in range(1, num_heads + 1))


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight, plus a bias where it has one."""

    __slots__ = ("_bias", "_eps", "_layer_norm", "_weight")

    def __init__(self, build: Build, args: PlainDecoderArgs) -> None:
        self._weight = build.parameter("weight", (args.hidden_size,))
        self._bias = build.parameter("bias", (args.hidden_size,)) if args.norm_bias else None
        self._eps = args.eps
        self._layer_norm: Callable[..., Tensor] = build.op("layer_norm", weight_dtype=build.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self._layer_norm(x, self._weight, self._bias, self._eps)


class PlainMLP:
    """down(activation(up(x)))."""

    __slots__ = ("_activate", "_down", "_up")

    def __init__(self, build: Build, args: PlainDecoderArgs) -> None:
        if args.activation not in _ACTIVATION_OPS:
            raise UnsupportedModelError(f"Activation {args.activation!r} is not supported here. Supported: {', '.join(_ACTIVATION_OPS)}.")
        self._up = Linear(build.at("up"), args.hidden_size, args.intermediate_size, args.mlp_bias)
        self._down = Linear(build.at("down"), args.intermediate_size, args.hidden_size, args.mlp_bias)
        self._activate: Callable[..., Tensor] = build.op(_ACTIVATION_OPS[args.activation])

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._activate(self._up(x)))


class PlainLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, build: Build, layer_id: int, args: PlainDecoderArgs) -> None:
        self._attention_norm = LayerNorm(build.at("attention_norm"), args)
        self._attention = Attention(build.at("attention"), layer_id, args.hidden_size, args.attention[layer_id])
        self._mlp_norm = LayerNorm(build.at("mlp_norm"), args)
        self._mlp = PlainMLP(build.at("mlp"), args)
        self._weighted_sum: Callable[..., Tensor] = build.op("weighted_sum")

    def __call__(self, x: Tensor, ctx: StepContext) -> Tensor:
        x = self._weighted_sum(x, self._attention(self._attention_norm(x), ctx), 1.0, 1.0)
        return self._weighted_sum(x, self._mlp(self._mlp_norm(x)), 1.0, 1.0)


class PlainDecoder:
    """Token ids to hidden states to logits. The base of the families' models, which add how checkpoints name things."""

    def __init__(self, args: PlainDecoderArgs, build: Build) -> None:
        self.args, self.parameters = args, build.parameters
        self._embed = Embedding(build.at("embed"), args.vocab_size, args.hidden_size)
        self._embed_norm = LayerNorm(build.at("embed_norm"), args) if args.embed_norm else None
        self._layers = [PlainLayer(build.at(f"layers.{i}"), i, args) for i in range(args.num_layers)]
        self._norm = LayerNorm(build.at("norm"), args)
        self._head = OutputHead(build.at("head"), args.vocab_size, args.hidden_size, self._embed if args.tied_output else None)

    def forward(self, token_ids: Tensor, ctx: StepContext) -> Tensor:
        """[T] int64 token ids -> [T, hidden_size], after the last norm. Writes the caches of `ctx`."""
        x = self._embed(token_ids)
        if self._embed_norm is not None:
            x = self._embed_norm(x)
        for layer in self._layers:
            x = layer(x, ctx)
        return self._norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size], rows of what `forward` returns -> [N, vocab_size] float32."""
        return self._head(hidden)

    @staticmethod
    def state_specs(args: PlainDecoderArgs, block_size: int, cache_dtype: str, dtype: str) -> Mapping[int, StateSpec | SharedState]:
        """layer id -> what it remembers. Needs no weights."""
        return {layer_id: attention.state_spec(block_size, cache_dtype) for layer_id, attention in enumerate(args.attention)}
