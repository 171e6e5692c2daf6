"""Which parts of a recursive grammar the lexer may match as a whole.

llguidance's lexer takes as much as it can: where a piece has matched and the next byte could go on with it, or with another piece
that may stand in the same place, that is what the byte does. The outcome is the grammar's own only where the byte could not as well
begin what follows. `split_pieces` finds the pieces that break this rule and takes them apart, a level at a time, down to single
characters if need be, of which none is another's beginning.

All readings of a text that are still open are cut at the same places as long as the rule holds. So it is enough to walk through
pairs of places that two readings can be in at once. Approximations go one way: they take apart what could have stayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from canter.structured.ebnf_tree import ALL_CHARS, Node, Ranges

MAX_STEPS = 100_000
"""Work to spend on a grammar, in steps of up to ten microseconds. What it doesn't reach stays whole."""
MAX_DEPTH = 150
"""Of groups and references within a piece."""


class Pieces:
    """The grammar's pieces: regular nodes outside of other regular nodes, but for those that were taken apart.

    `recursive` are the rules that can't be terminals. Texts that are taken apart become sequences, in place.
    """

    def __init__(self, rules: Mapping[str, Node], recursive: set[str]) -> None:
        self._rules = rules
        self._recursive = recursive
        self._irregular: set[Node] = set()
        for body in rules.values():
            self._find_irregular(body)
        self._apart: set[Node] = set()

    def is_piece(self, node: Node) -> bool:
        return node not in self._irregular and node not in self._apart

    def take_apart(self, node: Node) -> None:
        self._apart.add(node)
        if node.kind == "text":
            node.kind, node.parts = "sequence", [Node("text", char) for char in node.value]

    def spelled_rules(self) -> list[str]:
        """The rules that are no terminals: those that lead to themselves, and those that a part taken apart refers to."""
        found = dict.fromkeys(name for name in self._rules if name in self._recursive)
        todo = list(found)
        while todo:
            for name in self._references(self._rules[todo.pop()]):
                if name not in found:
                    found[name] = None
                    todo.append(name)
        return list(found)

    def _references(self, body: Node) -> list[str]:
        names: list[str] = []
        todo = [body]
        while todo:
            node = todo.pop()
            if self.is_piece(node):
                continue
            if node.kind == "ref":
                names.append(node.value)
            todo += node.parts
        return names

    def _find_irregular(self, node: Node) -> bool:
        inner = [self._find_irregular(part) for part in node.parts]
        if any(inner) and node.kind == "sequence":
            node.parts = _joined(node.parts, inner)
        if any(inner) or (node.kind == "ref" and node.value in self._recursive):
            self._irregular.add(node)
            return True
        return False


def _joined(parts: list[Node], irregular: list[bool]) -> list[Node]:
    """A sequence's parts with each run of regular ones made one."""
    joined: list[Node] = []
    for is_irregular, run in groupby(zip(parts, irregular, strict=True), key=itemgetter(1)):
        members = [part for part, _ in run]
        joined += members if is_irregular or len(members) == 1 else [Node("sequence", parts=members)]
    return joined


def split_pieces(rules: Mapping[str, Node], recursive: set[str]) -> Pieces:
    pieces = Pieces(rules, recursive)
    work = _Work()
    if "root" not in recursive:
        return pieces  # the output is one piece, which nothing follows
    try:
        while found := _Overlaps(rules, pieces, work).find():
            for node in found:
                pieces.take_apart(node)
    except _TooMuchError:
        pass  # the rest stays whole: what it matches obeys the grammar, though not all that does comes
    return pieces


class _TooMuchError(Exception):
    """The grammar is too large to be looked through."""


@dataclass(slots=True)
class _Work:
    left: int = MAX_STEPS

    def spend(self, steps: int = 1) -> None:
        self.left -= steps
        if self.left < 0:
            raise _TooMuchError


@dataclass(slots=True)
class _Ends:
    """What a part of the grammar can begin with, and whether it can be empty. `first` is a set of pieces, as bits."""

    first: int = 0
    empty: bool = False


@dataclass(slots=True)
class _Places:
    """A part of a piece: the places of its characters that can be first and last, and whether it can be empty."""

    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    empty: bool = False


class _Overlaps:
    def __init__(self, rules: Mapping[str, Node], pieces: Pieces, work: _Work) -> None:
        self._rules = rules
        self._pieces = pieces
        self._work = work
        self._nodes: list[Node] = []
        self._numbers: dict[Node, int] = {}
        self._ends: dict[str, _Ends] = {}
        self._after: list[int] = []  # of a piece: those that may follow, as bits
        self._after_rule: dict[str, int] = {}
        self._may_rule_be_empty: dict[str, bool] = {}
        # Places: their characters, their piece, the places that may follow within it, whether it may end there.
        self._chars: list[int] = []
        self._piece: list[int] = []
        self._next: list[list[int]] = []
        self._is_last: list[bool] = []
        self._first: list[list[int]] = []  # of a piece
        self._sets: dict[Ranges, int] = {}
        self._leads: list[int] = []  # of a set: the bytes that its characters begin with, as bits
        self._meets: dict[tuple[int, int], bool] = {}
        self._ranges: list[Ranges] = []

    def find(self) -> set[Node]:
        """The pieces to take apart."""
        self._link()
        for number, node in enumerate(self._nodes):
            self._place(number, node)
        after = [self._members(bits) for bits in self._after]
        leads = [self._leads_of(members) for members in after]
        found: set[Node] = set()
        start = self._first_places(self._members(self._ends["root"].first))
        seen: set[tuple[int, int]] = set()
        crossed: set[tuple[int, int]] = set()
        todo: list[tuple[int, int]] = []
        self._meet(start, start, seen, todo)
        while todo:
            one, other = todo.pop()
            for this, that in ((one, other), (other, one)):
                if self._is_last[this]:
                    ahead = leads[self._piece[this]]
                    self._work.spend(len(self._next[that]))
                    if any(self._leads[self._chars[place]] & ahead for place in self._next[that]):
                        found.add(self._nodes[self._piece[that]])
            self._meet(self._next[one], self._next[other], seen, todo)
            pair = (self._piece[one], self._piece[other])
            if self._is_last[one] and self._is_last[other] and pair not in crossed:
                crossed.add(pair)
                self._meet(self._first_places(after[pair[0]]), self._first_places(after[pair[1]]), seen, todo)
        return found

    def _meet(self, some: list[int], others: list[int], seen: set[tuple[int, int]], todo: list[tuple[int, int]]) -> None:
        """Note the pairs of places that one character can lead to."""
        for one in some:
            self._work.spend(len(others) + 1)
            for other in others:
                pair = (one, other) if one <= other else (other, one)
                if pair not in seen and self._have_common(self._chars[one], self._chars[other]):
                    seen.add(pair)
                    todo.append(pair)

    def _have_common(self, one: int, other: int) -> bool:
        pair = (one, other)
        known = self._meets.get(pair)
        if known is None:
            some, others = self._ranges[one], self._ranges[other]
            self._work.spend(len(some) * len(others))
            known = self._meets[pair] = any(low <= end and start <= high for low, high in some for start, end in others)
        return known

    def _members(self, bits: int) -> list[int]:
        members: list[int] = []
        while bits:
            low = bits & -bits
            members.append(low.bit_length() - 1)
            bits ^= low
        self._work.spend(len(members))
        return members

    def _first_places(self, members: list[int]) -> list[int]:
        return [place for number in members for place in self._first[number]]

    def _leads_of(self, members: list[int]) -> int:
        leads = 0
        for place in self._first_places(members):
            self._work.spend()
            leads |= self._leads[self._chars[place]]
        return leads

    # What may follow what, over all rules.

    def _link(self) -> None:
        spelled = list(dict.fromkeys(["root", *self._pieces.spelled_rules()]))
        self._ends = {name: _Ends() for name in spelled}
        changed = True
        while changed:
            changed = False
            for name in spelled:
                ends = self._ends_of(self._rules[name])
                changed |= ends != self._ends[name]
                self._ends[name] = ends
        self._after = [0] * len(self._nodes)
        self._after_rule = dict.fromkeys(spelled, 0)
        todo = set(spelled)
        while todo:
            name = todo.pop()
            self._follow(self._rules[name], self._after_rule[name], todo)

    def _ends_of(self, node: Node) -> _Ends:
        self._work.spend()
        if self._pieces.is_piece(node):
            number = self._numbers.get(node)
            if number is None:
                number = self._numbers[node] = len(self._nodes)
                self._nodes.append(node)
            return _Ends(1 << number, self._may_be_empty(node))
        if node.kind == "ref":
            return self._ends[node.value]
        inner = [self._ends_of(part) for part in node.parts]
        if node.kind == "repeat":
            return _Ends(inner[0].first, inner[0].empty or node.may_be_left_out)
        first = 0
        if node.kind == "choice":
            for ends in inner:
                first |= ends.first
            return _Ends(first, any(ends.empty for ends in inner))
        for ends in inner:
            first |= ends.first
            if not ends.empty:
                return _Ends(first, False)
        return _Ends(first, True)

    def _follow(self, node: Node, after: int, changed: set[str]) -> None:
        """Note what may follow each piece of a node, given what may follow the node. `changed` takes the rules that more may follow."""
        self._work.spend()
        if self._pieces.is_piece(node):
            self._after[self._numbers[node]] |= after
        elif node.kind == "ref":
            known = self._after_rule[node.value]
            if after & ~known:
                self._after_rule[node.value] = known | after
                changed.add(node.value)
        elif node.kind == "choice":
            for part in node.parts:
                self._follow(part, after, changed)
        elif node.kind == "repeat":
            self._follow(node.parts[0], after if node.value == "?" else after | self._ends_of(node.parts[0]).first, changed)
        else:
            for part in reversed(node.parts):
                self._follow(part, after, changed)
                ends = self._ends_of(part)
                after = ends.first | (after if ends.empty else 0)

    def _may_be_empty(self, node: Node) -> bool:
        self._work.spend()
        if node.kind == "ref":
            if not self._may_rule_be_empty:
                self._find_empty_rules()
            return self._may_rule_be_empty.get(node.value, False)
        if node.kind == "text":
            return not node.value
        if node.kind == "repeat":
            return node.may_be_left_out or self._may_be_empty(node.parts[0])
        if node.kind == "choice":
            return any(map(self._may_be_empty, node.parts))
        return node.kind == "sequence" and all(map(self._may_be_empty, node.parts))

    def _find_empty_rules(self) -> None:
        self._may_rule_be_empty = dict.fromkeys(self._rules, False)
        changed = True
        while changed:
            changed = False
            for name, body in self._rules.items():
                if not self._may_rule_be_empty[name] and self._may_be_empty(body):
                    self._may_rule_be_empty[name] = changed = True

    # The places of one piece. A number of repeats is taken for any number.

    def _place(self, number: int, node: Node) -> None:
        start = len(self._chars)
        places = self._places_of(node, 0)
        self._piece += [number] * (len(self._chars) - start)
        for place in places.last:
            self._is_last[place] = True
        self._first.append(places.first)

    def _places_of(self, node: Node, depth: int) -> _Places:
        if depth > MAX_DEPTH:
            raise _TooMuchError
        if node.kind == "ref":
            return self._places_of(self._rules[node.value], depth + 1)
        if node.kind == "text":
            characters = [self._new_place(((ord(char), ord(char)),)) for char in node.value]
            for place in characters[:-1]:
                self._next[place].append(place + 1)
            return _Places(characters[:1], characters[-1:], not characters)
        if node.kind in ("class", "any"):
            place = self._new_place(node.ranges if node.kind == "class" else ALL_CHARS)
            return _Places([place], [place])
        inner = [self._places_of(part, depth + 1) for part in node.parts]
        if node.kind == "choice":
            first = [place for part in inner for place in part.first]
            return _Places(first, [place for part in inner for place in part.last], any(part.empty for part in inner))
        if node.kind == "repeat":
            if node.value != "?":
                self._lead(inner[0].last, inner[0].first)
            return _Places(inner[0].first, inner[0].last, inner[0].empty or node.may_be_left_out)
        whole = _Places(empty=True)
        for part in inner:
            self._lead(whole.last, part.first)
            whole = _Places(
                whole.first + part.first if whole.empty else whole.first,
                whole.last + part.last if part.empty else part.last,
                whole.empty and part.empty,
            )
        return whole

    def _lead(self, some: list[int], others: list[int]) -> None:
        self._work.spend(len(some) * len(others))
        for place in some:
            self._next[place] += others

    def _new_place(self, ranges: Ranges) -> int:
        self._work.spend()
        chars = self._sets.get(ranges)
        if chars is None:
            chars = self._sets[ranges] = len(self._ranges)
            self._ranges.append(ranges)
            self._leads.append(_lead_bytes(ranges))
        self._chars.append(chars)
        self._next.append([])
        self._is_last.append(False)
        return len(self._chars) - 1


def _lead_bytes(ranges: Ranges) -> int:
    """The bytes that characters begin with in UTF-8, as bits. Those of a range lie side by side."""
    bits = 0
    for low, high in ranges:
        bits |= (2 << _lead_byte(high)) - (1 << _lead_byte(low))
    return bits


def _lead_byte(code: int) -> int:
    if code < 0x80:
        return code
    if code < 0x800:
        return 0xC0 | code >> 6
    return 0xE0 | code >> 12 if code < 0x10000 else 0xF0 | code >> 18
