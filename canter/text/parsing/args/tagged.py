"""Arguments written as keys and values between tags: a JSON object is made of them while they come."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from canter.text.parsing.args.coercion import coerce_text, dump, is_text, load_json, property_schema

Trim = Literal["none", "newline", "all"]
"""What of the blank around a value belongs to the format: nothing, one line break at each end, or all of it."""

ValueType = Literal["schema", "text", "json"]
"""Who says what type a value has: the tool's schema; or the format, that it is text, or JSON."""


class TaggedArguments:
    """Writes one call's arguments. A value that can only be a string goes out as it comes; any other when it is complete."""

    def __init__(self, schema: Mapping[str, Any], write: Callable[[str], None]) -> None:
        self._schema, self._write = schema, write
        self._num_keys = 0
        self._value: list[str] | None = None
        self._streams = False
        self._trim: Trim = "none"
        self._type: ValueType = "schema"
        self._key_schema: object = None
        self._at_start = False
        self._tail = ""

    def begin(self, key: str, trim: Trim, value_type: ValueType) -> None:
        """A value begins."""
        self.end()
        self._key_schema = property_schema(self._schema, key)
        self._trim, self._type = trim, value_type
        self._streams = value_type == "text" or (value_type == "schema" and is_text(self._key_schema))
        self._value, self._at_start, self._tail = [], True, ""
        self._write(("{" if not self._num_keys else ", ") + json.dumps(key, ensure_ascii=False) + ": " + ('"' if self._streams else ""))
        self._num_keys += 1

    def feed(self, text: str) -> None:
        if self._value is None or not text:
            return
        if not self._streams:
            self._value.append(text)
            return
        if self._at_start and self._trim != "none":
            text = text.removeprefix("\n") if self._trim == "newline" else text.lstrip()
            if self._trim == "all" and not text:
                return
        self._at_start = False
        if self._trim != "none":
            text = self._without_end(self._tail + text)
        self._write(_escaped(text))

    def _without_end(self, text: str) -> str:
        """The text without what may be the blank at the value's end, which is kept for later."""
        kept = text.removesuffix("\n") if self._trim == "newline" else text.rstrip()
        self._tail = text[len(kept) :]
        return kept

    def end(self) -> None:
        """The value is complete."""
        if self._value is None:
            return
        if self._streams:
            self._write('"')
        else:
            self._write(self._typed("".join(self._value)))
        self._value = None

    def _typed(self, text: str) -> str:
        if self._type == "json":
            try:
                return dump(load_json(text))
            except ValueError:
                return dump(text)
        if self._trim == "newline":
            text = text.removeprefix("\n").removesuffix("\n")
        elif self._trim == "all":
            text = text.strip()
        return dump(coerce_text(text, self._key_schema))

    def complete(self) -> None:
        """The call is complete: so is the object."""
        self.end()
        self._write("}" if self._num_keys else "{}")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
