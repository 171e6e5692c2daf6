"""A client of streamed answers that costs little: POST over HTTP/1.1, and the time of every server-sent event.

A load generator that spends more on a token than the server does measures itself. This one reads what the kernel has,
takes the time once, and decodes only the fields that are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools
import msgspec

MAX_ERROR_BYTES = 2000
MAX_EVENT_BYTES = 1 << 24
CONNECT_SECONDS = 30.0

_NULL = msgspec.Raw(b"null")


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw = _NULL


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = _NULL


_decoder = msgspec.json.Decoder(_Event)


@dataclass
class Result:
    """One request: times in seconds since it was sent. `gaps` are the times between chunks that brought something.

    `num_prompt` and `num_output` are the server's count, or None where it told of none. When every chunk tells of the tokens
    so far, a chunk of several counts as so many gaps.
    """

    sent: float
    ttft: float = 0.0
    latency: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_prompt: int | None = None
    num_output: int | None = None
    num_chunks: int = 0
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer; its chunks where the server does not count."""
        return self.num_chunks if self.num_output is None else self.num_output

    @property
    def tpot(self) -> float:
        """Seconds a token after the first."""
        return (self.latency - self.ttft) / (self.output_tokens - 1)


class EventReader:
    """Puts the events of one answer into a `Result` as they come."""

    def __init__(self, result: Result, clock: Callable[[], float]) -> None:
        self._result = result
        self._clock = clock
        self._last = 0.0
        self._told = 0
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Bytes of the body. A data line is an event: servers of this API never use more lines for one."""
        now = self._clock() - self._result.sent
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            self._result.error = self._result.error or "An event of the stream has no end."
            self._rest = b""
        for line in lines:
            if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                self._event(line[5:], now)

    def end(self) -> None:
        """The answer is whole."""
        result = self._result
        if result.error is None and not result.output_tokens:
            result.error = "The answer told of no tokens."
        # Tokens without a text of their own, to the last one, are first seen at the end.
        result.ttft = result.ttft or result.latency

    def _event(self, data: bytes, now: float) -> None:
        result = self._result
        try:
            event = _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            result.error = result.error or f"An event of the stream was not understood: {error}: {data[:80]!r}"
            return
        if event.error != _NULL:
            result.error = result.error or message_of(bytes(event.error))
            return
        told = None
        if event.usage is not None:
            told = event.usage.completion_tokens
            result.num_prompt = event.usage.prompt_tokens or result.num_prompt
            result.num_output = told or result.num_output
        if not event.choices:
            return
        result.latency = now
        if any(_brings_something(choice) for choice in event.choices):
            self._chunk(now, told)

    def _chunk(self, now: float, told: int | None) -> None:
        result = self._result
        result.num_chunks += 1
        tokens = 1 if told is None else max(1, told - self._told)
        self._told = told or 0
        if result.num_chunks == 1:
            result.ttft = now
        elif tokens == 1:
            result.gaps.append(now - self._last)
        else:
            result.gaps += [(now - self._last) / tokens] * tokens
        self._last = now


def _brings_something(choice: _Choice) -> bool:
    delta = choice.delta
    if delta is None:
        return bool(choice.text)
    return bool(delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls != _NULL)


class _ErrorBody(msgspec.Struct):
    error: msgspec.Raw = _NULL
    message: str | None = None


def message_of(body: bytes) -> str:
    """The sentence of an error: OpenAI's envelope, the error in it, or whatever was sent."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        found = msgspec.json.decode(body, type=_ErrorBody)
        if found.message:
            return found.message[:MAX_ERROR_BYTES]
        if found.error != _NULL:
            return message_of(bytes(found.error))
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode(body, type=str)[:MAX_ERROR_BYTES]
    return body[:MAX_ERROR_BYTES].decode(errors="replace").strip()


class _Connection(asyncio.Protocol):
    """One connection: a request at a time, the answer's bytes to `on_body` as they come."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.reusable = False
        self.answered = False
        self._parser: httptools.HttpResponseParser | None = None
        self._done: asyncio.Future[int] | None = None
        self._on_body: Callable[[bytes], None] = lambda data: None
        self._status = 0
        self._framed = False
        self._error = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    async def ask(self, request: bytes, on_body: Callable[[bytes], None]) -> tuple[int, bytes]:
        """(status, body of an error). Raises `OSError` when the connection ends before the answer does."""
        assert self.transport is not None
        self.reusable = self.answered = False
        self._status, self._framed, self._on_body = 0, False, on_body
        self._error.clear()
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self._done, bytes(self._error)

    def data_received(self, data: bytes) -> None:
        self.answered = True
        if self._parser is None or self._done is None or self._done.done():
            self.close()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(OSError(f"The answer is not HTTP: {error}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._framed = self._framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._status == 200:
            self._on_body(data)
        elif len(self._error) < MAX_ERROR_BYTES:
            self._error += data

    def on_message_complete(self) -> None:
        assert self._parser is not None and self._done is not None
        self.reusable = self._parser.should_keep_alive()
        if not self._done.done():
            self._done.set_result(self._status)

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if exc is None and self._status and not self._framed and self._done is not None and not self._done.done():
            self._done.set_result(self._status)  # an answer that says nothing of its length ends with the connection
        self._fail(OSError(f"The connection broke: {exc or 'the server closed it before the answer was whole'}."))

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    @property
    def closed(self) -> bool:
        return self.transport is None or self.transport.is_closing()

    def _fail(self, error: OSError) -> None:
        self.close()
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class StreamClient:
    """Connections to one server, kept and used again."""

    def __init__(self, url: str, headers: dict[str, str], verify: bool = True, clock: Callable[[], float] = time.perf_counter) -> None:
        parts = urlsplit(url)
        self._secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._secure else 80)
        self._clock = clock
        self._idle: list[_Connection] = []
        self._context: ssl.SSLContext | None = None
        if self._secure:
            self._context = ssl.create_default_context()
            if not verify:
                self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE
        lines = [
            f"POST {parts.path or '/'} HTTP/1.1",
            f"Host: {parts.netloc.rpartition('@')[2]}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
        ]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._head = "\r\n".join(lines).encode() + b"\r\nContent-Length: "

    async def ask(self, body: bytes) -> Result:
        """Send one request and time its stream. An error becomes part of the result: a load test goes on."""
        result = Result(self._clock())
        reader = EventReader(result, self._clock)
        try:
            status, body_of_error = await self._exchange(self._head + str(len(body)).encode() + b"\r\n\r\n" + body, reader)
        except (OSError, TimeoutError) as error:
            result.error = str(error) or type(error).__name__
        else:
            if status == 200:
                reader.end()
            else:
                result.error = f"The server answered {status}: {message_of(body_of_error)}"
        if result.error is not None:
            result.latency = self._clock() - result.sent
        return result

    async def close(self) -> None:
        """Close what is kept."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)

    async def _exchange(self, request: bytes, reader: EventReader) -> tuple[int, bytes]:
        """One request; a kept connection that the server has closed meanwhile is replaced once."""
        connection = await self._connection()
        fresh = not connection.answered
        try:
            answer = await connection.ask(request, reader.feed)
        except OSError:
            if fresh or connection.answered:
                raise
            connection = await self._connect()
            answer = await connection.ask(request, reader.feed)
        except asyncio.CancelledError:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return await self._connect()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        opening = loop.create_connection(_Connection, self._host, self._port, ssl=self._context)
        _, connection = await asyncio.wait_for(opening, CONNECT_SECONDS)
        return connection
