"""uvicorn's HTTP/1.1 protocol with bounds on what a client may send before its request is understood."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 128 * 1024
HEADER_SECONDS = 30.0
WRITE_SECONDS = 300.0
"""For so long a client may take nothing of what waits for it. What waits is bounded, but the connection would stay for ever."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections whose headers are too long (431) or too slow in coming, or whose client takes no bytes; uvicorn bounds
    none of these.

    A wish to switch protocols (`Upgrade: h2c`, which Java's client sends with every first request) is passed over, as
    RFC 9110 section 7.8 allows; uvicorn would lose the request's body.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tolerant = _Parser(self)
        self.parser = cast(httptools.HttpRequestParser, self._tolerant)
        self._header_bytes = 0
        self._in_headers = True
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # what follows a chunked body is of no use
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._header_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._tolerant.switches:
            super().on_message_complete()

    def on_headers_complete(self) -> None:
        if self._tolerant.switches:
            return
        self._in_headers = False
        self._stop_timer()
        super().on_headers_complete()

    def _expect_headers(self) -> None:
        self._header_bytes, self._in_headers = 0, True
        self._stop_timer()
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _refuse(self) -> None:
        if self._in_headers and not self.transport.is_closing():  # else an answer may be on its way
            self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        self.transport.close()


class _Parser:
    """httptools' parser, for which a request that wishes to switch protocols is like any other."""

    def __init__(self, protocol: BoundedHttpProtocol) -> None:
        self._protocol = protocol
        self._renew()

    @property
    def switches(self) -> bool:
        """Whether the request now read is to be read again without its wish. CONNECT is nothing but a wish."""
        return bool(self._parser.should_upgrade()) and self._parser.get_method() != b"CONNECT"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self.switches:
                raise
            head = self._plain_head()
            self._renew()
            self.feed_data(head + data[upgrade.args[0] :])

    def _renew(self) -> None:
        self._parser = httptools.HttpRequestParser(self._protocol)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it

    def _plain_head(self) -> bytes:
        lines = [self._parser.get_method() + b" " + self._protocol.url + b" HTTP/1.1"]
        for name, value in self._protocol.headers:
            if name == b"connection":
                value = b", ".join(token for token in map(bytes.strip, value.split(b",")) if token.lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])
