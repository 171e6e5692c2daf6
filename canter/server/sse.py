"""Answers that take long: they end when the client goes away, and streams of them as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from canter.core.logging import get_logger
from canter.server.errors import describe, encode_error, log_error

logger = get_logger(__name__)

DONE = b"data: [DONE]\n\n"
PING_SECONDS = 10.0
EVENT_STREAM = "text/event-stream; charset=utf-8"
KEEP_ALIVE = b": keep-alive\n\n"

encoder = msgspec.json.Encoder()


def event(message: object) -> bytes:
    """One server-sent event around a JSON body. JSON has no raw line feeds, so one data line holds it."""
    return b"data: " + encoder.encode(message) + b"\n\n"


def error_event(error: BaseException, scope: Scope) -> bytes:
    return b"data: " + encode_error(describe(error), scope) + b"\n\n"


@dataclass(frozen=True, slots=True)
class StreamForm:
    """What a dialect's streams look like, their events aside. `ping` is sent when nothing else has been for `PING_SECONDS`."""

    content_type: str = EVENT_STREAM
    error: Callable[[BaseException, Scope], bytes] = error_event
    end: bytes = DONE
    ping: bytes = b""

    @property
    def takes_comments(self) -> bool:
        """Whether comments may keep a quiet stream alive: only events can hold them, and pings of its own make them needless."""
        return self.content_type == EVENT_STREAM and not self.ping

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"content-type", self.content_type.encode()), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


OPENAI_FORM = StreamForm()


class GuardedResponse(Response):
    """Runs `work(send)` until it is done or the client has gone, at any time, also before the first byte of the answer.

    Cancelling the work closes its stream of outputs, and that aborts the request in the engine.
    """

    def __init__(self, work: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._work = work
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._work(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            finished = work.done()
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if finished:
            work.result()
        else:
            logger.debug("client of %r has gone", scope.get("path"))


def stream_response(events: AsyncGenerator[bytes, None], form: StreamForm = OPENAI_FORM) -> Response:
    """Events to send. An error before the first is an ordinary HTTP error; after it, an event of its own."""

    async def work(scope: Scope, receive: Receive, send: Send) -> None:
        pings: asyncio.Task[None] | None = None
        seconds = scope["app"].state.server.server_args.sse_keep_alive_interval if form.takes_comments else 0.0
        source = kept_alive(events, seconds)
        try:
            chunk: bytes | None = await anext(source)
            await send({"type": "http.response.start", "status": 200, "headers": form.headers})
            quiet = asyncio.Event()
            if form.ping:
                pings = asyncio.create_task(_ping(form.ping, quiet, send))
            try:
                while chunk is not None:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    quiet.clear()
                    chunk = await anext(source, None)
            except Exception as error:  # the stream has begun: the client is told in the stream, whatever it is
                log_error(error, scope)
                await _cancel(pings)
                await send({"type": "http.response.body", "body": form.error(error, scope), "more_body": True})
            await _cancel(pings)
            await send({"type": "http.response.body", "body": form.end})
        finally:
            await _cancel(pings)
            await source.aclose()

    return GuardedResponse(work)


async def _ping(ping: bytes, quiet: asyncio.Event, send: Send) -> None:
    """Send a ping whenever a whole period has passed in which nobody cleared `quiet`."""
    while True:
        quiet.set()
        await asyncio.sleep(PING_SECONDS)
        if quiet.is_set():
            await send({"type": "http.response.body", "body": ping, "more_body": True})


async def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def kept_alive(events: AsyncGenerator[bytes, None], seconds: float) -> AsyncGenerator[bytes, None]:
    """The events, with a comment whenever nothing has come for `seconds`; also before the first, which then can't be an HTTP error."""
    return _with_comments(events, seconds) if seconds else events


async def _with_comments(events: AsyncGenerator[bytes, None], seconds: float) -> AsyncGenerator[bytes, None]:
    following: asyncio.Future[bytes | None] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(events, None))
            while not (await asyncio.wait((following,), timeout=seconds))[0]:
                yield KEEP_ALIVE
            chunk = following.result()
            if chunk is None:
                return
            yield chunk
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await events.aclose()


def json_response(answer: Awaitable[object]) -> Response:
    """One body, made while the client is watched."""

    async def work(scope: Scope, receive: Receive, send: Send) -> None:
        body = encoder.encode(await answer)
        await Response(body, media_type="application/json")(scope, receive, send)

    return GuardedResponse(work)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
