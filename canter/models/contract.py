"""What a model is to the rest of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self

from torch import Tensor

from canter.core.state_specs import SharedState, StateSpec
from canter.layers.build import Build, Parameter
from canter.layers.context import StepContext
from canter.models.weights import WeightMap


class ModelArgs(Protocol):
    """The facts of a config that a model is built from. Frozen and hashable."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Read a config.json. Raises `CheckpointError` for missing or malformed keys, `UnsupportedModelError` for options."""
        ...


class Model(Protocol):
    """One architecture. `WEIGHTS` alone knows the names in a checkpoint."""

    Args: ClassVar[type[ModelArgs]]
    WEIGHTS: ClassVar[WeightMap]
    parameters: dict[str, Parameter]

    def __init__(self, args: Any, build: Build) -> None: ...

    def forward(self, token_ids: Tensor, ctx: StepContext) -> Tensor:
        """[T] int64 token ids -> [T, hidden_size], after the last norm. Writes the caches of `ctx`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size], rows of what `forward` returns -> [N, vocab_size] float32."""
        ...

    @staticmethod
    def state_specs(args: Any, block_size: int, cache_dtype: str, dtype: str) -> Mapping[int, StateSpec | SharedState]:
        """layer id -> what it remembers. Needs no weights. A layer with memories of two kinds has an id for each.

        `cache_dtype` is the type of keys and values, `dtype` that of the activations.
        """
        ...
