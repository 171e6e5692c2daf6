"""JSON that is passed on while it is written, and mended."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canter.text.parsing.args.json_text import JsonText


def passed(pieces: list[str]) -> str:
    reader, out = JsonText(), []
    for piece in pieces:
        text, end = reader.feed(piece)
        out.append(text)
        if reader.done:
            assert end <= len(piece)
            break
    return "".join(out) + reader.complete()


def strictly(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES, st.sampled_from([None, 1, 3]), st.booleans(), st.data())
@settings(max_examples=300, deadline=None)
def test_valid_json_stays_what_it_is(value: Any, indent: int | None, ascii_only: bool, data: st.DataObject) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    cut = data.draw(st.integers(0, len(text)))
    assert strictly(passed([text])) == value
    assert passed([text[:cut], text[cut:]]) == passed([text]) == passed(list(text))


@pytest.mark.parametrize("value", [{"a": [1, {"b": 'c\n"é'}], "d": None}, [[], {}, ""], "x"])
def test_valid_json_keeps_its_spelling_but_for_blank_around_commas(value: Any) -> None:
    text = json.dumps(value)
    assert passed([text]) == text


PIECES = st.lists(st.sampled_from([*'{}[]",:\\ \nu0 1-.eE\x00', "true", "NaN", "None", "abc", "\\u12", "é", "\u00a0", '"a"', "1e999"]))


@given(PIECES)
@settings(max_examples=1500, deadline=None)
def test_anything_becomes_valid_json_however_it_is_cut(pieces: list[str]) -> None:
    text = passed(pieces)
    strictly(text)
    assert passed(["".join(pieces)]) == text == passed(list("".join(pieces)))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('{"a": 1', '{"a": 1}'),
        ('{"a": "x', '{"a": "x"}'),
        ('{"a": "x\\', '{"a": "x"}'),
        ('{"a":', '{"a":null}'),
        ('{"a"', '{"a":null}'),
        ('{"a": [1, {"b": 2', '{"a": [1, {"b": 2}]}'),
        ('{"a": 1,}', '{"a": 1}'),
        ('{"a": 1, "b": [1, 2,],}', '{"a": 1, "b": [1, 2]}'),
        ('{"a": True, "b": None, "c": False}', '{"a": true, "b": null, "c": false}'),
        ('{"a": NaN, "b": -Infinity, "c": 1e999}', '{"a": null, "b": null, "c": null}'),
        ('{a: "x"}', '{"a": "x"}'),
        ('{"a": x}', '{"a": "x"}'),
        ('{"a": 01}', '{"a": "01"}'),
        ('{"a" 1}', '{"a": 1}'),
        ('{"a": 1 "b": 2}', '{"a": 1, "b": 2}'),
        ("[1 2]", "[1, 2]"),
        ('{"a": [1}', '{"a": [1]}'),
        ('{"a": "b\nc\td"}', '{"a": "b\\nc\\td"}'),
        (r'{"a": "\d \' \u12 \u00e9"}', r'{"a": "\\d ' + "'" + r' \\u12 \u00e9"}'),
        ('{"a": 1}}', '{"a": 1}'),
        ('{"a": 1} more', '{"a": 1}'),
        ("", "null"),
        ("}", "null"),
        ("12", "12"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_mended(written: str, meant: str) -> None:
    assert strictly(passed(list(written))) == strictly(meant)
