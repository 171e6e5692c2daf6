"""xgrammar as the backend: matchers that remember what they have accepted, and stand for those that the worker has.

A worker may be gone at any moment. So nothing is known there alone: each matcher is begun in a worker when it is first needed there, from
its grammar and its tokens. A token that the last mask allowed is accepted without asking; the worker hears of it with the next mask.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence

import msgspec

from canter.core.errors import EngineError, InvalidRequestError
from canter.core.grammar import MaskArray, Matcher
from canter.core.structured_outputs import PARAM
from canter.structured.constraint import Constraint
from canter.structured.xgrammar_constraints import Job, NotTaken, job_of
from canter.structured.xgrammar_messages import MASKS, Step, Visit, Visited
from canter.structured.xgrammar_process import Worker, WorkerLost, WorkerProcess

MAX_ENDS = 2
"""So often may a worker end of itself while it is at a grammar."""
MAX_TRIES = 8
FREE_SECONDS = 0.025
"""Of the processor for each visit: what a grammar takes beyond that on average is counted,"""
BUDGET_SECONDS = 1.0
"""up to so much."""
MAX_FAILED = 4096
"""Grammars that failed and are remembered; 32 bytes and a text that they share."""
TOO_SLOW = "xgrammar took too long over it"
ENDED = "xgrammar ended over it"


class Failed:
    """The grammars that have cost a worker, or took too long: nobody tries them again. The oldest are forgotten."""

    def __init__(self) -> None:
        self._errors: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, job: Job, error: str) -> None:
        with self._lock:
            self._errors[_digest(job)] = error
            while len(self._errors) > MAX_FAILED:
                self._errors.popitem(last=False)

    def get(self, job: Job) -> str | None:
        with self._lock:
            return self._errors.get(_digest(job))


class XGrammarGrammar:
    """A `core.grammar.Grammar`. `error`: why none of its matchers can go on."""

    def __init__(self, steps: Steps, job: Job) -> None:
        self.job = job
        self.error: str | None = None
        self._steps = steps
        self._num_ends = 0
        self._debt = 0.0

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._steps, self)

    def fail(self, error: str) -> None:
        self.error = error
        self._steps.failed.add(self.job, error)

    def lost_worker(self, is_slow: bool) -> None:
        """A worker was lost over it."""
        self._num_ends += 1
        if is_slow or self._num_ends >= MAX_ENDS:
            self.fail(TOO_SLOW if is_slow else ENDED)

    def spend(self, seconds: float) -> None:
        """A visit took so long."""
        self._debt = max(0.0, self._debt + seconds - FREE_SECONDS)
        if self._debt > BUDGET_SECONDS:
            self.fail(TOO_SLOW)


class XGrammarMatcher:
    """A `core.grammar.Matcher`. Of `_tokens` the worker `_worker` has the first `_sent`, and `_excess` more that were taken back since."""

    def __init__(self, steps: Steps, grammar: XGrammarGrammar) -> None:
        self.id = steps.new_id()
        self.grammar = grammar
        self._steps = steps
        self._own_error: str | None = None
        self._tokens: list[int] = []
        self._worker = 0
        self._sent = 0
        self._excess = 0
        self._mask: MaskArray | None = None
        self._may_end: bool | None = None

    def __del__(self) -> None:
        self._steps.released.append(self.id)

    @property
    def error(self) -> str | None:
        return self.grammar.error or self._own_error

    @property
    def may_end(self) -> bool:
        if self._may_end is None:
            self._steps.visit([(self, -1)], None)
        return bool(self._may_end)

    def fill(self, mask: MaskArray) -> None:
        self._steps.visit([(self, 0)], mask[None])

    def accept(self, token_ids: Sequence[int]) -> int:
        if self.error is not None:
            return 0
        before = len(self._tokens)
        for i, token_id in enumerate(token_ids):
            if self._mask is None:
                self._tokens += token_ids[i:]
                self._may_end = None
                self._steps.visit([(self, -1)], None)
                return max(0, len(self._tokens) - before)
            if not int(self._mask[token_id // 32]) >> token_id % 32 & 1:
                return i
            self._tokens.append(token_id)
            self._mask = self._may_end = None
        return len(token_ids)

    def rollback(self, count: int) -> None:
        if not count:
            return
        del self._tokens[len(self._tokens) - count :]
        self._excess += max(0, self._sent - len(self._tokens))
        self._sent = min(self._sent, len(self._tokens))
        self._mask = self._may_end = None

    def forced(self) -> list[int]:
        """None: xgrammar is not asked."""
        return []

    def visit_for(self, worker: Worker, line: int) -> Visit:
        if self._worker != worker.number:
            return Visit(self.id, self.grammar.job, 0, list(self._tokens), line)
        return Visit(self.id, None, self._excess, self._tokens[self._sent :], line)

    def take(self, worker: Worker, visit: Visit, done: Visited, mask: MaskArray | None) -> None:
        """What came of a visit."""
        if done.error:
            self.fail(done.error)
            return
        self.grammar.spend(done.seconds)
        kept = len(self._tokens) - len(visit.token_ids) + done.taken
        del self._tokens[kept:]
        self._worker, self._sent, self._excess = worker.number, kept, 0
        self._may_end = done.may_end
        if mask is not None:
            self._mask = mask.copy()

    def fail(self, error: str) -> None:
        self._own_error = error
        self._may_end = False
        self._mask = None


class Steps:
    """What all matchers ask of the worker. One thread at a time is heard."""

    def __init__(self, process: WorkerProcess) -> None:
        self.released: deque[int] = deque()
        self.failed = Failed()
        self._process = process
        self._ids = itertools.count(1)
        self._lock = threading.Lock()

    def new_id(self) -> int:
        return next(self._ids)

    def visit(self, wanted: Sequence[tuple[XGrammarMatcher, int]], masks: MaskArray | None) -> None:
        """Bring matchers up to date in the worker. Those of a line of 0 or more have that line of `masks` filled, with nothing on error."""
        with self._lock:
            for start in range(0, len(wanted), MASKS):
                part = wanted[start : start + MASKS]
                self._visit(part, masks)
                for matcher, line in part:
                    if matcher.error is not None and masks is not None and line >= 0:
                        masks[line] = 0

    def _visit(self, wanted: Sequence[tuple[XGrammarMatcher, int]], masks: MaskArray | None) -> None:
        for _ in range(MAX_TRIES):
            able = [(matcher, line) for matcher, line in wanted if matcher.error is None]
            if not able:
                return
            try:
                worker = self._process.worker()
            except EngineError as error:
                for matcher, _ in able:
                    matcher.fail(str(error))
                return
            visits = [matcher.visit_for(worker, place if line >= 0 else -1) for place, (matcher, line) in enumerate(able)]
            released = [self.released.popleft() for _ in range(len(self.released))]
            try:
                done = worker.step(Step(visits, released))
            except WorkerLost as lost:
                self._blame(worker, lost, [matcher for matcher, _ in able])
                continue
            for place, ((matcher, line), visit, found) in enumerate(zip(able, visits, done, strict=True)):
                mask = None if masks is None or line < 0 else worker.masks[place]
                if mask is not None and masks is not None and not found.error:
                    masks[line] = mask
                matcher.take(worker, visit, found, mask)
            return
        for matcher, _ in wanted:
            matcher.fail("the worker of xgrammar keeps ending")

    def _blame(self, worker: Worker, lost: WorkerLost, asked: list[XGrammarMatcher]) -> None:
        try:
            is_first = self._process.replace(worker)
        except EngineError as error:
            for matcher in asked:
                matcher.fail(str(error))
            return
        culprit = next((matcher.grammar for matcher in asked if matcher.id == lost.culprit), None)
        if is_first and culprit is not None:
            culprit.lost_worker(lost.is_slow)


class XGrammarBackend:
    """Compiles for one vocabulary, in the worker."""

    def __init__(self, process: WorkerProcess) -> None:
        self._process = process
        self._steps = Steps(process)
        self._uncompiled = Failed()

    def compile(self, constraint: Constraint) -> XGrammarGrammar:
        """Raises `NotTaken` for what isn't xgrammar's or what it can't compile in time, `InvalidRequestError` for what failed while it ran,
        before, and `EngineError` without a worker."""
        job = job_of(constraint)
        if (known := self._uncompiled.get(job)) is not None:
            raise NotTaken(known)
        if (known := self._steps.failed.get(job)) is not None:
            raise _refused(constraint, known)
        num_ends = 0
        for _ in range(MAX_TRIES):
            worker = self._process.worker()
            try:
                refusal = worker.compile(job).error
            except WorkerLost as lost:
                num_ends += self._process.replace(worker)
                if num_ends >= MAX_ENDS or (num_ends and lost.is_slow):
                    refusal = TOO_SLOW if lost.is_slow else ENDED
                    self._uncompiled.add(job, refusal)
                else:
                    continue
            if refusal:
                raise NotTaken(refusal)
            return XGrammarGrammar(self._steps, job)
        raise EngineError("The worker of xgrammar keeps ending.")

    def fill(self, matchers: Sequence[tuple[Matcher, int]], masks: MaskArray) -> None:
        self._steps.visit([(matcher, line) for matcher, line in matchers if isinstance(matcher, XGrammarMatcher)], masks)

    def shutdown(self) -> None:
        self._process.shutdown()


def _refused(constraint: Constraint, error: str) -> InvalidRequestError:
    name = f"{PARAM}.{constraint.kind}"
    return InvalidRequestError(f"{name} can't be served: {error}. Make the constraint simpler.", name)


def _digest(job: Job) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(job)).digest()
