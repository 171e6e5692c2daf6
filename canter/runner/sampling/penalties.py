"""Presence, frequency and repetition penalties, and the token counts that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from canter.kernels.reference.sampling import IN_PROMPT
from canter.runner.sampling.rows import IntArray, upload
from canter.runner.sampling.states import Feature, RowStates, SampleBatch


@dataclass(slots=True)
class Penalties:
    """Presence and frequency count the output only, repetition the prompt too; drafts before a logit count as output.

    Repetition first: a positive logit is divided, another multiplied; then frequency x count and presence are
    subtracted. `token_counts [R, V]` int32 exists once some request uses a penalty: `IN_PROMPT` says that a token occurs in
    the prompt, the bits below count it in the output.
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
        values = [self.states.column(name)[rows] for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")]
        drafts = _drafts_before(batch, index, self.states.vocab_size)
        self.states.ops.penalize(logits, upload(index, logits.device), rows, self.token_counts, *values, *drafts)


def _drafts_before(batch: SampleBatch, index: IntArray, vocab_size: int) -> tuple[Tensor, Tensor]:
    """For each logit and each distance back: the draft's id, int64, and 1 where there is one that counts, int32: [n, D].

    The draft d places before a logit's end is the input of the logit d places before it: the input of the request's
    first logit is no draft, it is counted already.
    """
    at = upload(index, batch.positions.device).unsqueeze(1)
    distance = torch.arange(batch.max_drafts, device=at.device)
    if batch.input_ids is None:
        empty = at.expand(-1, 0)
        return empty, empty.to(torch.int32)
    ids = batch.input_ids[(at - distance).clamp_(min=0)].to(torch.int64)
    counts = (batch.drafts_before()[at] > distance) & (ids >= 0) & (ids < vocab_size)
    return ids.clamp(0, vocab_size - 1), counts.to(torch.int32)
