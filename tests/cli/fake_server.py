"""A server of raw bytes in a thread: what a load generator meets, good manners or not."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Answer = list[bytes]
"""Pieces to write, each by itself; an empty one closes the connection."""


def head(status: int = 200, *lines: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} Whatever", *lines, "", ""]).encode()


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def whole(status: int, body: bytes) -> Answer:
    return [head(status, f"Content-Length: {len(body)}") + body]


def streamed(*events: bytes) -> Answer:
    """A chunked answer, an event a chunk."""
    return [head(200, "Content-Type: text/event-stream", "Transfer-Encoding: chunked"), *map(chunk, events), b"0\r\n\r\n"]


def event(content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def completion(*texts: str, usage: tuple[int, int] | None = (5, 3)) -> Answer:
    events = [event({"choices": [{"index": 0, "text": text}]}) for text in texts]
    if usage:
        events.append(event({"choices": [], "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}}))
    return streamed(*events, b"data: [DONE]\n\n")


class FakeServer:
    """Answers each POST with what `answer` makes of its number; remembers what it was sent."""

    def __init__(self, answer: Callable[[int], Answer], pause: float = 0.0) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.connections = self.running = self.most = 0
        self.url = ""
        self._answer = answer
        self._pause = pause

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                top = (await reader.readuntil(b"\r\n\r\n")).decode()
                if top.startswith("GET"):
                    pieces = whole(200, b'{"data": [{"id": "tiny"}]}')
                else:
                    length = next(int(line[15:]) for line in top.splitlines() if line.lower().startswith("content-length:"))
                    self.heads.append(top)
                    self.bodies.append(json.loads(await reader.readexactly(length)))
                    pieces = self._answer(len(self.bodies))
                if not await self._write(writer, pieces):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    async def _write(self, writer: asyncio.StreamWriter, pieces: Answer) -> bool:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for piece in pieces:
                if not piece:
                    return False
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(self._pause)
            return True
        finally:
            self.running -= 1


@contextmanager
def running(answer: Callable[[int], Answer], pause: float = 0.0) -> Iterator[FakeServer]:
    """A `FakeServer` on a free port, `url` its API root."""
    fake, loop = FakeServer(answer, pause), asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(fake.serve, "127.0.0.1", 0))
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        server.close()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
