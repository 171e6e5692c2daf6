"""Arguments in braces with bare keys and strings between marks of their own: Gemma's."""

from __future__ import annotations

import json
import re
from typing import Literal

from canter.text.parsing.args.coercion import coerce_text, dump, is_text, item_schema, property_schema
from canter.text.parsing.emitter import Emitter
from canter.text.parsing.lexer import Literals

_KEY_TEXT = re.compile(r"[^,:}]+")
_BARE_TEXT = re.compile(r"[^,}\]]+")
_BLANK = re.compile(r"\s+")
_CLOSERS = {"{": "}", "[": "]"}

Expects = Literal["start", "key", "value", "bare", "next", "nothing"]
Sink = Literal["key", "stream", "whole", "drop"]


class BraceArguments:
    """`{key:<|"|>text<|"|>,n:42,o:{...},l:[...]}`, written as JSON while it comes. `quote` is the mark around strings, which have no
    escapes. Bare values are typed by the schema, and go out when they are complete."""

    def __init__(self, emitter: Emitter, quote: str = '<|"|>') -> None:
        self._emitter = emitter
        self._literals = Literals([quote])
        self._write = emitter.arguments
        self._schema: object = emitter.pending_schema
        self._expects: Expects = "start"
        self._stack: list[tuple[str, object]] = []
        self._counts: list[int] = []
        self._pieces: list[str] = []  # a key, a bare value, or a string that is read whole
        self._value_schema: object = None
        self._sink: Sink = "drop"
        self._tail = ""
        self.in_string = False
        self.failed = False

    def feed(self, text: str) -> int:
        size, held = len(text), len(self._tail)
        text = self._tail + text
        self._tail = ""
        at = 0
        while at < len(text):
            match = self._literals.search(text, at)
            stop = match.start() if match is not None else self._literals.hold(text, at)
            if self.in_string:
                self._string(text[at:stop])
            else:
                while at < stop:
                    at = self._between(text, at, stop)
                    if self.failed:
                        return max(0, at - held)
            if match is None:
                self._tail = text[stop:]
                break
            self._toggle()
            at = match.end()
        return size

    def _toggle(self) -> None:
        """A mark: a string begins or ends."""
        self.in_string = not self.in_string
        if self.in_string:
            self._begin_string()
        elif self._sink == "stream":
            self._write('"')
            self._expects = "next"
        elif self._sink == "whole":
            self._end_bare()

    def _begin_string(self) -> None:
        self._sink = "drop"
        if self._expects == "key":
            self._sink, self._pieces = "key", []
        elif self._expects == "value":
            self._begin_value()
            self._sink = "stream" if is_text(self._value_schema) else "whole"
            if self._sink == "stream":
                self._write('"')

    def _string(self, text: str) -> None:
        if self._sink == "stream":
            self._write(json.dumps(text, ensure_ascii=False)[1:-1])
        elif self._sink != "drop":
            self._pieces.append(text)

    def _between(self, text: str, at: int, stop: int) -> int:
        """Outside of strings: takes at least one character, unless it fails."""
        expects = self._expects
        if expects == "key" and (match := _KEY_TEXT.match(text, at, stop)):
            self._pieces.append(match.group())
            return match.end()
        if expects == "bare" and (match := _BARE_TEXT.match(text, at, stop)):
            self._pieces.append(match.group())
            return match.end()
        if match := _BLANK.match(text, at, stop):
            return match.end()
        char = text[at]
        if expects == "start":
            if char != "{":
                self.failed = True
                return at
            self._emitter.open_call()
            self._open(char, self._schema)
        elif expects == "value" and char not in ",}]":
            self._begin_value()
            if char in "{[":
                self._open(char, self._value_schema)
            else:
                self._expects = "bare"
                return at
        elif expects != "nothing":
            self._separate(char)
        return at + 1

    def _open(self, char: str, schema: object) -> None:
        self._write(char)
        self._stack.append((char, schema))
        self._counts.append(0)
        self._pieces = []
        self._expects = "key" if char == "{" else "value"

    def _begin_value(self) -> None:
        """An item of a list needs a comma, and has the list's schema for items. What follows a key has both already."""
        kind, schema = self._stack[-1]
        if kind == "[":
            self._write(", " if self._counts[-1] else "")
            self._counts[-1] += 1
            self._value_schema = item_schema(schema)
        self._pieces = []

    def _separate(self, char: str) -> None:
        if char == ":":
            if self._expects == "key":
                self._end_key()
        elif char == ",":
            self._end_value()
            self._pieces = []
            self._expects = "key" if self._stack[-1][0] == "{" else "value"
        elif char in "}]":
            self._close_to(char)

    def _end_key(self) -> None:
        key = "".join(self._pieces).strip()
        self._write((", " if self._counts[-1] else "") + json.dumps(key, ensure_ascii=False) + ": ")
        self._counts[-1] += 1
        self._value_schema = property_schema(self._stack[-1][1], key)
        self._expects = "value"

    def _end_bare(self) -> None:
        text = "".join(self._pieces)
        self._pieces = []
        self._write(dump(coerce_text(text if self._sink == "whole" else text.strip(), self._value_schema)))
        self._sink = "drop"
        self._expects = "next"

    def _end_value(self) -> None:
        if self._expects == "bare":
            self._end_bare()
        elif self._expects == "value" and self._stack[-1][0] == "{":
            self._write("null")

    def _close_to(self, char: str) -> None:
        if all(_CLOSERS[kind] != char for kind, _ in self._stack):
            return
        while self._close() != char:
            pass

    def _close(self) -> str:
        self._end_value()
        closer = _CLOSERS[self._stack.pop()[0]]
        self._counts.pop()
        self._write(closer)
        self._expects = "next" if self._stack else "nothing"
        return closer

    def end(self, complete: bool) -> None:
        if self.failed or not complete:
            return
        if self._expects == "start":
            self._emitter.open_call()
            self._write("{}")
        if self.in_string:
            self._string(self._tail)
            self._toggle()
        while self._stack:
            self._close()
        self._emitter.close_call()
