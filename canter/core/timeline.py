"""What the engine's threads did when, for people: a trace in Chrome's format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from canter.core.errors import EngineError

T = TypeVar("T")

MAX_EVENTS = 200_000
"""A recording that nobody ends must not fill the memory: it stops here, and what it has is kept."""

_Parts = tuple[float, int, Sequence[tuple[str, Mapping[str, Any]]], Sequence[float]]
"""When they began, in microseconds, their thread, name and details of each, the seconds of each."""


class Timeline:
    """Records spans between `start` and `stop`; otherwise costs next to nothing.

    Spans may come from several threads: appending to a list is one step of the interpreter.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._path: str | None = None
        self._events: list[dict[str, Any]] = []
        self._parts: list[_Parts] = []
        self._num_events = 0
        self._threads: dict[int, str] = {}
        self._steps_to_skip = 0
        self._steps_left: int | None = None

    def start(self, path: str, skip_steps: int = 0, max_steps: int = 0) -> bool:
        """Record to a file from now on, or after some steps, and for at most so many (0: until `stop`). False when it records already.

        Raises `EngineError` for a file that can't be written.
        """
        if self._path is not None:
            return False
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "x", encoding="utf-8"):  # an error now, not after the recording
                pass
        except OSError as error:
            raise EngineError(f"The trace can't be written: {error.strerror}.") from None
        self._path, self._events, self._parts, self._threads, self._num_events = path, [], [], {}, 0
        self._steps_to_skip, self._steps_left = skip_steps, max_steps or None
        self.is_on = skip_steps == 0
        return True

    def stop(self) -> str | None:
        """Write the trace; returns its path, or None when there is no recording."""
        path, self._path, self.is_on = self._path, None, False
        if path is None:
            return None
        process = os.getpid()
        names = [
            {"name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
            for thread, name in self._threads.items()
        ]
        events, self._events = [*self._events, *_spans_of(self._parts)], []
        self._parts = []
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": [*names, *events], "displayTimeUnit": "ms"}, file)
        return path

    def next_step(self) -> None:
        """Count a step of the engine, about to begin."""
        if self._path is None:
            return
        if self._steps_to_skip:
            self._steps_to_skip -= 1
            return
        if self._steps_left is not None:
            self._steps_left -= 1
        self.is_on = self._steps_left is None or self._steps_left >= 0

    def around(self, name: str, work: Callable[[], T], **details: Any) -> Callable[[], T]:
        """`work`, recorded when it runs. Without a recording it is `work` itself."""
        if not self.is_on:
            return work

        def recorded() -> T:
            began = time.perf_counter_ns()
            try:
                return work()
            finally:
                self._add(name, began, details)

        return recorded

    def add_parts(self, parts: Sequence[tuple[str, Mapping[str, Any]]], seconds: Sequence[float]) -> None:
        """Spans, of a name and details each, that followed one another on this thread and have just ended.

        They are kept as they come, and become events when the trace is written: a step has hundreds of them.
        """
        if not self.is_on or self._num_events + len(parts) > MAX_EVENTS:
            return
        self._num_events += len(parts)
        self._parts.append((time.perf_counter_ns() / 1000 - sum(seconds) * 1e6, self._thread(), parts, seconds))

    def count(self, name: str, **values: float) -> None:
        """Values as of now, drawn as a curve."""
        if self.is_on:
            self._append({"name": name, "ph": "C", "ts": time.perf_counter_ns() / 1000, "pid": os.getpid(), "args": values})

    def _add(self, name: str, began: int, details: dict[str, Any]) -> None:
        took = (time.perf_counter_ns() - began) / 1000
        self._append(_span(name, began / 1000, took, self._thread(), details))

    def _thread(self) -> int:
        thread = threading.current_thread()
        ident = thread.native_id or 0
        self._threads.setdefault(ident, thread.name)
        return ident

    def _append(self, event: dict[str, Any]) -> None:
        if self._num_events < MAX_EVENTS:
            self._num_events += 1
            self._events.append(event)


def _span(name: str, began: float, took: float, thread: int, details: Mapping[str, Any]) -> dict[str, Any]:
    """An event of microseconds."""
    return {"name": name, "ph": "X", "ts": began, "dur": took, "pid": os.getpid(), "tid": thread, "args": details}


def _spans_of(runs: Iterable[_Parts]) -> Iterator[dict[str, Any]]:
    for began, thread, parts, seconds in runs:
        for (name, details), second in zip(parts, seconds, strict=True):
            yield _span(name, began, second * 1e6, thread, details)
            began += second * 1e6
