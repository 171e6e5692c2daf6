"""What compiles constraints: llguidance, or xgrammar with llguidance beside it for what xgrammar doesn't take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from canter.core.grammar import Grammar, MaskArray, Matcher
from canter.core.logging import get_logger
from canter.structured.constraint import Constraint
from canter.structured.guidance import GuidanceBackend, GuidanceMatcher
from canter.structured.xgrammar_backend import XGrammarBackend, XGrammarMatcher
from canter.structured.xgrammar_constraints import NotTaken

logger = get_logger(__name__)


class Backend(Protocol):
    """Compiles for one vocabulary. Safe to use from several threads."""

    def compile(self, constraint: Constraint) -> Grammar:
        """Raises `InvalidRequestError`."""
        ...

    def fill(self, matchers: Sequence[tuple[Matcher, int]], masks: MaskArray) -> None:
        """Fill the masks of matchers that this backend made."""
        ...

    def shutdown(self) -> None: ...


class XGrammarFirst:
    """A `Backend` of two. llguidance judges every constraint; what xgrammar is known to read as it is meant goes there, anything else
    stays. So a constraint is refused alike whichever of them serves it, and a process that only checks needs no xgrammar."""

    def __init__(self, xgrammar: XGrammarBackend, guidance: GuidanceBackend) -> None:
        self._xgrammar = xgrammar
        self._guidance = guidance

    def compile(self, constraint: Constraint) -> Grammar:
        """Raises `InvalidRequestError`; `EngineError` where xgrammar can't be run."""
        checked = self._guidance.compile(constraint)
        try:
            return self._xgrammar.compile(constraint)
        except NotTaken as reason:
            logger.info("llguidance serves a constraint (%s) in place of xgrammar: %.300r", constraint.kind, str(reason))
            return checked

    def fill(self, matchers: Sequence[tuple[Matcher, int]], masks: MaskArray) -> None:
        """Fill the masks of matchers that either of them made."""
        self._guidance.fill([found for found in matchers if isinstance(found[0], GuidanceMatcher)], masks)
        self._xgrammar.fill([found for found in matchers if isinstance(found[0], XGrammarMatcher)], masks)

    def shutdown(self) -> None:
        self._xgrammar.shutdown()
