"""Beam search over next-token log-probabilities: pure bookkeeping. `LLM` and the server ask the engine for the numbers.

Definitions are vLLM's: a beam's score is its summed log-probability over `num_tokens ** length_penalty`, where the
count takes in the prompt and leaves out a final EOS; every EOS among a beam's candidates completes a sequence; the
search runs for `max_tokens` steps, and completed and live beams compete at the end. Under `ignore_eos` EOS is a token
like any other, also in the count.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from canter.client.outputs import RequestOutput
from canter.core.errors import InvalidRequestError
from canter.core.messages import FINISH_LENGTH, FINISH_STOP
from canter.core.sampling_params import OutputKind, SamplingParams

MAX_LENGTH_PENALTY = 10.0
"""A length to its power, or to that of its negative, stays within the range of a float."""


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How to search; names and defaults are vLLM's. Raises `InvalidRequestError`."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidRequestError(f"{name} must be an integer of at least 1, got {value!r}.", name)
        penalty = self.length_penalty
        is_number = isinstance(penalty, (int, float)) and not isinstance(penalty, bool) and math.isfinite(penalty)
        if not is_number or abs(penalty) > MAX_LENGTH_PENALTY:
            raise InvalidRequestError(
                f"length_penalty must be a number between {-MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}, got {penalty!r}.",
                "length_penalty",
            )
        if self.temperature != 0:
            raise InvalidRequestError(
                f"temperature must be 0 in a beam search, got {self.temperature!r}: beams are ranked by the model's own log-probabilities.",
                "temperature",
            )


@dataclass(frozen=True)
class BeamSearchSequence:
    """A sequence that the search found. `tokens` begin with the prompt's; `text` is the output's alone."""

    tokens: list[int]
    cum_logprob: float
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class BeamSearchOutput:
    """The best `beam_width` sequences of a prompt, best first."""

    sequences: list[BeamSearchSequence]


def question(beam_width: int, vocab_size: int) -> SamplingParams:
    """What to ask the engine for each live beam and step: one token, and the logprobs of those that may follow."""
    return SamplingParams(
        temperature=0.0, max_tokens=1, logprobs=min(2 * beam_width, vocab_size), detokenize=False, output_kind=OutputKind.FINAL_ONLY
    )


def candidates(answer: RequestOutput, beam_width: int) -> dict[int, float]:
    """The likeliest next tokens that the answer to a `question` tells of, twice as many as beams."""
    positions = answer.outputs[0].logprobs or []
    if not positions:
        return {}
    return {token_id: entry.logprob for token_id, entry in itertools.islice(positions[0].items(), 2 * beam_width)}


def score(sequence: BeamSearchSequence, eos_token_ids: frozenset[int], length_penalty: float) -> float:
    """What sequences are ranked by: higher is better."""
    length = len(sequence.tokens)
    if sequence.tokens[-1] in eos_token_ids:
        length -= 1
    # A prompt of one token that ends in EOS at once has no length to divide by.
    divisor: float = max(length, 1) ** length_penalty
    return sequence.cum_logprob / divisor


@dataclass
class BeamSearch:
    """The search for one prompt: beams still alive, and the best sequences that reached EOS."""

    prompt_token_ids: Sequence[int]
    params: BeamSearchParams
    eos_token_ids: frozenset[int]
    beams: list[BeamSearchSequence] = field(init=False)
    completed: list[BeamSearchSequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.params.ignore_eos:
            self.eos_token_ids = frozenset()
        self.beams = [BeamSearchSequence(list(self.prompt_token_ids), 0.0)]

    def advance(self, options: Sequence[Mapping[int, float]]) -> None:
        """Extend each live beam by its candidates (token id -> log-probability) and keep the best `beam_width`."""
        completed: list[BeamSearchSequence] = []
        extended: list[tuple[float, BeamSearchSequence, int]] = []
        for beam, following in zip(self.beams, options, strict=True):
            for token_id, logprob in following.items():
                total = beam.cum_logprob + logprob
                if token_id in self.eos_token_ids:
                    tokens = [*beam.tokens, token_id] if self.params.include_stop_str_in_output else beam.tokens
                    completed.append(BeamSearchSequence(tokens, total, finish_reason=FINISH_STOP, stop_reason=token_id))
                else:
                    extended.append((total, beam, token_id))
        # Those that go on are of one length, so their sums rank them; only the few that are kept get lists of their own.
        best = heapq.nlargest(self.params.beam_width, extended, key=lambda candidate: candidate[0])
        self.beams = [BeamSearchSequence([*beam.tokens, token_id], total) for total, beam, token_id in best]
        self.completed = self._best(itertools.chain(self.completed, completed))

    def result(self, cut_reason: str = FINISH_LENGTH) -> list[BeamSearchSequence]:
        """The best sequences, completed or cut off, by length if nothing else."""
        cut = [BeamSearchSequence(beam.tokens, beam.cum_logprob, finish_reason=cut_reason) for beam in self.beams]
        return self._best(itertools.chain(self.completed, cut))

    def _best(self, sequences: Iterable[BeamSearchSequence]) -> list[BeamSearchSequence]:
        rank = self.params.length_penalty
        return heapq.nlargest(self.params.beam_width, sequences, key=lambda s: score(s, self.eos_token_ids, rank))
