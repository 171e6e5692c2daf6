"""Finding the literals that mean something in one state of a machine, in text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable


class Literals:
    """A set of literals: the leftmost is found, of those that begin there the longest.

    The longest tail of a text that may still become one of them has to be held back, so that where text is cut changes nothing.
    """

    def __init__(self, literals: Iterable[str]) -> None:
        found = sorted(set(literals), key=lambda literal: (-len(literal), literal))
        self._prefixes = {literal[:size] for literal in found for size in range(1, len(literal))}
        self._longest = len(found[0]) if found else 0
        # (?!) never matches: a state without literals.
        self.search = re.compile("|".join(map(re.escape, found)) or r"(?!)").search
        firsts = "".join(sorted({re.escape(literal[0]) for literal in found}))
        self._search_first = re.compile(f"[{firsts}]" if firsts else r"(?!)").search

    def may_grow(self, text: str, start: int) -> bool:
        """Whether what begins at `start` and reaches to the end may become another, longer literal."""
        return len(text) - start < self._longest and text[start:] in self._prefixes

    def hold(self, text: str, start: int) -> int:
        """Where the tail begins that may become a literal; the text's length when there is none."""
        at = max(start, len(text) - self._longest + 1)
        while match := self._search_first(text, at):
            if text[match.start() :] in self._prefixes:
                return match.start()
            at = match.end()
        return len(text)
