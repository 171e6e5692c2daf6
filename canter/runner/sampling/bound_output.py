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
    """What of an output matters to its masks. `tail`: the last tokens of a thought, which `end` ends. `opening`: what an output has
    begun with that may become the marker of a thought, and that the matcher hasn't taken yet. `run[place:]`: tokens that the grammar is
    known to force next.
    """

    phase: Phase
    num_tokens: int = 0
    tail: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    opening: tuple[int, ...] = ()
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
            return self._begin(token_id)
        return self._go_on(token_id)

    def _begin(self, token_id: int) -> int:
        """Take a token at the start, where a thought may begin."""
        progress = self.progress
        opening = (*progress.opening, token_id)
        for start, end in thought_markers(self.wanted):
            if start[: len(opening)] == opening:
                progress.opening = opening
                if start == opening:
                    progress.phase, progress.end, progress.opening = Phase.THOUGHT, end, ()
                return 0
        before, progress.opening, progress.phase = progress.opening, (), Phase.BOUND
        taken = self.matcher.accept(before) if before else 0
        if taken < len(before):
            progress.phase = Phase.LOST
        return taken + self._go_on(token_id)

    def _go_on(self, token_id: int) -> int:
        progress = self.progress
        if progress.phase >= Phase.OVER:
            return 0
        if token_id in self.end_ids:
            progress.phase = Phase.OVER
            return 0
        if progress.phase is Phase.THOUGHT:
            progress.tail = (*progress.tail, token_id)[-len(progress.end) :]
            if progress.tail == progress.end:
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
            progress.run, progress.place = self.matcher.forced(), 0
        return progress.run[progress.place : progress.place + most]

    def fill_forced(self, mask: MaskArray) -> bool:
        """Write the mask of the one token that must come next; False, and nothing is written, where there is none."""
        forced = self.forced()
        if forced:
            mask.fill(0)
            _set_bit(mask, forced[0])
        return bool(forced)

    def fill_within_marker(self, mask: MaskArray) -> bool:
        """Write the mask where an output has begun with a part of a thought's marker; False, and nothing is written, elsewhere. What the
        grammar makes of that part is only looked at."""
        opening = self.progress.opening
        if not opening:
            return False
        taken = self.matcher.accept(opening)
        mask.fill(0)
        if taken == len(opening):
            self.matcher.fill(mask)
            self.finish_mask(mask)
        else:
            self._allow_markers(mask)
        self.matcher.rollback(taken)
        return True

    def finish_mask(self, mask: MaskArray) -> None:
        """Make a filled mask say where the output may end, and where a thought may begin."""
        if self.matcher.may_end:
            mask |= self.ends
        if self.is_early and (mask & ~self.ends).any():
            mask &= ~self.ends
        if self.progress.phase is Phase.START:
            self._allow_markers(mask)

    def _allow_markers(self, mask: MaskArray) -> None:
        opening = self.progress.opening
        for start, _ in thought_markers(self.wanted):
            if len(start) > len(opening) and start[: len(opening)] == opening:
                _set_bit(mask, start[len(opening)])

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
        return BoundOutput(matcher, wanted, params.min_tokens, frozenset(ids), ends, _first(wanted, prompt))


def thought_markers(wanted: StructuredOutputsParams) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """What a thought of the output may begin with, and what ends it then."""
    pairs = [(wanted.thought_start_ids, wanted.thought_end_ids), *wanted.other_thoughts]
    return [(tuple(start), tuple(end)) for start, end in pairs if end]


def _first(wanted: StructuredOutputsParams, prompt: Sequence[int]) -> Progress:
    """Where an output begins."""
    pairs = thought_markers(wanted)
    if not pairs:
        return Progress(Phase.BOUND)
    start, end = pairs[0]
    tokens = np.asarray(prompt, np.int64)
    opened = {pair: open_thought(tokens, Markers(*pair)) for pair in pairs if pair[0]}
    last = max(((place, pair[1]) for pair, place in opened.items() if place is not None), default=None)
    is_open = wanted.in_thought
    if is_open is None:
        if not start:
            return Progress(Phase.BOUND) if tuple(prompt[-len(end) :]) == end else Progress(Phase.THOUGHT, end=end)
        is_open = last is not None
        if not is_open and any(_ends_near(tokens, marker) for _, marker in pairs):
            return Progress(Phase.BOUND)
    if is_open:
        return Progress(Phase.THOUGHT, end=last[1] if last is not None else end)
    return Progress(Phase.START if start else Phase.BOUND)


def _ends_near(tokens: IntArray, marker: Sequence[int]) -> bool:
    near = tokens[-(NEAR_TOKENS + len(marker)) :].tolist()
    return any(near[at : at + len(marker)] == list(marker) for at in range(len(near)))


def _set_bit(mask: MaskArray, token_id: int) -> None:
    word = mask[token_id // 32 : token_id // 32 + 1].view(np.uint32)
    word |= np.uint32(1 << token_id % 32)
