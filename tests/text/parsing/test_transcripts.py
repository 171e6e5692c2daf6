"""Every transcript of every format, cut into pieces in every way: the events stay the same."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from canter.text.parsing.formats import CALLS, THOUGHTS
from canter.text.parsing.machine import Machine
from tests.text.parsing.reading import Transcript, checked, read_transcripts, told

ALL = read_transcripts()
TEXT_ONLY = tuple(transcript for transcript in ALL if not transcript.needs_ids)

Delta = tuple[str, Sequence[int]]


def run(parser: Machine, deltas: Iterable[Delta], truncated: bool = False) -> list[dict[str, Any]]:
    events = [event for text, ids in deltas for event in parser.feed(text, ids)]
    return told(events + parser.finish(truncated))


def joined(pieces: list[tuple[str, int]], sizes: Iterable[int]) -> list[Delta]:
    """Pieces of tokens brought together, so many at a time."""
    deltas, at = [], 0
    for size in sizes:
        part = pieces[at : at + size]
        if part:
            deltas.append(("".join(text for text, _ in part), [token_id for _, token_id in part]))
        at += size
    return deltas


def lagging(pieces: list[tuple[str, int]], lags: Sequence[int]) -> list[Delta]:
    """The text comes some tokens later than the ids."""
    deltas: list[Delta] = []
    shown = 0
    for number, (_, token_id) in enumerate(pieces):
        upto = max(shown, number + 1 - lags[number % len(lags)])
        deltas.append(("".join(text for text, _ in pieces[shown:upto]), [token_id]))
        shown = upto
    return [*deltas, ("".join(text for text, _ in pieces[shown:]), [])]


def test_every_format_has_transcripts() -> None:
    assert {transcript.calls for transcript in ALL} - {None} >= distinct(CALLS)
    assert {transcript.thoughts for transcript in ALL} - {None} >= distinct(THOUGHTS)


def distinct(formats: dict[str, Any]) -> set[str]:
    """Names but aliases of one and the same format."""
    return {name for number, (name, item) in enumerate(formats.items()) if not any(item is o for o in list(formats.values())[:number])}


@pytest.mark.parametrize("byte_level", [True, False], ids=["bytes", "search"])
@pytest.mark.parametrize("transcript", ALL, ids=str)
def test_tokens_in_every_grouping(transcript: Transcript, byte_level: bool) -> None:
    tokenizer = transcript.tokenizer(byte_level)
    assert (tokenizer.token_bytes is not None) == byte_level
    pieces = transcript.pieces(tokenizer)
    n = len(pieces)
    rng = random.Random(str(transcript))
    groupings = [[n], [1] * n, [2] * n, *([size] * n for size in range(3, 14))]
    groupings += [[rng.randint(1, 9) for _ in range(n)] for _ in range(10)]
    groupings += [[at, n - at] for at in range(1, n, max(1, n // 40))]
    for sizes in groupings:
        checked(run(transcript.parser(tokenizer), joined(pieces, sizes)), transcript.said)


@pytest.mark.parametrize("byte_level", [True, False], ids=["bytes", "search"])
@pytest.mark.parametrize("transcript", ALL, ids=str)
def test_text_that_lags_behind_the_ids(transcript: Transcript, byte_level: bool) -> None:
    tokenizer = transcript.tokenizer(byte_level)
    pieces = transcript.pieces(tokenizer)
    rng = random.Random(str(transcript))
    for lags in [[1], [2], [3], [0, 3], [3, 2, 1, 0], [rng.randint(0, 3) for _ in range(17)]]:
        checked(run(transcript.parser(tokenizer), lagging(pieces, lags)), transcript.said)


@pytest.mark.parametrize("transcript", TEXT_ONLY, ids=str)
def test_text_without_ids(transcript: Transcript) -> None:
    tokenizer, text = transcript.tokenizer(), transcript.text
    rng = random.Random(str(transcript))
    cuts = [[], list(range(1, len(text)))]
    cuts += [list(range(size, len(text), size)) for size in range(2, 14)]
    cuts += [[at] for at in range(1, len(text))]
    cuts += [sorted(rng.sample(range(1, len(text)), min(len(text) - 1, 7))) for _ in range(10)] if len(text) > 1 else []
    for places in cuts:
        parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
        checked(run(transcript.parser(tokenizer), [(part, ()) for part in parts]), transcript.said)


@pytest.mark.parametrize("transcript", ALL, ids=str)
def test_truncation_after_every_token(transcript: Transcript) -> None:
    """What a cut output says is the beginning of what the whole one says; a call that was cut off doesn't end."""
    tokenizer = transcript.tokenizer()
    pieces = transcript.pieces(tokenizer)
    whole = _texts(run(transcript.parser(tokenizer), joined(pieces, [1] * len(pieces))))
    for size in range(len(pieces)):
        said = run(transcript.parser(tokenizer), joined(pieces[:size], [1] * size), truncated=True)
        one_by_one, at_once = _texts(said), _texts(run(transcript.parser(tokenizer), joined(pieces[:size], [size]), truncated=True))
        assert one_by_one == at_once
        raw = "".join(text for text, _ in pieces[:size])
        for (kind, text), (whole_kind, whole_text) in zip(one_by_one[:-1], whole, strict=False):
            assert kind == whole_kind and whole_text.startswith(text)
        if one_by_one:
            _check_last(one_by_one, whole, raw)


def _check_last(texts: list[tuple[str, str]], whole: list[tuple[str, str]], raw: str) -> None:
    """The last text may show the beginning of a marker that was cut in two: the end of the raw text."""
    kind, text = texts[-1]
    if len(texts) <= len(whole) and whole[len(texts) - 1][0] == kind and whole[len(texts) - 1][1].startswith(text):
        return
    assert kind in ("reasoning", "content")
    wanted = whole[len(texts) - 1][1] if len(texts) <= len(whole) and whole[len(texts) - 1][0] == kind else ""
    common = next((size for size in range(len(wanted), -1, -1) if text.startswith(wanted[:size])), 0)
    assert raw.strip().endswith(text[common:].strip()) and len(text) - common < 80, (text, wanted)


def _texts(said: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [
        ("call " + item["call"], item["raw"]) if "call" in item else next(iter(item.items()))
        for item in said
    ]  # fmt: skip
