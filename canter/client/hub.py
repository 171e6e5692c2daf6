"""The live requests of an asynchronous client: sends messages through a callable, deals deltas out to mailboxes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass

from canter.client.mailbox import Mailbox
from canter.client.outputs import RequestGroup, RequestOutput, RequestState, TokenTexts
from canter.client.protocol import RequestObserver
from canter.core.config import EngineArgs
from canter.core.errors import EngineError, InvalidRequestError, QueueFullError
from canter.core.logging import get_logger
from canter.core.messages import FINISH_ABORT, AbortRequests, AddRequest, EngineInfo, EngineStats, FrontendMessage, Outputs, RequestDelta
from canter.core.sampling_params import SamplingParams
from canter.text.tokenizer import Tokenizer

logger = get_logger(__name__)

RETRY_AFTER_SECONDS = 1.0
DEFAULT_MAX_QUEUED = 4096


def most_live(info: EngineInfo, args: EngineArgs) -> int:
    """How many engine requests may be alive at once, running and waiting; every choice of every prompt is one."""
    return info.max_num_seqs + (args.max_num_queued_reqs or DEFAULT_MAX_QUEUED)


@dataclass(slots=True, eq=False)
class _Live:
    """A request under way: its states, and where its reader waits."""

    group: RequestGroup
    mailbox: Mailbox


class RequestHub:
    """Knows every live request. `send` must hand a message to the engine without waiting.

    `max_live` bounds the engine requests alive at once (set it when the engine's limits are known); more are refused.
    """

    def __init__(
        self, send: Callable[[FrontendMessage], None], tokenizer: Tokenizer | None = None, observer: RequestObserver | None = None
    ) -> None:
        self.observer = observer
        self.max_live: int | None = None
        self.stats = EngineStats()
        self.last_heard = time.monotonic()
        self._send = send
        self._tokenizer: Tokenizer | None = None
        self._texts: TokenTexts | None = None
        self._groups: dict[str, _Live] = {}
        self._by_child: dict[str, _Live] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.set_tokenizer(tokenizer)

    def set_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)

    @property
    def num_live(self) -> int:
        """Engine requests alive: every choice of every request counts."""
        return len(self._by_child)

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """See `EngineClient.generate`."""
        arrival_time = time.time()
        self._check_room(params.n)  # before anything is made: a list of many prompts must be refused quickly
        group = RequestGroup(request_id, prompt, prompt_token_ids, params, self._tokenizer, arrival_time=arrival_time, texts=self._texts)
        live = _Live(group, Mailbox(params.output_kind))
        self._register(live)
        try:
            for child_id, state in group.states.items():
                self._send(AddRequest(child_id, prompt_token_ids, state.params, arrival_time, priority, cache_salt))
            while True:
                output = await live.mailbox.get()
                if output.error is not None:
                    raise output.error
                yield output
                if output.finished:
                    return
        finally:
            self._release(live)

    def deliver(self, outputs: Outputs) -> None:
        """Deal out one message of the engine. An error in one request's text ends only that request."""
        now = time.time()
        self.last_heard = time.monotonic()
        stopped: list[str] = []
        for delta in outputs.deltas:
            live = self._by_child.get(delta.request_id)
            if live is None:
                continue
            try:
                self._feed(live, delta, now, stopped)
            except Exception:
                logger.exception("output of request %r failed", delta.request_id)
                live.mailbox.fail(EngineError("The output of this request could not be turned into text."))
        if stopped:
            self._send(AbortRequests(stopped))
        if outputs.stats is not None:
            self.stats = outputs.stats
            if self.observer is not None:
                self.observer.on_step(outputs.stats)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests with the reason "abort": their readers get what there is, and the end."""
        for request_id in request_ids:
            live = self._groups.get(request_id)
            if live is None:
                continue
            children = live.group.unfinished_ids
            for child_id in children:
                self._feed(live, RequestDelta(child_id, [], FINISH_ABORT), time.time(), [])
            self._send(AbortRequests(children))

    def fail_all(self, error: EngineError) -> None:
        """Raise `error` in every reader; they end their requests."""
        for live in list(self._groups.values()):
            live.mailbox.fail(error)

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until no request is alive; False when they outlast `timeout` seconds."""
        if timeout > 0 and not self._idle.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout)
        return self._idle.is_set()

    def _check_room(self, num_choices: int) -> None:
        if self.max_live is not None and self.num_live + num_choices > self.max_live:
            raise QueueFullError(
                f"The server is full: {self.num_live} requests are running or waiting. Try again later.", RETRY_AFTER_SECONDS
            )

    def _register(self, live: _Live) -> None:
        group = live.group
        if group.request_id in self._groups or any(child_id in self._by_child for child_id in group.states):
            raise InvalidRequestError(f"A request with the id {group.request_id!r} is already running.", "request_id")
        if not self._by_child:
            self.last_heard = time.monotonic()
        self._groups[group.request_id] = live
        self._by_child.update((child_id, live) for child_id in group.states)
        self._idle.clear()

    def _feed(self, live: _Live, delta: RequestDelta, now: float, stopped: list[str]) -> None:
        state = live.group.states[delta.request_id]
        before = state.metrics.num_generation_tokens
        last = state.metrics.last_token_ts or state.metrics.arrival_time
        output = live.group.feed(delta)
        if self.observer is not None and state.metrics.num_generation_tokens > before:
            at = state.metrics.last_token_ts or now
            self.observer.on_tokens(state, state.metrics.num_generation_tokens - before, max(0.0, at - last), before == 0)
        if state.needs_abort:
            stopped.append(delta.request_id)
        if state.finished:
            self._end_state(state, now)
        if output is not None:
            live.mailbox.put(output)

    def _end_state(self, state: RequestState, now: float) -> None:
        self._by_child.pop(state.request_id, None)
        if self.observer is not None:
            self.observer.on_state_end(state, now)

    def _release(self, live: _Live) -> None:
        """The reader has gone: abort what still runs, and forget the request."""
        unfinished = live.group.unfinished_ids
        for child_id in unfinished:
            state = live.group.states[child_id]
            state.give_up()
            self._end_state(state, time.time())
        self._groups.pop(live.group.request_id, None)
        if not self._groups:
            self._idle.set()
        if self.observer is not None:
            self.observer.on_group_end(live.group)
        if unfinished:
            self._send(AbortRequests(unfinished))
