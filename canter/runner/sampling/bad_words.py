"""Bad words: token sequences that a request's output must not contain."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from canter.runner.sampling.processors import NEG_INF
from canter.runner.sampling.rows import IntArray, upload
from canter.runner.sampling.states import BadWords as RowWords
from canter.runner.sampling.states import Cached, Feature, RowStates, SampleBatch


@dataclass(frozen=True, slots=True)
class WordTable:
    """K words, each for one logit: `logits [K]`, `last [K]`, `prefixes [K, M]` right-aligned, and what is known of each place of
    a prefix: `ignored [K, M]` (it holds nothing), `back [M]` (tokens between it and the drawn one), `rows [K, 1]`,
    `first_output [K, 1]` and `num_drafts [K, 1]` of its logit."""

    logits: Tensor
    last: Tensor
    prefixes: Tensor
    ignored: Tensor
    back: Tensor
    rows: Tensor
    first_output: Tensor
    num_drafts: Tensor


@dataclass(slots=True)
class BadWords:
    """Where the output, drafts before the logit included, ends in all but the last id of a word, that id becomes -inf."""

    states: RowStates
    feature: int = Feature.BAD_WORDS
    _cache: Cached[WordTable] = field(default_factory=Cached)

    def apply(self, logits: Tensor, batch: SampleBatch, index: IntArray) -> None:
        table = self._cache.get(self.states, batch, lambda: _word_table(self.states, batch, index, logits.device))
        complete = ((self._history(batch, table) == table.prefixes) | table.ignored).all(1)
        self.states.ops.add_to_tokens(logits, table.logits, table.last, torch.where(complete, NEG_INF, 0.0))

    def _history(self, batch: SampleBatch, table: WordTable) -> Tensor:
        """The last M output tokens before each word's logit, newest last; -2 before the output's start: [K, M]."""
        at = (batch.total_len[table.rows] + (table.num_drafts - 1)) - table.back  # index among the row's tokens
        known = batch.all_token_ids[table.rows, at.clamp(0, batch.all_token_ids.shape[1] - 1)].to(torch.int64)
        if batch.max_drafts and batch.input_ids is not None:
            drafts = batch.input_ids[(table.logits.unsqueeze(1) - table.back).clamp_(min=0)].to(torch.int64)
            known = torch.where(table.back < table.num_drafts, drafts, known)
        return torch.where(at >= table.first_output, known, -2)


def _word_table(states: RowStates, batch: SampleBatch, index: IntArray, device: torch.device) -> WordTable:
    words: list[RowWords] = [entry for row in batch.rows_np[index] if (entry := states.bad_words[row]) is not None]
    width = max(entry.prefixes.shape[1] for entry in words)
    prefixes = np.concatenate([np.pad(w.prefixes, ((0, 0), (width - w.prefixes.shape[1], 0)), constant_values=-1) for w in words])
    lengths = np.concatenate([entry.lengths for entry in words])
    logits = upload(np.repeat(index, [len(entry.last) for entry in words]), device)
    rows = batch.rows[logits].unsqueeze(1)
    return WordTable(
        logits=logits,
        last=upload(np.concatenate([entry.last for entry in words]), device),
        prefixes=upload(prefixes, device),
        ignored=upload(np.arange(width) < width - lengths[:, None], device),
        back=torch.arange(width - 1, -1, -1, device=device),
        rows=rows,
        first_output=states.column("num_prompt_tokens")[rows],
        num_drafts=batch.drafts_before()[logits].unsqueeze(1),
    )
