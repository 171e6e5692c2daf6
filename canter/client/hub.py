"""The live requests of an asynchronous client: sends messages through a callable, deals deltas out to mailboxes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from dataclasses import dataclass, field

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
CLEARING_TOKENS = 8
"""A request that brings so many tokens after the engine's death has passed the point where the engine died: it is more than are
on their way at any moment."""
SHOWN_IDS = 8


def most_live(info: EngineInfo, args: EngineArgs) -> int:
    """How many engine requests may be alive at once, running and waiting; every choice of every prompt is one."""
    return info.max_num_seqs + (args.max_num_queued_reqs or DEFAULT_MAX_QUEUED)


@dataclass(slots=True, eq=False)
class _Live:
    """A request under way: its states, where its reader waits, and what sending it again takes.

    `deaths`: of engines that ran it, as long as it brought no more than a few tokens between one and the next.
    """

    group: RequestGroup
    mailbox: Mailbox
    priority: int
    cache_salt: str | None
    in_engine: bool = False
    was_in_engine: bool = False
    deaths: int = 0
    num_before: dict[str, int] = field(default_factory=dict)
    """Tokens that each unfinished choice had when it was sent to this engine."""
    cleared: asyncio.Event | None = None
    """While it is on trial: set when it has passed, or is over."""

    @property
    def is_held(self) -> bool:
        """Whether it waits for an engine."""
        return not (self.in_engine or self.mailbox.has_failed or self.group.finished)

    @property
    def is_cleared(self) -> bool:
        """Whether it has brought so much in this engine that the death of the one before was not its fault."""
        states = self.group.states
        return all(
            states[name].metrics.num_generation_tokens - before >= CLEARING_TOKENS or states[name].finish_reason not in (None, FINISH_ABORT)
            for name, before in self.num_before.items()
        )

    def messages(self) -> list[AddRequest]:
        """What an engine needs to run it from where it stands."""
        messages = []
        for child_id in self.group.unfinished_ids:
            state = self.group.states[child_id]
            output = state.output_token_ids if self.was_in_engine else None
            arrival = state.metrics.arrival_time
            messages.append(AddRequest(child_id, state.prompt_token_ids, state.params, arrival, self.priority, self.cache_salt, output))
        return messages


class RequestHub:
    """Knows every live request. `send` must hand a message to the engine without waiting.

    `max_live` bounds the engine requests alive at once (set it when the engine's limits are known); more are refused.
    `seed`: what the seeds of requests that bring none are made from. `is_open` False: requests wait for the first `go_on`.

    When the engine has died, `hold` keeps all requests until `resume` hands them to the next one; see docs/concepts/recovery.md.
    """

    def __init__(
        self,
        send: Callable[[FrontendMessage], None],
        tokenizer: Tokenizer | None = None,
        observer: RequestObserver | None = None,
        seed: int = 0,
        is_open: bool = True,
    ) -> None:
        self.observer = observer
        self.max_live: int | None = None
        self.stats = EngineStats()
        self.last_heard = time.monotonic()
        self._send = send
        self._seeds = random.Random(seed)
        self._is_open = is_open
        self._is_fair = True
        """Whether who is on trial can be blamed: no suspect before has left without being cleared, perhaps with a step on its way."""
        self._past_stats: EngineStats | None = None
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
        for state in group.states.values():
            if state.params.seed is None and not state.params.is_greedy:
                # An engine that goes on with the request must draw with the same seed.
                state.params = state.params.clone(seed=self._seeds.getrandbits(63))
        live = _Live(group, Mailbox(params.output_kind), priority, cache_salt)
        self._register(live)
        try:
            if self._is_open:
                self._submit(live)
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
                self._end_trial(live)
        if stopped:
            self._send(AbortRequests(stopped))
        if outputs.stats is not None:
            self.stats = outputs.stats if self._past_stats is None else outputs.stats.after(self._past_stats)
            if self.observer is not None:
                self.observer.on_step(self.stats)

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

    def hold(self, running: Collection[str] | None) -> None:
        """The engine has died: keep every request, and all that come, until `resume`.

        `running`: the ids that it ran then, None when nobody knows. A request that was there at two deaths without getting
        on between them is tried alone by `resume`; if the engine dies of that too, or ran nothing else at the second death,
        the request ends with an error.
        """
        self._is_open = False
        there = [live for live in self._groups.values() if live.in_engine and not live.mailbox.has_failed and _ran(live, running)]
        # A request that has left may have been running still; then nobody was alone.
        was_alone = len(there) == 1 and running is not None and there[0].group.states.keys() >= set(running)
        names = [live.group.request_id for live in there]
        logger.warning(
            "the engine died with %d requests: %s%s", len(names), ", ".join(names[:SHOWN_IDS]), " ..." * (len(names) > SHOWN_IDS)
        )
        for live in self._groups.values():
            if live.in_engine and live.is_cleared:
                live.deaths = 0
        for live in there:
            live.deaths += 1
            if live.deaths > 1 and self._is_fair and (was_alone or live.cleared is not None):
                logger.error("request %r ends: the engine has died of it %d times", live.group.request_id, live.deaths)
                live.mailbox.fail(EngineError("The engine died each time it worked on this request, the last time on nothing else."))
        for live in self._groups.values():
            live.in_engine = False
            self._end_trial(live)
        self._past_stats = self.stats
        self.stats = EngineStats(num_waiting=len(self._by_child)).after(self._past_stats)
        if self.observer is not None:
            self.observer.on_engine_restart()
            self.observer.on_step(self.stats)

    async def resume(self) -> None:
        """A new engine serves: hand it every request, with the tokens that it has told.

        Suspects first, one after another, each until it is cleared; then the others in order of arrival.
        """
        await self.try_suspects(True)
        await self.go_on()

    async def try_suspects(self, is_fair: bool) -> bool:
        """The first half of `resume`, while nobody else's requests run but those that were tried before. `is_fair`: whether all of
        them were cleared. Returns whether all are now."""
        self.last_heard = time.monotonic()
        self._is_fair = is_fair
        for live in [live for live in self._groups.values() if live.is_held and live.deaths > 1]:
            if live.is_held:
                logger.warning("request %r is tried alone: the engine has died of it or of its company", live.group.request_id)
                cleared = live.cleared = asyncio.Event()
                self._submit(live)
                await cleared.wait()
        return self._is_fair

    async def go_on(self) -> None:
        """The second half of `resume`: those that are held, and all that come."""
        while held := [live for live in self._groups.values() if live.is_held]:
            for live in held:
                if live.is_held:
                    self._submit(live)
                await asyncio.sleep(0)  # long prompts take long to encode
        self._is_open = True

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until no request is alive; False when they outlast `timeout` seconds."""
        if timeout > 0 and not self._idle.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout)
        return self._idle.is_set()

    def _end_trial(self, live: _Live) -> None:
        if live.cleared is not None:
            self._is_fair = self._is_fair and live.is_cleared
            live.cleared.set()
            live.cleared = None

    def _submit(self, live: _Live) -> None:
        for message in live.messages():
            live.num_before[message.request_id] = len(message.output_token_ids or ())
            self._send(message)
        live.in_engine = live.was_in_engine = True

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
        if live.cleared is not None and (live.is_cleared or live.group.finished):
            self._end_trial(live)

    def _end_state(self, state: RequestState, now: float) -> None:
        self._by_child.pop(state.request_id, None)
        if self.observer is not None:
            self.observer.on_state_end(state, now)

    def _release(self, live: _Live) -> None:
        """The reader has gone: abort what still runs, and forget the request."""
        self._end_trial(live)
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


def _ran(live: _Live, running: Collection[str] | None) -> bool:
    return running is None or any(child_id in running for child_id in live.group.unfinished_ids)
