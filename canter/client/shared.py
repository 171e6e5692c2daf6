"""The client of an engine that other frontend processes use too, by way of the process that hosts it (`client/exchange.py`)."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

import msgspec
import zmq

from canter.client.channel import Channel
from canter.client.host import finish_call
from canter.client.hub import RequestHub, most_live
from canter.client.outputs import RequestOutput
from canter.client.protocol import RequestObserver
from canter.client.remote import LONGEST_WAIT, STALL_SECONDS
from canter.core import messages
from canter.core.config import EngineArgs
from canter.core.errors import CanterError, ConfigError, EngineDeadError, EngineError, EngineNotReadyError, EngineRestartingError
from canter.core.logging import get_logger
from canter.core.messages import EngineInfo, EngineStats, Failed, LoadPhase, Message, Outputs, Ready, Utility, UtilityResult
from canter.core.sampling_params import SamplingParams
from canter.text.tokenizer import Tokenizer

logger = get_logger(__name__)

VITALS_SECONDS = 15.0
"""So long without a word from the host, which speaks twice a second, and it must be stuck."""
LINGER_MS = 1000
_decode = msgspec.msgpack.Decoder(Outputs | UtilityResult | LoadPhase | Ready | Failed | Utility).decode


class SharedClient:
    """An `EngineClient` in one of several frontends. Use: `await start()`, `await wait_ready()`, then `generate`.

    `identity` is the name that the exchange at `address` knows it by. `answers`: what it can be asked for besides, with
    functions that answer, at once or later.
    """

    def __init__(
        self,
        args: EngineArgs,
        address: str,
        identity: str,
        *,
        observer: RequestObserver | None = None,
        stall_timeout: float = STALL_SECONDS,
    ) -> None:
        self.info: EngineInfo | None = None
        self.phases: dict[str, float] = {}
        self.failure: CanterError | None = None
        self.answers: dict[str, Callable[..., Any]] = {}
        self._args = args
        self._address = address
        self._stall_timeout = stall_timeout
        # Seeds that are made must differ from those that the other frontends make.
        self._hub = RequestHub(self._send, None, observer, args.seed ^ (int(identity) << 64), is_open=False)
        self._channel: Channel | None = None
        self.identity = identity
        self._is_serving = False
        self._is_stopped = False
        self._settled = asyncio.Event()
        self._dead = asyncio.Event()
        self._call_ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Future[Any]] = set()
        self._resuming: asyncio.Future[Any] | None = None
        self._num_live_everywhere = 0
        self._silent_since = self._vitals_at = time.monotonic()
        self._own_answers: dict[str, Callable[..., Any]] = {
            "vitals": self._on_vitals,
            "engine_died": self._on_death,
            "try_suspects": self._hub.try_suspects,
            "go_on": self._hub.go_on,
        }

    @property
    def stats(self) -> EngineStats:
        return self._hub.stats

    @property
    def num_live(self) -> int:
        """Engine requests of this frontend."""
        return self._hub.num_live

    @property
    def is_restarting(self) -> bool:
        """See `EngineClient.is_restarting`."""
        return self.info is not None and not self._is_serving and not self._is_stopped and not self._dead.is_set()

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        """The last that was missing: from now on this frontend serves."""
        self._hub.set_tokenizer(tokenizer)
        self._send(Utility(next(self._call_ids), "ready"))

    async def start(self) -> None:
        """Connect; returns before anybody has answered."""
        self._channel = Channel(zmq.DEALER, self._receive, self.identity.encode())
        self._channel.connect(self._address)
        self._vitals_at = time.monotonic()
        self._send(Utility(next(self._call_ids), "join"))

    async def wait_ready(self) -> EngineInfo:
        """Wait until the engine serves. Raises `ConfigError` for a mistake of the user's, else `EngineDeadError`."""
        await self._settled.wait()
        if self.info is None:
            raise self.failure or EngineDeadError("The engine was stopped while it loaded.")
        return self.info

    async def wait_dead(self) -> None:
        """Wait until there is no engine any more."""
        await self._dead.wait()

    def check_health(self) -> None:
        """See `EngineClient.check_health`. An engine is stuck for all frontends, also those that have no request."""
        self._check_usable()
        self._check_serving()
        now = time.monotonic()
        if now - self._vitals_at > VITALS_SECONDS:
            raise EngineError(f"The process that hosts the engine has not spoken for {now - self._vitals_at:.0f} seconds.")
        if self._num_live_everywhere and now - self._silent_since > self._stall_timeout:
            raise EngineError(f"The engine has not answered for {now - self._silent_since:.0f} seconds.")

    def generate(
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
        self._check_usable()
        return self._hub.generate(request_id, prompt_token_ids, params, prompt=prompt, priority=priority, cache_salt=cache_salt)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """See `EngineClient.abort`."""
        self._hub.abort(request_ids)

    async def utility(self, method: str, *args: Any) -> Any:
        """See `EngineClient.utility`."""
        self._check_usable()
        self._check_serving()
        return await self.ask_exchange(method, *args)

    async def ask_exchange(self, method: str, *args: Any) -> Any:
        """Call a method of the exchange, whatever the engine does. Raises `EngineError` with its message."""
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(Utility(call_id, method, list(args)))
            return await future
        finally:
            self._calls.pop(call_id, None)

    async def everywhere(self, method: str, *args: Any) -> list[Any]:
        """The answers of all frontends, this one too, that are there."""
        answers: list[Any] = await self.ask_exchange("everywhere", method, list(args))
        return answers

    def fail_all(self, error: EngineError) -> None:
        """Raise `error` in the reader of every live request, which aborts it."""
        self._hub.fail_all(error)

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until no request of this frontend is alive; False when they outlast `timeout` seconds."""
        return await self._hub.wait_idle(min(timeout, LONGEST_WAIT))

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """End this frontend's part; the engine goes on. Idempotent."""
        if not await self.wait_idle(drain_timeout):
            self._hub.fail_all(EngineDeadError("The server is shutting down."))
            await self.wait_idle(1.0)
        self._is_stopped = True
        self._dead.set()
        self._settled.set()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._channel is not None:
            self._channel.close(LINGER_MS)
            self._channel = None

    def kill(self) -> None:
        """The engine is another process's: nothing is to be done."""

    def _check_usable(self) -> None:
        if self.failure is not None:
            raise EngineDeadError(str(self.failure))
        if self._is_stopped:
            raise EngineDeadError("The engine has been stopped.")
        if self.info is None:
            raise EngineNotReadyError("The model is still loading. Try again in a moment.")

    def _check_serving(self) -> None:
        if not self._is_serving:
            raise EngineRestartingError("The engine has died and is being restarted. Try again in a moment.")

    def _send(self, message: Message) -> None:
        if self._channel is not None:
            self._channel.send([messages.encode(message)])

    def _receive(self, parts: list[bytes]) -> None:
        try:
            self._handle(_decode(parts[-1]))
        except Exception:
            logger.exception("a message from the engine could not be handled")

    def _handle(self, message: Outputs | UtilityResult | LoadPhase | Ready | Failed | Utility) -> None:
        match message:
            case Outputs():
                self._hub.deliver(message)
            case UtilityResult():
                finish_call(self._calls.get(message.call_id), message)
            case Utility():
                self._answer(message)
            case LoadPhase():
                self.phases[message.name] = message.seconds
            case Ready():
                self.info = message.info
                self._hub.max_live = most_live(message.info, self._args)
                self._is_serving = True
                self._on_vitals(0, 0.0)
                self._settled.set()
            case Failed():
                self._is_serving = False
                self.failure = ConfigError(message.error) if message.user_error else EngineDeadError(message.error)
                self._dead.set()
                self._settled.set()
                self._hub.fail_all(EngineDeadError(message.error))

    def _on_vitals(self, num_live: int, silence: float) -> None:
        self._vitals_at = time.monotonic()
        self._num_live_everywhere = num_live
        self._silent_since = self._vitals_at - silence

    def _on_death(self, running: list[str] | None) -> None:
        self._is_serving = False
        self.phases.clear()
        if self._resuming is not None:
            self._resuming.cancel()
        self._hub.hold(None if running is None else frozenset(running))

    def _answer(self, call: Utility) -> None:
        """Call what is asked for. What takes time goes on beside the messages that follow."""
        answer = self._own_answers.get(call.method) or self.answers.get(call.method)
        if answer is None:
            self._send(UtilityResult(call.call_id, error=f"A frontend has no method {call.method!r}."))
            return
        try:
            result = answer(*call.args)
        except Exception as error:  # whoever asks must not wait for ever
            logger.exception("%s failed", call.method)
            self._send(UtilityResult(call.call_id, error=f"{call.method} failed: {type(error).__name__}."))
            return
        if not inspect.isawaitable(result):
            self._send(UtilityResult(call.call_id, result))
            return
        task = asyncio.ensure_future(result)
        if call.method in ("try_suspects", "go_on"):
            self._resuming = task
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._finish_answer(call, done))

    def _finish_answer(self, call: Utility, done: asyncio.Future[Any]) -> None:
        self._tasks.discard(done)
        if done.cancelled():
            self._send(UtilityResult(call.call_id, error=f"{call.method} was given up."))
        elif (error := done.exception()) is not None:
            logger.error("%s failed", call.method, exc_info=error)
            self._send(UtilityResult(call.call_id, error=f"{call.method} failed: {type(error).__name__}."))
        else:
            self._send(UtilityResult(call.call_id, done.result()))
