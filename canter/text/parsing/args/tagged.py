"""Arguments written as keys and values between tags: a JSON object is made of them while they come."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from canter.text.parsing.args.coercion import coerce_text, coerce_value, dump, is_text, load_json, property_schema

_WRAPPERS = ("arguments", "input")
"""Keys under which models write all arguments once more as one object."""

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
        self._wrapper: str | None = None

    def begin(self, key: str, trim: Trim, value_type: ValueType) -> None:
        """A value begins."""
        self.end()
        self._key_schema = property_schema(self._schema, key)
        self._trim, self._type = trim, value_type
        self._wrapper = key if not self._num_keys and self._may_wrap(key) else None
        self._value, self._at_start, self._tail = [], True, ""
        if self._wrapper is not None:
            self._streams = False
            return
        self._streams = value_type == "text" or (value_type == "schema" and is_text(self._key_schema))
        self._begin_key(key)

    def _may_wrap(self, key: str) -> bool:
        properties = self._schema.get("properties")
        return key in _WRAPPERS and isinstance(properties, Mapping) and bool(properties) and key not in properties

    def _begin_key(self, key: str) -> None:
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
        value, self._value = "".join(self._value), None
        if self._wrapper is not None:
            self._unwrap(self._wrapper, value)
        else:
            self._write('"' if self._streams else self._typed(value))

    def _unwrap(self, key: str, text: str) -> None:
        """An object whose keys are all arguments of the tool stands for the arguments themselves."""
        try:
            value = load_json(text)
        except ValueError:
            value = None
        if isinstance(value, dict) and value and value.keys() <= self._schema["properties"].keys():
            self._num_keys = len(value)
            self._write(dump(coerce_value(value, self._schema))[:-1])
        else:
            self._begin_key(key)
            self._write(dump(text) if self._type == "text" else self._typed(text))

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
