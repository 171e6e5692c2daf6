"""The machine that reads every format: a table of states and rules, made once, and one reader of it for each output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from canter.text.parsing.args.tagged import TaggedArguments
from canter.text.parsing.emitter import Emitter
from canter.text.parsing.events import Event
from canter.text.parsing.format import CONTENT, Body, Named, Rule, State
from canter.text.parsing.lexer import Literals
from canter.text.parsing.scanner import Anchor, Item, Scanner

_SLICE = 4096
"""Characters that are looked at together, so that a state's search never runs far past the place where the state changes."""

_MAX_HEADER = 1024
"""Characters of a call's header or key; one that grows longer is none."""


@dataclass(frozen=True, slots=True)
class Table:
    """States and rules made ready. `strict` holds what counts once ids are known: only literals that are no tokens."""

    states: Mapping[str, State]
    rules: Mapping[tuple[str, str], Rule]
    strict: Mapping[str, Literals]
    lenient: Mapping[str, Literals]
    anchors: Mapping[int, Anchor]


def make_table(states: Mapping[str, State], rules: Iterable[Rule], ids: Mapping[str, int], hidden: Mapping[int, str]) -> Table:
    """`ids`: the literals that are tokens of their own. `hidden`: special tokens, which are no text, whatever the format."""
    known: dict[tuple[str, str], Rule] = {}
    for rule in rules:
        for source in rule.sources.split():
            if source in states:
                known.setdefault((source, rule.literal), rule)
    named = {literal for _, literal in known}
    anchors = {token_id: Anchor(text, False) for token_id, text in hidden.items()}
    anchors |= {ids[literal]: Anchor(literal, True) for literal in named if literal in ids}
    of_state = {name: [literal for source, literal in known if source == name] for name in states}
    return Table(
        states,
        known,
        {name: Literals(literal for literal in literals if literal not in ids) for name, literals in of_state.items()},
        {name: Literals(literals) for name, literals in of_state.items()},
        anchors,
    )


class Machine:
    """Reads one output. See `canter.text.parsing.parser.OutputParser`."""

    def __init__(self, table: Table, initial: str, content: str, emitter: Emitter, scanner: Scanner) -> None:
        """`initial`: the first state; `content`: the one in which content begins."""
        self._table, self._content, self._emitter, self._scanner = table, content, emitter, scanner
        self._literals = table.lenient
        self._name = initial
        self._state = table.states[initial]
        self._sees_ids = False
        self._tail = ""  # text held back by the lexer
        self._origin = (
            initial if self._state.kind in ("content", "reasoning") else content
        )  # the last state of content or thought: where text goes that turns out to be no call
        self._header: list[str] = []
        self._header_size = 0
        self._tagged: TaggedArguments | None = None
        self._body: Body | None = None
        self._num_counted = 0  # ids that have been told apart: thought or not
        self._num_reasoning_tokens = 0
        if self._state.kind not in ("content", "reasoning"):
            emitter.hold()
        self._enter_kind()

    @property
    def num_reasoning_tokens(self) -> int:
        return self._num_reasoning_tokens

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Event]:
        if not token_ids and not text:
            return []
        if token_ids and not self._sees_ids:
            self._sees_ids = True
            self._literals = self._table.strict
        if not self._sees_ids:
            self._lex(text, final=False)
        else:
            for item in self._scanner.feed(text, token_ids):
                self._take_item(item)
            self._count(self._scanner.num_settled)
        return self._emitter.take()

    def finish(self, truncated: bool = False) -> list[Event]:
        if self._sees_ids:
            for item in self._scanner.finish():
                self._take_item(item)
        if truncated and self._state.kind not in ("content", "reasoning"):
            self._tail = ""  # the beginning of a marker that was cut off
        self._lex("", final=True)
        if self._body is not None:
            self._body.end(complete=not truncated)
            self._body = None
        if truncated:
            self._to_origin(self._emitter.give_up())
        else:
            self._end_tagged()
            self._to_origin(self._emitter.release())
        self._emitter.end_output(truncated)
        return self._emitter.take()

    def _count(self, number: int) -> None:
        """The ids up to this number belong to the present state."""
        if number > self._num_counted:
            if self._state.kind == "reasoning":
                self._num_reasoning_tokens += number - self._num_counted
            self._num_counted = number

    # Text and terminals

    def _take_item(self, item: Item) -> None:
        if isinstance(item, str):
            self._lex(item, final=False)
            return
        anchor, number = item
        self._lex("", final=True)
        self._count(number)
        self._num_counted = number + 1
        if anchor.is_terminal:
            self._take_marker(anchor.literal)

    def _take_marker(self, literal: str) -> None:
        rule = self._table.rules.get((self._name, literal))
        if rule is None:
            self._take_stray(literal)
        else:
            self._follow(rule)

    def _take_stray(self, literal: str) -> None:
        """A marker that means nothing in this state is text of it; between calls it is nothing."""
        if self._state.kind == "skip":
            self._emitter.remember(literal, is_marker=True)
        elif self._state.header is not None and self._emitter.held is not None and self._room(literal) < len(literal):
            self._abandon()
            self._take_marker(literal)
        else:
            self._take_all(literal)

    def _take_all(self, text: str) -> None:
        """Text without terminals; states may still change within it."""
        at = 0
        while at < len(text):
            at += self._take(text[at:])

    def _lex(self, text: str, final: bool) -> None:
        if len(text) <= _SLICE:
            if text:
                self._lex_slice(text, False)
        else:
            for start in range(0, len(text), _SLICE):
                self._lex_slice(text[start : start + _SLICE], False)
        if final and self._tail:
            self._lex_slice("", True)

    def _lex_slice(self, text: str, final: bool) -> None:
        if self._tail:
            text = self._tail + text
            self._tail = ""
        at, size = 0, len(text)
        while at < size:
            name = self._name
            literals = self._literals[name]
            match = literals.search(text, at)
            if match is None:
                end = size if final else literals.hold(text, at)
                if end > at:
                    at += self._take(text[at:end] if at or end < size else text)
                if self._name == name and at >= end:
                    self._tail = text[at:]
                    return
                continue
            start = match.start()
            if start > at:
                at += self._take(text[at:start])
                if at < start or self._name != name:
                    continue
            if not final and literals.may_grow(text, start):
                self._tail = text[start:]
                return
            at = match.end()
            if self._body is not None and self._body.in_string:
                self._take(match.group())
            else:
                self._follow(self._table.rules[name, match.group()])

    # States

    def _take(self, text: str) -> int:
        """Take text in the present state; returns how much, at least one character unless the state has changed."""
        kind = self._state.kind
        if kind == "content":
            if self._state.on_text is None:
                self._emitter.content(text)
                return len(text)
            return self._take_at_start(text)
        if kind == "reasoning":
            self._emitter.reasoning(text)
        elif kind == "value":
            if self._tagged is not None:
                self._tagged.feed(text)
        elif kind == "body":
            return self._take_body(text)
        elif kind in ("name", "key"):
            return self._take_header(text)
        elif kind == "skip":
            return self._take_skipped(text)
        return len(text)

    def _take_at_start(self, text: str) -> int:
        """Content that has not begun: blank text leaves everything open."""
        num_blank = len(text) - len(text.lstrip())
        if num_blank:
            self._emitter.content(text[:num_blank])
        if num_blank < len(text) and self._state.on_text is not None:
            self._go(self._state.on_text)
        return num_blank

    def _take_skipped(self, text: str) -> int:
        num_blank = len(text) - len(text.lstrip())
        self._emitter.remember(text[:num_blank], is_marker=True)
        if num_blank == len(text):
            return num_blank
        if self._state.on_text is not None:
            self._go(self._state.on_text)
            return num_blank
        if self._emitter.held is not None:
            self._emitter.remember(text[num_blank], is_marker=False)
            self._abandon()
            return num_blank + 1
        return len(text)

    def _take_header(self, text: str) -> int:
        room = self._room(text)
        if len(text) <= room:
            self._header.append(text)
            self._header_size += len(text)
            self._emitter.remember(text, is_marker=False)
            return len(text)
        if self._emitter.held is None:
            return len(text)  # inside a call that has begun: dropped
        self._emitter.remember(text[:room], is_marker=False)
        self._abandon()
        return room

    def _room(self, text: str) -> int:
        """How much of the text the header can take: it is bounded, and a name may be no header from some character on."""
        room = _MAX_HEADER - self._header_size
        if self._state.header is None:
            return room
        match = self._state.header.match("".join(self._header) + text)
        return min(room, match.end() - self._header_size if match is not None else 0)

    def _take_body(self, text: str) -> int:
        body = self._body
        if body is None:
            return len(text)
        held = self._emitter.held
        taken = body.feed(text)
        if self._emitter.held is not None:
            start = 0 if self._emitter.held is held else self._emitter.held_from
            self._emitter.remember(text[start:taken], is_marker=False)
        if body.failed:
            self._abandon()
        elif taken < len(text):
            if self._state.on_text is None:
                return len(text)
            self._go(self._state.on_text)
        return taken

    def _follow(self, rule: Rule) -> None:
        """A terminal has been read, and the state has a rule for it."""
        literal, target = rule.literal, rule.target
        if rule.trims:
            self._emitter.end_blank()
        if self._state.kind == "name" and target == self._name:
            self._header.append(literal)
            self._header_size += len(literal)
            self._emitter.remember(literal, is_marker=True)
            return
        named: Named | None = None
        if self._state.kind == "name":
            header = "".join(self._header)
            if self._state.route is not None:
                routed = self._state.route(header, target)
                readable = routed is not None
                if routed is not None:
                    target, named = routed
                    target = self._content if target == CONTENT else target
                    if named is None:
                        self._emitter.held = None
            else:
                named = self._state.read_name(header)
                readable = named is not None
            if not readable:
                self._emitter.remember(literal, is_marker=True)
                self._abandon()
                return
        if rule.keeps:
            self._go(target, "", named)
            self._take_all(literal)
        else:
            self._go(target, literal, named)

    def _abandon(self) -> None:
        """No call after all: what was held is text of where it came from."""
        text = self._emitter.release(with_markers=True)
        self._body = self._tagged = None
        self._to_origin(text)
        if text.strip():
            self._origin = self._table.states[self._origin].on_text or self._origin
        self._set(self._origin)

    def _to_origin(self, text: str) -> None:
        if not text:
            return
        if self._table.states[self._origin].kind == "reasoning":
            self._emitter.reasoning(text)
        else:
            self._emitter.content(text)

    def _go(self, target: str, literal: str = "", named: Named | None = None) -> None:
        """Change the state. `literal`: the marker that led there; `named`: the function whose name was read on leaving a header."""
        before, state = self._state, self._table.states[target]
        self._end_state(before, state, literal)
        if state.kind not in ("content", "reasoning"):
            if before.kind in ("content", "reasoning") or state.kind in ("name", "body"):
                self._emitter.hold()
            if state.kind == "drop":
                self._emitter.release()
            self._emitter.remember(literal, is_marker=True)
        if named is not None:
            known = named.otherwise is None or self._emitter.is_declared(named.name)
            self._emitter.name_call(named.name if known else named.otherwise or "", named.id)
            if state.kind != "body":
                self._open_tagged(state)
        if state.kind == "value" and self._tagged is not None:
            self._tagged.begin("".join(self._header).strip(), state.trim, state.value_type)
        self._set(target)
        if state.kind in ("content", "reasoning"):
            self._to_origin(self._emitter.release())
            self._origin = target

    def _end_state(self, before: State, state: State, literal: str) -> None:
        if before.kind == "value" and self._tagged is not None:
            self._tagged.end()
        if self._body is not None:
            self._body.end(complete=True)
            self._body = None
            if self._emitter.held is not None:  # it made no call
                self._emitter.remember(literal, is_marker=True)
                self._to_origin(self._emitter.release())
        if not state.in_call:
            self._end_tagged()
        elif state.kind == "name":
            self._end_tagged()
            self._emitter.close_call()

    def _open_tagged(self, state: State) -> None:
        schema = self._emitter.pending_schema
        self._emitter.open_call()
        self._tagged = TaggedArguments(schema, self._emitter.arguments)
        if not state.in_call:
            self._end_tagged()

    def _end_tagged(self) -> None:
        if self._tagged is not None:
            self._tagged.complete()
            self._tagged = None
            self._emitter.close_call()

    def _set(self, name: str) -> None:
        self._name, self._state = name, self._table.states[name]
        self._enter_kind()

    def _enter_kind(self) -> None:
        kind = self._state.kind
        if kind in ("name", "key"):
            self._header, self._header_size = [], 0
        elif kind == "body" and self._state.body is not None:
            self._body = self._state.body(self._emitter)
