"""Logprobs of the pipeline in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence

from canter.client.outputs import Logprob, PositionLogprobs
from canter.server.schemas.openai import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from canter.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON can't write."""


class ChatLogprobsFormat:
    """How a chat request wants its logprobs: `num_top` best tokens (-1: all that were computed) or the `named` ones, ids in place
    of texts."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, as_ids: bool, named: Sequence[int] = ()) -> None:
        self._table = tokenizer.token_bytes
        self._num_top = num_top
        self._as_ids = as_ids
        self._named = tuple(dict.fromkeys(named))

    def encode(self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs]) -> ChatLogprobs:
        """An entry for each token."""
        return ChatLogprobs([self._entry(t, position) for t, position in zip(token_ids, positions, strict=True)])

    def _entry(self, token_id: int, position: PositionLogprobs) -> TokenLogprob:
        best = sorted((item for item in position.items() if _is_top(item[1].rank, self._num_top)), key=lambda item: item[1].rank or 0)
        best += [(i, position[i]) for i in self._named if i in position]
        top = [TopLogprob(*self._token(i, entry)) for i, entry in best]
        return TokenLogprob(*self._token(token_id, position[token_id]), top)

    def _token(self, token_id: int, entry: Logprob) -> tuple[str, float, list[int]]:
        """(text, logprob, bytes): of a token that is a piece of a character, the bytes say what the text can't."""
        text = f"token_id:{token_id}" if self._as_ids else entry.decoded_token or ""
        exact = text.encode("utf-8", errors="replace") if self._table is None else self._table.bytes_of(token_id)
        return text, max(entry.logprob, LOWEST), list(exact)


def _is_top(rank: int | None, num_top: int) -> bool:
    return rank is not None and (num_top == -1 or rank <= num_top)


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs | None],
    num_top: int,
    as_ids: bool,
    offset: int,
    texts: Sequence[str],
    named: Sequence[int] = (),
) -> tuple[CompletionLogprobs, int]:
    """Four lists with an entry for each token, and the offset after them.

    `texts[i]` is the text of a token whose position has no logprobs; `named` are tokens to tell of beside the best. A
    position's `top_logprobs` always hold the actual token too: evaluation tools tell from it whether the token was the
    greedy choice. Of tokens that look alike the likeliest counts.
    """
    result = CompletionLogprobs()
    for token_id, position, plain in zip(token_ids, positions, texts, strict=True):
        text = plain if position is None or as_ids else token_text(token_id, position, False)
        result.tokens.append(f"token_id:{token_id}" if as_ids else text)
        result.text_offset.append(offset)
        offset += len(text)
        if position is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
        else:
            result.token_logprobs.append(max(position[token_id].logprob, LOWEST))
            result.top_logprobs.append(_top_dict(token_id, position, num_top, as_ids, named))
    return result, offset


def _top_dict(token_id: int, position: PositionLogprobs, num_top: int, as_ids: bool, named: Sequence[int]) -> dict[str, float]:
    result: dict[str, float] = {}
    for i, entry in sorted(position.items(), key=lambda item: item[1].rank or 0):
        if i == token_id or i in named or _is_top(entry.rank, num_top):
            result.setdefault(token_text(i, position, as_ids), max(entry.logprob, LOWEST))
    return result


def finite_prompt_logprobs(positions: list[PositionLogprobs | None] | None) -> list[PositionLogprobs | None] | None:
    """Prompt logprobs fit for JSON."""
    for position in positions or ():
        for entry in (position or {}).values():
            entry.logprob = max(entry.logprob, LOWEST)
    return positions


def token_text(token_id: int, position: PositionLogprobs, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else position[token_id].decoded_token or ""
