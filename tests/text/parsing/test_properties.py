"""What holds for every format, whatever a model writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.parsing.reading import Transcript, read_transcripts
from tests.text.parsing.test_transcripts import joined, run

ONE_EACH = {transcript.file: transcript for transcript in read_transcripts()}
COMMON = [
    "{",
    "}",
    "[",
    "]",
    '"',
    ":",
    ",",
    " ",
    "\n",
    "\\",
    "<",
    ">",
    "=",
    "ping",
    '{"name": "ping", "arguments": {"a": 1}}',
    "é",
    "5",
    "'",
]


def literals(transcript: Transcript) -> list[str]:
    """The markers of a format, in the thoughts and content state and every other; where thinking is off, one that means nothing."""
    table = transcript.parser(transcript.tokenizer())._table
    return sorted({literal for _, literal in table.rules}) or ["<think>"]


def valid(said: list[dict[str, Any]]) -> None:
    for item in said:
        if "call" in item:
            assert item["ended"]
            assert isinstance(json.loads(item["raw"], parse_constant=_refuse), dict)


def _refuse(constant: str) -> None:
    raise AssertionError(constant)


@pytest.mark.parametrize("file", ONE_EACH)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_comes_is_read_alike_however_it_is_cut(file: str, data: st.DataObject) -> None:
    transcript = ONE_EACH[file]
    tokenizer = transcript.tokenizer()
    markers = literals(transcript)
    parts = data.draw(st.lists(st.sampled_from(markers) | st.sampled_from([*COMMON, *markers, *(m[:-1] for m in markers)]), max_size=25))
    text = "".join(parts)
    whole = run(transcript.parser(tokenizer), [(text, ())])
    valid(whole)
    assert run(transcript.parser(tokenizer), [(char, ()) for char in text]) == comparable(whole)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert run(transcript.parser(tokenizer), [(piece, ()) for piece in pieces]) == comparable(whole)


@pytest.mark.parametrize("file", ONE_EACH)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_whatever_tokens_come_are_read_alike_however_they_are_grouped(file: str, data: st.DataObject) -> None:
    transcript = ONE_EACH[file]
    tokenizer = transcript.tokenizer()
    markers = literals(transcript)
    parts = data.draw(st.lists(st.sampled_from(markers) | st.sampled_from(COMMON), max_size=25))
    pieces = [(tokenizer.decode([i], False), i) for part in parts for i in tokenizer.encode(part, False) if part.isascii()]
    whole = run(transcript.parser(tokenizer), joined(pieces, [len(pieces)]))
    valid(whole)
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=len(pieces), max_size=len(pieces)))
    assert run(transcript.parser(tokenizer), joined(pieces, sizes)) == comparable(whole)
    assert run(transcript.parser(tokenizer), joined(pieces, [1] * len(pieces))) == comparable(whole)


class _AnyId:
    """Random ids are equal to each other."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str)


def comparable(said: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**item, "id": _AnyId()} if "id" in item else item for item in said]
