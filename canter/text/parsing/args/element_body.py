"""Arguments as nested elements, each of whose tags follows a mark of its own: MiniMax M3's."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from canter.text.parsing.args.coercion import coerce_text, dump, is_declared_text, item_schema, property_schema, types_of
from canter.text.parsing.emitter import Emitter
from canter.text.parsing.lexer import Literals

_MAX_TAG = 256
_MAX_DEPTH = 64
"""Elements inside of each other; the tags of deeper ones are text."""


@dataclass(slots=True)
class _Element:
    """One that is open. `name` empty: the call itself."""

    name: str
    schema: object
    streams: bool = False
    pieces: list[str] = field(default_factory=list)
    children: list[tuple[str, Any]] = field(default_factory=list)


class ElementArguments:
    """`<KEY>VALUE</KEY>` with `mark` before every tag, written as JSON while it comes. An element of elements is an object, or a list
    where the schema says so; elements of one name that follow each other are a list. A text is typed by the schema.

    An argument that the schema says is text goes out as it comes, any other when the next one begins.
    """

    failed = False
    in_string = False

    def __init__(self, emitter: Emitter, mark: str) -> None:
        self._emitter = emitter
        self._literals = Literals([mark])
        self._mark = mark
        self._stack = [_Element("", emitter.pending_schema)]
        self._repeated: tuple[str, list[Any]] | None = None  # an argument whose elements may go on
        self._num_keys = 0
        self._tail = ""
        self._tag: list[str] | None = None  # the text since a mark
        self._tag_size = 0
        emitter.open_call()

    def feed(self, text: str) -> int:
        size = len(text)
        text = self._tail + text
        self._tail = ""
        at = 0
        while at < len(text):
            if self._tag is not None:
                text, at = self._read_tag(self._tag, text, at)
                continue
            match = self._literals.search(text, at)
            stop = match.start() if match is not None else self._literals.hold(text, at)
            if stop > at:
                self._plain(text[at:stop])
            if match is None:
                self._tail = text[stop:]
                break
            self._tag, self._tag_size = [], 0
            at = match.end()
        return size

    def _read_tag(self, tag: list[str], text: str, at: int) -> tuple[str, int]:
        """The text after a mark, up to the end of the tag. Where none comes the mark is text, and what follows it is read again: that
        holds no mark, which has a `<` within. Returns the text that is left, and where in it to go on."""
        end = text.find(">", at, at + _MAX_TAG)
        piece = text[at:] if end < 0 else text[at : end + 1]
        begins_right = self._tag_size > 0 or piece.startswith("<")
        if not begins_right or "<" in piece[self._tag_size == 0 :] or self._tag_size + len(piece) > _MAX_TAG:
            self._tag = None
            self._plain(self._mark)
            return "".join(tag) + text[at:], 0
        tag.append(piece)
        self._tag_size += len(piece)
        if end >= 0:
            self._tag = None
            self._take_tag("".join(tag))
        return text, at + len(piece)

    def _take_tag(self, tag: str) -> None:
        name = tag[1:-1].strip()
        inner = self._stack[-1]
        if name.startswith("/"):
            self._close_to(name[1:].strip(), tag)
        elif inner.streams or len(self._stack) > _MAX_DEPTH or not name:
            self._plain(tag)
        else:
            self._open(name)

    def _plain(self, text: str) -> None:
        """Text of the innermost element. Between arguments there is none."""
        inner = self._stack[-1]
        if inner.streams:
            self._emitter.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        elif inner.name:
            inner.pieces.append(text)

    def _open(self, name: str) -> None:
        outer = self._stack[-1]
        is_list = bool(outer.name) and "array" in types_of(outer.schema)
        schema = item_schema(outer.schema) if is_list else property_schema(outer.schema, name)
        element = _Element(name, schema, streams=not outer.name and is_declared_text(schema))
        self._stack.append(element)
        if outer.name:
            return
        if self._repeated is not None and (element.streams or self._repeated[0] != name):
            self._end_argument()
        if element.streams:
            self._begin_argument(name)
            self._emitter.arguments('"')

    def _close_to(self, name: str, tag: str) -> None:
        """A closing tag: closes what was opened inside of its own as well. One that closes nothing is text where text streams."""
        if all(element.name != name for element in self._stack[1:]):
            if self._stack[-1].streams:
                self._plain(tag)
            return
        while self._close() != name:
            pass

    def _close(self) -> str:
        element = self._stack.pop()
        outer = self._stack[-1]
        if element.streams:
            self._emitter.arguments('"')
        elif outer.name:
            outer.children.append((element.name, _value(element)))
        elif self._repeated is not None:
            self._repeated[1].append(_value(element))
        else:
            self._repeated = (element.name, [_value(element)])
        return element.name

    def _begin_argument(self, name: str) -> None:
        self._emitter.arguments(("{" if not self._num_keys else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
        self._num_keys += 1

    def _end_argument(self) -> None:
        if self._repeated is None:
            return
        name, values = self._repeated
        self._repeated = None
        self._begin_argument(name)
        self._emitter.arguments(dump(values[0] if len(values) == 1 else values))

    def end(self, complete: bool) -> None:
        """The call has ended: what is open is closed."""
        if not complete:
            return
        rest = self._tail if self._tag is None else self._mark + "".join(self._tag)
        if rest:
            self._plain(rest)
        while len(self._stack) > 1:
            self._close()
        self._end_argument()
        self._emitter.arguments("}" if self._num_keys else "{}")
        self._emitter.close_call()


def _value(element: _Element) -> Any:
    """What an element that has been closed stands for."""
    text = "".join(element.pieces)
    types = types_of(element.schema)
    if not element.children:
        if not text.strip() and "string" not in types and types & {"array", "object"}:
            return [] if "array" in types else {}
        return coerce_text(text, element.schema)
    if "array" in types:
        return [value for _, value in element.children]
    grouped: dict[str, list[Any]] = {}
    for name, value in element.children:
        grouped.setdefault(name, []).append(value)
    found = {name: values[0] if len(values) == 1 else values for name, values in grouped.items()}
    if text.strip():
        key = "$text"
        while key in found:
            key = "$" + key
        found[key] = text.strip()
    return found
