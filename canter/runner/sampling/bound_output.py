"""One output and the grammar that it obeys: where it stands, and what that lets it go on with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from canter.core.grammar import Grammars, MaskArray, Matcher, mask_width
from canter.core.plan import RowError
from canter.core.sampling_params import SamplingParams
from canter.core.structured_outputs import StructuredOutputsParams
from canter.runner.sampling.rows import IntArray
from canter.runner.sampling.thinking import Markers, open_thought

NEAR_TOKENS = 6
"""A thought that ends so near to the prompt's end was put there to say that there is none."""


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
    """What of an output matters to its masks. `tail`: the last tokens of a thought. `run[place:]`: tokens that the grammar is known to
    force next."""

    phase: Phase
    num_tokens: int = 0
    tail: tuple[int, ...] = ()
    run: Sequence[int] = ()
    place: int = 0


@dataclass(slots=True)
class BoundOutput:
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
        if progress.place < len(progress.run) and progress.run[progress.place] == token_id:
            progress.place += 1
        else:
            progress.run, progress.place = (), 0
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

    def forced(self, most: int = 1) -> Sequence[int]:
        """The tokens that must come next, the first `most` of them: of each the mask would hold no other.

        The grammar is asked once for each run, for it looks at all of it every time, and a text that it forces may be long.
        """
        progress = self.progress
        if progress.phase is not Phase.BOUND:
            return ()
        if progress.place == len(progress.run):
            progress.run, progress.place = () if self.matcher.may_end else self.matcher.forced(), 0
        return progress.run[progress.place : progress.place + most]

    def fill_forced(self, mask: MaskArray) -> bool:
        """Write the mask of the one token that must come next; False, and nothing is written, where there is none."""
        forced = self.forced()
        if forced:
            mask.fill(0)
            _set_bit(mask, forced[0])
        return bool(forced)

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
class BoundOutputs:
    """The outputs of all requests that have a grammar, each from its request's first row until `forget`: across preemptions, too."""

    grammars: Grammars | None
    vocab_size: int
    _outputs: dict[str, BoundOutput] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._outputs)

    def get(self, request_id: str) -> BoundOutput | None:
        return self._outputs.get(request_id)

    def add(self, request_id: str, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> BoundOutput:
        """A request takes a row. Exact for one that comes back with output."""
        output = self._outputs.get(request_id)
        done = len(token_ids) - num_prompt_tokens
        if output is None or output.progress.num_tokens > done:
            output = self._outputs[request_id] = self._begin(params, token_ids[:num_prompt_tokens])
        output.take(token_ids[num_prompt_tokens + output.progress.num_tokens :])
        return output

    def forget(self, request_id: str) -> None:
        """A request has finished. Unknown ids are ignored."""
        self._outputs.pop(request_id, None)

    def _begin(self, params: SamplingParams, prompt: Sequence[int]) -> BoundOutput:
        wanted = params.structured_outputs
        if wanted is None or self.grammars is None:
            raise RuntimeError("a request without a grammar was taken for one that has one")
        matcher = self.grammars.get(wanted).matcher()
        ids = params.all_stop_token_ids | set(params.eos_token_ids)
        ends = np.zeros(mask_width(self.vocab_size), np.int32)
        for token_id in ids:
            if token_id < self.vocab_size:
                _set_bit(ends, token_id)
        return BoundOutput(matcher, wanted, params.min_tokens, frozenset(ids), ends, Progress(_first_phase(wanted, prompt)))


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
