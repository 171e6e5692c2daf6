"""The engine core: requests in, token deltas out. One loop, with up to `depth` steps in flight on the device."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from canter.core.errors import CanterError, EngineDeadError, EngineError, InvalidRequestError
from canter.core.grammar import Grammar, Grammars
from canter.core.logging import get_logger
from canter.core.messages import AddRequest, EngineInfo, EngineStats, RequestDelta
from canter.core.plan import RowError, SchedulePlan, StepOutput
from canter.core.sampling_params import SamplingParams
from canter.core.timeline import Timeline
from canter.scheduler.scheduler import Scheduler

logger = get_logger(__name__)

IDLE_SECONDS = 0.005
"""Longest wait for a grammar by an engine that has nothing else to do."""


class PendingOutput(Protocol):
    """A step on its way: `result` waits for the device and gives the step's tokens."""

    def result(self) -> StepOutput: ...


class Runner(Protocol):
    """What the engine asks of a runner. Both calls return before the device is done."""

    def execute(self, plan: SchedulePlan) -> Any:
        """Launch the model's forward; returns a handle for `sample`."""
        ...

    def sample(self, pending: Any) -> PendingOutput:
        """Launch the choice of tokens from a launched forward."""
        ...

    def shutdown(self) -> None: ...


class EngineCore:
    """Runs requests to their end.

    `step` schedules ahead: while `depth` is 2, step N+1 is planned and launched before the tokens of step N are known
    to the host; they reach it on the device. With `depth` 1 every step is awaited before the next is planned. `check_params`
    raises `InvalidRequestError` for parameters that only this engine can judge. `grammars` compiles what requests want their outputs
    to obey, while the requests are held.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        info: EngineInfo,
        depth: int = 2,
        clock: Callable[[], float] = time.time,
        check_params: Callable[[SamplingParams], None] | None = None,
        timeline: Timeline | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.info = info
        self._grammars = grammars
        self._compiled: queue.SimpleQueue[tuple[str, Future[Grammar]]] = queue.SimpleQueue()
        self._timeline = timeline or Timeline()
        self._is_paused = False
        self._scheduler = scheduler
        self._runner = runner
        self._depth = depth
        self._clock = clock
        self._check_params = check_params
        self._in_flight: deque[tuple[SchedulePlan, PendingOutput]] = deque()
        self._deltas: list[RequestDelta] = []
        self._is_shut_down = False
        self.on_new_rows: Callable[[list[str]], None] | None = None
        """Told the ids of all requests that run, before the first step that some of them run in."""
        self._utilities: dict[str, Callable[..., Any]] = {
            "reset_prefix_cache": scheduler.reset_prefix_cache,
            "pause": self.pause,
            "resume": self.resume,
            "start_profile": self._timeline.start,
            "stop_profile": self._timeline.stop,
        }

    def add_request(self, request: AddRequest) -> None:
        """Queue a request. Raises `InvalidRequestError` or `QueueFullError`, and `EngineDeadError` after `shutdown`; then the
        request does not exist."""
        if self._is_shut_down:
            raise EngineDeadError("The engine has been shut down.")
        if not request.prompt_token_ids:
            raise InvalidRequestError("The prompt is empty: at least one token is needed.", "prompt")
        vocab_size = self.info.vocab_size
        _check_ids(request.prompt_token_ids, vocab_size, "The prompt")
        if request.output_token_ids:
            _check_ids(request.output_token_ids, vocab_size, "The output so far")
        request.sampling.verify_vocabulary(vocab_size, -1)
        if self._check_params is not None:
            self._check_params(request.sampling)
        grammar = self._compile(request.sampling)
        is_ready = grammar is None or grammar.done()
        if grammar is not None and is_ready:
            grammar.result()  # raises why it was refused
        self._scheduler.add(request, self._clock(), is_ready)
        if grammar is not None and not is_ready:
            request_id = request.request_id
            grammar.add_done_callback(lambda done: self._compiled.put((request_id, done)))

    def check_params(self, sampling: SamplingParams) -> None:
        """Raise `InvalidRequestError` for a constraint that can't be served. Waits for its grammar."""
        if sampling.structured_outputs is not None and self._grammars is not None:
            self._grammars.check_now(sampling.structured_outputs)

    def _compile(self, sampling: SamplingParams) -> Future[Grammar] | None:
        """The grammar that a request wants, under way or done."""
        if sampling.structured_outputs is None:
            return None
        if self._grammars is None:
            raise InvalidRequestError("structured_outputs are not served by this engine.", "structured_outputs")
        return self._grammars.submit(sampling.structured_outputs)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; their last deltas come with the next `step`. Unknown ids are ignored."""
        self._deltas.extend(self._scheduler.abort(request_ids, self._clock()))

    def step(self) -> list[RequestDelta]:
        """Plan ahead, wait for the oldest step in flight, and return what is new."""
        timeline = self._timeline
        timeline.next_step()
        self._take_grammars()
        self._deltas.extend(self._scheduler.expire(self._clock()))
        while len(self._in_flight) < self._depth and self._wants_step():
            plan = timeline.around("schedule", lambda: self._scheduler.schedule(self._clock()))()
            if not plan.has_work:
                break
            if plan.new_rows and self.on_new_rows is not None:
                self.on_new_rows(self._scheduler.running_ids())
            launch = timeline.around("launch", partial(self._launch, plan), step=plan.step_id)
            self._in_flight.append((plan, launch()))
        timeline.around("finish", self._finish_oldest)()
        stats = self._scheduler.stats() if timeline.is_on else None
        if stats is not None:
            timeline.count("requests", running=stats.num_running, waiting=stats.num_waiting)
            timeline.count("cache", used=stats.cache_usage)
        deltas, self._deltas = self._deltas, []
        return deltas

    def has_work(self) -> bool:
        """Whether `step` has something to do: requests to run, rows to drop, steps in flight, or deltas to give out."""
        return bool(self._in_flight or self._deltas or self._scheduler.has_held) or self._wants_step()

    def _take_grammars(self) -> None:
        """Let in the requests whose grammars are done. With nothing else to do, wait for one, but not so long as to keep a message
        waiting."""
        if not self._scheduler.has_held:
            return
        is_idle = not (self._in_flight or self._deltas or self._wants_step())
        try:
            while True:
                request_id, grammar = self._compiled.get(is_idle, IDLE_SECONDS if is_idle else None)
                is_idle = False
                error = grammar.exception()
                if error is None:
                    self._scheduler.release(request_id)
                    continue
                if not isinstance(error, CanterError):
                    logger.error("a grammar could not be compiled", exc_info=error)
                known = isinstance(error, CanterError)
                reason = RowError(str(error), type(error).__name__) if known else RowError("The grammar could not be compiled.")
                self._deltas.extend(self._scheduler.refuse(request_id, reason))
        except queue.Empty:
            return

    def _wants_step(self) -> bool:
        return not self._is_paused and self._scheduler.has_work()

    def _launch(self, plan: SchedulePlan) -> PendingOutput:
        return self._runner.sample(self._runner.execute(plan))

    def pause(self) -> None:
        """Plan no more steps. Requests stay as they are, new ones are queued, and aborts work."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished()

    def stats(self) -> EngineStats:
        return self._scheduler.stats()

    def utility(self, method: str, args: list[Any]) -> Any:
        """Call an engine method by name. Raises `InvalidRequestError` for a name that does not exist."""
        if method not in self._utilities:
            raise InvalidRequestError(f"The engine has no method {method!r}. It has: {', '.join(sorted(self._utilities))}.", "method")
        return self._utilities[method](*args)

    def shutdown(self) -> None:
        """Wait for the steps in flight and give the device back. No request is taken afterwards; a second call does nothing."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        while self._in_flight:
            self._finish_oldest()
        self._runner.shutdown()
        if self._grammars is not None:
            self._grammars.shutdown()

    def _finish_oldest(self) -> None:
        """Wait for the oldest step in flight. Whatever interrupts the wait, the step stays in flight."""
        if self._in_flight:
            plan, pending = self._in_flight[0]
            deltas = self._finish_step(plan, pending)
            self._in_flight.popleft()
            self._deltas.extend(deltas)

    def _finish_step(self, plan: SchedulePlan, pending: PendingOutput) -> list[RequestDelta]:
        try:
            output = pending.result()
        except Exception as error:
            # The step's requests can't go on: their tokens are lost. Others, and later requests, can.
            logger.exception("step %d failed", plan.step_id)
            reason = str(error) if isinstance(error, EngineError) else f"The engine failed in a step ({type(error).__name__})."
            return self._scheduler.fail(plan, reason, self._clock())
        return self._scheduler.update(plan, output, self._clock())


def _check_ids(token_ids: list[int], vocab_size: int, what: str) -> None:
    if max(token_ids) >= vocab_size or min(token_ids) < 0:
        wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise InvalidRequestError(f"{what} must hold token ids in [0, {vocab_size}), got {wrong}.", "prompt")
