"""The process that holds xgrammar and all of its grammars: `python -m canter.structured.xgrammar_worker FD`.

The library and the vocabulary take seconds to load. So the process that has loaded them does nothing else than to fork another, which does
the work and may be killed at any time; the next is there within milliseconds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Protocol

import msgspec
import numpy as np

from canter.core.grammar import MaskArray, mask_width
from canter.structured.xgrammar_constraints import MAX_WHITESPACE, Job
from canter.structured.xgrammar_messages import (
    IS_COMPILING,
    MATCHER,
    MOVES,
    Compiled,
    Ready,
    Step,
    Tokens,
    Visit,
    Visited,
    memory_bytes,
    views,
)

KEPT_BYTES = 1 << 30
"""Of compiled grammars that are kept for the next request that wants them."""
MORE_BYTES = 6 << 30
"""Address space that a worker may take beside what it begins with."""
TOKENS_A_MOVE = 1024
PR_SET_PDEATHSIG = 1


class Matcher(Protocol):
    """One output. `fill` writes a line of the shared masks."""

    @property
    def may_end(self) -> bool: ...

    def accept(self, token_id: int) -> bool: ...

    def rollback(self, count: int) -> None: ...

    def fill(self, masks: MaskArray, line: int) -> None: ...


class Library(Protocol):
    """What compiles. Raises whatever it likes for what it can't."""

    width: int

    def compile(self, job: Job) -> tuple[Any, int]:
        """A grammar, and the bytes that it takes."""
        ...

    def matcher(self, grammar: Any) -> Matcher: ...


class XGrammar:
    """xgrammar for one vocabulary."""

    def __init__(self, package: Any, tokens: Tokens) -> None:
        self._package = package
        self.width = mask_width(tokens.size)
        self._stops = tokens.eos_token_ids
        info = package.TokenizerInfo(tokens.token_bytes, package.VocabType.RAW, vocab_size=tokens.size, stop_token_ids=tokens.eos_token_ids)
        self._compiler = package.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        written = np.zeros(32 * self.width, np.uint8)
        written[[i for i, text in enumerate(tokens.token_bytes) if text]] = 1
        self._written = np.packbits(written, bitorder="little").view(np.int32)

    def compile(self, job: Job) -> tuple[Any, int]:
        grammar = self._compiled(job)
        return grammar, int(grammar.memory_size_bytes)

    def _compiled(self, job: Job) -> Any:
        if job.kind == "json":
            # In its strict mode an object or array is what its schema says, and no more.
            limit = MAX_WHITESPACE if job.any_whitespace else None
            return self._compiler.compile_json_schema(
                job.text,
                any_whitespace=job.any_whitespace,
                max_whitespace_cnt=limit,
                separators=None if job.any_whitespace else (",", ":"),
                strict_mode=True,
            )
        return self._compiler.compile_regex(job.text) if job.kind == "regex" else self._compiler.compile_grammar(job.text)

    def matcher(self, grammar: Any) -> XGrammarMatcher:
        return XGrammarMatcher(self._package.GrammarMatcher(grammar), self._written)


class XGrammarMatcher:
    """A matcher of xgrammar's that never writes a token that is no text, nor one that ends the output."""

    def __init__(self, inner: Any, written: MaskArray) -> None:
        self._inner = inner
        self._written = written

    def accept(self, token_id: int) -> bool:
        is_written = token_id // 32 < len(self._written) and bool(int(self._written[token_id // 32]) >> token_id % 32 & 1)
        return is_written and bool(self._inner.accept_token(token_id))

    def rollback(self, count: int) -> None:
        self._inner.rollback(count)

    def fill(self, masks: MaskArray, line: int) -> None:
        masks[line] = -1  # it leaves alone what allows every token
        self._inner.fill_next_token_bitmask(masks, line)
        masks[line] &= self._written

    @property
    def may_end(self) -> bool:
        return bool(self._inner.is_completed())


class _Worker:
    """Does the work of one fork."""

    def __init__(self, library: Library, memory: mmap.mmap) -> None:
        self._library = library
        self._header, self._masks = views(memory, library.width)
        self._lock = threading.Lock()
        self._grammars: OrderedDict[Job, tuple[Any, int]] = OrderedDict()
        self._num_bytes = 0
        self._matchers: dict[int, Matcher] = {}

    def run(self, steps: Connection, compilations: Connection) -> None:
        """Until the other side is gone."""
        threading.Thread(target=_answer, args=(compilations, Job, self.compile), daemon=True).start()
        _answer(steps, Step, self.step)

    def compile(self, job: Job) -> Compiled:
        """Compile, and see that something can be written at all."""
        try:
            matcher = self._library.matcher(self._grammar(job))
            mask = np.zeros((1, self._library.width), np.int32)
            matcher.fill(mask, 0)
        except Exception as error:  # the library's own
            return Compiled(_text(error))
        return Compiled("" if mask.any() or matcher.may_end else "no output can satisfy it")

    def step(self, step: Step) -> list[Visited]:
        for matcher in step.released:
            self._matchers.pop(matcher, None)
        done = []
        for visit in step.visits:
            self._header[MATCHER] = visit.matcher
            self._header[MOVES] += 1
            try:
                done.append(self._visit(visit))
            except Exception as error:  # the library's own
                done.append(Visited(0, False, _text(error)))
        self._header[MATCHER] = 0
        return done

    def _visit(self, visit: Visit) -> Visited:
        if visit.begin is not None:
            self._header[IS_COMPILING] = 1
            try:
                self._matchers[visit.matcher] = self._library.matcher(self._grammar(visit.begin))
            finally:
                self._header[IS_COMPILING] = 0
                self._header[MOVES] += 1
        start = time.thread_time()
        matcher = self._matchers[visit.matcher]
        if visit.rollback:
            matcher.rollback(visit.rollback)
        taken = 0
        for token_id in visit.token_ids:
            if not matcher.accept(token_id):
                break
            taken += 1
            if not taken % TOKENS_A_MOVE:
                self._header[MOVES] += 1
        if visit.line >= 0:
            matcher.fill(self._masks, visit.line)
        may_end = matcher.may_end
        return Visited(taken, may_end, seconds=time.thread_time() - start)

    def _grammar(self, job: Job) -> Any:
        with self._lock:
            known = self._grammars.get(job)
            if known is not None:
                self._grammars.move_to_end(job)
                return known[0]
        made = self._library.compile(job)
        with self._lock:
            if job not in self._grammars:
                self._num_bytes += made[1]
                self._grammars[job] = made
            while self._num_bytes > KEPT_BYTES and len(self._grammars) > 1:
                self._num_bytes -= self._grammars.popitem(last=False)[1][1]
        return made[0]


def _answer(connection: Connection, kind: Any, answer: Callable[[Any], Any]) -> None:
    decoder = msgspec.msgpack.Decoder(kind)
    while True:
        try:
            asked = decoder.decode(connection.recv_bytes())
            connection.send_bytes(msgspec.msgpack.encode(answer(asked)))
        except (EOFError, ConnectionError):
            return  # the engine is gone


def _text(error: Exception) -> str:
    return f"{error}".strip() or type(error).__name__


def load_library(tokens: Tokens) -> Library:
    """xgrammar is loaded by this process alone."""
    import xgrammar  # noqa: PLC0415

    return XGrammar(xgrammar, tokens)


def serve(control_fd: int, load: Callable[[Tokens], Library] = load_library) -> None:
    """Load, then fork a worker each time that one is asked for, in place of the last, until the engine is gone."""
    control = socket.socket(fileno=control_fd)
    connection = Connection(os.dup(control_fd))
    tokens = msgspec.msgpack.decode(connection.recv_bytes(), type=Tokens)
    try:
        library = load(tokens)
    except Exception as error:
        connection.send_bytes(msgspec.msgpack.encode(Ready(f"{type(error).__name__}: {error}")))
        return
    connection.send_bytes(msgspec.msgpack.encode(Ready()))
    child = 0
    while True:
        asked, descriptors, _, _ = socket.recv_fds(control, 1, 3)
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if not asked:
            return
        child = os.fork()
        if not child:
            control.close()
            connection.close()
            _work(library, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _work(library: Library, steps: int, compilations: int, memory: int) -> NoReturn:
    """The whole life of a worker."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with open("/proc/self/statm") as file:
            limit = int(file.read().split()[0]) * mmap.PAGESIZE + MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        _Worker(library, mmap.mmap(memory, memory_bytes(library.width))).run(Connection(steps), Connection(compilations))
    finally:
        os._exit(0)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
    os._exit(0)  # the interpreter would take its time to clear torch away, and the engine waits
