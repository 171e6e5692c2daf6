"""How much of a long prompt a step may compute while others generate, so that these don't wait long for their next token.

A prompt is long when it needs more than one step: one that fits holds the others up once, for as long as `max_num_batched_tokens`
takes. So prompts that come in a crowd are computed as fast as ever.
"""

from __future__ import annotations

import sys
from collections import deque
from statistics import median

FIRST_TOKENS = 16
"""Prompt tokens of a step before anything has been measured."""
MOST_GROWTH = 2
NEW_SHARE = 0.3
"""Weight of the newest measurement of what a prompt token costs: that changes from step to step."""
NUM_QUIET = 32
"""Steps without prompt tokens that are remembered. Their median counts: now and then one is late for other reasons."""
NO_LIMIT = sys.maxsize


class PrefillPace:
    """Keeps a step that computes a part of long prompts within `slowdown` times one that computes none; 0 for no limit.

    Learns from the time that steps took: that of steps without prompt tokens, and what a prompt token costs on top, which
    grows with the length of its context. `step_tokens`: most tokens of a step.
    """

    def __init__(self, slowdown: float, step_tokens: int) -> None:
        self._slowdown = slowdown
        self._step_tokens = step_tokens
        self._quiet: deque[float] = deque(maxlen=NUM_QUIET)
        self._shortest: float | None = None
        self._token_seconds: float | None = None
        self._limit = FIRST_TOKENS
        self._left = NO_LIMIT

    @property
    def limit(self) -> int:
        """Most tokens of long prompts in a step in which others generate, at least 1."""
        return self._limit

    def begin(self, any_generate: bool) -> None:
        """A step is planned next; do any generate in it?"""
        self._left = self._limit if self._slowdown and any_generate else NO_LIMIT

    def is_long(self, num_uncached: int) -> bool:
        """Whether a prompt of which so many tokens are to be computed is held back."""
        return num_uncached > self._step_tokens

    def share(self, num_uncached: int) -> int:
        """Most tokens, 0 too, that such a prompt gets in the step being planned."""
        return self._left if self.is_long(num_uncached) else NO_LIMIT

    def first_share(self, num_uncached: int) -> int:
        """Most tokens of one that is to be admitted, at least 1: those behind it in the queue would else wait for another's end."""
        return max(1, self.share(num_uncached))

    def take(self, num_uncached: int, num_tokens: int) -> None:
        """Such a prompt gets so many tokens in the step being planned."""
        if self.is_long(num_uncached):
            self._left -= num_tokens

    def note(self, num_prompt_tokens: int, num_long_tokens: int, seconds: float) -> None:
        """A step in which others generated took so long, with so many prompt tokens, and so many of these of long prompts.

        One that computed short prompts too teaches nothing: their tokens cost less.
        """
        if num_prompt_tokens == 0:
            self._quiet.append(seconds)
        elif num_prompt_tokens == num_long_tokens:
            # Where none was without prompt tokens, the shortest comes next to it.
            self._shortest = seconds if self._shortest is None else min(self._shortest, seconds)
            quiet = median(self._quiet) if self._quiet else self._shortest
            new = max(0.0, seconds - quiet) / num_prompt_tokens
            known = new if self._token_seconds is None else self._token_seconds
            self._token_seconds = (1 - NEW_SHARE) * known + NEW_SHARE * new
            wanted = (self._slowdown - 1) * quiet / max(self._token_seconds, 1e-9)
            self._limit = max(1, int(min(wanted, MOST_GROWTH * self._limit)))
