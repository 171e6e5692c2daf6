"""Inputs of single layers: each layer adds what a table of its own says of a token, beside what the residual stream carries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from canter.core.errors import UnsupportedModelError
from canter.layers.build import Build
from canter.layers.embedding import Embedding
from canter.layers.linear import Linear
from canter.layers.norm import NormArgs, RMSNorm


@dataclass(frozen=True, slots=True)
class PerLayerArgs:
    """`size`: of a layer's input. `vocab_size`: tokens that the table knows; others have the input of token 0."""

    size: int
    vocab_size: int
    activation: str


class PerLayerInputs:
    """Token ids and their embeddings [T, hidden_size] -> a [T, size] for each layer."""

    def __init__(self, build: Build, args: PerLayerArgs, num_layers: int, vocab_size: int, hidden_size: int, norm: NormArgs) -> None:
        self._sizes = (args.size,) * num_layers
        self._limit = args.vocab_size if args.vocab_size < vocab_size else 0
        self._known_ids: Callable[..., Tensor] = build.op("known_ids")
        self._embed = Embedding(build.at("embed"), args.vocab_size, num_layers * args.size, args.size**0.5)
        self._projection = Linear(build.at("projection"), hidden_size, num_layers * args.size)
        # The projection counts hidden_size^-0.5 times: the norm undoes that, but for its eps.
        self._norm = RMSNorm(build.at("norm"), args.size, replace(norm, eps=norm.eps * hidden_size))
        self._weighted_sum: Callable[..., Tensor] = build.op("weighted_sum")

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Sequence[Tensor]:
        projected = self._norm(self._projection(embedded).view(-1, len(self._sizes), self._sizes[0])).view(-1, sum(self._sizes))
        looked_up = self._embed(self._known_ids(token_ids, self._limit) if self._limit else token_ids)
        return self._weighted_sum(projected, looked_up, 0.5**0.5, 0.5**0.5).split_with_sizes(self._sizes, 1)


class PerLayerBranch:
    """norm(out(gelu(gate(x)) * input)) of one layer: [T, hidden_size]."""

    def __init__(self, build: Build, args: PerLayerArgs, hidden_size: int, norm: NormArgs) -> None:
        if args.activation != "gelu_pytorch_tanh":
            raise UnsupportedModelError(f"Activation {args.activation!r} of layer inputs is not supported, only 'gelu_pytorch_tanh' is.")
        self._gate = Linear(build.at("gate"), hidden_size, args.size)
        self._out = Linear(build.at("out"), args.size, hidden_size)
        self._norm = RMSNorm(build.at("norm"), hidden_size, norm)
        self._activate: Callable[..., Tensor] = build.op("gelu_tanh_mul")

    def __call__(self, x: Tensor, layer_input: Tensor) -> Tensor:
        return self._norm(self._out(self._activate(layer_input, self._gate(x))))
