"""The client of an engine in a process of its own: starts it, talks to it, and starts it again when it has died."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

from canter.client.child import EngineChild
from canter.client.hub import RequestHub, most_live
from canter.client.launch import ENGINE_COMMAND, EngineLaunch
from canter.client.outputs import RequestOutput
from canter.client.protocol import RequestObserver
from canter.client.restarts import RestartPolicy
from canter.core import messages
from canter.core.config import EngineArgs
from canter.core.errors import CanterError, ConfigError, EngineDeadError, EngineError, EngineNotReadyError, EngineRestartingError
from canter.core.logging import get_logger
from canter.core.messages import (
    EngineInfo,
    EngineStats,
    Failed,
    FrontendMessage,
    LoadPhase,
    Outputs,
    Ready,
    Shutdown,
    Utility,
    UtilityResult,
)
from canter.core.sampling_params import SamplingParams
from canter.text.tokenizer import Tokenizer

logger = get_logger(__name__)

EXIT_SECONDS = 10.0
TERMINATE_SECONDS = 2.0
STALL_SECONDS = 300.0
LONGEST_WAIT = 365 * 24 * 3600.0


class RemoteClient:
    """An `EngineClient` for a child process. Use: `await start()`, `await wait_ready()`, then `generate`.

    `command` is what is run as the engine, `launch` one that has been started with it already; `stall_timeout`: seconds
    without a sign of life, while requests run, after which `check_health` raises. `tokenizer` may come later
    (`set_tokenizer`), but before the first request. `restarts`: when a ready engine dies, it is started again and requests go
    on; None: they end with an error.
    """

    def __init__(
        self,
        args: EngineArgs,
        tokenizer: Tokenizer | None = None,
        *,
        observer: RequestObserver | None = None,
        command: Sequence[str] = ENGINE_COMMAND,
        launch: EngineLaunch | None = None,
        stall_timeout: float = STALL_SECONDS,
        restarts: RestartPolicy | None = None,
    ) -> None:
        self.info: EngineInfo | None = None
        self.phases: dict[str, float] = {}
        self._args = args
        self._command = tuple(command)
        self._launch = launch
        self._stall_timeout = stall_timeout
        self._restarts = restarts
        self._hub = RequestHub(self._send, tokenizer, observer, args.seed)
        self._failure: CanterError | None = None
        self._stopping = False
        self._is_serving = False
        self._last_words: CanterError | None = None
        self._died_at = 0.0
        self._settled = asyncio.Event()
        self._dead = asyncio.Event()
        self._utilities: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._child: EngineChild | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._resuming: asyncio.Task[None] | None = None

    @property
    def stats(self) -> EngineStats:
        return self._hub.stats

    @property
    def num_live(self) -> int:
        """Engine requests alive."""
        return self._hub.num_live

    @property
    def process_id(self) -> int | None:
        """Of the engine that runs, or the last that did."""
        return None if self._child is None else self._child.pid

    @property
    def is_restarting(self) -> bool:
        """See `EngineClient.is_restarting`."""
        return self.info is not None and not self._is_serving and not self._stopping and not self._dead.is_set()

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        self._hub.set_tokenizer(tokenizer)

    async def start(self) -> None:
        """Start the engine process; returns before it has loaded. Raises `OSError`."""
        self._child = EngineChild(self._command, self._args, self._handle, self._launch)
        await self._child.start()
        self._supervisor = asyncio.create_task(self._supervise())

    async def wait_ready(self) -> EngineInfo:
        """Wait until the engine serves. Raises `ConfigError` for a mistake of the user's, else `EngineDeadError`."""
        await self._settled.wait()
        if self.info is None:
            raise self._failure or EngineDeadError("The engine was stopped while it loaded.")
        return self.info

    async def wait_dead(self) -> None:
        """Wait until the engine process has ended, for whatever reason, and no other follows."""
        await self._dead.wait()

    def check_health(self) -> None:
        """See `EngineClient.check_health`."""
        self._check_usable()
        self._check_serving()
        silence = time.monotonic() - self._hub.last_heard
        if self._hub.num_live and silence > self._stall_timeout:
            raise EngineError(f"The engine has not answered for {silence:.0f} seconds.")

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
        call_id = next(self._call_ids)
        future = self._utilities[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(Utility(call_id, method, list(args)))
            return await future
        finally:
            self._utilities.pop(call_id, None)

    def fail_all(self, error: EngineError) -> None:
        """Raise `error` in the reader of every live request, which aborts it."""
        self._hub.fail_all(error)

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until no request is alive; False when they outlast `timeout` seconds."""
        return await self._hub.wait_idle(min(timeout, LONGEST_WAIT))

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """See `EngineClient.shutdown`. Idempotent; also stops an engine that still loads."""
        if not await self.wait_idle(drain_timeout):
            self._hub.fail_all(EngineDeadError("The server is shutting down."))
            await self.wait_idle(1.0)
        self._stopping = True
        if self._child is not None and not self._dead.is_set():
            if self._is_serving:
                self._child.send(Shutdown())
                await self._wait_exit(EXIT_SECONDS)
            for stop in (self._child.terminate, self._child.kill):
                if self._is_child_alive():
                    stop()
                    await self._wait_exit(TERMINATE_SECONDS)
        await self._close()

    def kill(self) -> None:
        """Kill the engine process at once, and clear away what would stay behind."""
        self._stopping = True
        if self._child is not None:
            if self._is_child_alive():
                self._child.kill()
            self._child.hide()

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(str(self._failure))
        if self._stopping or self._dead.is_set():
            raise EngineDeadError("The engine has been stopped.")
        if self.info is None:
            raise EngineNotReadyError("The model is still loading. Try again in a moment.")

    def _check_serving(self) -> None:
        if not self._is_serving:
            raise EngineRestartingError("The engine has died and is being restarted. Try again in a moment.")

    def _send(self, message: FrontendMessage) -> None:
        if self._child is not None and self._is_serving:
            self._child.send(message)

    def _handle(self, message: messages.EngineMessage) -> None:
        match message:
            case Outputs():
                self._hub.deliver(message)
            case UtilityResult():
                self._finish_utility(message)
            case LoadPhase():
                self.phases[message.name] = message.seconds
                logger.debug("engine: %s took %.2f s", message.name, message.seconds)
            case Ready():
                self._on_ready(message.info)
            case Failed():
                kind = ConfigError if message.user_error else EngineDeadError
                self._last_words = kind(message.error)

    def _on_ready(self, info: EngineInfo) -> None:
        assert self._child is not None
        is_first = self.info is None
        self.info = info
        self._hub.max_live = most_live(info, self._args)
        self._child.hide()  # however this process ends now
        self._is_serving = True
        if is_first:
            self._settled.set()
        else:
            seconds = time.monotonic() - self._died_at
            logger.warning("the engine is back after %.1f s: %d requests go on", seconds, self._hub.num_live)
            self._resuming = asyncio.create_task(self._hub.resume())

    def _finish_utility(self, result: UtilityResult) -> None:
        future = self._utilities.get(result.call_id)
        if future is None or future.done():
            return
        if result.error is None:
            future.set_result(result.result)
        else:
            future.set_exception(EngineError(result.error))

    async def _supervise(self) -> None:
        """See to the end of one engine after another; then nothing that waits for them may wait on."""
        error = await self._end_of_life()
        while error is not None and (delay := self._next_delay()) is not None:
            await asyncio.sleep(delay)
            error = await self._next_life()
        if error is not None:
            self._failure = error
        self._dead.set()
        self._settled.set()
        self._hub.fail_all(self._for_requests(error or EngineDeadError("The engine has been stopped.")))

    async def _end_of_life(self) -> CanterError | None:
        """Wait for the end of the process; None when it was asked to end, else why it did."""
        assert self._child is not None
        code = await self._child.wait()
        was_serving, self._is_serving = self._is_serving, False
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        error = self._last_words or EngineDeadError(f"The engine process ended {how}.")
        self._last_words = None
        self._end_utilities(self._for_requests(error))
        if self._stopping:
            return None
        logger.error("the engine process ended %s", how)
        if was_serving and self._restarts is not None:
            self._died_at = time.monotonic()
            await self._stop_resuming()
            self._hub.hold(self._child.running())
        return error

    def _next_delay(self) -> float | None:
        """Seconds until the engine is to be started again; None when it is not."""
        if self._restarts is None or self.info is None:
            return None
        delay, policy = self._restarts.next_delay(time.monotonic()), self._restarts
        if delay is None:
            logger.error("the engine is not restarted: it was %d times within %.0f s", policy.num_recent, policy.window)
        else:
            logger.warning("restarting the engine in %.0f s (restart %d of at most %d)", delay, policy.num_recent, policy.max_restarts)
        return delay

    async def _next_life(self) -> CanterError | None:
        """Start the engine again, and wait for its end as `_end_of_life` does."""
        assert self._child is not None
        self._child.close()
        self.phases.clear()
        self._child = EngineChild(self._command, self._args, self._handle)
        try:
            await self._child.start()
        except OSError as error:
            return EngineDeadError(f"The engine process could not be started again: {error.strerror or error}.")
        return await self._end_of_life()

    def _for_requests(self, error: CanterError) -> EngineError:
        return error if isinstance(error, EngineError) else EngineDeadError(str(error))

    def _end_utilities(self, error: EngineError) -> None:
        for future in self._utilities.values():
            if not future.done():
                future.set_exception(error)

    async def _stop_resuming(self) -> None:
        task, self._resuming = self._resuming, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _is_child_alive(self) -> bool:
        return self._child is not None and self._child.is_alive and not self._dead.is_set()

    async def _wait_exit(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._dead.wait(), seconds)
        except TimeoutError:
            logger.warning("the engine process has not ended after %.0f s", seconds)

    async def _close(self) -> None:
        await self._stop_resuming()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._dead.set()
            self._settled.set()
        if self._child is not None:
            self._child.close()
