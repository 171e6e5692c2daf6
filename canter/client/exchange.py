"""One engine and several frontend processes: who sent which request, where its answers go, and what all frontends are asked.

The process between them reads no more of a message than the name of its request. Every frontend keeps its own requests, with
the tokens told so far (`client/shared.py`), and the order in which they go on after a death is kept here, for all of them.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import msgspec
import zmq

from canter.client.channel import SOCKET_NAME, Channel, private_directory
from canter.client.host import EngineHost, finish_call, for_requests
from canter.client.hub import most_live
from canter.client.launch import EngineLaunch
from canter.client.restarts import RestartPolicy
from canter.core import messages
from canter.core.config import EngineArgs
from canter.core.errors import CanterError, ConfigError, EngineDeadError, EngineError, QueueFullError
from canter.core.logging import get_logger
from canter.core.messages import (
    FINISH_ERROR,
    AbortRequests,
    EngineInfo,
    EngineStats,
    Failed,
    LoadPhase,
    Message,
    Outputs,
    Ready,
    RequestDelta,
    Utility,
    UtilityResult,
)

logger = get_logger(__name__)

TICK_SECONDS = 0.5
MOST_UNANSWERED = 60
"""A frontend that has left so many ticks unanswered is stuck. They are counted, not timed: while this process is stopped there are none."""
POLL_SECONDS = 1.0
CLOSE_GATE, OPEN_GATE = "close_gate", "open_gate"
_NIL = msgspec.Raw(b"\xc0")


class SealedOutputs(Message, tag=Outputs.__name__):
    """`Outputs` whose deltas are passed on as they came."""

    deltas: list[msgspec.Raw]
    stats: EngineStats | None = None


class _DeltaHead(msgspec.Struct, array_like=True, gc=False):
    request_id: str
    new_token_ids: msgspec.Raw
    finish_reason: str | None = None


class _AddHead(Message, tag="AddRequest"):
    request_id: str
    prompt_token_ids: msgspec.Raw
    sampling: msgspec.Raw
    arrival_time: msgspec.Raw = _NIL
    priority: msgspec.Raw = _NIL
    cache_salt: msgspec.Raw = _NIL
    output_token_ids: msgspec.Raw = _NIL


_decode_engine = msgspec.msgpack.Decoder(SealedOutputs | UtilityResult | LoadPhase | Ready | Failed).decode
_decode_delta = msgspec.msgpack.Decoder(_DeltaHead).decode
_decode_member = msgspec.msgpack.Decoder(_AddHead | AbortRequests | Utility | UtilityResult).decode


class EngineObserver(Protocol):
    """Told of the engine's life, for metrics."""

    def on_step(self, stats: EngineStats) -> None:
        """The engine has finished a step."""
        ...

    def on_engine_restart(self) -> None:
        """The engine has died and is started again."""
        ...


@dataclass(eq=False, slots=True)
class Member:
    """A frontend process as it is seen from here. `told`: what it last answered to a poll, by method."""

    identity: bytes
    address: str
    directory: str | None
    has_joined: bool = False
    is_ready: bool = False
    may_send: bool = False
    """Whether its requests are for the engine that runs: not before it has been told to go on."""
    requests: set[str] = field(default_factory=set)
    calls: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    num_unanswered: int = 0
    told: dict[str, Any] = field(default_factory=dict)


class Exchange:
    """Use: `start`, `add_member` for each frontend process and `remove_member` at its end, `shutdown`.

    `methods`: what frontends may call here; all else that they call is the engine's. `on_stuck` is told of a frontend that
    does not answer any more.
    """

    def __init__(
        self,
        args: EngineArgs,
        *,
        observer: EngineObserver,
        command: Sequence[str],
        launch: EngineLaunch | None = None,
        restarts: RestartPolicy | None,
        on_stuck: Callable[[Member], None],
    ) -> None:
        self.host: EngineHost[SealedOutputs] = EngineHost(args, command, restarts, _decode_engine, self, launch)
        self.methods: dict[str, Callable[..., Awaitable[Any]]] = {"everywhere": self.everywhere}
        self._args = args
        self._observer = observer
        self._on_stuck = on_stuck
        self._channel: Channel | None = None
        self._members: dict[bytes, Member] = {}
        self._owners: dict[str, Member] = {}
        self._max_live = 0
        self._stats = EngineStats()
        self._past_stats: EngineStats | None = None
        self._last_heard = time.monotonic()
        self._serial = itertools.count()
        self._call_ids = itertools.count()
        self._is_open = False
        self._is_gate_closed = False
        self._resuming: asyncio.Task[None] | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._answering: set[asyncio.Task[None]] = set()

    @property
    def members(self) -> list[Member]:
        """Those that can be spoken to."""
        return [member for member in self._members.values() if member.has_joined]

    @property
    def num_live(self) -> int:
        """Engine requests of all frontends."""
        return len(self._owners)

    async def start(self) -> None:
        """Start the engine process. Raises `OSError`."""
        self._channel = Channel(zmq.ROUTER, self._receive)
        await self.host.start()
        self._ticking = asyncio.create_task(self._tick())

    def add_member(self) -> Member:
        """A place for a frontend process: where and under what name it is to connect. Raises `OSError`."""
        assert self._channel is not None
        identity = f"{next(self._serial)}"
        directory = private_directory()
        address = f"ipc://{directory}/{SOCKET_NAME}"
        try:
            self._channel.bind(address)
        except zmq.ZMQError as error:
            raise OSError(error.errno, str(error)) from error
        member = self._members[identity.encode()] = Member(identity.encode(), address, directory)
        return member

    def remove_member(self, member: Member) -> None:
        """Its process has ended: nothing of it stays in the engine, nobody waits for it."""
        self._hide(member)
        self._members.pop(member.identity, None)
        if member.requests:
            logger.warning("a frontend has left %d requests; they are aborted", len(member.requests))
            self.host.send(AbortRequests(list(member.requests)))
        for request_id in member.requests:
            self._owners.pop(request_id, None)
        member.requests.clear()
        for future in member.calls.values():
            if not future.done():
                future.set_exception(EngineError("The frontend process has ended."))

    async def shutdown(self) -> None:
        """Stop the engine and close the sockets. Idempotent."""
        for task in (self._ticking, self._resuming, *self._answering):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self.host.shutdown()
        self._close()

    def kill(self) -> None:
        """End the engine at once, and clear away what would stay behind."""
        self.host.kill()
        for member in self._members.values():
            self._hide(member)

    async def call(self, member: Member, method: str, *args: Any) -> Any:
        """Ask one frontend. Raises `EngineError` with its message, also when it ends before it has answered."""
        return await self._ask(member, method, args)

    async def everywhere(self, method: str, args: list[Any]) -> list[Any]:
        """Ask every frontend, and wait for all; one that ends meanwhile has nothing to say."""
        if method in (CLOSE_GATE, OPEN_GATE):
            self._is_gate_closed = method == CLOSE_GATE  # for those that join later
        answers = await asyncio.gather(*(self._ask(member, method, args) for member in self.members), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, EngineError):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def poll(self, method: str) -> None:
        """Ask every frontend for figures, which `told` then has; who does not answer soon keeps those that it told before."""

        async def ask(member: Member) -> None:
            member.told[method] = await self._ask(member, method, ())

        tasks = [asyncio.create_task(ask(member)) for member in self.members]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=POLL_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def on_outputs(self, outputs: SealedOutputs) -> None:
        """See `Guest`, as for those below."""
        self._last_heard = time.monotonic()
        if outputs.stats is not None:
            self._stats = outputs.stats if self._past_stats is None else outputs.stats.after(self._past_stats)
            self._observer.on_step(self._stats)
        shares: dict[Member, list[msgspec.Raw]] = {}
        for delta in outputs.deltas:
            head = _decode_delta(delta)
            member = self._owners.get(head.request_id)
            if member is None:
                continue
            if head.finish_reason is not None:
                del self._owners[head.request_id]
                member.requests.discard(head.request_id)
            shares.setdefault(member, []).append(delta)
        for member, deltas in shares.items():
            self._send(member, SealedOutputs(deltas, self._stats))

    def on_phase(self, name: str, seconds: float) -> None:
        self._broadcast(LoadPhase(name, seconds))

    def on_ready(self, info: EngineInfo, is_first: bool) -> None:
        self._max_live = most_live(info, self._args)
        self._last_heard = time.monotonic()
        if not is_first:
            logger.warning("the engine is back after %.1f s", self.host.seconds_down)
        self._broadcast(Ready(info))
        self._resuming = asyncio.create_task(self._resume())

    async def on_death(self, running: frozenset[str] | None) -> None:
        """Every frontend holds its requests; what one has sent before it knew is meant for nobody."""
        self._is_open = False
        if self._resuming is not None:
            self._resuming.cancel()
            await asyncio.gather(self._resuming, return_exceptions=True)
        self._owners.clear()
        for member in self._members.values():
            member.may_send = False
            member.requests.clear()
        self._past_stats = self._stats
        self._stats = EngineStats().after(self._past_stats)
        self._observer.on_engine_restart()
        self._observer.on_step(self._stats)
        await self.everywhere("engine_died", [None if running is None else sorted(running)])

    def on_end(self, error: CanterError | None) -> None:
        reason = error or EngineDeadError("The engine has been stopped.")
        self._broadcast(Failed(str(for_requests(reason)), isinstance(reason, ConfigError)))

    async def _resume(self) -> None:
        """An engine serves. Requests that are suspected of having killed the last are tried one after another, whosever they are."""
        is_fair = True
        for member in self.members:
            member.may_send = True
            try:
                is_fair = await self._ask(member, "try_suspects", (is_fair,))
            except EngineError:
                is_fair = False  # it has ended, perhaps with a step of its suspect on the way
        self._is_open = True
        for member in self.members:
            self._admit(member)

    def _admit(self, member: Member) -> None:
        member.may_send = True
        if self._is_gate_closed:
            self._ask(member, CLOSE_GATE, ())
        self._ask(member, "go_on", ())

    async def _tick(self) -> None:
        """Tell every frontend how the engine is, which also shows whether it listens."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            silence = time.monotonic() - self._last_heard
            for member in self.members:
                if member.num_unanswered >= MOST_UNANSWERED:
                    self._on_stuck(member)
                    continue
                member.num_unanswered += 1
                self._send(member, Outputs([], self._stats))
                self._ask(member, "vitals", (self.num_live, silence)).add_done_callback(partial(_note_answer, member))

    def _ask(self, member: Member, method: str, args: Iterable[Any]) -> asyncio.Future[Any]:
        call_id = next(self._call_ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        member.calls[call_id] = future
        future.add_done_callback(lambda done: (member.calls.pop(call_id, None), done.cancelled() or done.exception()))
        self._send(member, Utility(call_id, method, list(args)))
        return future

    def _receive(self, parts: list[bytes]) -> None:
        identity, data = parts
        member = self._members.get(identity)
        if member is None:
            return  # of a process that has ended
        try:
            self._handle(member, _decode_member(data), data)
        except Exception:
            logger.exception("a message from a frontend could not be handled")

    def _handle(self, member: Member, message: _AddHead | AbortRequests | Utility | UtilityResult, data: bytes) -> None:
        match message:
            case _AddHead():
                self._add(member, message, data)
            case AbortRequests():
                self.host.send(message)
            case UtilityResult():
                finish_call(member.calls.get(message.call_id), message)
            case Utility(method="join"):
                self._join(member)
            case Utility(method="ready"):
                member.is_ready = True
            case Utility():
                task = asyncio.create_task(self._answer(member, message))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)

    def _add(self, member: Member, request: _AddHead, data: bytes) -> None:
        if not member.may_send or self.host.child is None:
            return
        if len(self._owners) >= self._max_live and bytes(request.output_token_ids) == bytes(_NIL):
            text = f"The server is full: {len(self._owners)} requests are running or waiting. Try again later."
            refusal = RequestDelta(request.request_id, [], FINISH_ERROR, error=text, error_type=QueueFullError.__name__)
            self._send(member, Outputs([refusal]))
            return
        if not self._owners:
            self._last_heard = time.monotonic()
        self._owners[request.request_id] = member
        member.requests.add(request.request_id)
        self.host.child.send_encoded(data)

    def _join(self, member: Member) -> None:
        """It has connected: tell it how things stand."""
        member.has_joined = True
        self._hide(member)
        for name, seconds in self.host.phases.items():
            self._send(member, LoadPhase(name, seconds))
        if self.host.info is not None and self.host.is_serving:
            self._send(member, Ready(self.host.info))
        if self.host.failure is not None:
            self.on_end(self.host.failure)
        if self._is_open:
            self._admit(member)

    async def _answer(self, member: Member, call: Utility) -> None:
        try:
            if call.method in self.methods:
                result = await self.methods[call.method](*call.args)
            else:
                result = await self.host.utility(call.method, *call.args)
            answer = UtilityResult(call.call_id, result)
        except CanterError as error:
            answer = UtilityResult(call.call_id, error=str(error))
        except Exception as error:
            logger.exception("%s failed", call.method)
            answer = UtilityResult(call.call_id, error=f"{call.method} failed: {type(error).__name__}.")
        if member.identity in self._members:
            self._send(member, answer)

    def _send(self, member: Member, message: Message) -> None:
        if self._channel is not None:
            self._channel.send([member.identity, messages.encode(message)])

    def _broadcast(self, message: Message) -> None:
        for member in self.members:
            self._send(member, message)

    def _hide(self, member: Member) -> None:
        """Remove the socket's path: it is needed to connect only, and then nothing can stay behind."""
        if member.directory is not None:
            shutil.rmtree(member.directory, ignore_errors=True)
            member.directory = None

    def _close(self) -> None:
        for member in self._members.values():
            self._hide(member)
        if self._channel is not None:
            self._channel.close(linger_ms=200)
            self._channel = None


def _note_answer(member: Member, _: asyncio.Future[Any]) -> None:
    member.num_unanswered = 0
