"""Where thoughts begin and end: the markers of a reasoning model, as token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from canter.core.errors import ConfigError
from canter.core.sampling_params import MAX_MARKER_TOKENS, SamplingParams
from canter.text.tokenizer import Tokenizer

MAX_PROMPT_TOKENS = 4096
"""Of a prompt's end, where an open thought is looked for."""
START_KEY, END_KEY = "reasoning_start_str", "reasoning_end_str"
KNOWN_MARKERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>", "<channel|>"),
    ("<|content_thinking|>", "<|end_message|>"),
    ("<ifm|think>", "</ifm|think>"),
    ("<ifm|think_fast>", "</ifm|think_fast>"),
    ("<ifm|think_faster>", "</ifm|think_faster>"),
)
"""Pairs that published models have as tokens of their own; K2 Horizon has one for each effort."""
SPELLED_MARKERS = (("<|open|>", "think", "<|sep|>"), ("<|close|>", "think", "<|sep|>"))
"""Kimi K3's, a word between tokens."""

_SUFFIXED = re.compile(r"<think(:[^<>]{1,64})>")
"""What Hunyuan's models have, in whose markers a suffix stands."""


@dataclass(frozen=True, slots=True)
class ThinkingMarkers:
    """Token ids of what opens a thought and of what closes it. `others`: further pairs, where a model has more than one."""

    start: list[int]
    end: list[int]
    others: tuple[tuple[list[int], list[int]], ...] = ()


class ThoughtWatch:
    """Follows an output's tokens into its thought and out of it. A thought is open at once if the prompt's end has one open; otherwise
    the output may begin with one."""

    def __init__(self, start: Sequence[int], end: Sequence[int], prompt_token_ids: Sequence[int]) -> None:
        self._start, self._end = list(start), list(end)
        self.is_open = _last_is_open(prompt_token_ids, self._start, self._end)
        self._tail: list[int] = []
        self._may_open = not self.is_open

    def feed(self, token_id: int) -> bool:
        """Take the next token; whether it belongs to a thought, its markers included."""
        if not self.is_open and not self._may_open:
            return False
        self._tail.append(token_id)
        if self.is_open:
            self._tail = self._tail[-len(self._end) :]
            self.is_open = self._tail != self._end
            return True
        self._may_open = self._tail == self._start[: len(self._tail)]
        if self._tail == self._start:
            self.is_open, self._may_open, self._tail = True, False, []
        return self._may_open or self.is_open


def _last_is_open(ids: Sequence[int], start: list[int], end: list[int]) -> bool:
    """Whether of all markers in the last tokens of a prompt the last one opens a thought."""
    ids = list(ids[-MAX_PROMPT_TOKENS:])
    for at in range(len(ids), 0, -1):
        if end and ids[max(0, at - len(end)) : at] == end:
            return False
        if start and ids[max(0, at - len(start)) : at] == start:
            return True
    return False


def find_markers(tokenizer: Tokenizer, config: Mapping[str, Any]) -> ThinkingMarkers | None:
    """The markers that `reasoning_config` names, or those that the tokenizer is known to have; None where there are none.

    Raises `ConfigError` for a configuration that names no two different markers which the model can write.
    """
    if not config:
        return _known(tokenizer)
    unknown = sorted(set(config) - {START_KEY, END_KEY})
    if unknown:
        raise ConfigError(f"reasoning_config has no {unknown[0]!r}. It has: {START_KEY}, {END_KEY}.")
    start, end = (_encoded(tokenizer, key, config.get(key)) for key in (START_KEY, END_KEY))
    markers = ThinkingMarkers(start, end)
    if markers.start == markers.end:
        raise ConfigError(f"reasoning_config: {START_KEY} and {END_KEY} must differ, both are {config[START_KEY]!r}.")
    return markers


def free_thoughts(params: SamplingParams, markers: ThinkingMarkers, in_thought: bool | None = None) -> SamplingParams:
    """A copy whose constraint, if it has one, leaves thoughts alone and holds from their end on.

    `in_thought`: whether the prompt's end has a thought open; None: as the prompt's tokens say.
    """
    wanted = params.structured_outputs
    if wanted is None:
        return params
    found = dict(thought_start_ids=markers.start, thought_end_ids=markers.end, other_thoughts=list(markers.others), in_thought=in_thought)
    return params.clone(structured_outputs=msgspec.structs.replace(wanted, **found))


def _known(tokenizer: Tokenizer) -> ThinkingMarkers | None:
    texts = (tokenizer.id_to_token(token_id) or "" for token_id in sorted(tokenizer.added_token_ids))
    suffixes = [match[1] for match in map(_SUFFIXED.fullmatch, texts) if match]
    found: list[tuple[list[int], list[int]]] = []
    for pair in (*KNOWN_MARKERS, *((f"<think{suffix}>", f"</think{suffix}>") for suffix in suffixes)):
        start, end = (tokenizer.token_to_id(text) for text in pair)
        if start is not None and end is not None and {start, end} <= tokenizer.added_token_ids:
            found.append(([start], [end]))
    spelled = [part for marker in SPELLED_MARKERS for part in marker if part.startswith("<")]
    if {tokenizer.token_to_id(token) for token in spelled} <= tokenizer.added_token_ids:
        start_ids, end_ids = (tokenizer.encode("".join(marker), add_special_tokens=False) for marker in SPELLED_MARKERS)
        found.append((start_ids, end_ids))
    return ThinkingMarkers(*found[0], tuple(found[1:])) if found else None


def _encoded(tokenizer: Tokenizer, key: str, text: object) -> list[int]:
    if not isinstance(text, str) or not text:
        raise ConfigError(f"reasoning_config needs {key}, a text such as '</think>', got {text!r}.")
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids or len(ids) > MAX_MARKER_TOKENS or tokenizer.unk_token_id in ids:
        raise ConfigError(f"reasoning_config: {key} must be 1 to {MAX_MARKER_TOKENS} tokens of the model, which {text!r:.80} is not.")
    return ids
