"""One JSON value, passed on while it is being written, and mended where models err."""

from __future__ import annotations

import json
import math
import re

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_BLANK = re.compile(r"[ \t\r\n]+")
_WORD = re.compile(r'[^\s"{}\[\],:]+')
JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_HEX = frozenset("0123456789abcdefABCDEF")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_NO_NUMBER = frozenset(("NaN", "nan", "Infinity", "-Infinity", "+Infinity", "inf", "-inf"))
_CLOSERS = {"{": "}", "[": "]"}

# What the innermost bracket waits for.
_KEY, _COLON, _VALUE, _NEXT_KEY, _ITEM, _NEXT_ITEM = range(6)


class JsonText:
    """Give it text; it gives back JSON, as early as it is sure. Whatever comes in, all that goes out, with what `complete` adds,
    is one valid JSON value: words of Python and bare words are written as JSON has them, numbers that JSON lacks become null,
    control characters and wrong escapes in strings are escaped, commas, colons and brackets are set right.

    `done`: the value is complete. `in_string`: the next character belongs to a string. `opened`: the first character of the value.
    """

    __slots__ = ("_brackets", "_comma", "_escape", "_waits", "_word", "done", "in_string", "opened")

    def __init__(self) -> None:
        self._brackets: list[str] = []
        self._waits: list[int] = []
        self._comma = False
        self._escape = ""
        self._word: list[str] = []
        self.done = False
        self.in_string = False
        self.opened = ""

    def feed(self, text: str, start: int = 0) -> tuple[str, int]:
        """JSON that is sure now, and the place after the last character taken: short of the end only when the value is complete."""
        out: list[str] = []
        at = start
        while at < len(text) and not self.done:
            at = self._string(text, at, out) if self.in_string else self._between(text, at, out)
        return "".join(out), at

    def complete(self) -> str:
        """The output has ended: what the value lacks. An empty value is null."""
        if self.done:
            return ""
        out: list[str] = []
        if self.in_string:
            self._escape = ""
            self._end_string(out)
        self._end_word(out)
        while self._brackets:
            self._close(self._brackets[-1], out)
        if not self.opened:
            out.append("null")
        self.done = True
        return "".join(out)

    def _string(self, text: str, at: int, out: list[str]) -> int:
        if self._escape:
            return self._escaped(text, at, out)
        if match := _PLAIN.match(text, at):
            out.append(match.group())
            return match.end()
        char = text[at]
        if char == "\\":
            self._escape = char
        elif char == '"':
            self._end_string(out)
        else:
            out.append(json.dumps(char)[1:-1])
        return at + 1

    def _escaped(self, text: str, at: int, out: list[str]) -> int:
        """Within an escape, which is passed on when it is whole."""
        char = text[at]
        if len(self._escape) == 1 and char != "u":
            valid = char in '"\\/bfnrt'
            out.append("\\" + char if valid else "'" if char == "'" else "\\\\")
            self._escape = ""
            return at + 1 if valid or char == "'" else at
        if len(self._escape) > 1 and char not in _HEX:
            out.append("\\" + self._escape)  # not a character's number: the backslash was meant
            self._escape = ""
            return at
        self._escape += char
        if len(self._escape) == 6:
            out.append(self._escape)
            self._escape = ""
        return at + 1

    def _between(self, text: str, at: int, out: list[str]) -> int:
        if match := _WORD.match(text, at):
            self._word.append(match.group())
            return match.end()
        if self._word:
            self._end_word(out)
            if self.done:
                return at
        if match := _BLANK.match(text, at):
            if self._brackets and not self._comma:
                out.append(match.group())
            return match.end()
        char = text[at]
        if char == '"':
            self._begin(char, out)
            out.append(char)
            self.in_string = True
        elif char in "{[":
            self._open(char, out)
        elif char in "}]":
            self._close_to(char, out)
        elif char == ":" and self._waits and self._waits[-1] == _COLON:
            out.append(char)
            self._waits[-1] = _VALUE
        elif char == "," and self._waits:
            self._separate(out)
        return at + 1

    def _begin(self, char: str, out: list[str]) -> None:
        """A token of the value begins: first what has to stand before it."""
        self.opened = self.opened or char
        if not self._waits:
            return
        if self._waits[-1] == _COLON:
            out.append(":")
            self._waits[-1] = _VALUE
        elif self._waits[-1] in (_NEXT_KEY, _NEXT_ITEM):
            out.append(", " if self._comma else ",")
            self._waits[-1] -= 3 if self._waits[-1] == _NEXT_KEY else 1
        self._comma = False

    def _end_token(self) -> None:
        if self._waits:
            self._waits[-1] = {_KEY: _COLON, _VALUE: _NEXT_KEY, _ITEM: _NEXT_ITEM}[self._waits[-1]]
        else:
            self.done = True

    def _end_string(self, out: list[str]) -> None:
        out.append('"')
        self.in_string = False
        self._end_token()

    def _end_word(self, out: list[str]) -> None:
        if not self._word:
            return
        word = "".join(self._word)
        self._word = []
        self._begin(word[0], out)
        out.append(json.dumps(word) if self._waits and self._waits[-1] == _KEY else json_word(word))
        self._end_token()

    def _open(self, char: str, out: list[str]) -> None:
        if self._waits and self._waits[-1] in (_KEY, _NEXT_KEY):
            return  # no key begins so
        self._begin(char, out)
        out.append(char)
        self._brackets.append(char)
        self._waits.append(_KEY if char == "{" else _ITEM)

    def _close_to(self, char: str, out: list[str]) -> None:
        """A closing bracket: closes what was opened inside of its own as well."""
        opener = "{" if char == "}" else "["
        if opener not in self._brackets:
            return
        while self._close(self._brackets[-1], out) != opener:
            pass

    def _close(self, opener: str, out: list[str]) -> str:
        if self._waits[-1] in (_COLON, _VALUE):
            out.append("null" if self._waits[-1] == _VALUE else ":null")
        out.append(_CLOSERS[opener])
        self._brackets.pop()
        self._waits.pop()
        self._comma = False
        self._end_token()
        return opener

    def _separate(self, out: list[str]) -> None:
        """A comma is written when something follows it."""
        if self._waits[-1] in (_COLON, _VALUE):
            out.append("null" if self._waits[-1] == _VALUE else ":null")
            self._waits[-1] = _NEXT_KEY
        self._comma = self._waits[-1] in (_NEXT_KEY, _NEXT_ITEM)


def json_word(word: str) -> str:
    """A value written without quotes, as JSON: a number or constant, null for what is no finite number, else a string."""
    if word in _WORDS:
        return _WORDS[word]
    if word in _NO_NUMBER:
        return "null"
    if JSON_NUMBER.fullmatch(word):
        return word if math.isfinite(float(word)) else "null"
    return json.dumps(word, ensure_ascii=False)
