"""A ZeroMQ socket in an event loop, read without futures."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import cast

import zmq

MAX_IPC_PATH_BYTES = 100
SOCKET_NAME = "socket"
TURN_SECONDS = 0.005
_READABLE = int(zmq.POLLIN)  # zmq's own flags are of an enum, slow to combine


class Channel:
    """Reads a socket and hands every message, as the list of its parts, to `on_message` in the event loop.

    Neither side of the socket has a limit on what waits, so sending never does. Closing is the owner's.
    """

    def __init__(self, kind: int, on_message: Callable[[list[bytes]], None], identity: bytes | None = None) -> None:
        self._on_message = on_message
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        if identity is not None:
            self._socket.setsockopt(zmq.IDENTITY, identity)
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self, address: str) -> None:
        """Listen, and read from now on. Raises `zmq.ZMQError`."""
        self._socket.bind(address)
        self._read_in_loop()

    def connect(self, address: str) -> None:
        """Speak to who listens there, and read from now on."""
        self._socket.connect(address)
        self._read_in_loop()

    def send(self, parts: Sequence[bytes]) -> None:
        self._socket.send_multipart(parts)
        # The descriptor tells of new events once; sending may have taken note of one that is still to be read.
        asyncio.get_running_loop().call_soon(self.read)

    def read(self) -> None:
        """Read all that there is: the descriptor becomes readable again only with what comes later. A flood is read in turns with
        other work."""
        turn_ends = time.monotonic() + TURN_SECONDS
        while self._loop is not None and cast(int, self._socket.get(zmq.EVENTS)) & _READABLE:
            self._on_message(self._socket.recv_multipart())
            if time.monotonic() > turn_ends:
                self._loop.call_soon(self.read)
                return

    def close(self, linger_ms: int = 0) -> None:
        """Give the socket back; waits for at most `linger_ms` until what was sent is on its way. Idempotent."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None
        if not self._socket.closed:
            self._socket.close(linger=linger_ms)
            self._context.term()

    def _read_in_loop(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            # Not through zmq.asyncio: its futures cost more for each message than all that is then done with it.
            self._loop.add_reader(self._socket.fileno(), self.read)


def private_directory() -> str:
    """A new directory for a socket, `SOCKET_NAME`, that only this user may enter, on a path short enough for a unix socket."""
    path = tempfile.mkdtemp(prefix="canter-")
    if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES - len(SOCKET_NAME) - 1:
        os.rmdir(path)
        path = tempfile.mkdtemp(prefix="canter-", dir="/tmp")
    return path
