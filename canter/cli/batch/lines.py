"""The lines of a batch: requests as they come, results as they are written. OpenAI's formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from canter.core.errors import CanterError, InvalidRequestError
from canter.server.batch import Answer
from canter.server.body import parse
from canter.server.errors import describe, encode_error

READ_BYTES = 1 << 16
BOM = b"\xef\xbb\xbf"
ID_PREFIX = "batch_req_"


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not empty. `number` counts from 1, empty ones too; `data` is None when it is longer than allowed."""

    number: int
    data: bytes | None


def split_lines(read: Callable[[int], bytes], longest: int) -> Iterator[list[Line]]:
    """The lines of a file, in portions of what one read brings. A line longer than `longest` bytes is never held whole."""
    number, size, parts = 1, 0, list[bytes]()
    ended = list[Line]()

    def end() -> None:
        nonlocal number, size
        data = b"".join(parts).removeprefix(BOM if number == 1 else b"").strip()
        if size > longest:
            ended.append(Line(number, None))
        elif data:
            ended.append(Line(number, data))
        number, size = number + 1, 0
        parts.clear()

    while chunk := read(READ_BYTES):
        for i, piece in enumerate(chunk.split(b"\n")):
            if i:
                end()
            size += len(piece)
            if size <= longest:
                parts.append(piece)
            else:
                parts.clear()
        if ended:
            yield ended
            ended = []
    end()
    if ended:
        yield ended


class BatchRequest(msgspec.Struct):
    """A line of the input."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class BatchResponse(msgspec.Struct):
    """The HTTP side of a result."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct):
    """Why a line failed, in short; the whole error is the response's body."""

    code: str
    message: str


class BatchResult(msgspec.Struct):
    """A line of the output. `id` holds the number of the line that it answers; `error` is null when that went well."""

    id: str
    custom_id: str | None
    response: BatchResponse
    error: BatchError | None


class _Named(msgspec.Struct):
    custom_id: msgspec.Raw = msgspec.Raw(b"null")


class _Wishes(msgspec.Struct):
    stream: bool | None = None
    background: bool | None = None


class _Failure(msgspec.Struct):
    message: str = ""
    type: str = ""


class _FailureBody(msgspec.Struct):
    error: _Failure


def custom_id_of(data: bytes) -> str | None:
    """The id that a line gives itself, also when nothing else of it can be used."""
    try:
        return msgspec.json.decode(msgspec.json.decode(data, type=_Named).custom_id, type=str)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def read_request(data: bytes) -> BatchRequest:
    """A line as a request. Raises `InvalidRequestError` naming the field."""
    try:
        request = parse(data, BatchRequest)
    except InvalidRequestError as error:
        raise InvalidRequestError(str(error).replace("The request body", "The line", 1), error.param) from None
    if request.method != "POST":
        raise InvalidRequestError(f"method must be POST, got {request.method!r:.80}.", "method")
    if not request.url.startswith("/"):
        raise InvalidRequestError(f"url must be a path such as /v1/chat/completions, got {request.url!r:.200}.", "url")
    try:
        wishes = msgspec.json.decode(request.body, type=_Wishes)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return request  # the route says what is wrong with it
    for name in ("stream", "background"):
        if getattr(wishes, name):
            raise InvalidRequestError(f"{name} is not possible in a batch, where each line has one whole answer. Leave it out.", name)
    return request


def failed(error: CanterError) -> Answer:
    """The answer to a line that no route has seen."""
    info = describe(error)
    return Answer(info.code, encode_error(info))


def encode_result(number: int, custom_id: str | None, request_id: str, answer: Answer) -> bytes:
    """A line of the output, with its line feed."""
    body = one_line_json(answer.body)
    error = None
    if answer.status != 200:
        try:
            failure = msgspec.json.decode(body, type=_FailureBody).error
        except msgspec.DecodeError:
            failure = _Failure()
        error = BatchError(failure.type or f"http_{answer.status}", failure.message or f"The answer has the status {answer.status}.")
    response = BatchResponse(answer.status, request_id, msgspec.Raw(body))
    return msgspec.json.encode(BatchResult(f"{ID_PREFIX}{number}", custom_id, response, error)) + b"\n"


def one_line_json(body: bytes) -> bytes:
    """JSON without line feeds; what is no JSON, as a foreign server may send, becomes a string."""
    try:
        return msgspec.json.format(body, indent=-1)
    except (msgspec.DecodeError, RecursionError):
        return msgspec.json.encode(body.decode(errors="replace"))
