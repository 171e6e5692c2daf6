"""Grammars on demand: compiled on threads of their own, kept while they are used, refused when they take too long."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from canter.core.errors import InvalidRequestError, QueueFullError
from canter.core.grammar import Grammar, MaskArray, Matcher
from canter.core.structured_outputs import PARAM, StructuredOutputsConfig, StructuredOutputsParams
from canter.core.vocabulary import Vocabulary
from canter.structured.constraint import Constraint

if TYPE_CHECKING:
    from canter.structured.guidance import GuidanceBackend

COMPILE_SECONDS = 5.0
"""Longest that a request waits for its grammar. The library's own limits end what is left of the work."""
MAX_PENDING = 256
"""Most grammars that are being compiled or wait for it."""
CACHED_GRAMMARS = 256
CACHED_CHARS = 1 << 24


class GrammarCompiler:
    """Turns constraints into grammars for one model.

    `load_vocabulary` is called once, when the first grammar is asked for; it may take a second for a large vocabulary. Safe to use
    from several threads. Implements `core.grammar.Grammars`.
    """

    def __init__(
        self, load_vocabulary: Callable[[], Vocabulary], config: StructuredOutputsConfig | None = None, *, num_threads: int = 1
    ) -> None:
        self.config = config or StructuredOutputsConfig()
        self._load_vocabulary = load_vocabulary
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(1, "canter-grammars")
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._backend: GuidanceBackend | None = None
        self._cache: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._cached_chars = 0
        self._pending: dict[Constraint, Future[Grammar]] = {}

    async def check(self, params: StructuredOutputsParams, seconds: float = COMPILE_SECONDS) -> None:
        """Raise `InvalidRequestError` for a constraint that can't be served, or not within `seconds`; `QueueFullError` when too many
        wait. For an event loop, which it never holds up."""
        future = asyncio.wrap_future(self.submit(params))
        try:
            await asyncio.wait_for(asyncio.shield(future), seconds)
        except TimeoutError:
            future.add_done_callback(_forget)
            raise _too_slow(seconds) from None

    def check_now(self, params: StructuredOutputsParams, seconds: float = COMPILE_SECONDS) -> None:
        """`check`, for who may wait."""
        try:
            self.submit(params).result(seconds)
        except TimeoutError:
            raise _too_slow(seconds) from None

    def submit(self, params: StructuredOutputsParams) -> Future[Grammar]:
        constraint = Constraint.of(params, self.config)
        with self._lock:
            known = self._take_cached(constraint)
            if known is not None:
                ready: Future[Grammar] = Future()
                ready.set_result(known)
                return ready
            if constraint in self._pending:
                return self._pending[constraint]
            if len(self._pending) >= MAX_PENDING:
                raise QueueFullError(f"{len(self._pending)} grammars are being compiled already. Retry later.")
            future = self._pool.submit(self._compile, constraint)
            self._pending[constraint] = future
        future.add_done_callback(lambda _: self._done(constraint))
        return future

    def get(self, params: StructuredOutputsParams) -> Grammar:
        constraint = Constraint.of(params, self.config)
        with self._lock:
            known = self._take_cached(constraint)
        return known if known is not None else self._compile(constraint)

    def fill(self, matchers: Sequence[tuple[Matcher, int]], masks: MaskArray) -> None:
        self.backend.fill(matchers, masks)

    def shutdown(self) -> None:
        """Compile nothing more; doesn't wait."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def backend(self) -> GuidanceBackend:
        """Made when it is first asked for."""
        with self._loading:
            if self._backend is None:
                self._backend = load_backend(self._load_vocabulary(), self._num_threads)
            return self._backend

    def _compile(self, constraint: Constraint) -> Grammar:
        grammar = self.backend.compile(constraint)
        with self._lock:
            if constraint not in self._cache:
                self._cached_chars += constraint.num_chars
            self._cache[constraint] = grammar
            self._cache.move_to_end(constraint)
            while len(self._cache) > CACHED_GRAMMARS or self._cached_chars > CACHED_CHARS:
                self._cached_chars -= self._cache.popitem(last=False)[0].num_chars
        return grammar

    def _take_cached(self, constraint: Constraint) -> Grammar | None:
        known = self._cache.get(constraint)
        if known is not None:
            self._cache.move_to_end(constraint)
        return known

    def _done(self, constraint: Constraint) -> None:
        with self._lock:
            self._pending.pop(constraint, None)


def load_backend(vocabulary: Vocabulary, num_threads: int) -> GuidanceBackend:
    """llguidance is loaded by those who use it."""
    from canter.structured.guidance import GuidanceBackend  # noqa: PLC0415

    return GuidanceBackend(vocabulary, num_threads)


def _too_slow(seconds: float) -> InvalidRequestError:
    return InvalidRequestError(f"{PARAM} took longer than {seconds:g} seconds to compile. Make the constraint simpler.", PARAM)


def _forget(future: asyncio.Future[Grammar]) -> None:
    """Nobody asks any more; an error is taken note of, or the loop would report it."""
    if not future.cancelled():
        future.exception()
