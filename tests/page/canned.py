"""A server whose chat answers are written by the test: the real app and page over a fake engine, with one route in front."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route, Router

from tests.server.helpers import Harness

Script = Callable[[dict[str, Any]], AsyncIterator[bytes]]


def chunk(finish: str | None = None, usage: dict[str, int] | None = None, **delta: Any) -> bytes:
    body: dict[str, Any] = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    body["choices"] = [{"index": 0, "delta": delta, "finish_reason": finish}]
    if usage:
        body["usage"] = usage
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def script(*pieces: bytes, delay: float = 0.0) -> Script:
    """An answer of these pieces."""

    async def run(body: dict[str, Any]) -> AsyncIterator[bytes]:
        for piece in pieces:
            await asyncio.sleep(delay)
            yield piece

    return run


class CannedServer:
    """Runs until `close`. `script` answers the next chats (None: the fake engine does), `bodies` are those of the chats so far."""

    def __init__(self, *, prefix: str = "", models: list[dict[str, Any]] | None = None, **server: Any) -> None:
        self.script: Script | None = None
        self.failure: tuple[int, bytes] | None = None
        self.bodies: list[dict[str, Any]] = []
        self.num_left = 0
        self.scrapes = 0
        self._models = models
        self._prefix = prefix
        self._server_args = server
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(20)

    def close(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(20)

    def call_soon(self, action: Callable[[], None]) -> None:
        """Run it in the server's loop, where events are set."""
        self._loop.call_soon_threadsafe(action)

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, "the server never saw it"
            time.sleep(0.02)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.harness = Harness(**self._server_args)
        app = self.harness.app
        real_chat = next(route for route in app.router.routes if isinstance(route, Route) and route.path == "/v1/chat/completions")
        real_metrics = next(route for route in app.router.routes if isinstance(route, Route) and route.path == "/metrics")

        async def chat(request: Request) -> Response:
            self.bodies.append(json.loads(await request.body()))
            if self.failure is not None:
                return Response(self.failure[1], self.failure[0], media_type="application/json")
            if self.script is None:
                return await real_chat.endpoint(request)
            return StreamingResponse(self._watched(self.script(self.bodies[-1])), media_type="text/event-stream")

        async def metrics(request: Request) -> Response:
            self.scrapes += 1
            return await real_metrics.endpoint(request)

        async def models(request: Request) -> Response:
            return Response(json.dumps({"object": "list", "data": self._models}), media_type="application/json")

        rows = [Route("/v1/chat/completions", chat, methods=["POST"]), Route("/metrics", metrics)]
        if self._models is not None:
            rows.append(Route("/v1/models", models))
        app.router.routes[:0] = rows
        shown = Router([Mount(self._prefix, app=app)]) if self._prefix else app
        config = uvicorn.Config(shown, host="127.0.0.1", port=0, log_config=None, lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._server.capture_signals = no_signals  # type: ignore[method-assign]
        serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}{self._prefix}/"
        self._ready.set()
        await serving

    async def _watched(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Counts the clients that leave before the end."""
        ended = False
        try:
            async for piece in pieces:
                yield piece
            ended = True
        finally:
            self.num_left += not ended


def no_signals() -> Any:
    """uvicorn's signal handlers belong to a main thread."""
    return contextlib.nullcontext()
