"""Bodies of JSON: the arguments of a call whose name is known, and calls that carry their names inside."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from canter.text.parsing.args.json_text import JsonText
from canter.text.parsing.emitter import Emitter

_BLANK = re.compile(r"\s*")


class JsonArguments:
    """An object, passed on as it comes. Its last bracket is kept until the call ends.

    A string is taken for an object that was written as JSON twice.
    """

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self._json = JsonText()
        self._last = ""
        self._nested: list[str] | None = None
        self.failed = False

    @property
    def in_string(self) -> bool:
        return self._json.in_string

    def feed(self, text: str) -> int:
        start = 0
        if not self._json.opened:
            start = _match_end(text)
            if start == len(text):
                return start
            if text[start] not in '{"':
                self.failed = True
                return start
            if text[start] == '"':
                self._nested = []
            else:
                self._emitter.open_call()
        if self._json.done:
            return _match_end(text)
        piece, end = self._json.feed(text, start)
        if self._nested is not None:
            self._nested.append(piece)
            if self._json.done:
                self._unwrap()
        elif self._json.done:
            self._emitter.arguments(piece[:-1])
            self._last = piece[-1:]
        else:
            self._emitter.arguments(piece)
        return _match_end(text, end)

    def _unwrap(self) -> None:
        inner = unwrapped("".join(self._nested or ()))
        self._nested = None
        if inner is None:
            self.failed = True
            return
        self._emitter.open_call()
        self._emitter.arguments(inner[:-1])
        self._last = inner[-1]

    def end(self, complete: bool) -> None:
        if self._nested is not None or self.failed:
            return
        if not self._json.opened:
            if complete:
                self._emitter.open_call()
                self._emitter.arguments("{}")
        elif self._last:
            self._emitter.arguments(self._last)
        elif complete:
            self._emitter.arguments(self._json.complete())
        if complete:
            self._emitter.close_call()


def _match_end(text: str, start: int = 0) -> int:
    match = _BLANK.match(text, start)
    return match.end() if match else start


def unwrapped(text: str) -> str | None:
    """The object that a JSON string holds as text, mended; None when it holds no object."""
    reader = JsonText()
    piece, _ = reader.feed(json.loads(text).strip())
    if reader.opened != "{":
        return None
    return piece + reader.complete()


class JsonCalls:
    """Calls as objects with the function's name and its arguments inside, alone, in a row or in a list.

    `declared_only`: an object that names no declared function is none (for formats that mark calls by nothing else).
    `key_is_name`: the one key of an object is the function's name, and its value the arguments.
    """

    def __init__(
        self,
        emitter: Emitter,
        names: tuple[str, ...] = ("name",),
        arguments: tuple[str, ...] = ("arguments", "parameters"),
        separators: str = ",;",
        declared_only: bool = False,
        key_is_name: bool = False,
    ) -> None:
        self._emitter = emitter
        self._names, self._arguments, self._separators = names, arguments, separators
        self._declared_only, self._key_is_name = declared_only, key_is_name
        self._step: Callable[[str, int], int] = self._outside
        self._in_list = self._closed = self._has_calls = False
        self._json = JsonText()
        self._captured: list[str] = []
        self._key = ""
        self._reset()
        self.failed = False

    def _reset(self) -> None:
        """A new object begins."""
        self._name: str | None = None
        self._early: str | None = None  # arguments that came before the name
        self._has_arguments = False

    @property
    def in_string(self) -> bool:
        return self._json.in_string

    def feed(self, text: str) -> int:
        at = 0
        while at < len(text) and not self.failed:
            step = self._step
            following = step(text, at)
            if following == at and self._step == step:
                return at
            at = following
        return at

    def _fail(self, at: int) -> int:
        if not self._emitter.call_is_open:
            self.failed = True
            return at
        return at + 1  # too late: what doesn't belong into the open call is dropped

    def _outside(self, text: str, at: int) -> int:
        """Before an object, between two, or after the last. Stays at what is no part of the body."""
        at = _match_end(text, at)
        if at == len(text):
            return at
        char = text[at]
        if char == "{" and not self._closed:
            self._reset()
            self._emitter.hold(at)
            self._step = self._before_key
            return at + 1
        if char == "[" and not self._in_list and not self._closed:
            self._in_list = True
            return at + 1
        if char == "]" and self._in_list:
            self._in_list, self._closed = False, True
            return at + 1
        if char in self._separators and self._has_calls:
            self._closed = False
            return at + 1
        if not self._has_calls or self._in_list:
            return self._fail(at)
        self._step = self._over
        return at

    def _over(self, text: str, at: int) -> int:
        return at

    def _before_key(self, text: str, at: int) -> int:
        at = _match_end(text, at)
        if at == len(text):
            return at
        if text[at] == '"':
            return self._capture(self._after_key, at)
        if text[at] == "}":
            self._step = self._outside
            return self._end_object(at)
        if text[at] == ",":
            return at + 1
        return self._fail(at)

    def _capture(self, then: Callable[[], None], at: int) -> int:
        """A value is read whole before it is used."""
        self._json, self._captured = JsonText(), []

        def read(text: str, start: int) -> int:
            piece, end = self._json.feed(text, start)
            self._captured.append(piece)
            if self._json.done:
                then()
            return end

        self._step = read
        return at

    def _after_key(self) -> None:
        self._key = json.loads("".join(self._captured))
        if self._key_is_name and self._name is None:
            self._name, self._key = self._key, self._arguments[0]
        if self._declared_only and self._key not in (*self._names, *self._arguments, "type", "id"):
            self.failed = True  # an answer in JSON, which need not wait for its end
        self._step = self._colon

    def _colon(self, text: str, at: int) -> int:
        at = _match_end(text, at)
        if at == len(text):
            return at
        if text[at] != ":":
            return self._fail(at)
        self._step = self._value
        return at + 1

    def _value(self, text: str, at: int) -> int:
        at = _match_end(text, at)
        if at == len(text):
            return at
        if text[at] in ",}":
            self._step = self._before_key
            return at
        if self._key in self._names and self._name is None:
            return self._capture(self._take_name, at) if text[at] == '"' else self._fail(at)
        if self._key in self._arguments and not self._has_arguments:
            self._has_arguments = True
            if text[at] == "{" and self._begin_call():
                self._json = JsonText()
                self._step = self._stream
                return at
            return self._capture(self._take_arguments, at)
        return self._capture(self._drop, at)

    def _drop(self) -> None:
        self._step = self._before_key

    def _take_name(self) -> None:
        self._name = json.loads("".join(self._captured)).strip()
        self._step = self._before_key
        if self._early is not None and self._begin_call():
            self._emitter.arguments(self._early)

    def _begin_call(self) -> bool:
        """Open the call when its name is known, and a function's."""
        if not self._name or (self._declared_only and not self._emitter.is_declared(self._name)):
            return False
        self._emitter.name_call(self._name)
        self._emitter.open_call()
        self._has_calls = True
        return True

    def _take_arguments(self) -> None:
        """Arguments that could not be passed on as they came: the name isn't known yet, or they are no plain object."""
        text = "".join(self._captured)
        self._step = self._before_key
        if text[0] == '"':
            inner = unwrapped(text)
        else:
            inner = text if text[0] == "{" else "{}" if text in ("null", "[]") else None
        if inner is None:
            self.failed = True
        elif self._begin_call():
            self._emitter.arguments(inner)
        else:
            self._early = inner

    def _stream(self, text: str, at: int) -> int:
        piece, at = self._json.feed(text, at)
        self._emitter.arguments(piece)
        if self._json.done:
            self._step = self._before_key
        return at

    def _end_object(self, at: int) -> int:
        if not self._emitter.call_is_open:
            if self._early is not None or not self._begin_call():
                self.failed = True
                return at + 1
            self._emitter.arguments("{}")
        self._emitter.close_call()
        return at + 1

    def end(self, complete: bool) -> None:
        if not self._emitter.call_is_open:
            return
        if self._step == self._stream and complete:
            self._emitter.arguments(self._json.complete())
        elif not self._has_arguments and complete:
            self._emitter.arguments("{}")
        if complete:
            self._emitter.close_call()
