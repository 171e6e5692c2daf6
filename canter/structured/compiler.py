"""Grammars on demand: compiled on threads of their own, kept while they are used, refused when they take too long."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from canter.core.errors import CanterError, InvalidRequestError, QueueFullError
from canter.core.grammar import Grammar, MaskArray, Matcher
from canter.core.logging import get_logger
from canter.core.structured_outputs import PARAM, StructuredOutputsConfig, StructuredOutputsParams
from canter.core.vocabulary import Vocabulary
from canter.structured.constraint import Constraint
from canter.structured.refused import RefusedGrammar, RefusedMatcher

if TYPE_CHECKING:
    from canter.structured.backends import Backend

logger = get_logger(__name__)

COMPILE_SECONDS = 5.0
"""Longest that a request waits for its grammar. The library's own limits end what is left of the work."""
MAX_PENDING = 256
"""Most grammars that are being compiled or wait for it."""
CACHED_GRAMMARS = 256
CACHED_CHARS = 1 << 24


class GrammarCompiler:
    """Turns constraints into grammars for one model.

    `load_vocabulary` is called once, when the first grammar is asked for; it may take a second for a large vocabulary. Safe to use
    from several threads. Implements `core.grammar.Grammars`. `checks_only`: nothing but whether constraints can be served is asked of
    it, which llguidance alone knows.
    """

    def __init__(
        self,
        load_vocabulary: Callable[[], Vocabulary],
        config: StructuredOutputsConfig | None = None,
        *,
        num_threads: int = 1,
        checks_only: bool = False,
    ) -> None:
        self.config = config or StructuredOutputsConfig()
        self._load_vocabulary = load_vocabulary
        self._num_threads = num_threads
        self._uses_xgrammar = self.config.backend == "xgrammar" and not checks_only
        self._is_shut_down = False
        self._pool = ThreadPoolExecutor(1, "canter-grammars")
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._backend: Backend | None = None
        self._cache: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._cached_chars = 0
        self._pending: dict[Constraint, Future[Grammar]] = {}

    def start(self) -> None:
        """Load what takes longer than a request may wait: the process of xgrammar. Raises `EngineError`."""
        if self._uses_xgrammar:
            self.backend  # noqa: B018  made when it is first asked for

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
        if known is not None:
            return known
        try:
            return self._compile(constraint)
        except CanterError as error:
            return RefusedGrammar(str(error))
        except Exception as error:
            logger.error("a grammar could not be compiled", exc_info=error)
            return RefusedGrammar("it could not be compiled")

    def fill(self, matchers: Sequence[tuple[Matcher, int]], masks: MaskArray) -> None:
        refused = [(matcher, line) for matcher, line in matchers if isinstance(matcher, RefusedMatcher)]
        for matcher, line in refused:
            matcher.fill(masks[line])
        self.backend.fill([found for found in matchers if found not in refused] if refused else matchers, masks)

    def shutdown(self) -> None:
        """Compile nothing more, and end the processes that do; doesn't wait for what is being compiled."""
        self._is_shut_down = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._backend is not None:
            self._backend.shutdown()

    @property
    def backend(self) -> Backend:
        """Made when it is first asked for."""
        with self._loading:
            if self._backend is None:
                self._backend = load_backend(self._load_vocabulary(), self._num_threads, self._uses_xgrammar)
                if self._is_shut_down:
                    self._backend.shutdown()
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
        """The grammar from the cache; one that has failed since is dropped."""
        known = self._cache.get(constraint)
        if known is None:
            return None
        if known.error is not None:
            del self._cache[constraint]
            self._cached_chars -= constraint.num_chars
            return None
        self._cache.move_to_end(constraint)
        return known

    def _done(self, constraint: Constraint) -> None:
        with self._lock:
            self._pending.pop(constraint, None)


def load_backend(vocabulary: Vocabulary, num_threads: int, uses_xgrammar: bool) -> Backend:
    """llguidance is loaded by those who use it, and the process of xgrammar started. Raises `EngineError`."""
    from canter.structured.backends import XGrammarFirst  # noqa: PLC0415
    from canter.structured.guidance import GuidanceBackend  # noqa: PLC0415
    from canter.structured.xgrammar_backend import XGrammarBackend  # noqa: PLC0415
    from canter.structured.xgrammar_process import WorkerProcess  # noqa: PLC0415

    guidance = GuidanceBackend(vocabulary, num_threads)
    if not uses_xgrammar:
        return guidance
    process = WorkerProcess(vocabulary)
    process.worker()
    return XGrammarFirst(XGrammarBackend(process), guidance)


def _too_slow(seconds: float) -> InvalidRequestError:
    return InvalidRequestError(f"{PARAM} took longer than {seconds:g} seconds to compile. Make the constraint simpler.", PARAM)


def _forget(future: asyncio.Future[Grammar]) -> None:
    """Nobody asks any more; an error is taken note of, or the loop would report it."""
    if not future.cancelled():
        future.exception()
