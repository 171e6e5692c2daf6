"""Bad words: token sequences that a request's output must not contain."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from canter.runner.sampling.rows import IntArray, upload
from canter.runner.sampling.states import BadWords as RowWords
from canter.runner.sampling.states import Cached, Feature, RowStates, SampleBatch


@dataclass(slots=True)
class BadWords:
    """Where the output, drafts before the logit included, ends in all but the last id of a word, that id becomes -inf."""

    states: RowStates
    feature: int = Feature.BAD_WORDS
    _cache: Cached[tuple[Tensor, ...]] = field(default_factory=Cached)

    def apply(self, logits: Tensor, batch: SampleBatch, index: IntArray) -> None:
        words = self._cache.get(self.states, batch, lambda: self._words(batch, index))
        inputs = batch.input_ids if batch.max_drafts else None
        self.states.ops.forbid_words(logits, *words, batch.all_token_ids, batch.total_len, inputs)

    def _words(self, batch: SampleBatch, index: IntArray) -> tuple[Tensor, ...]:
        """Each row's words for each of its logits: arguments `lines` to `drafts` of the op `forbid_words`."""
        words: list[RowWords] = [entry for row in batch.rows_np[index] if (entry := self.states.bad_words[row]) is not None]
        width = max(entry.prefixes.shape[1] for entry in words)
        prefixes = [np.pad(entry.prefixes, ((0, 0), (width - entry.prefixes.shape[1], 0)), constant_values=-1) for entry in words]
        lines = np.repeat(index, [len(entry.last) for entry in words])
        rows = batch.rows_np[lines]
        columns = (
            lines,
            np.concatenate([entry.last for entry in words]),
            np.concatenate(prefixes),
            np.concatenate([entry.lengths for entry in words]),
            rows,
            self.states.columns["num_prompt_tokens"].host[rows],
            np.zeros_like(lines) if batch.local_pos_np is None else batch.local_pos_np[lines].astype(np.int64),
        )
        return tuple(upload(column, self.states.device) for column in columns)
