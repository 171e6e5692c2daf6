"""How many prompt tokens a step may compute while others generate, so that these don't wait long for their next token."""

from __future__ import annotations

from collections import deque
from statistics import median

FIRST_TOKENS = 16
"""Prompt tokens of a step before anything has been measured."""
MOST_GROWTH = 2
NEW_SHARE = 0.3
"""Weight of the newest measurement of what a prompt token costs: that changes from step to step."""
NUM_QUIET = 32
"""Steps without prompt tokens that are remembered. Their median counts: now and then one is late for other reasons."""


class PrefillPace:
    """Keeps a step that computes prompt tokens within `slowdown` times one that computes none.

    Learns from the time that steps took: that of steps without prompt tokens, and what a prompt token costs on top, which
    grows with the length of its context.
    """

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._quiet: deque[float] = deque(maxlen=NUM_QUIET)
        self._token_seconds: float | None = None
        self._limit = FIRST_TOKENS

    @property
    def limit(self) -> int:
        """Most prompt tokens of the next step, at least 1."""
        return self._limit

    def note(self, num_prompt_tokens: int, seconds: float) -> None:
        """A step with so many prompt tokens, in which others generated, took so long."""
        if num_prompt_tokens == 0:
            self._quiet.append(seconds)
        elif self._quiet:
            quiet = median(self._quiet)
            new = max(0.0, seconds - quiet) / num_prompt_tokens
            known = new if self._token_seconds is None else self._token_seconds
            self._token_seconds = (1 - NEW_SHARE) * known + NEW_SHARE * new
            wanted = (self._slowdown - 1) * quiet / max(self._token_seconds, 1e-9)
            self._limit = max(1, int(min(wanted, MOST_GROWTH * self._limit)))
