"""The routes for callers without a socket: a request of a batch file goes to the app as HTTP would bring it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

from canter.client.launch import ENGINE_COMMAND
from canter.client.protocol import EngineClient
from canter.client.remote import RemoteClient
from canter.core.config import EngineArgs
from canter.server.app import ROUTES, build_app
from canter.server.args import ServerArgs
from canter.server.load import load_engine
from canter.server.metrics import Metrics

BATCH_PREFIXES = ("/v1/", "/v2/")
TEXT_PATHS = ("/tokenize", "/detokenize")


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request. `retry_after`: it was not taken in, and may be in so many seconds."""

    status: int
    body: bytes
    retry_after: float | None = None


def batch_paths() -> list[str]:
    """The paths that a line of a batch may name: those that are asked with a body and answer with one."""
    return [
        route.path
        for route in ROUTES
        if "POST" in (route.methods or ()) and "{" not in route.path and (route.path.startswith(BATCH_PREFIXES) or route.path in TEXT_PATHS)
    ]


class AppCaller:
    """Calls an app's routes, and knows whether it makes sense to go on."""

    def __init__(self, app: ASGIApp, client: EngineClient, server_args: ServerArgs) -> None:
        self._app = app
        self._client = client
        self._headers = [(b"content-type", b"application/json")]
        if server_args.api_keys:
            self._headers.append((b"authorization", f"Bearer {server_args.api_keys[0]}".encode()))

    @property
    def concurrency(self) -> int:
        """Requests at once that keep the engine's batch full, and a next one ready for each."""
        return 2 * self._client.info.max_num_seqs if self._client.info is not None else 1

    async def ask(self, path: str, body: bytes, request_id: str) -> Answer:
        """Run one request. Raises `EngineDeadError` when there is no engine any more; cancelling aborts the request."""
        answer = await call(self._app, path, body, self._headers, request_id)
        if answer.status >= 500 and answer.retry_after is None:
            self._client.check_health()
        return answer


async def call(app: ASGIApp, path: str, body: bytes, headers: Sequence[tuple[bytes, bytes]], request_id: str) -> Answer:
    """One POST to an app."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [*headers, (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
        "canter.request_id": request_id,
    }
    unread = [body]
    status, retry_after, parts = 500, None, list[bytes]()

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.get_running_loop().create_future()  # this client never goes away; the wait ends with the task
        raise AssertionError("unreachable")

    async def send(message: Message) -> None:
        nonlocal status, retry_after
        if message["type"] == "http.response.start":
            status = message["status"]
            given = dict(message.get("headers", ())).get(b"retry-after", b"")
            retry_after = float(given) if given.isdigit() else None
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return Answer(status, b"".join(parts), retry_after)


@contextlib.asynccontextmanager
async def served_app(args: EngineArgs, server_args: ServerArgs, engine_command: Sequence[str] = ENGINE_COMMAND) -> AsyncIterator[AppCaller]:
    """An engine of one's own with the server's routes before it, for as long as the block runs."""
    metrics = Metrics((server_args.served_model_name or [args.model])[0])
    client = RemoteClient(args, observer=metrics, command=engine_command)
    app = build_app(client, None, engine_args=args, server_args=server_args, metrics=metrics)
    try:
        await load_engine(client, app.state.server)
        yield AppCaller(app, client, server_args)
    finally:
        await client.shutdown()
