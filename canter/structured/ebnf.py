"""EBNF as xgrammar and llama.cpp (GBNF) write it, translated to Lark.

    root ::= "[" item ("," item)* "]"      # a comment
    item ::= [a-z]+ | root

Texts in double quotes, classes of characters, `.`, groups, `|`, `*`, `+`, `?`, `{m}`, `{m,}` and `{m,n}`. What refers to no rule
that comes back to itself becomes a terminal, which the lexer matches as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from canter.core.errors import InvalidRequestError
from canter.core.structured_outputs import MAX_NESTING, PARAM
from canter.structured.literals import text_literal

MAX_REPEATS = 10_000
MAX_CODE = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_RULE = re.compile(r"^[ \t]*[A-Za-z_][A-Za-z0-9_.-]*[ \t]*::=", re.MULTILINE)
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_REPEATS = re.compile(r"\{[ \t]*(\d+)[ \t]*(,[ \t]*(\d*)[ \t]*)?\}")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "0": "\0", "a": "\a", "e": "\x1b"}
_RANGE = re.compile(r"\\x\{([0-9a-f]+)\}(?:-\\x\{([0-9a-f]+)\})?")
_CODES = {"x": 2, "u": 4, "U": 8}


def is_ebnf(text: str) -> bool:
    """Whether a grammar is written in this way, and not in Lark's."""
    return _RULE.search(text) is not None


@dataclass(slots=True)
class _Node:
    """kind text, class, any, ref (texts: `value`), or sequence, choice, repeat (of `parts`; `value` the suffix)."""

    kind: str
    value: str = ""
    parts: list[_Node] = field(default_factory=list)
    at: int = 0

    def nodes(self) -> Iterator[_Node]:
        todo = [self]
        while todo:
            node = todo.pop()
            yield node
            todo += node.parts


def ebnf_to_lark(text: str) -> str:
    """The same grammar in Lark. Raises `InvalidRequestError` with line and column."""
    return _Writer(_read(text)).write()


def ebnf_to_xgrammar(text: str) -> str:
    """The same grammar in EBNF that can be read in one way only. Raises `InvalidRequestError` with line and column."""
    rules = _read(text)
    names = {name: "root" if name == "root" else f"r{i}" for i, name in enumerate(rules)}
    return "\n".join(f"{names[name]} ::= {_plain(body, names)}" for name, body in rules.items())


def _read(text: str) -> dict[str, _Node]:
    rules = _Reader(text).read()
    for node in (node for body in rules.values() for node in body.nodes() if node.kind == "ref"):
        if node.value not in rules:
            raise _error(text, node.at, f"there is no rule {node.value!r}")
    if "root" not in rules:
        raise _error(text, 0, "there is no rule 'root', which is where an output begins")
    return rules


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def read(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        self._skip()
        while self._at < len(self._text):
            start = self._at
            name = self._name()
            if name is None:
                raise self._error("a rule such as 'name ::= ...' was expected")
            self._skip()
            if not self._take("::="):
                raise self._error(f"'::=' was expected after {name!r}")
            if name in rules:
                raise _error(self._text, start, f"there are two rules {name!r}")
            rules[name] = self._choice()
        return rules

    def _choice(self) -> _Node:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else _Node("choice", parts=options)

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        self._skip()
        while (item := self._item()) is not None:
            self._skip()
            parts.append(self._repeated(item))
            self._skip()
        return parts[0] if len(parts) == 1 else _Node("sequence", parts=parts)

    def _item(self) -> _Node | None:
        """The next text, class, group or reference; None before whatever ends a sequence."""
        start = self._at
        char = self._text[start : start + 1]
        if char == '"':
            return _Node("text", self._quoted())
        if char == "[":
            return self._class()
        if char == "(":
            if self._text.startswith(("(=", "(?"), start):
                raise self._error("lookahead is not supported")
            self._depth += 1
            if self._depth > MAX_NESTING:
                raise self._error(f"groups may be nested {MAX_NESTING} levels deep at most")
            self._at += 1
            inner = self._choice()
            if not self._take(")"):
                raise self._error("')' was expected")
            self._depth -= 1
            return inner
        if char == ".":
            self._at += 1
            return _Node("any")
        name = self._name()
        if name is None:
            if char and char not in "|)":
                raise self._error(f"{char!r} was not expected")
            return None
        after = _SPACE.match(self._text, self._at)
        if self._text.startswith("::=", after.end() if after else self._at):  # the next rule
            self._at = start
            return None
        return _Node("ref", name, at=start)

    def _repeated(self, item: _Node) -> _Node:
        char = self._text[self._at : self._at + 1]
        if char and char in "*+?":
            self._at += 1
            return self._repeated(_Node("repeat", char, [item]))
        found = _REPEATS.match(self._text, self._at)
        if found is None:
            return item
        low, high = int(found[1]), int(found[3]) if found[3] else None
        if max(low, high or 0) > MAX_REPEATS or (high is not None and high < low):
            raise self._error(f"repeats must count up, to at most {MAX_REPEATS}")
        self._at = found.end()
        suffix = f"{{{low}}}" if found[2] is None else f"{{{low},{'' if high is None else high}}}"
        return self._repeated(_Node("repeat", suffix, [item]))

    def _quoted(self) -> str:
        chars: list[str] = []
        start = self._at
        self._at += 1
        while not self._take('"'):
            if self._at >= len(self._text) or self._text[self._at] == "\n":
                raise _error(self._text, start, "the text has no end")
            chars.append(self._char())
        return "".join(chars)

    def _class(self) -> _Node:
        """A class of characters as a regex has it."""
        start = self._at
        self._at += 1
        body = "^" if self._take("^") else ""
        while not self._take("]"):
            if self._at >= len(self._text):
                raise _error(self._text, start, "the class of characters has no end")
            low = high = self._char()
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                if self._at >= len(self._text):
                    raise _error(self._text, start, "the class of characters has no end")
                high = self._char()
            if high < low:
                raise self._error(f"the range {low}-{high} is empty")
            body += _code(low) if low == high else f"{_code(low)}-{_code(high)}"
        if body in ("", "^"):
            raise _error(self._text, start, "the class of characters is empty")
        return _Node("class", f"[{body}]")

    def _char(self) -> str:
        char = self._text[self._at]
        self._at += 1
        if char != "\\" or self._at >= len(self._text):
            return char
        char = self._text[self._at]
        self._at += 1
        if char in _CODES:
            digits = self._text[self._at : self._at + _CODES[char]]
            if len(digits) < _CODES[char] or not re.fullmatch("[0-9A-Fa-f]+", digits) or not _is_char(int(digits, 16)):
                raise self._error(f"{_CODES[char]} hexadecimal digits of a character were expected after \\{char}")
            self._at += len(digits)
            return chr(int(digits, 16))
        return _ESCAPES.get(char, char)

    def _name(self) -> str | None:
        found = _NAME.match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        return found[0]

    def _take(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _error(self, what: str) -> InvalidRequestError:
        return _error(self._text, self._at, what)


class _Writer:
    """Writes rules; the parts of one that are regular become terminals of their own."""

    def __init__(self, rules: dict[str, _Node]) -> None:
        self._rules = rules
        self._recursive = _recursive(rules)
        self._names = {name: f"r{i}" if name in self._recursive else f"T{i}" for i, name in enumerate(rules)}
        self._lines: list[str] = []
        self._num_terminals = 0

    def write(self) -> str:
        self._lines.append(f"start: {self._names['root']}")
        for name, body in self._rules.items():
            if name in self._recursive:
                self._lines.append(f"{self._names[name]}: {self._symbols(body)}")
            else:
                self._lines.append(f"{self._names[name]}: {_terminal(body, self._names)}")
        return "\n".join(self._lines)

    def _is_regular(self, node: _Node) -> bool:
        return not any(inner.kind == "ref" and inner.value in self._recursive for inner in node.nodes())

    def _symbols(self, node: _Node) -> str:
        """A node within a rule."""
        if node.kind == "ref":
            return self._names[node.value]
        if self._is_regular(node):
            return self._new_terminal(node)
        if node.kind == "choice":
            return "(" + " | ".join(map(self._symbols, node.parts)) + ")"
        if node.kind == "repeat":
            return f"({self._symbols(node.parts[0])}){node.value}"
        parts: list[str] = []
        regular: list[_Node] = []
        for part in node.parts:
            if self._is_regular(part):
                regular.append(part)
                continue
            parts += self._joined(regular)
            regular = []
            parts.append(self._symbols(part))
        return " ".join(parts + self._joined(regular))

    def _joined(self, regular: list[_Node]) -> list[str]:
        if not regular:
            return []
        return [self._symbols(regular[0] if len(regular) == 1 else _Node("sequence", parts=regular))]

    def _new_terminal(self, node: _Node) -> str:
        name = f"PART{self._num_terminals}"
        self._num_terminals += 1
        self._lines.append(f"{name}: {_terminal(node, self._names)}")
        return name


def _terminal(node: _Node, names: dict[str, str]) -> str:
    """A regular node within a terminal."""
    if node.kind == "text":
        return text_literal(node.value)
    if node.kind == "class":
        return f"/{node.value}/"
    if node.kind == "any":
        return "/(?s:.)/"
    if node.kind == "ref":
        return names[node.value]
    inner = [_terminal(part, names) for part in node.parts]
    if node.kind == "repeat":
        return f"({inner[0]}){node.value}"
    if node.kind == "choice":
        return "(" + " | ".join(inner) + ")"
    return "(" + " ".join(inner) + ")" if inner else '""'


def char_ranges(ranges: Sequence[tuple[int, int]], is_negated: bool) -> list[tuple[int, int]]:
    """A class of characters as ranges of codes in their order, or all but those; without surrogates, which are no text: xgrammar would let
    them be written."""
    found: list[tuple[int, int]] = []
    start = 0
    for low, high in [*sorted([*ranges, SURROGATES] if is_negated else ranges), (MAX_CODE + 1, MAX_CODE + 1)]:
        if is_negated and start < low:
            found.append((start, low - 1))
        start = max(start, high + 1)
    if is_negated:
        return found
    below = [(low, min(high, SURROGATES[0] - 1)) for low, high in ranges if low < SURROGATES[0]]
    return below + [(max(low, SURROGATES[1] + 1), high) for low, high in ranges if high > SURROGATES[1]]


def _plain(node: _Node, names: dict[str, str]) -> str:
    """A node in EBNF, with each character as its code."""
    if node.kind == "text":
        return '"' + "".join(f"\\U{ord(char):08x}" for char in node.value) + '"'
    if node.kind in ("class", "any"):
        ranges = [(int(found[1], 16), int(found[2] or found[1], 16)) for found in _RANGE.finditer(node.value)]
        chars = char_ranges(ranges, node.kind == "any" or node.value.startswith("[^"))
        return "[" + "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in chars) + "]"
    if node.kind == "ref":
        return names[node.value]
    inner = [_plain(part, names) for part in node.parts]
    if node.kind == "repeat":
        return f"({inner[0]}){node.value}"
    if node.kind == "choice":
        return "(" + " | ".join(inner) + ")"
    return "(" + " ".join(inner) + ")" if inner else '""'


def _recursive(rules: dict[str, _Node]) -> set[str]:
    """The rules that lead back to themselves, and those that lead to such."""
    uses = {name: {node.value for node in body.nodes() if node.kind == "ref"} for name, body in rules.items()}
    # What is left when rules that use none but finished ones are taken away, again and again.
    left = set(rules)
    while finished := {name for name in left if not uses[name] & left}:
        left -= finished
    return left


def _code(char: str) -> str:
    return f"\\x{{{ord(char):x}}}"


def _is_char(code: int) -> bool:
    return code < 0x110000 and not 0xD800 <= code < 0xE000


def _error(text: str, at: int, what: str) -> InvalidRequestError:
    line = text.count("\n", 0, at) + 1
    column = at - (text.rfind("\n", 0, at) + 1) + 1
    return InvalidRequestError(f"{PARAM}.grammar, line {line}, column {column}: {what}.", f"{PARAM}.grammar")
