"""The engine's side of the worker of xgrammar: what it is asked, how long that may take, and who is to blame when nothing comes back."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from canter.core.errors import EngineError
from canter.core.grammar import mask_width
from canter.core.vocabulary import Vocabulary
from canter.structured.xgrammar_constraints import Job
from canter.structured.xgrammar_messages import (
    IS_COMPILING,
    MATCHER,
    MOVES,
    Compiled,
    Ready,
    Step,
    Tokens,
    Visited,
    memory_bytes,
    views,
)

WORKER_COMMAND = (sys.executable, "-m", "canter.structured.xgrammar_worker")
START_SECONDS = 120.0
COMPILE_SECONDS = 2.0
"""Longest that a compilation may take. The first one of a grammar holds no step up, but those behind a worker's end do."""
VISIT_SECONDS = 0.5
"""Longest that a step may be at one matcher: thousands of times what a mask takes."""
LOOK_SECONDS = 0.05


class WorkerLost(Exception):
    """Nothing came back. `culprit`: the matcher that was being worked on, or 0. `is_slow`: its time was up; else the worker has ended."""

    def __init__(self, culprit: int, is_slow: bool) -> None:
        super().__init__()
        self.culprit = culprit
        self.is_slow = is_slow


class Worker:
    """One fork: may be asked for a step by one thread, and for a compilation by another."""

    def __init__(self, number: int, steps: Connection, compilations: Connection, memory: mmap.mmap, width: int) -> None:
        self.number = number
        self._steps = steps
        self._compilations = compilations
        self._header, self.masks = views(memory, width)

    def step(self, step: Step) -> list[Visited]:
        """Raises `WorkerLost`."""
        seen, since = -1, 0.0

        def is_late() -> bool:
            nonlocal seen, since
            if int(self._header[MOVES]) != seen:
                seen, since = int(self._header[MOVES]), time.monotonic()
            return time.monotonic() - since > (COMPILE_SECONDS if self._header[IS_COMPILING] else VISIT_SECONDS)

        answer = self._ask(self._steps, step, is_late)
        return msgspec.msgpack.decode(answer, type=list[Visited])

    def compile(self, job: Job) -> Compiled:
        """Raises `WorkerLost`; its culprit means nothing."""
        start = time.monotonic()
        answer = self._ask(self._compilations, job, lambda: time.monotonic() - start > COMPILE_SECONDS)
        return msgspec.msgpack.decode(answer, type=Compiled)

    def _ask(self, connection: Connection, question: Any, is_late: Callable[[], bool]) -> bytes:
        try:
            connection.send_bytes(msgspec.msgpack.encode(question))
            while not connection.poll(LOOK_SECONDS):
                if is_late():
                    raise WorkerLost(int(self._header[MATCHER]), True)
            return connection.recv_bytes()
        except (EOFError, OSError):
            raise WorkerLost(int(self._header[MATCHER]), False) from None

    def close(self) -> None:
        self._steps.close()
        self._compilations.close()


class WorkerProcess:
    """The process that forks workers, and the worker that is to be asked now. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary, command: Sequence[str] = WORKER_COMMAND) -> None:
        self._command = tuple(command)
        self._tokens = _tokens(vocabulary)
        self._width = mask_width(vocabulary.size)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._worker: Worker | None = None
        self._number = 0
        self._is_closed = False

    def worker(self) -> Worker:
        """The worker; started where there is none. Raises `EngineError`."""
        with self._lock:
            return self._worker or self._fork()

    def replace(self, lost: Worker) -> bool:
        """End a worker and have another. False where another thread has done so already: then nobody who asked this one is to blame."""
        with self._lock:
            if self._worker is not lost:
                return False
            self._worker = None
            self._fork()
            lost.close()
            return True

    def shutdown(self) -> None:
        """End the processes. Nothing is started afterwards."""
        with self._lock:
            self._is_closed = True
            self._worker = None
            self._stop()

    def _fork(self) -> Worker:
        if self._is_closed:
            raise EngineError("The engine has been shut down.")
        if self._control is None:
            self._start()
        try:
            return self._ask_for_fork()
        except OSError:  # its parent has ended, too
            self._stop()
            self._start()
            return self._ask_for_fork()

    def _ask_for_fork(self) -> Worker:
        assert self._control is not None
        steps, other_steps = socket.socketpair()
        compilations, other_compilations = socket.socketpair()
        shared = os.memfd_create("canter-masks")
        os.ftruncate(shared, memory_bytes(self._width))
        memory = mmap.mmap(shared, memory_bytes(self._width))
        try:
            socket.send_fds(self._control, [b"f"], [other_steps.fileno(), other_compilations.fileno(), shared])
        finally:
            other_steps.close()
            other_compilations.close()
            os.close(shared)
        self._number += 1
        self._worker = Worker(self._number, Connection(steps.detach()), Connection(compilations.detach()), memory, self._width)
        return self._worker

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno())], stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=(theirs.fileno(),)
            )
        finally:
            theirs.close()
        self._control = ours
        connection = Connection(os.dup(ours.fileno()))
        try:
            connection.send_bytes(msgspec.msgpack.encode(self._tokens))
            if not connection.poll(START_SECONDS):
                raise EngineError(f"The worker of xgrammar did not start within {START_SECONDS:g} seconds.")
            ready = msgspec.msgpack.decode(connection.recv_bytes(), type=Ready)
            if ready.error:
                raise EngineError(f"xgrammar can't be loaded: {ready.error}")
        except (EOFError, OSError):
            self._stop()
            raise EngineError("The worker of xgrammar ended while it started.") from None
        except EngineError:
            self._stop()
            raise
        finally:
            connection.close()

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()  # its end makes the parent end its worker, and itself
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def _tokens(vocabulary: Vocabulary) -> Tokens:
    size = vocabulary.size
    texts = [bytes(text) for text in vocabulary.token_bytes[:size]]
    texts += [b""] * (size - len(texts))
    ends = [i for i in vocabulary.eos_token_ids if i < size] or [size - 1]
    for token_id in (*vocabulary.markers.values(), *ends):
        if token_id < size:
            texts[token_id] = b""
    return Tokens(size, texts, ends)
