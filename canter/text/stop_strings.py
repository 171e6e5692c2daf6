"""Stop strings over a stream of text: nothing that may turn out to belong to a stop string is let through."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopChecker:
    """Watches the text of one output.

    The match that is complete first ends the output; of several that end at the same character the longest counts. What
    comes out does not depend on how the text is cut into pieces. After a match `matched` is the stop string, and all further
    text is dropped.

    `include`: the stop string itself stays in the output (then nothing needs to be held back). The text of the first
    `min_tokens` tokens is let through unchecked and can't be part of a match; feed token by token while it matters.
    """

    def __init__(self, stop: Sequence[str], include: bool = False, min_tokens: int = 0) -> None:
        self.matched: str | None = None
        self._stop, self._include, self._min_tokens = list(stop), include, min_tokens
        self._next, self._fail, self._depth, self._match = _automaton(self._stop)
        self._state = 0
        self._held = ""

    def feed(self, text: str, num_tokens: int | None = None) -> tuple[str, str | None]:
        """Add text. Returns what may be shown now, maybe nothing, and the stop string that has ended the output, if one has.

        `num_tokens`: how many tokens the output has, those of `text` included; needed only with `min_tokens`.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._stop or (num_tokens is not None and num_tokens <= self._min_tokens):
            return text, None
        return self._search(text), self.matched

    def _search(self, text: str) -> str:
        text, start = self._held + text, len(self._held)
        for position in range(start, len(text)):
            self._state = self._step(self._state, text[position])
            found = self._match[self._state]
            if found >= 0:
                return self._end(text, position + 1, self._stop[found])
        cut = len(text) if self._include else len(text) - self._depth[self._state]
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The output has ended without a match: returns what was held back."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _step(self, state: int, char: str) -> int:
        """The longest beginning of any stop string that the text now ends with."""
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def _end(self, text: str, end: int, stop: str) -> str:
        self.matched, self._held = stop, ""
        return text[: end if self._include else end - len(stop)]


def _automaton(words: list[str]) -> tuple[list[dict[str, int]], list[int], list[int], list[int]]:
    """Aho and Corasick's machine (CACM 18(6), 1975): transitions, fallback, length and longest word that ends here, per state."""
    following: list[dict[str, int]] = [{}]
    depth, match = [0], [-1]
    for index, word in enumerate(words):
        state = 0
        for char in word:
            if char not in following[state]:
                following[state][char] = len(following)
                following.append({})
                depth.append(depth[state] + 1)
                match.append(-1)
            state = following[state][char]
        match[state] = index
    fail = [0] * len(following)
    queue = deque(following[0].values())
    while queue:
        state = queue.popleft()
        for char, child in following[state].items():
            fallback = fail[state]
            while fallback and char not in following[fallback]:
                fallback = fail[fallback]
            fail[child] = following[fallback].get(char, 0)
            if match[child] < 0:
                match[child] = match[fail[child]]
            queue.append(child)
    return following, fail, depth, match
