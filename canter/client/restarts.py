"""How often and how soon an engine that has died is started again."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 600.0
FIRST_DELAY = 1.0
LONGEST_DELAY = 30.0


class RestartPolicy:
    """At most `max_restarts` within `window` seconds: the first at once, the next after `delay` seconds, each later one after twice
    as many as the one before."""

    def __init__(self, max_restarts: int, window: float = WINDOW_SECONDS, delay: float = FIRST_DELAY) -> None:
        self.max_restarts = max_restarts
        self.window = window
        self._delay = delay
        self._times: deque[float] = deque()

    @property
    def num_recent(self) -> int:
        """Restarts within the window, as of the last `next_delay`."""
        return len(self._times)

    def next_delay(self, now: float) -> float | None:
        """Count a restart and tell the seconds to wait before it; None when there have been too many."""
        while self._times and now - self._times[0] > self.window:
            self._times.popleft()
        if len(self._times) >= self.max_restarts:
            return None
        self._times.append(now)
        return 0.0 if len(self._times) == 1 else min(LONGEST_DELAY, self._delay * 2.0 ** (len(self._times) - 2))
