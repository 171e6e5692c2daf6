"""How far a batch is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from tqdm.std import tqdm

SECONDS = 10.0


class Progress:
    """Counts lines. `total` None: how many there are is not known."""

    def __init__(self, total: int | None, done: int, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.answered = 0
        self.failed = 0
        self._total = total
        self._done = done
        self._out = out
        self._clock = clock
        self._started = self._told = clock()
        self._bar: tqdm[object] | None = None
        if out.isatty():
            self._bar = tqdm(total=total, initial=done, unit="line", file=out, dynamic_ncols=True)

    def add(self, failed: bool) -> None:
        """One more result is written."""
        self.answered += 1
        self.failed += failed
        if self._bar is not None:
            self._bar.update(1)
            if failed:
                self._bar.set_postfix_str(f"{self.failed:,} failed", refresh=False)
        elif self._clock() - self._told >= SECONDS:
            self._told = self._clock()
            print(self._line(), file=self._out, flush=True)

    def close(self, end: str) -> None:
        """Say how it ended."""
        if self._bar is not None:
            self._bar.close()
        print(f"{self._line()}; {end}", file=self._out, flush=True)

    def _line(self) -> str:
        seconds = max(self._clock() - self._started, 1e-9)
        of = "" if self._total is None else f" of {self._total:,}"
        return f"{self._done + self.answered:,}{of} lines, {self.failed:,} failed, {self.answered / seconds:,.1f} lines/s"
