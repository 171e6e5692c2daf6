"""Logits processors that were loaded by name, as one stage of the pipeline. One that raises fails a request, never a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from canter.core.errors import CanterError
from canter.core.logging import get_logger
from canter.core.plan import RowError
from canter.core.sampling_params import SamplingParams
from canter.logits_processors.interface import AddedRow, BatchUpdate, LogitsBatch, LogitsProcessor
from canter.runner.sampling.rows import IntArray, upload
from canter.runner.sampling.states import Feature, RowStates, SampleBatch

logger = get_logger(__name__)


@dataclass(slots=True)
class Plugins:
    """The loaded processors, in order, and which of them each row uses. `failed`: rows whose request must end, and why."""

    states: RowStates
    processors: Sequence[LogitsProcessor]
    feature: int = Feature.PLUGINS
    failed: dict[int, RowError] = field(default_factory=dict)
    _used: dict[int, list[LogitsProcessor]] = field(default_factory=dict)

    def add_row(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        """A request takes a row. Returns whether any processor applies to it."""
        self.failed.pop(row, None)
        used: list[LogitsProcessor] = []
        for processor in self.processors:
            try:
                if processor.applies_to(params) and not (params.is_greedy and processor.is_argmax_invariant()):
                    processor.update_state(BatchUpdate(added=[AddedRow(row, params, token_ids, num_prompt_tokens)]))
                    used.append(processor)
            except Exception as error:
                self._fail(row, processor, error)
        if used:
            self._used[row] = used
        return bool(used) or row in self.failed

    def remove_row(self, row: int) -> None:
        """The row's request has finished or was preempted."""
        for processor in self._used.pop(row, ()):
            try:
                processor.update_state(BatchUpdate(removed=[row]))
            except Exception:
                logger.exception("logits processor %s: row %d could not be removed", type(processor).__name__, row)

    def apply(self, logits: Tensor, batch: SampleBatch, index: IntArray) -> None:
        for processor in self.processors:
            rows = batch.rows_np[index].tolist()
            uses = [row not in self.failed and processor in self._used.get(row, ()) for row in rows]
            lines = index[uses]
            if len(lines) and not self._apply_to(processor, logits, batch, lines):
                for line in lines.tolist():
                    if int(batch.rows_np[line]) not in self.failed:  # by a draft before this one
                        self._apply_to(processor, logits, batch, np.array([line]))

    def errors(self, batch: SampleBatch) -> dict[int, RowError]:
        """Of the batch's logits those whose request has failed, and why."""
        if not self.failed:
            return {}
        return {line: self.failed[row] for line, row in enumerate(batch.rows_np.tolist()) if row in self.failed}

    def _apply_to(self, processor: LogitsProcessor, logits: Tensor, batch: SampleBatch, lines: IntArray) -> bool:
        """Let a processor change some rows, all or none. False when it raised for several: then it isn't known for whom."""
        where = upload(lines, logits.device)
        try:
            changed = processor.apply(logits[where], _logits_batch(self.states, batch, lines))
            if not isinstance(changed, Tensor) or changed.shape != (len(lines), logits.shape[1]):
                raise TypeError(f"apply must return logits of shape {(len(lines), logits.shape[1])}")
            logits[where] = changed.to(logits)
        except Exception as error:
            if len(lines) > 1:
                return False
            self._fail(int(batch.rows_np[lines[0]]), processor, error)
        return True

    def _fail(self, row: int, processor: LogitsProcessor, error: Exception) -> None:
        name = type(processor).__name__
        logger.error("logits processor %s failed on a request", name, exc_info=error)
        if isinstance(error, CanterError):
            self.failed[row] = RowError(str(error), type(error).__name__)
        else:
            self.failed[row] = RowError(f"The logits processor {name} failed on this request ({type(error).__name__}).")


def _logits_batch(states: RowStates, batch: SampleBatch, lines: IntArray) -> LogitsBatch:
    """On a GPU the lengths are waited for: a processor can't be told of tokens without."""
    rows = batch.rows_np[lines].tolist()
    lengths = batch.total_len[upload(batch.rows_np[lines], batch.total_len.device)].tolist()
    drafts = [0] * len(rows) if batch.local_pos_np is None else batch.local_pos_np[lines].tolist()
    tokens = []
    for line, row, length, num_drafts in zip(lines.tolist(), rows, lengths, drafts, strict=True):
        known = batch.all_token_ids[row, :length]
        if num_drafts and batch.input_ids is not None:
            known = torch.cat((known, batch.input_ids[line - num_drafts + 1 : line + 1].to(known.dtype)))
        tokens.append(known)
    prompt_lengths = states.columns["num_prompt_tokens"].host
    return LogitsBatch(rows, tokens, [int(prompt_lengths[row]) for row in rows])
