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
    """Entries of a logits matrix: `where [2, K]` (logit, token id), and a value for each, `values [K]`."""

    where: Tensor
    values: Tensor

    def add_to(self, logits: Tensor, values: Tensor) -> None:
        """Add to each entry. Entries that occur twice get both; -inf may meet -inf, and stays."""
        logits.index_put_((self.where[0], self.where[1]), values, accumulate=True)


def flatten(lists: Sequence[IdList | None], rows: IntArray, index: IntArray, device: torch.device) -> Entries:
    """The id lists of the rows of logits `index`, one behind the other."""
    chosen = [entry for row in rows[index] if (entry := lists[row]) is not None]
    logit = np.repeat(index, [len(entry.ids) for entry in chosen])
    where = np.stack((logit, np.concatenate([entry.ids for entry in chosen])))
    return Entries(upload(where, device), upload(np.concatenate([entry.values for entry in chosen]), device))


@dataclass(slots=True)
class AllowedIds:
    """Every id that is not allowed becomes -inf; allowed ones keep their logits."""

    states: RowStates
    feature: int = Feature.ALLOWED_IDS
    _cache: Cached[Entries] = field(default_factory=Cached)

    def apply(self, logits: Tensor, batch: SampleBatch, index: IntArray) -> None:
        entries = self._cache.get(self.states, batch, lambda: self._entries(batch, index, logits.device))
        line, ids = entries.where[0], entries.where[1]  # line: place in `index`
        chosen = upload(index, logits.device)
        kept = logits[chosen[line], ids]
        logits.index_fill_(0, chosen, NEG_INF)
        logits[chosen[line], ids] = kept

    def _entries(self, batch: SampleBatch, index: IntArray, device: torch.device) -> Entries:
        return flatten(self.states.allowed, batch.rows_np[index], np.arange(len(index)), device)


@dataclass(slots=True)
class LogitBias:
    """Adds the request's bias to the logits of its ids."""

    states: RowStates
    feature: int = Feature.LOGIT_BIAS
    _cache: Cached[Entries] = field(default_factory=Cached)

    def apply(self, logits: Tensor, batch: SampleBatch, index: IntArray) -> None:
        entries = self._cache.get(self.states, batch, lambda: flatten(self.states.bias, batch.rows_np, index, logits.device))
        entries.add_to(logits, entries.values)


@dataclass(slots=True)
class MinTokens:
    """No token that would end the output may stand among its first `min_tokens`."""

    states: RowStates
    feature: int = Feature.MIN_TOKENS
    _cache: Cached[Entries] = field(default_factory=Cached)

    def apply(self, logits: Tensor, batch: SampleBatch, index: IntArray) -> None:
        entries = self._cache.get(self.states, batch, lambda: flatten(self.states.stops, batch.rows_np, index, logits.device))
        first_free = self.states.column("num_prompt_tokens") + self.states.column("min_tokens")  # [R]
        too_early = batch.positions + 1 < first_free[batch.rows]  # [L]
        entries.add_to(logits, torch.where(too_early[entries.where[0]], NEG_INF, entries.values))
