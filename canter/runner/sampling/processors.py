"""Logits processors that name token ids: allowed ids, bias, min_tokens.

A processor changes logits in place, for the rows that use it, each row by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from canter.runner.sampling.rows import IntArray, upload
from canter.runner.sampling.states import Cached, Feature, IdList, RowStates, SampleBatch

NEG_INF = float("-inf")


class LogitsProcessor(Protocol):
    """A stage of the pipeline, run when some row of the batch has `feature`."""

    feature: int

    def apply(self, logits: Tensor, batch: SampleBatch, index: IntArray) -> None:
        """Change logits [L, V] float32 in place; `index` (host, ascending) are the logits whose rows use the feature."""
        ...


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of a logits matrix, `lines [K]` and token `ids [K]`, with a value for each, `values [K]`."""

    lines: Tensor
    ids: Tensor
    values: Tensor


def _lists(lists: Sequence[IdList | None], rows: IntArray) -> list[IdList]:
    return [entry for row in rows if (entry := lists[row]) is not None]


def flatten(lists: Sequence[IdList | None], rows: IntArray, index: IntArray, device: torch.device) -> Entries:
    """The id lists of the rows of logits `index`, one behind the other."""
    chosen = _lists(lists, rows[index])
    lines = np.repeat(index, [len(entry.ids) for entry in chosen])
    ids, values = np.concatenate([entry.ids for entry in chosen]), np.concatenate([entry.values for entry in chosen])
    return Entries(upload(lines, device), upload(ids, device), upload(values, device))


@dataclass(slots=True)
class AllowedIds:
    """Every id that is not allowed becomes -inf; allowed ones keep their logits."""

    states: RowStates
    feature: int = Feature.ALLOWED_IDS
    _cache: Cached[tuple[Tensor, Tensor, Tensor]] = field(default_factory=Cached)

    def apply(self, logits: Tensor, batch: SampleBatch, index: IntArray) -> None:
        self.states.ops.allow_tokens(logits, *self._cache.get(self.states, batch, lambda: self._lists(batch, index, logits.device)))

    def _lists(self, batch: SampleBatch, index: IntArray, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, where the ids of each begin, and the ids."""
        ids = [entry.ids for entry in _lists(self.states.allowed, batch.rows_np[index])]
        starts = np.cumsum([0, *map(len, ids)], dtype=np.int64)
        return upload(index, device), upload(starts, device), upload(np.concatenate(ids), device)


@dataclass(slots=True)
class LogitBias:
    """Adds the request's bias to the logits of its ids."""

    states: RowStates
    feature: int = Feature.LOGIT_BIAS
    _cache: Cached[Entries] = field(default_factory=Cached)

    def apply(self, logits: Tensor, batch: SampleBatch, index: IntArray) -> None:
        entries = self._cache.get(self.states, batch, lambda: flatten(self.states.bias, batch.rows_np, index, logits.device))
        self.states.ops.add_to_tokens(logits, entries.lines, entries.ids, entries.values)


@dataclass(slots=True)
class MinTokens:
    """No token that would end the output may stand among its first `min_tokens`."""

    states: RowStates
    feature: int = Feature.MIN_TOKENS
    _cache: Cached[tuple[Entries, Tensor]] = field(default_factory=Cached)

    def apply(self, logits: Tensor, batch: SampleBatch, index: IntArray) -> None:
        entries, first_free = self._cache.get(self.states, batch, lambda: self._entries(batch, index, logits.device))
        too_early = batch.positions[entries.lines] + 1 < first_free
        self.states.ops.add_to_tokens(logits, entries.lines, entries.ids, torch.where(too_early, NEG_INF, 0.0))

    def _entries(self, batch: SampleBatch, index: IntArray, device: torch.device) -> tuple[Entries, Tensor]:
        """The ids that would end an output, and for each the first position where it may stand."""
        entries = flatten(self.states.stops, batch.rows_np, index, device)
        first_free = self.states.column("num_prompt_tokens") + self.states.column("min_tokens")  # [R]
        return entries, first_free[batch.rows[entries.lines]]
