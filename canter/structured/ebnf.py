"""EBNF as xgrammar and llama.cpp (GBNF) write it, translated to Lark.

    root ::= "[" item ("," item)* "]"      # a comment
    item ::= [a-z]+ | root

Texts in double quotes, classes of characters, `.`, groups, `|`, `*`, `+`, `?`, `{m}`, `{m,}` and `{m,n}`. What refers to no rule
that comes back to itself becomes a terminal, which the lexer matches as a whole, unless that would take in what follows (`ebnf_pieces`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from canter.core.errors import InvalidRequestError
from canter.core.structured_outputs import MAX_NESTING, PARAM
from canter.structured.ebnf_pieces import split_pieces
from canter.structured.ebnf_tree import Node, Ranges, complement, recursive_rules
from canter.structured.literals import text_literal

MAX_REPEATS = 10_000
MAX_PARENTHESES = 12
"""Levels of parentheses that are written before a part gets a name. llguidance takes 28."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_RULE = re.compile(r"^[ \t]*[A-Za-z_][A-Za-z0-9_.-]*[ \t]*::=", re.MULTILINE)
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_REPEATS = re.compile(r"\{[ \t]*(\d+)[ \t]*(,[ \t]*(\d*)[ \t]*)?\}")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "0": "\0", "a": "\a", "e": "\x1b"}
_CODES = {"x": 2, "u": 4, "U": 8}


def is_ebnf(text: str) -> bool:
    """Whether a grammar is written in this way, and not in Lark's."""
    return _RULE.search(text) is not None


def ebnf_to_lark(text: str) -> str:
    """The same grammar in Lark. Raises `InvalidRequestError` with line and column."""
    return _Writer(read_ebnf(text)).write()


def read_ebnf(text: str) -> dict[str, Node]:
    """The rules of a grammar, `root` among them. Raises `InvalidRequestError` with line and column."""
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

    def read(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
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

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Node("choice", parts=options)

    def _sequence(self) -> Node:
        parts: list[Node] = []
        self._skip()
        while (item := self._item()) is not None:
            self._skip()
            parts.append(self._repeated(item))
            self._skip()
        return parts[0] if len(parts) == 1 else Node("sequence", parts=parts)

    def _item(self) -> Node | None:
        """The next text, class, group or reference; None before whatever ends a sequence."""
        start = self._at
        char = self._text[start : start + 1]
        if char == '"':
            return Node("text", self._quoted())
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
            return Node("any")
        name = self._name()
        if name is None:
            if char and char not in "|)":
                raise self._error(f"{char!r} was not expected")
            return None
        after = _SPACE.match(self._text, self._at)
        if self._text.startswith("::=", after.end() if after else self._at):  # the next rule
            self._at = start
            return None
        return Node("ref", name, at=start)

    def _repeated(self, item: Node) -> Node:
        char = self._text[self._at : self._at + 1]
        if char and char in "*+?":
            self._at += 1
            return Node("repeat", char, [item])
        found = _REPEATS.match(self._text, self._at)
        if found is None:
            return item
        low, high = int(found[1]), int(found[3]) if found[3] else None
        if max(low, high or 0) > MAX_REPEATS or (high is not None and high < low):
            raise self._error(f"repeats must count up, to at most {MAX_REPEATS}")
        self._at = found.end()
        suffix = f"{{{low}}}" if found[2] is None else f"{{{low},{'' if high is None else high}}}"
        return Node("repeat", suffix, [item])

    def _quoted(self) -> str:
        chars: list[str] = []
        start = self._at
        self._at += 1
        while not self._take('"'):
            if self._at >= len(self._text) or self._text[self._at] == "\n":
                raise _error(self._text, start, "the text has no end")
            chars.append(self._char())
        return "".join(chars)

    def _class(self) -> Node:
        """A class of characters as a regex has it."""
        start = self._at
        self._at += 1
        body = "^" if self._take("^") else ""
        ranges: list[tuple[int, int]] = []
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
            ranges.append((ord(low), ord(high)))
            body += _code(low) if low == high else f"{_code(low)}-{_code(high)}"
        if body in ("", "^"):
            raise _error(self._text, start, "the class of characters is empty")
        chars: Ranges = tuple(ranges)
        return Node("class", f"[{body}]", ranges=complement(chars) if body[0] == "^" else chars)

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
    """Writes rules; each piece of one becomes a terminal, and so do the rules that pieces refer to."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._rules = rules
        self._recursive = recursive_rules(rules)
        self._pieces = split_pieces(rules, self._recursive)
        self._names = {name: (f"r{i}", f"T{i}") for i, name in enumerate(rules)}
        self._lines: list[str] = []
        self._parts: dict[str, str] = {}

    def write(self) -> str:
        self._lines.append(f"start: {self._names['root'][0 if 'root' in self._recursive else 1]}")
        for name in self._pieces.spelled_rules():
            self._lines.append(f"{self._names[name][0]}: {self._symbols(self._rules[name])}")
        for name, body in self._rules.items():
            if name not in self._recursive:
                self._lines.append(f"{self._names[name][1]}: {self._terminal(body)}")
        return "\n".join(self._lines)

    def _symbols(self, node: Node, depth: int = 1) -> str:
        """A node within a rule."""
        if self._pieces.is_piece(node):
            written = self._terminal(node)
            return written if node.kind == "ref" else self._named("PART", written)
        if node.kind == "ref":
            return self._names[node.value][0]
        written = self._grouped(node, [self._symbols(part, depth + 1) for part in node.parts])
        return written if depth % MAX_PARENTHESES else self._named("part", written)

    def _named(self, prefix: str, written: str) -> str:
        """A rule or terminal of its own; equal ones are the same."""
        name = self._parts.get(written)
        if name is None:
            name = self._parts[written] = f"{prefix}{len(self._parts)}"
            self._lines.append(f"{name}: {written}")
        return name

    def _terminal(self, node: Node, depth: int = 1) -> str:
        """A regular node within a terminal."""
        if node.kind == "text":
            return text_literal(node.value)
        if node.kind == "class":
            return f"/{node.value}/"
        if node.kind == "any":
            return "/(?s:.)/"
        if node.kind == "ref":
            return self._names[node.value][1]
        written = self._grouped(node, [self._terminal(part, depth + 1) for part in node.parts])
        return written if depth % MAX_PARENTHESES else self._named("PART", written)

    def _grouped(self, node: Node, inner: list[str]) -> str:
        if node.kind == "repeat":
            return f"({inner[0]}){node.value}"
        if node.kind == "choice":
            return "(" + " | ".join(inner) + ")"
        return "(" + " ".join(inner) + ")" if inner else '""'


def _code(char: str) -> str:
    return f"\\x{{{ord(char):x}}}"


def _is_char(code: int) -> bool:
    return code < 0x110000 and not 0xD800 <= code < 0xE000


def _error(text: str, at: int, what: str) -> InvalidRequestError:
    line = text.count("\n", 0, at) + 1
    column = at - (text.rfind("\n", 0, at) + 1) + 1
    return InvalidRequestError(f"{PARAM}.grammar, line {line}, column {column}: {what}.", f"{PARAM}.grammar")
