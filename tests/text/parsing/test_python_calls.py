"""Calls written as Python: faults of other readers, each under its thread or advisory, and work that grows with the text."""

from __future__ import annotations

import json

import pytest

from canter.text.parsing.args.python_body import PythonCalls
from canter.text.parsing.events import CallArguments, CallEnd, CallStart
from tests.text.parsing.reading import told
from tests.text.parsing.test_traces import FILLER, parser_of, text_only


def test_cve_2025_9141_arguments_are_never_run() -> None:
    code = "__import__('os').system('touch /tmp/ran')"
    said = text_only("pythonic", [f"[f(text={code}, count=[x for x in ().__class__.__bases__])]"])
    assert json.loads(said[0]["raw"]) == {"text": code, "count": ["x for x in ().__class__.__bases__"]}


def test_strings_go_out_while_they_grow() -> None:
    parser, _ = parser_of("pythonic")
    assert parser.feed("[f(te") == []
    assert [type(event) for event in parser.feed('xt="a ')] == [CallStart, CallArguments]
    assert [parser.feed(word) for word in ("b ", "c")] == [[CallArguments(0, "b ")], [CallArguments(0, "c")]]
    assert parser.feed('", count=1') == [CallArguments(0, '", "count": ')]
    assert parser.feed("2)") == [CallArguments(0, "12}"), CallEnd(0)]
    assert parser.feed("]") == parser.finish() == []


@pytest.mark.parametrize("calls", ["pythonic", "llama4_pythonic"])
def test_text_that_only_begins_like_a_list_streams(calls: str) -> None:
    parser, _ = parser_of(calls)
    said = [told(parser.feed(piece)) for piece in ("[1] ", "As ", "f(x)", " says")]
    assert [item["content"] for items in said for item in items] == ["[1]", " As", " f(x)", " says"]


# What made the regular expression of CVE-2025-48887 (GHSA-w6q7) run for ever.
ADVERSARIAL = [
    "[A(A=" + "\t)A(A=,\t" * 20_000,
    "[" * 100_000,
    "[f(" + "a=" * 60_000,
    '[f(text="' + "\\" * 100_000,
    "[f(count=" + "(" * 100_000,
]


@pytest.mark.parametrize("text", ADVERSARIAL, ids=["list", "brackets", "keywords", "escapes", "tuples"])
@pytest.mark.parametrize("size", [3, 1_000_000])
def test_cve_2025_48887_adversarial_text_is_read_in_linear_work(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    original = PythonCalls.feed

    def counted(self: PythonCalls, piece: str) -> int:
        taken.append(len(piece))
        return original(self, piece)

    monkeypatch.setattr(PythonCalls, "feed", counted)
    for item in text_only("pythonic", [text[at : at + size] for at in range(0, len(text), size)]):
        assert "call" not in item or isinstance(json.loads(item["raw"]), dict)
    assert sum(taken) <= 1.5 * len(text) + 100


def test_200_kb_of_a_string_in_linear_work(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    original = PythonCalls._string

    def counted(self: PythonCalls, text: str, at: int) -> int:
        nonlocal steps
        steps += 1
        return original(self, text, at)

    monkeypatch.setattr(PythonCalls, "_string", counted)
    text = f'[f(text="{FILLER}")]'
    for size in (4, 1_000_000):
        steps = 0
        said = text_only("pythonic", [text[at : at + size] for at in range(0, len(text), size)])
        assert json.loads(said[0]["raw"]) == {"text": json.loads(f'"{FILLER}"')}
        assert steps <= len(text)
