"""Calls written as Python: `[f(a=1, b="x"), g()]`. Read in one pass, never run: literals become JSON, anything else is text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from canter.text.parsing.args.json_text import JSON_NUMBER, json_word
from canter.text.parsing.emitter import Emitter

_BLANK = re.compile(r"\s*")
_NAME_START = re.compile(r"[^\W\d]")
_NAME_TEXT = re.compile(r"[\w.-]+")
_WORD_TEXT = re.compile(r"[^\s,()\[\]{}:='\"]+")
_SEPARATED = re.compile(r"[+-]?[0-9]+(?:_[0-9]+)+(?:\.[0-9]*)?")
_INTEGER = re.compile(r"[+-]?0(?:[xX][0-9a-fA-F]{1,64}|[bB][01]{1,256}|[oO][0-7]{1,64})")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_PREFIX = re.compile(r"[rR]?[bBfFuU]?[rR]?")
_PLAIN = re.compile(r"[^'\"\\\x00-\x1f]+")
_EXPRESSION_TEXT = re.compile(r"[^'\"\\,:()\[\]{}]+")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}
_HEX, _OCTAL = frozenset("0123456789abcdefABCDEF"), frozenset("01234567")
_CLOSERS = {"(": ")", "[": "]", "{": "}", "tuple": ")"}
_MAX_NAME = 256
_MAX_DEPTH = 64
"""Brackets in brackets that are followed; what is nested deeper stays text."""

Step = Callable[[str, int], int]


class PythonCalls:
    """Calls of functions, alone, in a row or in a list. Arguments without a keyword are the schema's properties in turn.

    Strings go out while they grow, everything else when it is complete. A quote between two letters is an apostrophe.
    `declared_only`: what calls no declared function is none (for formats that mark calls by nothing else).
    """

    def __init__(self, emitter: Emitter, declared_only: bool = False) -> None:
        self._emitter, self._declared_only = emitter, declared_only
        self._write = emitter.arguments
        self._step: Step = self._outside
        self._in_list = self._closed = self._has_calls = False
        self._properties: list[str] = []
        self._stack: list[str] = []
        self._counts: list[int] = []
        self._pieces: list[str] = []  # a name, a word, an expression, or a string that is a key
        self._size = 0  # of a name
        self._is_key = False  # what is being read is the key of a dict
        self._needs_value = False  # a key has been written
        self._dropped = False  # what is being read has no place
        self._quote = ""
        self._num_quotes = 0
        self._is_raw = False
        self._escape = ""
        self._has_blank = False  # since the string's last quote
        self._depth = 0
        self._inner_quote = ""
        self.failed = False

    @property
    def in_string(self) -> bool:
        if self._step == self._expression:
            return bool(self._inner_quote)
        return self._step == self._string or (self._step == self._opening and len(self._quote) == 1)

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
        self.failed = True
        return at

    # Calls

    def _outside(self, text: str, at: int) -> int:
        """Before a call, between two, or after the last. Stays at what is no part of the body."""
        at = _match_end(text, at)
        if at == len(text):
            return at
        char = text[at]
        if not self._closed:
            if char == "[" and not self._in_list:
                self._in_list = True
                return at + 1
            if char == "]" and self._in_list and self._has_calls:
                self._in_list, self._closed = False, True
                return at + 1
            if char in ",;" and self._has_calls:
                return at + 1
            if _NAME_START.match(char):
                self._emitter.hold(at)
                self._pieces, self._size = [], 0
                self._step = self._function
                return at
        if not self._has_calls or self._in_list:
            return self._fail(at)
        self._step = self._over
        return at

    def _over(self, text: str, at: int) -> int:
        return at

    def _function(self, text: str, at: int) -> int:
        """The name, up to its bracket."""
        if match := _NAME_TEXT.match(text, at):
            self._pieces.append(match.group()[: _MAX_NAME + 1])
            self._size += len(match.group())
            return match.end() if self._size <= _MAX_NAME else self._fail(at)
        name = "".join(self._pieces)
        if text[at] != "(" or (self._declared_only and not self._emitter.is_declared(name)):
            return self._fail(at)
        self._emitter.name_call(name)
        properties = self._emitter.pending_schema.get("properties")
        self._properties = list(properties) if isinstance(properties, Mapping) else []
        self._stack, self._counts = ["("], [0]
        self._needs_value = False
        self._step = self._argument
        return at + 1

    def _open(self) -> None:
        """It is a call: an argument or the closing bracket follows the name."""
        if not self._emitter.call_is_open:
            self._emitter.open_call()
            self._has_calls = True
            self._write("{")

    def _argument(self, text: str, at: int) -> int:
        at = _match_end(text, at)
        if at == len(text):
            return at
        char = text[at]
        is_open = self._emitter.call_is_open
        if char == ")" or (char in "]}" and is_open):
            self._open()
            self._close_to(char)
            return at + 1
        if char == "," and is_open:
            return at + 1
        if _NAME_START.match(char):
            self._pieces = []
            self._step = self._keyword
            return at
        if self._declared_only and not is_open:
            return self._fail(at)
        self._begin_positional()
        return at

    def _keyword(self, text: str, at: int) -> int:
        """A word that is the argument's keyword, or else its value."""
        if match := _WORD_TEXT.match(text, at):
            self._pieces.append(match.group())
            return match.end()
        end = _match_end(text, at)
        if end > at:
            self._pieces.append(text[at:end])
            return end
        if text[at] == "=":
            self._open()
            self._begin_key(json.dumps("".join(self._pieces).strip(), ensure_ascii=False))
            self._step = self._value
            return at + 1
        if self._declared_only and not self._emitter.call_is_open:
            return self._fail(at)
        self._begin_positional()
        self._step = self._bare
        return at

    def _begin_positional(self) -> None:
        self._open()
        index = self._counts[0]
        self._dropped = index >= len(self._properties)
        if not self._dropped:
            self._begin_key(json.dumps(self._properties[index], ensure_ascii=False))
        self._step = self._value

    def _begin_key(self, key: str) -> None:
        self._write((", " if self._counts[-1] else "") + key + ": ")
        self._counts[-1] += 1
        self._needs_value = True

    # Values

    def _value(self, text: str, at: int) -> int:
        at = _match_end(text, at)
        if at == len(text):
            return at
        char = text[at]
        if char in ")]},":
            self._is_key = False
            self._step = self._next
        elif char in "'\"":
            self._begin_string("")
        elif char in "([{":
            if self._is_key or self._dropped or len(self._stack) > _MAX_DEPTH:
                self._begin_expression()
                return at
            self._begin_value()
            self._open_bracket(char)
            return at + 1
        elif char in ":=":
            return at + 1
        else:
            self._pieces = []
            self._step = self._bare
        return at

    def _begin_value(self) -> None:
        """Items of a list need a comma before them; keys and keywords have brought theirs."""
        self._needs_value = False
        if self._stack[-1] in ("[", "tuple"):
            self._write(", " if self._counts[-1] else "")
            self._counts[-1] += 1

    def _open_bracket(self, char: str) -> None:
        self._write("{" if char == "{" else "[")
        self._stack.append("tuple" if char == "(" else char)
        self._counts.append(0)
        self._begin_element()

    def _begin_element(self) -> None:
        """In a dict a key follows, in a list an item, among arguments another one."""
        self._dropped = False
        self._is_key = self._stack[-1] == "{"
        self._step = self._argument if self._stack[-1] == "(" else self._value

    def _end_scalar(self, value: str) -> None:
        """`value`: JSON of what has been read."""
        self._step = self._next
        if self._is_key:
            self._begin_key(value if value[0] == '"' else json.dumps(value))
        elif not self._dropped:
            self._begin_value()
            self._write(value)

    def _bare(self, text: str, at: int) -> int:
        """A number, a constant, or the beginning of something else."""
        if match := _WORD_TEXT.match(text, at):
            self._pieces.append(match.group())
            return match.end()
        char = text[at]
        if self._ends_value(char):
            self._end_scalar(_python_word("".join(self._pieces).strip()))
        elif char in "'\"" and _PREFIX.fullmatch("".join(self._pieces)):
            self._begin_string("".join(self._pieces))
        else:
            self._begin_expression(self._pieces)
        return at

    def _ends_value(self, char: str) -> bool:
        return char in ",)]}" or (char == ":" and self._is_key)

    def _begin_expression(self, pieces: list[str] | None = None) -> None:
        self._pieces, self._depth, self._inner_quote = pieces or [], 0, ""
        self._step = self._expression

    def _expression(self, text: str, at: int) -> int:
        """Python that is no literal: its text, up to the comma or bracket that ends it."""
        if match := _EXPRESSION_TEXT.match(text, at):
            self._pieces.append(match.group())
            return match.end()
        char = text[at]
        if self._inner_quote:
            self._inner_quote = "" if char == self._inner_quote else self._inner_quote
        elif char in "'\"":
            self._inner_quote = char
        elif not self._depth and self._ends_value(char):
            self._end_expression()
            return at
        elif char in "([{)]}":
            self._depth += 1 if char in "([{" else -1
        self._pieces.append(char)
        return at + 1

    def _end_expression(self) -> None:
        written, self._pieces = "".join(self._pieces).strip(), []
        self._end_scalar(_python_word(written))

    # Strings

    def _begin_string(self, prefix: str) -> None:
        self._is_raw = "r" in prefix.lower()
        self._quote, self._num_quotes, self._escape, self._has_blank = "", 0, "", False
        self._pieces = []
        if not self._is_key and not self._dropped:
            self._begin_value()
        self._put('"')
        self._step = self._opening

    def _put(self, text: str) -> None:
        """A piece of a string. A key is kept until it is complete, a value goes out."""
        if self._is_key:
            self._pieces.append(text)
        elif not self._dropped:
            self._write(text)

    def _opening(self, text: str, at: int) -> int:
        """The quotes that open a string: one, or three; two are an empty string."""
        char = text[at]
        if not self._quote or (char == self._quote[0] and len(self._quote) < 3):
            self._quote += char
            return at + 1
        self._step = self._string
        if len(self._quote) == 2:
            self._quote = self._quote[0]
            self._has_blank = True
            self._step = self._after_string
        return at

    def _string(self, text: str, at: int) -> int:
        if self._escape:
            return self._in_escape(text, at)
        char = text[at]
        if char == self._quote[0]:
            self._num_quotes += 1
            if self._num_quotes == len(self._quote):
                self._num_quotes, self._has_blank = 0, len(self._quote) == 3
                self._step = self._after_string
            return at + 1
        self._put_quotes()
        if match := _PLAIN.match(text, at):
            self._put(_escaped(match.group()))
            return match.end()
        if char == "\\":
            self._escape = char
        else:
            self._put(_escaped(char))
        return at + 1

    def _put_quotes(self) -> None:
        """Quotes that were fewer than would end the string."""
        if self._num_quotes:
            self._put(_escaped(self._quote[0] * self._num_quotes))
            self._num_quotes = 0

    def _in_escape(self, text: str, at: int) -> int:
        """Within an escape, which goes out when it is whole."""
        char = text[at]
        kind = self._escape[1:2]
        if not kind and (self._is_raw or (char not in _CODES and char not in _OCTAL)):
            self._escape = ""
            self._put(_escaped("\\" + char if self._is_raw else _ESCAPES.get(char, "\\" + char)))
            return at + 1
        size = len(self._escape) - 2 if kind in _CODES else len(self._escape) - 1
        if kind and (size == _CODES.get(kind, 3) or char not in (_HEX if kind in _CODES else _OCTAL)):
            self._end_escape()
            return self._string(text, at)
        self._escape += char
        return at + 1

    def _end_escape(self) -> None:
        escape, self._escape = self._escape, ""
        kind, digits = escape[1:2], escape[2:]
        if kind not in _CODES:
            self._put(json.dumps(chr(int(escape[1:], 8)))[1:-1] if kind else _escaped(escape))
        elif len(digits) < _CODES[kind] or int(digits, 16) > 0x10FFFF:
            self._put(_escaped(escape))
        else:
            self._put(escape if kind == "u" else json.dumps(chr(int(digits, 16)))[1:-1])

    def _after_string(self, text: str, at: int) -> int:
        """After a quote: the string has ended, or another follows that belongs to it, or it was an apostrophe."""
        char = text[at]
        if not self._has_blank and char.isalnum():
            self._put(_escaped(self._quote))
            self._step = self._string
            return at
        end = _match_end(text, at)
        self._has_blank = self._has_blank or end > at
        if end == len(text):
            return end
        if text[end] in "'\"":
            self._quote, self._has_blank, self._is_raw = "", False, False
            self._step = self._opening
        else:
            self._end_string()
        return end

    def _end_string(self) -> None:
        if self._is_key:
            self._end_scalar("".join(self._pieces) + '"')
        else:
            self._put('"')
            self._step = self._next

    # After a value

    def _next(self, text: str, at: int) -> int:
        at = _match_end(text, at)
        if at == len(text):
            return at
        char = text[at]
        if char == ":" and self._is_key:
            self._is_key = False
            self._step = self._value
        elif char == ",":
            self._end_pair()
            self._begin_element()
        elif char in ")]}":
            self._close_to(char)
        else:  # more than a literal: only the literal counts
            self._end_pair()
            self._dropped, self._is_key = True, False
            self._begin_expression()
            return at
        return at + 1

    def _end_pair(self) -> None:
        """A key that has no value has null."""
        if self._needs_value:
            self._write("null")
        self._needs_value = False

    def _close_to(self, char: str) -> None:
        """A closing bracket: closes what was opened inside of its own as well; the list of calls stands outside of all."""
        if any(_CLOSERS[kind] == char for kind in self._stack):
            while self._close() != char:
                pass
        elif char == "]" and self._in_list:
            while self._stack:
                self._close()
            self._in_list, self._closed = False, True

    def _close(self) -> str:
        self._end_pair()
        kind = self._stack.pop()
        self._counts.pop()
        self._write("]" if kind in ("[", "tuple") else "}")
        self._dropped = self._is_key = False
        self._step = self._next
        if not self._stack:
            self._emitter.close_call()
            self._step = self._outside
        return _CLOSERS[kind]

    def end(self, complete: bool) -> None:
        """The output, or the calls' place in it, has ended: what is open is closed."""
        if not complete or not self._emitter.call_is_open:
            return
        if self._step == self._string:
            self._put_quotes()
            self._end_string()
        elif self._step in (self._opening, self._after_string):
            self._end_string()
        elif self._step in (self._bare, self._expression):
            self._end_expression()
        while self._stack:
            self._close()


def _match_end(text: str, start: int) -> int:
    match = _BLANK.match(text, start)
    return match.end() if match else start


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _python_word(word: str) -> str:
    """A value written without quotes, as JSON."""
    plain = (word.replace("_", "") if _SEPARATED.fullmatch(word) else word).removeprefix("+")
    if JSON_NUMBER.fullmatch(plain):
        return json_word(plain)
    if _INTEGER.fullmatch(plain):
        return str(int(plain, 0))
    if _DECIMAL.fullmatch(plain):
        return json_word(repr(float(plain)))
    return json_word(word)
