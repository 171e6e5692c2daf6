"""Structured outputs: of each logit, only tokens that the request's grammar allows next keep their value.

The host walks the grammars, on a thread of its own: the tokens of one step are taken and the masks of the next are filled while the
device runs the model. What a mask holds follows from the request alone: its grammar, its stop tokens, its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
from torch import Tensor

from canter.core.errors import InvalidRequestError
from canter.core.grammar import Grammars, MaskArray, Matcher, mask_width
from canter.core.plan import RowError
from canter.core.sampling_params import SamplingParams
from canter.core.structured_outputs import StructuredOutputsParams
from canter.runner.sampling.rows import IntArray, upload
from canter.runner.sampling.states import Feature, RowStates, SampleBatch
from canter.runner.sampling.thinking import Markers, open_thought

NEAR_TOKENS = 6
"""A thought that ends so near to the prompt's end was put there to say that there is none."""

Told = Callable[[], tuple[Tensor, Tensor]]
"""A step's tokens on the host: [S, W], of which the first [S] count. Waits for them."""


class Phase(IntEnum):
    """Where an output stands: within a thought; at its very start, where a thought may begin; bound by its grammar; or ended, where
    whatever comes means nothing; or lost, by a token that its grammar does not allow."""

    THOUGHT = 0
    START = 1
    BOUND = 2
    OVER = 3
    LOST = 4


@dataclass(slots=True)
class Progress:
    """What of an output matters to its masks. `tail`: the last tokens of a thought."""

    phase: Phase
    num_tokens: int = 0
    tail: tuple[int, ...] = ()


@dataclass(slots=True)
class _Output:
    """A request's output. `ends`: the bits of `end_ids`, the tokens that end it."""

    matcher: Matcher
    wanted: StructuredOutputsParams
    min_tokens: int
    end_ids: frozenset[int]
    ends: MaskArray
    progress: Progress
    error: RowError | None = None

    def take(self, token_ids: Sequence[int]) -> int:
        """Move on by these tokens; returns how many of them the matcher took."""
        return sum(self._take(token_id) for token_id in token_ids)

    def _take(self, token_id: int) -> int:
        progress = self.progress
        progress.num_tokens += 1
        if progress.phase is Phase.START:
            progress.phase = Phase.THOUGHT if [token_id] == self.wanted.thought_start_ids else Phase.BOUND
            if progress.phase is Phase.THOUGHT:
                return 0
        if progress.phase >= Phase.OVER:
            return 0
        if token_id in self.end_ids:
            progress.phase = Phase.OVER
            return 0
        if progress.phase is Phase.THOUGHT:
            end = tuple(self.wanted.thought_end_ids)
            progress.tail = (*progress.tail, token_id)[-len(end) :]
            if progress.tail == end:
                progress.phase = Phase.BOUND
            return 0
        taken = self.matcher.accept([token_id])
        if not taken:
            progress.phase = Phase.LOST
        return taken

    @property
    def is_bound(self) -> bool:
        """Whether the grammar has a say in the next token."""
        return self.progress.phase in (Phase.START, Phase.BOUND)

    @property
    def is_early(self) -> bool:
        """Whether the next token must not end the output yet."""
        return self.progress.num_tokens < self.min_tokens

    def finish_mask(self, mask: MaskArray) -> None:
        """Make a filled mask say where the output may end, and where a thought may begin."""
        if self.matcher.may_end:
            mask |= self.ends
        if self.is_early and (mask & ~self.ends).any():
            mask &= ~self.ends
        if self.progress.phase is Phase.START:
            _set_bit(mask, self.wanted.thought_start_ids[0])

    def free_mask(self, mask: MaskArray) -> None:
        """The mask where no grammar holds."""
        mask.fill(-1)
        if self.is_early and self.progress.phase is Phase.THOUGHT:
            mask &= ~self.ends


@dataclass(slots=True)
class GrammarMasks:
    """The stage of the pipeline, and what it keeps of each request until `forget`: across preemptions, too."""

    states: RowStates
    grammars: Grammars | None = None
    feature: int = Feature.GRAMMAR
    _outputs: dict[str, _Output] = field(default_factory=dict)
    _rows: dict[int, _Output] = field(default_factory=dict)
    _told: list[tuple[list[tuple[int, _Output]], Told]] = field(default_factory=list)
    _job: Future[MaskArray] | None = None
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "canter-masks"))

    def add_row(self, row: int, request_id: str, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """A request takes a row. Exact for one that comes back with output."""
        self._settle()
        self._take_told()
        output = self._outputs.get(request_id)
        done = len(token_ids) - num_prompt_tokens
        if output is None or output.progress.num_tokens > done:
            output = self._outputs[request_id] = self._begin(params, token_ids[:num_prompt_tokens])
        output.take(token_ids[num_prompt_tokens + output.progress.num_tokens :])
        self._rows[row] = output

    def remove_row(self, row: int) -> None:
        """The row's request has finished or was preempted."""
        self._rows.pop(row, None)

    def forget(self, request_id: str) -> None:
        """A request has finished."""
        self._outputs.pop(request_id, None)

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

    def _begin(self, params: SamplingParams, prompt: Sequence[int]) -> _Output:
        wanted = params.structured_outputs
        if wanted is None or self.grammars is None:
            raise RuntimeError("a row without a grammar was added to the stage of grammars")
        matcher = self.grammars.get(wanted).matcher()
        ids = params.all_stop_token_ids | set(params.eos_token_ids)
        ends = np.zeros(mask_width(self.states.vocab_size), np.int32)
        for token_id in ids:
            if token_id < self.states.vocab_size:
                _set_bit(ends, token_id)
        return _Output(matcher, wanted, params.min_tokens, frozenset(ids), ends, Progress(_first_phase(wanted, prompt)))

    def _take_told(self) -> None:
        told, self._told = self._told, []
        for lines, tokens in told:
            token_ids, counts = tokens()
            for line, output in lines:
                output.take(token_ids[line, : int(counts[line])].tolist())
                if output.progress.phase is Phase.LOST and output.error is None:
                    output.error = RowError("The output has left its grammar.")

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

    def _fill(self, outputs: list[tuple[int, _Output]], masks: MaskArray) -> None:
        """The masks of outputs where they stand, each in its line."""
        bound = [(line, output) for line, output in outputs if output.is_bound]
        if self.grammars is not None and bound:
            self.grammars.fill([(output.matcher, line) for line, output in bound], masks)
        for line, output in outputs:
            if output.is_bound and (fault := output.matcher.error) is not None:
                output.error = RowError(f"structured_outputs: the grammar can't go on: {fault}", InvalidRequestError.__name__)
                output.progress.phase = Phase.LOST
            if output.is_bound:
                output.finish_mask(masks[line])
            else:
                output.free_mask(masks[line])

    def _fill_ahead(self, output: _Output, drafts: list[int], masks: MaskArray) -> None:
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


def _first_phase(wanted: StructuredOutputsParams, prompt: Sequence[int]) -> Phase:
    """Where an output begins."""
    start, end = wanted.thought_start_ids, wanted.thought_end_ids
    if not end:
        return Phase.BOUND
    is_open = wanted.in_thought
    if is_open is None:
        if not start:
            return Phase.BOUND if list(prompt[-len(end) :]) == end else Phase.THOUGHT
        tokens = np.asarray(prompt, np.int64)
        is_open = open_thought(tokens, Markers(tuple(start), tuple(end))) is not None
        if not is_open and _ends_near(tokens, end):
            return Phase.BOUND
    if is_open:
        return Phase.THOUGHT
    return Phase.START if len(start) == 1 else Phase.BOUND


def _ends_near(tokens: IntArray, marker: Sequence[int]) -> bool:
    near = tokens[-(NEAR_TOKENS + len(marker)) :].tolist()
    return any(near[at : at + len(marker)] == list(marker) for at in range(len(near)))


def _set_bit(mask: MaskArray, token_id: int) -> None:
    word = mask[token_id // 32 : token_id // 32 + 1].view(np.uint32)
    word |= np.uint32(1 << token_id % 32)
