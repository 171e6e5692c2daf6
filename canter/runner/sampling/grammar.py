"""Structured outputs: of each logit, only tokens that the request's grammar allows next keep their value.

The host walks the grammars, on a thread of its own: the tokens of one step are taken and the masks of the next are filled while the
device runs the model. What a mask holds follows from the request alone: its grammar, its stop tokens, its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from canter.core.errors import InvalidRequestError
from canter.core.grammar import Grammars, MaskArray, mask_width
from canter.core.plan import RowError
from canter.core.sampling_params import SamplingParams
from canter.core.structured_outputs import PARAM
from canter.runner.sampling.bound_output import BoundOutput, BoundOutputs, Phase
from canter.runner.sampling.rows import IntArray, upload
from canter.runner.sampling.states import Feature, RowStates, SampleBatch

Told = Callable[[], tuple[Tensor, Tensor]]
"""A step's tokens on the host: [S, W], of which the first [S] count. Waits for them."""


@dataclass(slots=True)
class GrammarMasks:
    """The stage of the pipeline, and the outputs that it makes masks for."""

    states: RowStates
    grammars: Grammars | None = None
    feature: int = Feature.GRAMMAR
    _outputs: BoundOutputs = field(init=False)
    _rows: dict[int, BoundOutput] = field(default_factory=dict)
    _told: list[tuple[list[tuple[int, BoundOutput]], Told]] = field(default_factory=list)
    _job: Future[MaskArray] | None = None
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "canter-masks"))

    def __post_init__(self) -> None:
        self._outputs = BoundOutputs(self.grammars, self.states.vocab_size)

    def add_row(self, row: int, request_id: str, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """A request takes a row. Exact for one that comes back with output."""
        self._settle()
        self._take_told()
        self._rows[row] = self._outputs.add(request_id, params, token_ids, num_prompt_tokens)

    def remove_row(self, row: int) -> None:
        """The row's request has finished or was preempted."""
        self._rows.pop(row, None)

    def forget(self, request_id: str) -> None:
        """A request has finished."""
        self._outputs.forget(request_id)

    def record(self, rows_np: IntArray, told: Told) -> None:
        """Take note of a step's new tokens, in the order of distinct table rows."""
        lines = [(line, self._rows[row]) for line, row in enumerate(rows_np.tolist()) if row in self._rows]
        if lines:
            self._told.append((lines, told))

    def prepare(self, batch: SampleBatch) -> None:
        """Begin with the masks of a batch whose logits are yet to be computed."""
        self._settle()
        index = np.flatnonzero(self.states.features[batch.rows_np] & self.feature)
        self._job = self._pool.submit(self._masks, batch, index) if len(index) else None

    def apply(self, logits: Tensor, batch: SampleBatch, index: IntArray) -> None:
        if self._job is None:
            self.prepare(batch)
        job, self._job = self._job, None
        if job is not None:
            masks = upload(job.result(), logits.device)
            self.states.ops.mask_tokens(logits, upload(index, logits.device), masks)

    def errors(self, batch: SampleBatch) -> dict[int, RowError]:
        """Of the batch's logits those whose request has failed, and why."""
        found: dict[int, RowError] = {}
        for line, row in enumerate(batch.rows_np.tolist()):
            output = self._rows.get(row)
            if output is not None and output.error is not None:
                found[line] = output.error
        return found

    def shutdown(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _settle(self) -> None:
        """Wait for the masks of a batch that was never sampled from, as its forward failed."""
        job, self._job = self._job, None
        if job is not None:
            job.exception()

    def _take_told(self) -> None:
        told, self._told = self._told, []
        for lines, tokens in told:
            token_ids, counts = tokens()
            for line, output in lines:
                output.take(token_ids[line, : int(counts[line])].tolist())
                if output.progress.phase is Phase.LOST and output.error is None:
                    fault = output.matcher.error
                    output.error = RowError("The output has left its grammar.") if fault is None else _fault(fault)

    def _masks(self, batch: SampleBatch, index: IntArray) -> MaskArray:
        """The masks of logits `index` of a batch: [N, W]."""
        self._take_told()
        masks = np.empty((len(index), mask_width(self.states.vocab_size)), np.int32)
        rows = batch.rows_np[index].tolist()
        drafts = [0] * len(rows) if batch.local_pos_np is None else batch.local_pos_np[index].tolist()
        outputs = [self._rows[row] for row in rows]
        if not any(drafts):
            self._fill(list(enumerate(outputs)), masks)
            return masks
        inputs = None if batch.input_ids is None else batch.input_ids.tolist()
        start = 0
        while start < len(rows):
            stop = start + 1
            while stop < len(rows) and drafts[stop]:
                stop += 1
            tokens = [] if inputs is None else [inputs[line] for line in index[start + 1 : stop].tolist()]
            self._fill_ahead(outputs[start], tokens, masks[start:stop])
            start = stop
        return masks

    def _fill(self, outputs: list[tuple[int, BoundOutput]], masks: MaskArray) -> None:
        """The masks of outputs where they stand, each in its line."""
        outputs = [
            (line, output) for line, output in outputs if not (output.fill_forced(masks[line]) or output.fill_within_marker(masks[line]))
        ]
        bound = [(line, output) for line, output in outputs if output.is_bound]
        if self.grammars is not None and bound:
            self.grammars.fill([(output.matcher, line) for line, output in bound], masks)
        for line, output in outputs:
            if output.is_bound and (fault := output.matcher.error) is not None:
                output.error = _fault(fault)
                output.progress.phase = Phase.LOST
            if output.is_bound:
                output.finish_mask(masks[line])
            else:
                output.free_mask(masks[line])

    def _fill_ahead(self, output: BoundOutput, drafts: list[int], masks: MaskArray) -> None:
        """The masks of an output where it stands and after each draft, [1 + D, W]; the output stays where it is."""
        now = replace(output.progress)
        taken = 0
        for place in range(len(masks)):
            if place:
                taken += output.take([drafts[place - 1]])
            self._fill([(0, output)], masks[place : place + 1])
        if output.error is None:
            output.matcher.rollback(taken)
            output.progress = now


def _fault(fault: str) -> RowError:
    return RowError(f"{PARAM}: the grammar can't go on: {fault}", InvalidRequestError.__name__)
