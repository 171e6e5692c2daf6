"""llguidance as the backend: constraints become its grammars, and its parser walks them token by token.

It compiles hardly anything in advance: what a step needs is derived when it is needed, within limits on the work and the memory.
So every matcher of a grammar is a copy of one that has been started, and shares what that has derived.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from canter.core.errors import InvalidRequestError
from canter.core.grammar import MaskArray, Matcher, mask_width
from canter.core.structured_outputs import PARAM
from canter.core.vocabulary import Vocabulary
from canter.structured.constraint import Constraint
from canter.structured.lark import to_lark
from canter.structured.schema import locate_fault

LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""About a tenth of a second of work for a grammar and for a step, and 100 MB, at most."""
PARALLEL_MASKS = 4
"""So many masks are worth giving to several threads."""
MAX_ERROR_CHARS = 1000
MIN_STACK, STACK_PER_CHAR, MAX_STACK = 8 << 20, 4 << 10, 512 << 20
"""Bytes. A level of rules takes about 3 KB of stack and no less than 7 characters, a `$ref` about 10 KB and 40 characters."""
_STACK_LOCK = threading.Lock()
_T = TypeVar("_T")


class _Tokens(TokenizerWrapper):
    """A vocabulary as llguidance reads it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.is_tokenizer_wrapper = True
        self.bos_token_id = None
        tokens = [bytes(token) for token in vocabulary.token_bytes[: vocabulary.size]]
        self.tokens = tokens + [b""] * (vocabulary.size - len(tokens))
        self.special_token_ids = sorted({i for i in (*vocabulary.markers.values(), *vocabulary.eos_token_ids) if i < vocabulary.size})
        for token, token_id in vocabulary.markers.items():
            if token_id < vocabulary.size:
                self.tokens[token_id] = token.encode()
        self.eos_token_id = next(iter(vocabulary.eos_token_ids), vocabulary.size - 1)
        self._encode = vocabulary.encode
        spelled = sorted(filter(None, vocabulary.markers), key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, spelled))) if spelled else None

    def __call__(self, text: str) -> list[int]:
        """The tokens that a text is usually made of. A marker's spelling is cut in two, or the tokenizer would make it the marker."""
        if self._marker is None:
            return self._encode(text)
        ids: list[int] = []
        start = 0
        for match in self._marker.finditer(text):
            ids += self._encode(text[start : match.start() + 1])
            start = match.start() + 1
        return ids + self._encode(text[start:])


class GuidanceMatcher:
    """A `core.grammar.Matcher` over llguidance's."""

    __slots__ = ("_width", "inner")

    def __init__(self, inner: LLMatcher, width: int) -> None:
        self.inner = inner
        self._width = width

    def fill(self, mask: MaskArray) -> None:
        self.inner.unsafe_compute_mask_ptr(mask.ctypes.data, 4 * self._width)

    def accept(self, token_ids: Sequence[int]) -> int:
        return int(self.inner.try_consume_tokens(list(token_ids)))

    def rollback(self, count: int) -> None:
        if count and not self.inner.rollback(count):
            raise RuntimeError(f"the grammar could not take {count} tokens back: {self.error}")

    def forced(self) -> list[int]:
        # Where the output may end, a token that ends it may come, too.
        return [] if self.may_end else list(self.inner.compute_ff_tokens())

    @property
    def may_end(self) -> bool:
        return bool(self.inner.is_accepting())

    @property
    def error(self) -> str | None:
        return _shorten(self.inner.get_error()) if self.inner.is_error() else None


class GuidanceGrammar:
    """A `core.grammar.Grammar`: a started matcher, of which every request gets a copy."""

    error: str | None = None

    def __init__(self, first: LLMatcher, width: int) -> None:
        self._first = first
        self._width = width

    def matcher(self) -> GuidanceMatcher:
        return GuidanceMatcher(self._first.deep_copy(), self._width)


class GuidanceBackend:
    """Compiles for one vocabulary. `num_threads` fill masks."""

    def __init__(self, vocabulary: Vocabulary, num_threads: int = 1) -> None:
        tokens = _Tokens(vocabulary)
        eos = [i for i in vocabulary.eos_token_ids if i < vocabulary.size] or [tokens.eos_token_id]
        self._tokenizer = LLTokenizer(tokens, eos_token=eos)
        self._markers = dict(vocabulary.markers)
        self._width = mask_width(vocabulary.size)
        self._executor = LLExecutor(num_threads) if num_threads > 1 else None

    def compile(self, constraint: Constraint) -> GuidanceGrammar:
        """Raises `InvalidRequestError` with the place of what is wrong."""
        try:
            grammar = to_lark(constraint, self._markers)
            first = _with_deep_stack(len(grammar), partial(self._start, grammar))
        except InvalidRequestError:
            raise
        except ValueError as error:  # the library's own
            raise self._refused(constraint, str(error)) from None
        if first.is_error():
            raise self._refused(constraint, first.get_error())
        return GuidanceGrammar(first, self._width)

    def fill(self, matchers: Sequence[tuple[Matcher, int]], masks: MaskArray) -> None:
        """Fill the masks of matchers that this backend made."""
        if self._executor is not None and len(matchers) >= PARALLEL_MASKS:
            inner = [(matcher.inner, line) for matcher, line in matchers if isinstance(matcher, GuidanceMatcher)]
            self._executor.unsafe_compute_mask_ptr(inner, masks.ctypes.data, 4 * self._width, len(masks))
            return
        for matcher, line in matchers:
            matcher.fill(masks[line])

    def shutdown(self) -> None:
        """Nothing runs beside its callers."""

    def _start(self, grammar: str) -> LLMatcher:
        """A matcher that has computed its first mask: some faults of a grammar show only then."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            mask = np.zeros(self._width, np.int32)
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if not matcher.is_error() and not mask.any():
                raise ValueError("no output can satisfy it")
        return matcher

    def _refused(self, constraint: Constraint, message: str) -> InvalidRequestError:
        where = ""
        if constraint.kind == "json":
            where = locate_fault(constraint, self._fault)
        return InvalidRequestError(f"{PARAM}.{constraint.kind} can't be served{where}: {_shorten(message)}", f"{PARAM}.{constraint.kind}")

    def _fault(self, constraint: Constraint) -> str | None:
        """Why a constraint can't be compiled, or None."""
        grammar = to_lark(constraint, self._markers)
        check = partial(LLMatcher.validate_grammar_with_warnings, grammar, limits=LIMITS)
        is_error, messages = _with_deep_stack(len(grammar), check)
        return messages[0] if is_error else None


def _with_deep_stack(num_chars: int, work: Callable[[], _T]) -> _T:
    """Do work on a grammar of so many characters on a thread whose stack is deep enough for it.

    The library goes down from rule to rule, and from `$ref` to `$ref`, as deep as these go: 3000 rules, each with the next in it, take
    8 MiB of stack, and where a stack ends the process ends. Memory that isn't used isn't taken, and matchers don't go down.
    """
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # handed to who waits
            future.set_exception(error)

    with _STACK_LOCK:
        usual = threading.stack_size(min(MIN_STACK + num_chars * STACK_PER_CHAR, MAX_STACK))
        try:
            threading.Thread(target=run, name="canter-grammar").start()
        finally:
            threading.stack_size(usual)
    return future.result()


def _shorten(message: str) -> str:
    text = message.partition("<backtrace>")[0].strip()  # of a panic within the library, which says nothing to who reads it
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "..."
