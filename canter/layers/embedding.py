"""Token embeddings, and the output layer that turns hidden states into logits."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from canter.layers.build import Build, Matrix, Value


class Embedding:
    """[T] token ids -> [T, hidden_size] of the build's type. `scale` multiplies the rows once it is rounded to that type."""

    __slots__ = ("_dtype", "_embedding", "_scale", "matrix")

    def __init__(self, build: Build, vocab_size: int, hidden_size: int, scale: float = 1.0) -> None:
        self.matrix = build.matrix("weight", (vocab_size, hidden_size), use="lookup")
        self._scale = scale
        self._dtype = build.dtype
        self._embedding: Callable[..., Tensor] = build.op("embedding", weight_dtype=build.dtype)

    @property
    def weight(self) -> Value:
        """The table, once it is loaded."""
        return self.matrix.value

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._embedding(token_ids, self.matrix.value, self._scale, self._dtype)


class OutputHead:
    """[N, hidden_size] -> [N, vocab_size] float32 logits, capped to (-softcap, softcap) when that is not 0.

    `tied` is the embedding that lends its weights; None gives the head weights of its own.
    """

    __slots__ = ("_linear", "_softcap", "_softcap_op", "matrix")

    def __init__(self, build: Build, vocab_size: int, hidden_size: int, tied: Embedding | None, softcap: float = 0.0) -> None:
        self.matrix: Matrix = build.matrix("weight", (vocab_size, hidden_size), use="output") if tied is None else tied.matrix
        self.matrix.uses.add("output")
        self._linear: Callable[..., Tensor] = build.op("linear", weight_dtype=build.dtype)
        self._softcap = softcap
        self._softcap_op: Callable[..., Tensor] = build.op("softcap")

    @property
    def weight(self) -> Value:
        """The weights, once they are loaded."""
        return self.matrix.value

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self._linear(hidden, self.matrix.value, None).float()
        return self._softcap_op(logits, self._softcap) if self._softcap else logits
