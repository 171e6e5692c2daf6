"""Whoever hosts an engine process: starts it, calls it, and starts it again when it has died. It knows nothing of requests."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from canter.client.child import EngineChild
from canter.client.launch import EngineLaunch
from canter.client.restarts import RestartPolicy
from canter.core.config import EngineArgs
from canter.core.errors import CanterError, ConfigError, EngineDeadError, EngineError, EngineNotReadyError, EngineRestartingError
from canter.core.logging import get_logger
from canter.core.messages import EngineInfo, Failed, LoadPhase, Message, Ready, Shutdown, Utility, UtilityResult

logger = get_logger(__name__)

M = TypeVar("M", bound=Message, contravariant=True)

EXIT_SECONDS = 10.0
TERMINATE_SECONDS = 2.0
PAUSE, RESUME = "pause", "resume"


class Guest(Protocol[M]):
    """Who has the requests. All but the end comes as often as engines do."""

    def on_outputs(self, outputs: M) -> None:
        """The engine has done a step."""
        ...

    def on_phase(self, name: str, seconds: float) -> None:
        """A phase of start-up has ended."""
        ...

    def on_ready(self, info: EngineInfo, is_first: bool) -> None:
        """An engine serves."""
        ...

    async def on_death(self, running: frozenset[str] | None) -> None:
        """It has died, and another may follow. `running`: the ids that it ran then, None when nobody knows."""
        ...

    def on_end(self, error: CanterError | None) -> None:
        """No engine follows. `error`: why, None when it was asked to end."""
        ...


class EngineHost(Generic[M]):
    """Use: `await start()`, `await wait_ready()`, `send`, `await shutdown()`.

    `command` is what is run as the engine, `launch` one that has been started with it already. `restarts`: when a ready engine dies
    it is started again; None: that is the end. `decode` makes the engine's messages; those that are not for the host go to `guest`. A
    pause outlives the engine that was paused.
    """

    def __init__(
        self,
        args: EngineArgs,
        command: Sequence[str],
        restarts: RestartPolicy | None,
        decode: Callable[[bytes], Any],
        guest: Guest[M],
        launch: EngineLaunch | None = None,
    ) -> None:
        self.info: EngineInfo | None = None
        self.phases: dict[str, float] = {}
        self.failure: CanterError | None = None
        """Why there is no engine any more, unless it was asked to end."""
        self.is_serving = False
        self.is_stopping = False
        self.restarts = restarts
        self.child: EngineChild[Any] | None = None
        self._args = args
        self._command = tuple(command)
        self._decode = decode
        self._guest = guest
        self._launch = launch
        self._is_paused = False
        self._last_words: CanterError | None = None
        self._died_at = 0.0
        self._settled = asyncio.Event()
        self._dead = asyncio.Event()
        self._utilities: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def is_restarting(self) -> bool:
        """Whether a ready engine has died and another is on its way."""
        return self.info is not None and not self.is_serving and not self.is_stopping and not self._dead.is_set()

    @property
    def seconds_down(self) -> float:
        """Since the last death."""
        return time.monotonic() - self._died_at

    async def start(self) -> None:
        """Start the engine process; returns before it has loaded. Raises `OSError`."""
        self.child = EngineChild(self._command, self._args, self._decode, self.handle, self._launch)
        await self.child.start()
        self._supervisor = asyncio.create_task(self._supervise())

    async def wait_ready(self) -> EngineInfo:
        """Wait until the engine serves. Raises `ConfigError` for a mistake of the user's, else `EngineDeadError`."""
        await self._settled.wait()
        if self.info is None:
            raise self.failure or EngineDeadError("The engine was stopped while it loaded.")
        return self.info

    async def wait_dead(self) -> None:
        """Wait until the engine process has ended, for whatever reason, and no other follows."""
        await self._dead.wait()

    def check_usable(self) -> None:
        """Raises `EngineNotReadyError` before there is an engine, `EngineDeadError` when there will be none."""
        if self.failure is not None:
            raise EngineDeadError(str(self.failure))
        if self.is_stopping or self._dead.is_set():
            raise EngineDeadError("The engine has been stopped.")
        if self.info is None:
            raise EngineNotReadyError("The model is still loading. Try again in a moment.")

    def check_serving(self) -> None:
        """Raises `EngineRestartingError` between two engines."""
        if not self.is_serving:
            raise EngineRestartingError("The engine has died and is being restarted. Try again in a moment.")

    def send(self, message: Any) -> None:
        """Hand a message to the engine that serves; without one it is dropped."""
        if self.child is not None and self.is_serving:
            self.child.send(message)

    async def utility(self, method: str, *args: Any) -> Any:
        """See `EngineClient.utility`."""
        self.check_usable()
        self.check_serving()
        result = await self._call(method, list(args))
        if method in (PAUSE, RESUME):
            self._is_paused = method == PAUSE
        return result

    async def shutdown(self) -> None:
        """Stop the engine, one that still loads too. Idempotent."""
        self.is_stopping = True
        if self.child is not None and not self._dead.is_set():
            if self.is_serving:
                self.child.send(Shutdown())
                await self._wait_exit(EXIT_SECONDS)
            for stop in (self.child.terminate, self.child.kill):
                if self._is_child_alive():
                    stop()
                    await self._wait_exit(TERMINATE_SECONDS)
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._dead.set()
            self._settled.set()
        if self.child is not None:
            self.child.close()

    def kill(self) -> None:
        """Kill the engine process at once, and clear away what would stay behind."""
        self.is_stopping = True
        if self.child is not None:
            if self._is_child_alive():
                self.child.kill()
            self.child.hide()

    def handle(self, message: Any) -> None:
        """What the engine says."""
        match message:
            case UtilityResult():
                finish_call(self._utilities.get(message.call_id), message)
            case LoadPhase():
                self.phases[message.name] = message.seconds
                logger.debug("engine: %s took %.2f s", message.name, message.seconds)
                self._guest.on_phase(message.name, message.seconds)
            case Ready():
                self._on_ready(message.info)
            case Failed():
                kind = ConfigError if message.user_error else EngineDeadError
                self._last_words = kind(message.error)
            case _:
                self._guest.on_outputs(message)

    async def _call(self, method: str, args: list[Any]) -> Any:
        call_id = next(self._call_ids)
        future = self._utilities[call_id] = asyncio.get_running_loop().create_future()
        try:
            self.send(Utility(call_id, method, args))
            return await future
        finally:
            self._utilities.pop(call_id, None)

    def _on_ready(self, info: EngineInfo) -> None:
        assert self.child is not None
        is_first = self.info is None
        self.info = info
        self.child.hide()  # however this process ends now
        self.is_serving = True
        if self._is_paused:
            self.send(Utility(next(self._call_ids), PAUSE))  # before any request
        if is_first:
            self._settled.set()
        self._guest.on_ready(info, is_first)

    async def _supervise(self) -> None:
        """See to the end of one engine after another; then nothing that waits for them may wait on."""
        error = await self._end_of_life()
        while error is not None and (delay := self._next_delay()) is not None:
            await asyncio.sleep(delay)
            error = await self._next_life()
        if error is not None:
            self.failure = error
        self._dead.set()
        self._settled.set()
        self._guest.on_end(error)

    async def _end_of_life(self) -> CanterError | None:
        """Wait for the end of the process; None when it was asked to end, else why it did."""
        assert self.child is not None
        code = await self.child.wait()
        was_serving, self.is_serving = self.is_serving, False
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        error = self._last_words or EngineDeadError(f"The engine process ended {how}.")
        self._last_words = None
        self._end_utilities(for_requests(error))
        if self.is_stopping:
            return None
        logger.error("the engine process ended %s", how)
        if was_serving and self.restarts is not None:
            self._died_at = time.monotonic()
            await self._guest.on_death(self.child.running())
        return error

    def _next_delay(self) -> float | None:
        """Seconds until the engine is to be started again; None when it is not."""
        if self.restarts is None or self.info is None:
            return None
        delay, policy = self.restarts.next_delay(time.monotonic()), self.restarts
        if delay is None:
            logger.error("the engine is not restarted: it was %d times within %.0f s", policy.num_recent, policy.window)
        else:
            logger.warning("restarting the engine in %.0f s (restart %d of at most %d)", delay, policy.num_recent, policy.max_restarts)
        return delay

    async def _next_life(self) -> CanterError | None:
        """Start the engine again, and wait for its end as `_end_of_life` does."""
        assert self.child is not None
        self.child.close()
        self.phases.clear()
        self.child = EngineChild(self._command, self._args, self._decode, self.handle)
        try:
            await self.child.start()
        except OSError as error:
            return EngineDeadError(f"The engine process could not be started again: {error.strerror or error}.")
        return await self._end_of_life()

    def _end_utilities(self, error: EngineError) -> None:
        for future in self._utilities.values():
            if not future.done():
                future.set_exception(error)

    def _is_child_alive(self) -> bool:
        return self.child is not None and self.child.is_alive and not self._dead.is_set()

    async def _wait_exit(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._dead.wait(), seconds)
        except TimeoutError:
            logger.warning("the engine process has not ended after %.0f s", seconds)


def finish_call(future: asyncio.Future[Any] | None, result: UtilityResult) -> None:
    """Give an answer to who waits for it, if somebody still does."""
    if future is None or future.done():
        return
    if result.error is None:
        future.set_result(result.result)
    else:
        future.set_exception(EngineError(result.error))


def for_requests(error: CanterError) -> EngineError:
    """A reason as those who sent requests are told it."""
    return error if isinstance(error, EngineError) else EngineDeadError(str(error))
