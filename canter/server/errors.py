"""The one table from exceptions to HTTP statuses, and the envelope that every error wears."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from canter.core.errors import (
    AuthenticationError,
    CanterError,
    ConflictError,
    EngineDeadError,
    EngineError,
    EngineNotReadyError,
    InvalidRequestError,
    ModelNotFoundError,
    NotFoundError,
    PayloadTooLargeError,
    PermissionDeniedError,
    QueueFullError,
    RequestTimeoutError,
)
from canter.core.logging import get_logger
from canter.server.request_ids import made_request_id
from canter.server.schemas import anthropic, ollama

logger = get_logger(__name__)


class TooManyRequestsError(QueueFullError):
    """A full queue, where the server was told to answer with 429."""


STATUSES: tuple[tuple[type[Exception], int, str], ...] = (
    (InvalidRequestError, 400, "BadRequestError"),
    (AuthenticationError, 401, "AuthenticationError"),
    (PermissionDeniedError, 403, "PermissionDeniedError"),
    (ModelNotFoundError, 404, "NotFoundError"),
    (NotFoundError, 404, "NotFoundError"),
    (ConflictError, 409, "ConflictError"),
    (PayloadTooLargeError, 413, "RequestEntityTooLargeError"),
    (TooManyRequestsError, 429, "RateLimitError"),
    (QueueFullError, 503, "ServiceUnavailableError"),
    (EngineNotReadyError, 503, "ServiceUnavailableError"),
    (EngineDeadError, 503, "ServiceUnavailableError"),
    (RequestTimeoutError, 504, "GatewayTimeoutError"),
    (EngineError, 500, "InternalServerError"),
)
"""Exception, status, `type` in the envelope; the first row that fits counts. What is in no row is our own fault: 500."""

LOADING_RETRY_SECONDS = 2
MAX_MESSAGE_CHARS = 4096
INTERNAL_MESSAGE = "The server made an error. Its log has the details."
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_OBJECT_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,16}")
"""As Python writes it of an object that a chat template shows, say."""
_FILE_PATH = re.compile(r"(?<![\w.])/(?:[\w.+@-]+/)+[\w.+@-]*")


class ErrorInfo(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct):
    """OpenAI's envelope, on every route that has none of its own in `ENVELOPES`."""

    error: ErrorInfo


ENVELOPES: dict[str, Callable[[ErrorInfo, str], object]] = {
    "/v1/messages": anthropic.envelope,
    "/api/": ollama.envelope,
}
"""Beginning of a path -> what makes the body of an error there, of its description and the id of the request."""


def describe(error: BaseException) -> ErrorInfo:
    """Status and text for an exception. Only what Canter raised on purpose, or HTTP itself, is told in its own words."""
    if isinstance(error, HTTPException):
        status = HTTPStatus(error.status_code)
        return ErrorInfo(str(error.detail), _camel_case(status.phrase), None, error.status_code)
    for kind, code, name in STATUSES:
        if isinstance(error, kind):
            message = _OBJECT_ADDRESS.sub("", str(error)) if code < 500 else sanitise(str(error))
            return ErrorInfo(cut(message), name, _param(error), code)
    return ErrorInfo(INTERNAL_MESSAGE, "InternalServerError", None, 500)


def sanitise(message: str) -> str:
    """Without memory addresses and file paths, and one line only."""
    first_line = message.partition("\n")[0]
    return _FILE_PATH.sub("<path>", _ADDRESS.sub("<address>", first_line))


def cut(message: str) -> str:
    """A message that echoes a huge input must not be huge itself."""
    return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "…"


def error_response(error: BaseException, scope: Scope | None = None) -> Response:
    """The HTTP answer for an exception, in the envelope of the request's route, with `Retry-After` where trying again makes sense."""
    info = describe(error)
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, QueueFullError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    elif isinstance(error, EngineNotReadyError):
        headers["Retry-After"] = str(LOADING_RETRY_SECONDS)
    elif isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    elif isinstance(error, PayloadTooLargeError):
        headers["Connection"] = "close"  # the rest of the body is not read
    return Response(encode_error(info, scope), info.code, headers, "application/json")


def encode_error(info: ErrorInfo, scope: Scope | None = None) -> bytes:
    """The body of an error, in the envelope that the route's clients know."""
    path = "" if scope is None else scope["path"].removeprefix(scope.get("root_path", ""))
    for beginning, envelope in ENVELOPES.items():
        if scope is not None and path.startswith(beginning):
            return msgspec.json.encode(envelope(info, made_request_id(scope)))
    return msgspec.json.encode(ErrorBody(info))


def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405 in the envelope, naming what was asked for."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        error.detail = f"There is no route {cut(request.url.path)!r}."
    elif error.status_code == 405:
        error.detail = f"{request.method} is not allowed here; allowed: {(error.headers or {}).get('Allow', '')}."
    return error_response(error, request.scope)


class ErrorMiddleware:
    """Turns every exception that a route lets out into an answer; our own faults are logged with their traceback.

    `on_refused` is told of requests that a full queue had no room for; they get `queue_full_status`.
    """

    def __init__(self, app: ASGIApp, queue_full_status: int = 503, on_refused: Callable[[], None] = lambda: None) -> None:
        self._app = app
        self._queue_full_status = queue_full_status
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except ClientDisconnect:
            return
        except QueueFullError as error:
            self._on_refused()
            log_error(error, scope)
            if not started:
                refusal = TooManyRequestsError(str(error), error.retry_after) if self._queue_full_status == 429 else error
                await error_response(refusal, scope)(scope, receive, send)
        except Exception as error:  # the outermost place: whatever it is, it is logged, and the client gets an answer
            log_error(error, scope)
            if not started:
                await error_response(error, scope)(scope, receive, send)


def printable(text: str) -> str:
    """A text with nothing in it that could pass for another line of a log, or give a terminal orders."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def log_error(error: BaseException, scope: Scope | dict[str, Any]) -> None:
    """Our own faults with a traceback; the user's at debug level only."""
    if isinstance(error, CanterError):
        logger.debug("%s %r: %s", scope.get("method"), scope.get("path"), printable(str(error)))
    else:
        logger.error("%s %r failed", scope.get("method"), scope.get("path"), exc_info=error)


def _param(error: BaseException) -> str | None:
    if isinstance(error, ModelNotFoundError):
        return "model"
    return getattr(error, "param", None)


def _camel_case(phrase: str) -> str:
    return "".join(word.capitalize() for word in re.split(r"[^A-Za-z]+", phrase)) + "Error"
