"""The tree of an EBNF grammar's rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Ranges = tuple[tuple[int, int], ...]
"""Code points, each range with both its ends."""
ALL_CHARS: Ranges = ((0, 0x10FFFF),)


@dataclass(slots=True, eq=False)
class Node:
    """kind text, class, any, ref (texts: `value`), or sequence, choice, repeat (of `parts`; `value` the suffix).

    `ranges` are the characters of a class, `at` is the place of a reference in the grammar's text.
    """

    kind: str
    value: str = ""
    parts: list[Node] = field(default_factory=list)
    at: int = 0
    ranges: Ranges = ()

    def nodes(self) -> Iterator[Node]:
        todo = [self]
        while todo:
            node = todo.pop()
            yield node
            todo += node.parts

    @property
    def may_be_left_out(self) -> bool:
        """Of a repeat: whether it takes none of its part, too."""
        return self.value[0] in "*?" or self.value.startswith(("{0,", "{0}"))


def recursive_rules(rules: Mapping[str, Node]) -> set[str]:
    """The rules that lead back to themselves, and those that lead to such."""
    uses = {name: {node.value for node in body.nodes() if node.kind == "ref"} for name, body in rules.items()}
    used_by: dict[str, list[str]] = {name: [] for name in rules}
    for name, others in uses.items():
        for other in others:
            used_by[other].append(name)
    # What is left when rules that use none but finished ones are taken away, again and again.
    unfinished = {name: len(others) for name, others in uses.items()}
    todo = [name for name, count in unfinished.items() if not count]
    left = set(rules)
    while todo:
        name = todo.pop()
        left.remove(name)
        for user in used_by[name]:
            unfinished[user] -= 1
            if not unfinished[user]:
                todo.append(user)
    return left


def complement(ranges: Ranges) -> Ranges:
    """Every other character."""
    others: list[tuple[int, int]] = []
    start = 0
    for low, high in sorted(ranges):
        if low > start:
            others.append((start, low - 1))
        start = max(start, high + 1)
    return (*others, (start, 0x10FFFF)) if start <= 0x10FFFF else tuple(others)
