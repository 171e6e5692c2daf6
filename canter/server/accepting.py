"""Accepting connections on a socket that other processes accept on too."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable

from canter.core.logging import get_logger

logger = get_logger(__name__)

OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
REST_SECONDS = 1.0


class SharedAcceptor:
    """Takes one connection a turn of the event loop, so that whoever is busy leaves the next to the others.

    An event loop's own server takes all that wait, and the process that wakes first would have a whole burst to itself.
    """

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext | None,
        handshake_seconds: float | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener.dup()  # closing is ours then
        self._protocol = protocol
        self._context = context
        self._handshake_seconds = handshake_seconds
        self._joining: set[asyncio.Task[None]] = set()
        self._resting: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._listener.fileno(), self._accept)
        self._is_open = True

    def close(self) -> None:
        """Take no more. Connections that stand go on. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._listener.fileno())
            if self._resting is not None:
                self._resting.cancel()
            self._listener.close()

    async def wait_closed(self) -> None:
        """Give up the handshakes under way."""
        for task in self._joining:
            task.cancel()
        await asyncio.gather(*self._joining, return_exceptions=True)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another was quicker, or the client has left
        except OSError as error:
            if error.errno not in OUT_OF_FILES:
                raise
            logger.error("no connection can be accepted for a moment: %s", error.strerror)
            self._loop.remove_reader(self._listener.fileno())
            self._resting = self._loop.call_later(REST_SECONDS, self._loop.add_reader, self._listener.fileno(), self._accept)
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._join(connection))
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    async def _join(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._protocol, connection, ssl=self._context, ssl_handshake_timeout=self._handshake_seconds
            )
        except (OSError, ssl.SSLError) as error:
            logger.debug("a connection failed at once: %s", error)
            connection.close()
