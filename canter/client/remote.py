"""The client of an engine in a process of its own: starts it, talks to it over a private ZeroMQ socket, and watches it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import asdict
from typing import Any, cast

import zmq

from canter.client.hub import RequestHub, most_live
from canter.client.outputs import RequestOutput
from canter.client.protocol import RequestObserver
from canter.core import messages
from canter.core.config import EngineArgs
from canter.core.errors import CanterError, ConfigError, EngineDeadError, EngineError, EngineNotReadyError
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

ENGINE_COMMAND = (sys.executable, "-m", "canter.engine.process")
MAX_IPC_PATH_BYTES = 100
EXIT_SECONDS = 10.0
TERMINATE_SECONDS = 2.0
STALL_SECONDS = 300.0
LONGEST_WAIT = 365 * 24 * 3600.0
_READABLE = int(zmq.POLLIN)  # zmq's own flags are of an enum, slow to combine


class RemoteClient:
    """An `EngineClient` for a child process. Use: `await start()`, `await wait_ready()`, then `generate`.

    `command` is what is run as the engine; `stall_timeout`: seconds without a sign of life, while requests run,
    after which `check_health` raises. `tokenizer` may come later (`set_tokenizer`), but before the first request.
    """

    def __init__(
        self,
        args: EngineArgs,
        tokenizer: Tokenizer | None = None,
        *,
        observer: RequestObserver | None = None,
        command: Sequence[str] = ENGINE_COMMAND,
        stall_timeout: float = STALL_SECONDS,
    ) -> None:
        self.info: EngineInfo | None = None
        self.phases: dict[str, float] = {}
        self._args = args
        self._command = tuple(command)
        self._stall_timeout = stall_timeout
        self._hub = RequestHub(self._send, tokenizer, observer)
        self._failure: CanterError | None = None
        self._stopping = False
        self._settled = asyncio.Event()
        self._dead = asyncio.Event()
        self._utilities: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._directory: str | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._engine_identity: bytes | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def stats(self) -> EngineStats:
        return self._hub.stats

    @property
    def num_live(self) -> int:
        """Engine requests alive."""
        return self._hub.num_live

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        self._hub.set_tokenizer(tokenizer)

    async def start(self) -> None:
        """Bind the socket and start the engine process; returns before it has loaded."""
        self._directory = _private_directory()
        address = f"ipc://{self._directory}/engine"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.bind(address)
        try:
            # A session of its own keeps a terminal's Ctrl-C from the engine, so that requests can be drained.
            self._process = await asyncio.create_subprocess_exec(*self._command, stdin=asyncio.subprocess.PIPE, start_new_session=True)
        except OSError:
            await self._close()
            raise
        # Not through zmq.asyncio: its futures cost more for each message than all that is then done with it.
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._receive)
        self._tasks = [asyncio.create_task(self._watch())]
        line = json.dumps({"address": address, "args": asdict(self._args)}) + "\n"
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())  # stays open: its end tells the engine that this process is gone

    async def wait_ready(self) -> EngineInfo:
        """Wait until the engine serves. Raises `ConfigError` for a mistake of the user's, else `EngineDeadError`."""
        await self._settled.wait()
        if self.info is None:
            raise self._failure or EngineDeadError("The engine was stopped while it loaded.")
        return self.info

    async def wait_dead(self) -> None:
        """Wait until the engine process has ended, for whatever reason."""
        await self._dead.wait()

    def check_health(self) -> None:
        """See `EngineClient.check_health`."""
        self._check_usable()
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
        if self._process is not None and not self._dead.is_set():
            if self.info is not None:
                self._send(Shutdown())
                await self._wait_exit(EXIT_SECONDS)
            for stop in (self._process.terminate, self._process.kill):
                if not self._dead.is_set():
                    with contextlib.suppress(ProcessLookupError):
                        stop()
                    await self._wait_exit(TERMINATE_SECONDS)
        await self._close()

    def kill(self) -> None:
        """Kill the engine process at once, and clear away what would stay behind."""
        self._stopping = True
        if self._process is not None and not self._dead.is_set():
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        self._remove_directory()

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(str(self._failure))
        if self._stopping or self._dead.is_set():
            raise EngineDeadError("The engine has been stopped.")
        if self.info is None:
            raise EngineNotReadyError("The model is still loading. Try again in a moment.")

    def _send(self, message: FrontendMessage) -> None:
        """Hand a message to the engine. With no limit on the socket's queue this never waits."""
        if self._socket is None or self._engine_identity is None or self._dead.is_set():
            return
        self._socket.send_multipart([self._engine_identity, messages.encode(message)])
        # The descriptor tells of new events once; sending may have taken note of one that is still to be read.
        asyncio.get_running_loop().call_soon(self._receive)

    def _receive(self) -> None:
        """Read all that there is: the descriptor becomes readable again only with what comes later."""
        while self._socket is not None and cast(int, self._socket.get(zmq.EVENTS)) & _READABLE:
            self._engine_identity = self._socket.recv()
            data = self._socket.recv()  # the parts of a message come together
            try:
                self._handle(messages.decode_engine(data))
            except Exception:
                logger.exception("a message from the engine could not be handled")

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
                self._fail(kind(message.error))

    def _on_ready(self, info: EngineInfo) -> None:
        self.info = info
        self._hub.max_live = most_live(info, self._args)
        self._remove_directory()  # both ends are connected: now nothing can stay behind, however this process ends
        self._settled.set()

    def _finish_utility(self, result: UtilityResult) -> None:
        future = self._utilities.get(result.call_id)
        if future is None or future.done():
            return
        if result.error is None:
            future.set_result(result.result)
        else:
            future.set_exception(EngineError(result.error))

    async def _watch(self) -> None:
        """Wait for the end of the process; then nothing that waits for the engine may wait on."""
        assert self._process is not None
        code = await self._process.wait()
        await asyncio.sleep(0.05)  # let its last message, which says why, be read first
        self._dead.set()
        if not self._stopping and self._failure is None:
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            logger.error("the engine process ended %s", how)
            self._fail(EngineDeadError(f"The engine process ended {how}."))
        self._settled.set()
        self._hub.fail_all(EngineDeadError("The engine has been stopped."))

    def _fail(self, error: CanterError) -> None:
        """The engine is of no more use. The first reason is the one that is told."""
        self._failure = self._failure or error
        for_requests = error if isinstance(error, EngineError) else EngineDeadError(str(error))
        self._hub.fail_all(for_requests)
        for future in self._utilities.values():
            if not future.done():
                future.set_exception(for_requests)
        self._settled.set()

    async def _wait_exit(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._dead.wait(), seconds)
        except TimeoutError:
            logger.warning("the engine process has not ended after %.0f s", seconds)

    async def _close(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close(linger=0)
            self._socket = None
        if self._context is not None:
            self._context.term()
            self._context = None
        self._remove_directory()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


def _private_directory() -> str:
    """A new directory that only this user may enter, on a path short enough for a unix socket."""
    path = tempfile.mkdtemp(prefix="canter-")
    if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES - len("/engine"):
        os.rmdir(path)
        path = tempfile.mkdtemp(prefix="canter-", dir="/tmp")
    return path
