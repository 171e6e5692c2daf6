"""Where the tokens that mean something stand in the text.

Text alone can't tell a marker from prose that spells it; ids can. A scanner takes both, and cuts the text at the tokens that have
a meaning, however far the text lags behind the ids.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from canter.text.token_bytes import TokenBytes
from canter.text.tokenizer import Tokenizer

_PROMPT_TAIL = 8
_DRIFT = 8
"""Characters by which a token may stand elsewhere than its bytes say, before it counts as missing from the text."""


_PATIENCE = 1024
"""Characters that are searched for a token's text before it counts as missing."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """A token with a meaning of its own: the text it has, and whether it is a terminal or only not to be shown."""

    literal: str
    is_terminal: bool


Item = str | tuple[Anchor, int]
"""Plain text, or an anchor with the number of ids before it."""


class Scanner(Protocol):
    """Cuts text at anchors. Items in the order of the text: plain text, and anchors that have been found in it."""

    num_ids: int
    """Ids so far."""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Item]: ...

    def finish(self) -> list[Item]:
        """What is left, anchors whose text never came at their places."""
        ...

    @property
    def num_settled(self) -> int:
        """Ids before the first anchor that hasn't been found yet."""
        ...


def make_scanner(tokenizer: Tokenizer, anchors: Mapping[int, Anchor], prompt_token_ids: Sequence[int]) -> Scanner:
    if tokenizer.token_bytes is not None:
        return PositionScanner(tokenizer.token_bytes, anchors, prompt_token_ids)
    return SearchScanner(tokenizer, anchors)


class PositionScanner:
    """For vocabularies whose tokens are bytes: counts characters, so that every token's place is known before its text is there."""

    def __init__(self, table: TokenBytes, anchors: Mapping[int, Anchor], prompt_token_ids: Sequence[int]) -> None:
        self._bytes_of, self._anchors = table.bytes_of, anchors
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = b"".join(map(self._bytes_of, prompt_token_ids[-_PROMPT_TAIL:]))
        self._decoder.decode(_incomplete_end(tail))
        self._skips_space = table.strip_leading_space and not prompt_token_ids
        self.num_ids = 0
        self._num_expected = 0  # characters that the ids so far stand for
        self._num_given = 0  # characters handed on
        self._num_read = 0  # characters that have come
        self._waiting: deque[tuple[int, Anchor, int]] = deque()
        self._held = ""

    @property
    def num_settled(self) -> int:
        return self._waiting[0][2] if self._waiting else self.num_ids

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Item]:
        if token_ids:
            self._num_expected = max(self._num_expected, self._num_read)
            self._place(token_ids)
        self._num_read += len(text)
        if not self._waiting:
            self._num_given += len(text)
            return [text] if text else []
        self._held += text
        return self._cut(final=False)

    def finish(self) -> list[Item]:
        items = self._cut(final=True)
        if self._held:
            items.append(self._held)
            self._held = ""
        return items

    def _place(self, token_ids: Sequence[int]) -> None:
        bytes_of, decode = self._bytes_of, self._decoder.decode
        if self._anchors.keys().isdisjoint(token_ids):
            self._num_expected += self._length(decode(b"".join(map(bytes_of, token_ids))))
            self.num_ids += len(token_ids)
            return
        for token_id in token_ids:
            self._num_expected += self._length(decode(bytes_of(token_id)))
            anchor = self._anchors.get(token_id)
            if anchor is not None:
                self._waiting.append((self._num_expected - len(anchor.literal), anchor, self.num_ids))
            self.num_ids += 1

    def _length(self, text: str) -> int:
        if self._skips_space and text:
            self._skips_space = False
            return len(text) - text.startswith(" ")
        return len(text)

    def _cut(self, final: bool) -> list[Item]:
        items: list[Item] = []
        at, held = 0, self._held
        while self._waiting:
            position, anchor, number = self._waiting[0]
            start = max(at, position - self._num_given)
            if not final and start + len(anchor.literal) > len(held):
                # The anchor's text isn't there yet: what stands before it is.
                start = min(start, len(held))
                if start > at:
                    items.append(held[at:start])
                    at = start
                break
            self._waiting.popleft()
            start = min(start, len(held))
            found = self._find(held, anchor.literal, at, start)
            if found > at:
                items.append(held[at:found])
            items.append((anchor, number))
            at = found + len(anchor.literal) if held.startswith(anchor.literal, found) else found
            if at != position - self._num_given + len(anchor.literal):
                self._shift(at - (position - self._num_given + len(anchor.literal)))
        if not self._waiting and not final:
            if at < len(held):
                items.append(held[at:])
            at = len(held)
        self._held = held[at:]
        self._num_given += at
        return items

    def _find(self, held: str, literal: str, at: int, start: int) -> int:
        """The place of a literal: where it is due, close by, or, when the text lacks it, where it is due without any text."""
        if held.startswith(literal, start):
            return start
        found = held.find(literal, max(at, start - _DRIFT), start + len(literal) + _DRIFT)
        return start if found < 0 else found

    def _shift(self, by: int) -> None:
        """The text is elsewhere than its ids say: so is all that follows."""
        self._num_expected += by
        self._waiting = deque((position + by, anchor, number) for position, anchor, number in self._waiting)


def _incomplete_end(data: bytes) -> bytes:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data)
    return decoder.getstate()[0]


class SearchScanner:
    """For other vocabularies: a token's text is searched for. Ordinary tokens may spell the same text before it; how often they do
    says which of the places in the text is the token's."""

    def __init__(self, tokenizer: Tokenizer, anchors: Mapping[int, Anchor]) -> None:
        self._tokenizer, self._anchors = tokenizer, anchors
        self.num_ids = 0
        self._run: list[int] = []  # ordinary tokens since the last anchor
        self._waiting: deque[tuple[int, Anchor, int]] = deque()  # how many look-alikes come first
        self._past: list[str] = []  # text since the last anchor that has been handed on
        self._held = ""

    @property
    def num_settled(self) -> int:
        return self._waiting[0][2] if self._waiting else self.num_ids

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Item]:
        for token_id in token_ids:
            anchor = self._anchors.get(token_id)
            if anchor is None:
                self._run.append(token_id)
            else:
                spelled = self._tokenizer.decode_with_backend(self._run, False) if self._run else ""
                self._waiting.append((spelled.count(anchor.literal), anchor, self.num_ids))
                self._run = []
            self.num_ids += 1
        if not self._waiting:
            if text:
                self._past.append(text)
            return [text] if text else []
        self._held += text
        return self._cut(final=False)

    def finish(self) -> list[Item]:
        items = self._cut(final=True)
        if self._held:
            items.append(self._held)
            self._held = ""
        return items

    def _cut(self, final: bool) -> list[Item]:
        items: list[Item] = []
        while self._waiting:
            num_before, anchor, number = self._waiting[0]
            found = self._find(anchor.literal, num_before)
            if found < 0:
                if not final and len(self._held) <= _PATIENCE and not self._later_found():
                    break
                found, size = 0, 0  # the text lacks it: it counts where it is due
            else:
                size = len(anchor.literal)
            if found:
                items.append(self._held[:found])
            items.append((anchor, number))
            self._held = self._held[found + size :]
            self._past = []
            self._waiting.popleft()
        if not self._waiting and not final and self._held:
            items.append(self._held)
            self._past.append(self._held)
            self._held = ""
        return items

    def _find(self, literal: str, num_before: int) -> int:
        """The place in the held text, or -1: past `num_before` look-alikes since the last anchor, those handed on included."""
        past = "".join(self._past)
        whole = past + self._held
        found = whole.find(literal)
        while found >= 0 and (num_before > 0 or found < len(past)):
            num_before -= 1
            found = whole.find(literal, found + len(literal))
        return found - len(past) if found >= 0 else -1

    def _later_found(self) -> bool:
        """Whether the text has gone past an anchor that it lacks: one that comes later is there."""
        return any(anchor.literal in self._held and anchor != self._waiting[0][1] for _, anchor, _ in list(self._waiting)[1:])
