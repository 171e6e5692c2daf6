"""One engine process: its start, its socket, its end. It knows nothing of requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import cast

import zmq

from canter.client.launch import EngineLaunch
from canter.core import messages
from canter.core.black_box import read_running
from canter.core.config import EngineArgs
from canter.core.logging import get_logger
from canter.core.messages import EngineMessage, FrontendMessage

logger = get_logger(__name__)

MAX_IPC_PATH_BYTES = 100
LAST_MESSAGES_SECONDS = 0.05
TURN_SECONDS = 0.005
_READABLE = int(zmq.POLLIN)  # zmq's own flags are of an enum, slow to combine


class EngineChild:
    """A child process that speaks the protocol of `canter.engine.process`. `on_message` is called in the event loop.

    Use: `await start()`, `send`, `await wait()` for its end, `close()`. `launch`: a process that was started ahead of time, in place
    of `command`.
    """

    def __init__(
        self, command: Sequence[str], args: EngineArgs, on_message: Callable[[EngineMessage], None], launch: EngineLaunch | None = None
    ) -> None:
        self._command = tuple(command)
        self._args = args
        self._on_message = on_message
        self._launch = launch
        self._directory: str | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
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
        self._directory = _private_directory()
        address = f"ipc://{self._directory}/engine"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.bind(address)
        # Not through zmq.asyncio: its futures cost more for each message than all that is then done with it.
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._receive)
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
        """Hand a message to the engine. With no limit on the socket's queue this never waits; before it is ready nothing is sent."""
        if self._socket is None or self._identity is None:
            return
        self._socket.send_multipart([self._identity, messages.encode(message)])
        # The descriptor tells of new events once; sending may have taken note of one that is still to be read.
        asyncio.get_running_loop().call_soon(self._receive)

    async def wait(self) -> int:
        """Wait for the end of the process and for its last messages, which may say why. Returns its exit code, or minus the signal."""
        assert self._exit_code is not None
        code = await self._exit_code
        await asyncio.sleep(LAST_MESSAGES_SECONDS)
        self._receive()
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
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close(linger=0)
            self._socket = None
        if self._context is not None:
            self._context.term()
            self._context = None
        self.hide()

    def _receive(self) -> None:
        """Read all that there is: the descriptor becomes readable again only with what comes later. A flood is read in turns with
        other work."""
        turn_ends = time.monotonic() + TURN_SECONDS
        while self._socket is not None and cast(int, self._socket.get(zmq.EVENTS)) & _READABLE:
            self._identity = self._socket.recv()
            data = self._socket.recv()  # the parts of a message come together
            try:
                self._on_message(messages.decode_engine(data))
            except Exception:
                logger.exception("a message from the engine could not be handled")
            if time.monotonic() > turn_ends:
                asyncio.get_running_loop().call_soon(self._receive)
                return


def _private_directory() -> str:
    """A new directory that only this user may enter, on a path short enough for a unix socket."""
    path = tempfile.mkdtemp(prefix="canter-")
    if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES - len("/engine"):
        os.rmdir(path)
        path = tempfile.mkdtemp(prefix="canter-", dir="/tmp")
    return path
