"""One engine process: its start, its socket, its end. It knows nothing of requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Generic, TypeVar

import zmq

from canter.client.channel import SOCKET_NAME, Channel, private_directory
from canter.client.launch import EngineLaunch
from canter.core import messages
from canter.core.black_box import read_running
from canter.core.config import EngineArgs
from canter.core.logging import get_logger
from canter.core.messages import FrontendMessage

logger = get_logger(__name__)

M = TypeVar("M")

LAST_MESSAGES_SECONDS = 0.05


class EngineChild(Generic[M]):
    """A child process that speaks the protocol of `canter.engine.process`. `on_message` is called in the event loop, with what
    `decode` makes of a message.

    Use: `await start()`, `send`, `await wait()` for its end, `close()`. `launch`: a process that was started ahead of time, in place
    of `command`.
    """

    def __init__(
        self,
        command: Sequence[str],
        args: EngineArgs,
        decode: Callable[[bytes], M],
        on_message: Callable[[M], None],
        launch: EngineLaunch | None = None,
    ) -> None:
        self._command = tuple(command)
        self._args = args
        self._decode = decode
        self._on_message = on_message
        self._launch = launch
        self._directory: str | None = None
        self._channel: Channel | None = None
        self._identity: bytes | None = None
        self._exit_code: asyncio.Future[int] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._launch is None else self._launch.process.pid

    @property
    def is_alive(self) -> bool:
        return self._launch is not None and self._launch.is_alive

    @property
    def directory(self) -> str | None:
        """Where its socket lies, until `hide`."""
        return self._directory

    async def start(self) -> None:
        """Bind the socket and start the process; returns before it has loaded. Raises `OSError`, and then needs no `close`."""
        try:
            await self._start()
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, str(error)) from error
        except BaseException:
            self.close()
            raise

    async def _start(self) -> None:
        self._directory = private_directory()
        address = f"ipc://{self._directory}/{SOCKET_NAME}"
        self._channel = Channel(zmq.ROUTER, self._receive)
        self._channel.bind(address)
        if self._launch is None:
            self._launch = EngineLaunch(self._command)
        self._exit_code = asyncio.get_running_loop().create_future()
        threading.Thread(target=self._watch, args=(self._launch, self._exit_code), name="canter-engine-watch", daemon=True).start()
        start = {"address": address, "args": asdict(self._args), "black_box": self._launch.black_box}
        self._launch.tell((json.dumps(start) + "\n").encode())

    @staticmethod
    def _watch(launch: EngineLaunch, exit_code: asyncio.Future[int]) -> None:
        """Wait for the end of the process, which the event loop can't do for one that it did not start."""
        code = launch.process.wait()

        def tell() -> None:
            if not exit_code.done():
                exit_code.set_result(code)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            exit_code.get_loop().call_soon_threadsafe(tell)

    def send(self, message: FrontendMessage) -> None:
        """Hand a message to the engine; this never waits. Before it is ready nothing is sent."""
        self.send_encoded(messages.encode(message))

    def send_encoded(self, data: bytes) -> None:
        """`send`, of what is encoded already."""
        if self._channel is not None and self._identity is not None:
            self._channel.send([self._identity, data])

    async def wait(self) -> int:
        """Wait for the end of the process and for its last messages, which may say why. Returns its exit code, or minus the signal."""
        assert self._exit_code is not None
        code = await self._exit_code
        await asyncio.sleep(LAST_MESSAGES_SECONDS)
        if self._channel is not None:
            self._channel.read()
        return code

    def running(self) -> frozenset[str] | None:
        """The requests that the engine ran when it last told; None when it has not."""
        return None if self._launch is None else read_running(self._launch.black_box)

    def terminate(self) -> None:
        if self._launch is not None:
            self._launch.process.terminate()

    def kill(self) -> None:
        if self._launch is not None:
            self._launch.process.kill()

    def hide(self) -> None:
        """Remove the socket's path. Once both ends are connected they need it no more, and then nothing can stay behind."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def close(self) -> None:
        """Give everything back but the process; its stdin closes, so a living one ends. Idempotent."""
        if self._launch is not None:
            self._launch.close()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self.hide()

    def _receive(self, parts: list[bytes]) -> None:
        self._identity, data = parts
        try:
            self._on_message(self._decode(data))
        except Exception:
            logger.exception("a message from the engine could not be handled")
