"""Presence, frequency and repetition penalties, and the token counts that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from canter.runner.sampling.rows import IntArray, edit_rows, upload
from canter.runner.sampling.states import Feature, RowStates, SampleBatch

IN_PROMPT = 1 << 30
"""In `token_counts`: the token occurs in the prompt. The bits below count its occurrences in the output."""


@dataclass(slots=True)
class Penalties:
    """Presence and frequency count the output only, repetition the prompt too; drafts before a logit count as output.

    Repetition first: a positive logit is divided, another multiplied; then frequency x count and presence are
    subtracted. `token_counts [R, V]` int32 exists once some request uses a penalty.
    """

    states: RowStates
    feature: int = Feature.PENALTIES
    token_counts: Tensor | None = None

    def set_row(self, row: int, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Count a row's tokens anew; exact for a request that comes back with output."""
        states = self.states
        if self.token_counts is None:
            self.token_counts = torch.zeros(states.num_rows, states.vocab_size, dtype=torch.int32, device=states.device)
        tokens = np.asarray(token_ids, np.int64).reshape(-1)
        known = (tokens >= 0) & (tokens < states.vocab_size)
        is_prompt = np.arange(len(tokens)) < num_prompt_tokens
        counts = np.bincount(tokens[known & ~is_prompt], minlength=states.vocab_size).astype(np.int32)
        counts[np.unique(tokens[known & is_prompt])] += IN_PROMPT
        self.token_counts[row] = upload(counts, states.device)

    def record(self, rows: Tensor, token_ids: Tensor, num_sampled: Tensor) -> None:
        """Count new output: the first num_sampled [S] of token_ids [S, W], for the distinct table rows `rows` [S]."""
        if self.token_counts is None:
            return
        is_new = torch.arange(token_ids.shape[1], device=rows.device) < num_sampled.unsqueeze(1)
        at = (rows.unsqueeze(1).expand_as(token_ids), token_ids)
        self.token_counts.index_put_(at, is_new.to(torch.int32), accumulate=True)

    def apply(self, logits: Tensor, batch: SampleBatch, index: IntArray) -> None:
        if self.token_counts is None:
            raise RuntimeError("a row with penalties was not set up by set_row")
        rows = upload(batch.rows_np[index], logits.device)
        drafts = _drafts_before(batch, index, self.states.vocab_size)
        repetition, frequency, presence = (
            self._column(name, neutral, batch.rows_np[index], rows)
            for name, neutral in (("repetition_penalty", 1.0), ("frequency_penalty", 0.0), ("presence_penalty", 0.0))
        )
        for x, part in edit_rows(logits, index):
            counts = self.token_counts[rows[part]]  # [n, V]
            for ids, weights in drafts:
                counts.scatter_add_(1, ids[part], weights[part])
            if repetition is not None:
                _repel(x, counts, repetition[part])
            counts.bitwise_and_(IN_PROMPT - 1)
            if frequency is not None:
                x.sub_(counts.to(torch.float32).mul_(frequency[part]))
            if presence is not None:
                x.sub_(counts.clamp_(max=1).to(torch.float32).mul_(presence[part]))

    def _column(self, name: str, neutral: float, rows_np: IntArray, rows: Tensor) -> Tensor | None:
        """A penalty of each row, [n, 1]; None when no row has it."""
        if (self.states.columns[name].host[rows_np] == neutral).all():
            return None
        return self.states.column(name)[rows].unsqueeze(1)


def _repel(x: Tensor, counts: Tensor, repetition: Tensor) -> None:
    """Divide positive logits of tokens that occur, multiply others. x [n, V] in place; repetition [n, 1].

    Of the quotient and the product, the smaller is meant when the penalty is above 1 and the larger when it is below;
    arithmetic does that several times faster than selections by a condition.
    """
    occurs = counts.clamp(max=1).to(torch.float32)
    factor = occurs.mul(repetition).add_(occurs.neg_().add_(1.0))  # the penalty or 1, exactly
    side = torch.where(repetition >= 1.0, 1.0, -1.0)
    product = x.mul(factor).mul_(side)
    x.div_(factor).mul_(side)
    torch.minimum(x, product, out=product)
    torch.mul(product, side, out=x)


def _drafts_before(batch: SampleBatch, index: IntArray, vocab_size: int) -> list[tuple[Tensor, Tensor]]:
    """For each distance back: (draft ids [n, 1] int64, 1 where there is one that counts and 0 elsewhere [n, 1] int32).

    The draft d places before a logit's end is the input of the logit d places before it: the input of the request's
    first logit is no draft, it is counted already.
    """
    if batch.max_drafts == 0 or batch.input_ids is None:
        return []
    at = upload(index, batch.positions.device)
    num_before = batch.drafts_before()[at]
    found = []
    for distance in range(batch.max_drafts):
        ids = batch.input_ids[(at - distance).clamp_(min=0)].to(torch.int64)
        counts = (num_before > distance) & (ids >= 0) & (ids < vocab_size)
        found.append((ids.clamp(0, vocab_size - 1).unsqueeze(1), counts.to(torch.int32).unsqueeze(1)))
    return found
