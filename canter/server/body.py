"""Request bodies: read with a bound, decoded and validated, with errors that name the field."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from canter.core.errors import InvalidRequestError, PayloadTooLargeError
from canter.core.logging import get_logger

logger = get_logger(__name__)

T = TypeVar("T", bound=msgspec.Struct)
_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_NULL = b"null"
_MAX_NEUTRAL_BYTES = 64
_SLICE_BYTES = 2**18
"""Looked at by itself: a body of tiny parts is found out after a few."""
NODES, TEXTS, VALUES = "lists, objects and fields of objects", "texts", "values"
MOST_PARTS = {NODES: 100_000, TEXTS: 250_000, VALUES: 1_000_000}
"""What a field may hold, so that it is decoded in less than 100 ms. Prompts of token ids need so many values."""
MOST_ESCAPES = 1_000_000
"""Backslashes in a body: what stands behind them is decoded one by one."""
MOST_FIELDS = 400_000
"""Of all objects in a body, unknown ones too: every name is compared with those that are known."""
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
    """A body as a struct. Null means the default, unknown fields are ignored, unsupported ones refused by name.

    Only fields that `kind` knows are decoded, so that junk of many million values costs nothing, and a field of very many parts is
    refused unread. (A thread would not help: the decoder keeps the interpreter to itself.)
    """
    _refuse_slow(body)
    layout = _layout(kind)
    fields = _split(body, layout.raw)
    if logger.isEnabledFor(logging.DEBUG):
        _log_unknown(body, layout)
    given = {name: raw for name in layout.raw.__struct_fields__ if memoryview(raw := getattr(fields, name)) != _NULL}
    refuse_unsupported({name: _small_value(given[name]) for name in layout.unsupported if name in given}, layout.unsupported)
    for name in layout.required:
        if name not in given:
            raise InvalidRequestError(f"{name} is required.", name)
    for name, raw in given.items():
        _refuse_many_parts(name, bytes(memoryview(raw)))
    return kind(**{name: _field(name, given[name], decoder) for name, decoder in layout.decoders.items() if name in given})


@dataclass(frozen=True, slots=True)
class _Layout:
    """How to read a kind of body: `raw` splits it into its known fields, `decoders` read them."""

    raw: type[msgspec.Struct]
    decoders: dict[str, msgspec.json.Decoder[Any]]
    required: tuple[str, ...]
    unsupported: Mapping[str, tuple[Any, ...]]


@cache
def _layout(kind: type[msgspec.Struct]) -> _Layout:
    fields = msgspec.structs.fields(kind)
    unsupported: dict[str, tuple[Any, ...]] = getattr(kind, "UNSUPPORTED", {})
    names = dict.fromkeys([*(field.encode_name for field in fields), *unsupported])
    raw = msgspec.defstruct(kind.__name__, [(name, msgspec.Raw, msgspec.Raw(_NULL)) for name in names])
    decoders = {field.encode_name: msgspec.json.Decoder(field.type) for field in fields}
    return _Layout(raw, decoders, tuple(field.encode_name for field in fields if field.required), unsupported)


def _split(body: bytes, raw: type[msgspec.Struct]) -> msgspec.Struct:
    try:
        return msgspec.json.decode(body, type=raw)
    except msgspec.ValidationError:
        text = body.lstrip()[:1]
        what = {b"[": "list", b'"': "str", b"n": "NoneType", b"t": "bool", b"f": "bool"}.get(text, "number")
        raise InvalidRequestError(f"The request body must be a JSON object, got {what}.") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {_reason(error)}.") from None


def _log_unknown(body: bytes, layout: _Layout) -> None:
    unknown = [name for name in msgspec.json.decode(body, type=dict[str, msgspec.Raw]) if name not in layout.raw.__struct_fields__]
    if unknown:
        logger.debug("ignored unknown fields: %s", ", ".join(map(repr, unknown))[:1000])


def _refuse_slow(body: bytes) -> None:
    """Raise `InvalidRequestError` for a body that would hold up all others when it is split into fields."""
    if body.count(b"\\") > MOST_ESCAPES:
        raise InvalidRequestError(f"The request body holds more than {MOST_ESCAPES} backslashes, the most that this server reads.")
    if body.count(b":") <= MOST_FIELDS:
        return
    number = 0
    for part in _without_texts(body):
        number += part.count(b":")
        if number > MOST_FIELDS:
            raise InvalidRequestError(f"The request body holds more than {MOST_FIELDS} fields, the most that this server reads.")


def _refuse_many_parts(name: str, body: bytes) -> None:
    """Raise `InvalidRequestError` for a field of which the decoding would hold up all others."""
    if body[:1] == b'"' or _exceeded(_slices(body)) is None:
        return
    kind = _exceeded(_without_texts(body))
    if kind is not None:
        raise InvalidRequestError(f"{name} holds more than {MOST_PARTS[kind]} {kind}, the most that this server reads.", name)


def _exceeded(parts: Iterable[bytes]) -> str | None:
    """The first kind of parts of which JSON has too many, when what stands in texts counts too. Ends as soon as there are."""
    counts = Counter[bytes]()
    for part in parts:
        for mark in (b"[", b"{", b":", b'"', b","):
            counts[mark] += part.count(mark)
        found = {NODES: counts[b"["] + counts[b"{"] + counts[b":"], TEXTS: counts[b'"'] // 2, VALUES: counts[b","]}
        for kind, most in MOST_PARTS.items():
            if found[kind] > most:
                return kind
    return None


def _slices(json: bytes) -> Iterator[bytes]:
    return (json[start : start + _SLICE_BYTES] for start in range(0, len(json), _SLICE_BYTES))


def _without_texts(json: bytes) -> Iterator[bytes]:
    """JSON in slices, its texts empty."""
    plain = json.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in json else json
    inside = 0
    for part in _slices(plain):
        pieces = part.split(b'"')
        yield b'""'.join(pieces[inside::2])
        inside ^= (len(pieces) - 1) & 1


def _small_value(raw: msgspec.Raw) -> Any:
    """The value of a field of which only short values are of interest."""
    if memoryview(raw).nbytes > _MAX_NEUTRAL_BYTES:
        return raw
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return raw


def _field(name: str, raw: msgspec.Raw, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        # JSON writers of some languages have no integers: 5.0 is as good as 5.
        number = _small_value(raw) if decoder.type in (int, int | None) else None
        if isinstance(number, float) and number.is_integer():
            return int(number)
        raise _named_error(error, name) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{name}: not valid JSON: {_reason(error)}.", name) from None


def _reason(error: Exception) -> str:
    return str(error) or "it is nested too deeply"


def refuse_unsupported(given: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    """Fields that this server can't honour yet must not be dropped in silence: only their neutral values pass."""
    for name, neutral in unsupported.items():
        if name in given and not any(given[name] == value and type(given[name]) is type(value) for value in neutral):
            raise InvalidRequestError(f"{name} is not supported by this server. Leave it out.", name)


def _named_error(error: msgspec.ValidationError, name: str) -> InvalidRequestError:
    match = _PATH.match(str(error))
    what, path = (match["what"], name + (match["path"] or "")) if match else (str(error), name)
    missing = _MISSING.match(what)
    if missing:
        path = f"{path}.{missing['name']}"
        return InvalidRequestError(f"{path} is required.", path)
    what = what.replace("`", "")
    return InvalidRequestError(f"{path}: {what[:1].lower()}{what[1:]}.", path)
