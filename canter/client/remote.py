"""The client of an engine in a process of its own, and of no other client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

from canter.client.host import EngineHost, for_requests
from canter.client.hub import RequestHub, most_live
from canter.client.launch import ENGINE_COMMAND, EngineLaunch
from canter.client.outputs import RequestOutput
from canter.client.protocol import RequestObserver
from canter.client.restarts import RestartPolicy
from canter.core import messages
from canter.core.config import EngineArgs
from canter.core.errors import CanterError, EngineDeadError, EngineError
from canter.core.logging import get_logger
from canter.core.messages import EngineInfo, EngineStats, Outputs
from canter.core.sampling_params import SamplingParams
from canter.text.tokenizer import Tokenizer

logger = get_logger(__name__)

STALL_SECONDS = 300.0
LONGEST_WAIT = 365 * 24 * 3600.0


class RemoteClient:
    """An `EngineClient` for a child process. Use: `await start()`, `await wait_ready()`, then `generate`.

    `command` is what is run as the engine; `stall_timeout`: seconds without a sign of life, while requests run,
    after which `check_health` raises. `tokenizer` may come later (`set_tokenizer`), but before the first request.
    `restarts`: when a ready engine dies, it is started again and requests go on; None: they end with an error.
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
        self.host: EngineHost[Outputs] = EngineHost(args, command, restarts, messages.decode_engine, self, launch)
        self._args = args
        self._stall_timeout = stall_timeout
        self._hub = RequestHub(self.host.send, tokenizer, observer, args.seed)
        self._resuming: asyncio.Task[None] | None = None

    @property
    def info(self) -> EngineInfo | None:
        return self.host.info

    @property
    def phases(self) -> dict[str, float]:
        return self.host.phases

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
        return None if self.host.child is None else self.host.child.pid

    @property
    def is_restarting(self) -> bool:
        """See `EngineClient.is_restarting`."""
        return self.host.is_restarting

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        self._hub.set_tokenizer(tokenizer)

    async def start(self) -> None:
        """Start the engine process; returns before it has loaded. Raises `OSError`."""
        await self.host.start()

    async def wait_ready(self) -> EngineInfo:
        """Wait until the engine serves. Raises `ConfigError` for a mistake of the user's, else `EngineDeadError`."""
        return await self.host.wait_ready()

    async def wait_dead(self) -> None:
        """Wait until the engine process has ended, for whatever reason, and no other follows."""
        await self.host.wait_dead()

    def check_health(self) -> None:
        """See `EngineClient.check_health`."""
        self.host.check_usable()
        self.host.check_serving()
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
        self.host.check_usable()
        return self._hub.generate(request_id, prompt_token_ids, params, prompt=prompt, priority=priority, cache_salt=cache_salt)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """See `EngineClient.abort`."""
        self._hub.abort(request_ids)

    async def utility(self, method: str, *args: Any) -> Any:
        """See `EngineClient.utility`."""
        return await self.host.utility(method, *args)

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
        await self.host.shutdown()
        await self._stop_resuming()

    def kill(self) -> None:
        """Kill the engine process at once, and clear away what would stay behind."""
        self.host.kill()

    def on_outputs(self, outputs: Outputs) -> None:
        """See `Guest`, as for those below."""
        self._hub.deliver(outputs)

    def on_phase(self, name: str, seconds: float) -> None:
        """The host has it."""

    def on_ready(self, info: EngineInfo, is_first: bool) -> None:
        self._hub.max_live = most_live(info, self._args)
        if not is_first:
            logger.warning("the engine is back after %.1f s: %d requests go on", self.host.seconds_down, self._hub.num_live)
            self._resuming = asyncio.create_task(self._hub.resume())

    async def on_death(self, running: frozenset[str] | None) -> None:
        await self._stop_resuming()
        self._hub.hold(running)

    def on_end(self, error: CanterError | None) -> None:
        self._hub.fail_all(for_requests(error or EngineDeadError("The engine has been stopped.")))

    async def _stop_resuming(self) -> None:
        task, self._resuming = self._resuming, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
