"""What stands for a grammar where it can't be compiled, and nothing may be raised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from canter.core.grammar import MaskArray


@dataclass(frozen=True, slots=True)
class RefusedGrammar:
    """A `core.grammar.Grammar` whose matchers allow nothing, and say why."""

    error: str

    def matcher(self) -> RefusedMatcher:
        return RefusedMatcher(self.error)


@dataclass(frozen=True, slots=True)
class RefusedMatcher:
    error: str
    may_end: bool = False

    def fill(self, mask: MaskArray) -> None:
        mask.fill(0)

    def accept(self, token_ids: Sequence[int]) -> int:
        return 0

    def rollback(self, count: int) -> None:
        if count:
            raise RuntimeError("a matcher that takes no tokens was to take some back")

    def forced(self) -> list[int]:
        return []
