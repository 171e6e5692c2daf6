"""Token embeddings, and the output layer that turns hidden states into logits."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from canter.layers.build import Build


class Embedding:
    """[T] token ids -> [T, hidden_size]. `scale` multiplies the rows once it is rounded to the weights' type."""

    __slots__ = ("_embedding", "_scale", "weight")

    def __init__(self, build: Build, vocab_size: int, hidden_size: int, scale: float = 1.0) -> None:
        self.weight = build.parameter("weight", (vocab_size, hidden_size))
        self._scale = scale
        self._embedding: Callable[..., Tensor] = build.op("embedding", weight_dtype=self.weight.dtype)

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._embedding(token_ids, self.weight, self._scale)


class OutputHead:
    """[N, hidden_size] -> [N, vocab_size] float32 logits, capped to (-softcap, softcap) when that is not 0.

    `tied` is the embedding that lends its weights; None gives the head weights of its own.
    """

    __slots__ = ("_linear", "_softcap", "_softcap_op", "weight")

    def __init__(self, build: Build, vocab_size: int, hidden_size: int, tied: Embedding | None, softcap: float = 0.0) -> None:
        self.weight = build.parameter("weight", (vocab_size, hidden_size)) if tied is None else tied.weight
        self._linear: Callable[..., Tensor] = build.op("linear", weight_dtype=self.weight.dtype)
        self._softcap = softcap
        self._softcap_op: Callable[..., Tensor] = build.op("softcap")

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self._linear(hidden, self.weight, None).float()
        return self._softcap_op(logits, self._softcap) if self._softcap else logits
