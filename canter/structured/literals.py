"""Texts and regexes as they are spelled in a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from llguidance import regex_to_lark


def text_literal(text: str) -> str:
    """A text between quotes; never empty."""
    return json.dumps(text)


def regex_literal(pattern: str) -> str:
    """A regex between slashes."""
    return f"/{regex_to_lark(pattern)}/"


@dataclass(frozen=True, slots=True)
class Markers:
    """The tokens of a vocabulary that are no text, found where a text spells them."""

    ids: Mapping[str, int]
    _pattern: re.Pattern[str] | None = field(init=False)

    def __post_init__(self) -> None:
        spelled = sorted(filter(None, self.ids), key=len, reverse=True)
        object.__setattr__(self, "_pattern", re.compile("|".join(map(re.escape, spelled))) if spelled else None)

    def split(self, text: str) -> list[str]:
        """The text in pieces: each a marker's spelling, or text without any."""
        pieces: list[str] = []
        start = 0
        for found in self._pattern.finditer(text) if self._pattern else ():
            pieces += [piece for piece in (text[start : found.start()], found[0]) if piece]
            start = found.end()
        return pieces + ([text[start:]] if start < len(text) else [])

    def literal(self, text: str) -> str:
        """The text as a grammar's symbols: markers become their tokens. Empty for the empty text."""
        return " ".join(f"<[{self.ids[piece]}]>" if piece in self.ids else text_literal(piece) for piece in self.split(text))
