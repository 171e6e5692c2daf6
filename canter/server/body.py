"""Request bodies: read with a bound, decoded and validated, with errors that name the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from canter.core.errors import InvalidRequestError, PayloadTooLargeError
from canter.core.logging import get_logger

logger = get_logger(__name__)

T = TypeVar("T", bound=msgspec.Struct)
_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`$")


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises `PayloadTooLargeError` as soon as it is known to be longer than `limit` bytes."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise PayloadTooLargeError(f"The request body has {declared} bytes; this server accepts at most {limit}.")
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise PayloadTooLargeError(f"The request body has more than the {limit} bytes that this server accepts.")
        chunks.append(chunk)
    return b"".join(chunks)


async def read_json(request: Request, kind: type[T], limit: int) -> T:
    """Read, decode and validate a JSON body. A missing content type passes; another than JSON does not."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise InvalidRequestError(f"The content type must be application/json, got {content_type!r:.80}.")
    return parse(await read_body(request, limit), kind)


def parse(body: bytes, kind: type[T]) -> T:
    """A body as a struct. Null means the default, unknown fields are ignored, unsupported ones refused by name."""
    fields = _decode_object(body, kind)
    given = {name: value for name, value in fields.items() if value is not None}
    refuse_unsupported(given, getattr(kind, "UNSUPPORTED", {}))
    known = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    unknown = [name for name in given if name not in known]
    if unknown:
        logger.debug("ignored unknown fields: %s", ", ".join(map(repr, unknown))[:1000])
    for name, value in given.items():
        # JSON writers of some languages have no integers: 5.0 is as good as 5.
        if isinstance(value, float) and value.is_integer() and known.get(name) in (int, int | None):
            given[name] = int(value)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _named_error(error) from None


def refuse_unsupported(given: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    """Fields that this server can't honour yet must not be dropped in silence: only their neutral values pass."""
    for name, neutral in unsupported.items():
        if name in given and not any(given[name] == value and type(given[name]) is type(value) for value in neutral):
            raise InvalidRequestError(f"{name} is not supported by this server. Leave it out.", name)


def _decode_object(body: bytes, kind: type[T]) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except msgspec.ValidationError as error:
        _raise_with_field(body, kind)
        raise _named_error(error) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {str(error) or 'it is nested too deeply'}.") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"The request body must be a JSON object, got {type(value).__name__}.")
    return value


def _raise_with_field(body: bytes, kind: type[T]) -> None:
    """Decoding against the schema names the field of a number that JSON allows and no machine can hold."""
    try:
        msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _named_error(error) from None
    except (msgspec.DecodeError, RecursionError):
        return


def _named_error(error: msgspec.ValidationError) -> InvalidRequestError:
    match = _PATH.match(str(error))
    what, path = (match["what"], match["path"] or "") if match else (str(error), "")
    missing = _MISSING.match(what)
    if missing:
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return InvalidRequestError(f"{name} is required.", name)
    what = what.replace("`", "")
    text = f"{path}: {what[:1].lower()}{what[1:]}." if path else f"{what}."
    return InvalidRequestError(text, path or None)
