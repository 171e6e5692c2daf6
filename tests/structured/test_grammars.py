"""Constraints of every kind: what they let through, what they end on, and what they refuse, and where."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from canter.core import structured_outputs
from canter.core.errors import ConfigError, InvalidRequestError
from canter.core.grammar import Matcher, mask_width
from canter.core.structured_outputs import StructuredOutputsConfig, StructuredOutputsParams
from canter.core.vocabulary import Vocabulary
from canter.structured import compiler as compiler_module
from canter.structured.compiler import GrammarCompiler
from canter.structured.guidance import _shorten

SIZE = 200
EOS = 2
MARKERS = {"<unk>": 0, "<s>": 1, "</s>": EOS, "<call>": 131, "</call>": 132}


def ascii_vocabulary(size: int = SIZE) -> Vocabulary:
    """Tokens 3 to 130 are the ASCII characters; ids from 133 on stand for nothing."""
    tokens = [b""] * 3 + [bytes([code]) for code in range(128)] + [b"", b""]
    markers = {text: token_id for text, token_id in MARKERS.items() if token_id < size}
    return Vocabulary(size, tokens[:size], markers, [EOS], encode)


def encode(text: str) -> list[int]:
    return [ord(char) + 3 for char in text]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(ascii_vocabulary)


def allowed(matcher: Matcher) -> list[int]:
    mask = np.zeros(mask_width(SIZE), np.int32)
    matcher.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def tokens_of(*parts: str | int) -> list[int]:
    return [i for part in parts for i in ([part] if isinstance(part, int) else encode(part))]


def takes(compiler: GrammarCompiler, *parts: str | int, **wanted: Any) -> bool:
    """Whether these are a whole output."""
    matcher = compiler.get(StructuredOutputsParams(**wanted)).matcher()
    tokens = tokens_of(*parts)
    for token in tokens:
        ids = allowed(matcher)
        assert max(ids, default=0) < 133, "padding of the vocabulary"
        if token not in ids:
            return False
        assert matcher.accept([token]) == 1
    return matcher.may_end and EOS in allowed(matcher)


TAG = {"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {"type": "object"}}, "end": "</f>"}
OLD = {"structures": [{"begin": "<f=a>", "schema": {}, "end": "</f>"}], "triggers": ["<f="]}
CALL = {"begin": "<call>add\n", "content": {"type": "json_schema", "json_schema": {"type": "object"}}, "end": "</call>"}


def tag(**fields: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": fields}


X_GRAMMAR = {"type": "grammar", "grammar": 'root ::= "x"'}
TWO_CALLS = [131, "add\n{}", 132, ",", 131, "add\n{}", 132]


@pytest.mark.parametrize(
    ("wanted", "parts", "fits"),
    [
        (dict(json_object=True), ['{"a": [1, null]}'], True),
        (dict(json_object=True), ["[1]"], False),
        (dict(json_object=True), ["{\n\n"], False),
        (dict(json_object=True), ['{\n    "a":\n    1\n}'], True),
        (dict(json_object=True, disable_any_whitespace=True), ['{"a":1}'], True),
        (dict(json_object=True, disable_any_whitespace=True), ['{ "a":1}'], False),
        (dict(json_object=True, whitespace_pattern="_?"), ['{_"a":1}'], True),
        (dict(json={"type": "object", "properties": {"a": {"type": "integer"}}}), ['{"a":1,"b":2}'], True),
        (dict(json={"type": "object", "properties": {"a": {}}}, disable_additional_properties=True), ['{"b":2}'], False),
        (dict(json={"type": "array", "items": {"type": "string", "format": "binary"}, "uniqueItems": False}), ['["x"]'], True),
        (dict(regex="a/b[0-9]{2}"), ["a/b12"], True),
        (dict(regex="a/b[0-9]{2}"), ["a/b1"], False),
        (dict(choice=["red", "green"]), ["green"], True),
        (dict(choice=["red", 'say "x"\n']), ['say "x"\n'], True),
        (dict(choice=["red"]), ["re"], False),
        (dict(choice=["</s>"]), ["</s>"], True),
        (dict(grammar='start: NUM ("+" NUM)*\nNUM: /[0-9]+/'), ["1+22"], True),
        (dict(grammar='root ::= "[" item ("," item)* "]" # c\nitem ::= [a-z]+ | root'), ["[a,[b]]"], True),
        (dict(grammar='root ::= "a" "bc" | "ab" "d"'), ["abc"], True),
        (dict(grammar='root ::= "a"{2} [^\\x41-\\u0050]? .'), ["aaz!"], True),
        (dict(grammar='root ::= "a"{2} [^\\x41-\\u0050]? .'), ["a"], False),
        (dict(structural_tag=OLD), ["x <f=a>1</f>y"], True),
        (dict(structural_tag=OLD), ["<f=b"], False),
        (dict(structural_tag=tag(type="triggered_tags", triggers=["<f"], tags=[TAG])), ["no tag"], True),
        (dict(structural_tag=tag(type="triggered_tags", triggers=["<f"], tags=[TAG], at_least_one=True)), ["no tag"], False),
        (dict(structural_tag=tag(type="triggered_tags", triggers=["<f"], tags=[TAG], stop_after_first=True)), ["x<f=a>{}</f>y"], False),
        (dict(structural_tag=tag(type="triggered_tags", triggers=["<call>"], tags=[CALL])), ["x", 131, "add\n{}", 132, "y"], True),
        (dict(structural_tag=tag(type="triggered_tags", triggers=["<ca"], tags=[CALL])), ["x", 131, "add\n{}", 132], True),
        (dict(structural_tag=tag(type="triggered_tags", triggers=["<call>"], tags=[CALL])), [132], False),
        (dict(structural_tag=tag(type="tags_with_separator", separator=",", tags=[CALL])), TWO_CALLS, True),
        (
            dict(structural_tag=tag(type="sequence", elements=[{"type": "any_text"}, {"type": "const_string", "value": "END"}])),
            ["EN END"],
            True,
        ),
        (dict(structural_tag=tag(type="any_text", excludes=["bad"])), ["a bad"], False),
        (
            dict(structural_tag=tag(type="or", elements=[{"type": "regex", "pattern": "[0-9]"}, X_GRAMMAR])),
            ["x"],
            True,
        ),
    ],
)  # fmt: skip
def test_what_fits(compiler: GrammarCompiler, wanted: dict[str, Any], parts: list[str | int], fits: bool) -> None:
    assert takes(compiler, *parts, **wanted) == fits


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (dict(json={"properties": {"a": {"items": {"anyOf": [{"type": "strin"}]}}}}), "#/properties/a/items/anyOf/0"),
        (dict(json={"type": "array", "uniqueItems": True}), "uniqueItems"),
        (dict(json={"enum": []}), "anyOf is empty"),
        (dict(json={"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (dict(regex="a(b"), "unclosed group"),
        (dict(regex="(?=a)b"), "look-around"),
        (dict(grammar="start: expr\nexpr: NUM"), "2(7)"),
        (dict(grammar='root ::= "a" foo'), "line 1, column 14"),
        (dict(grammar='root ::= "a" |\n  ( "b"'), "line 2, column 8"),
        (dict(grammar='rot ::= "a"'), "root"),
        (dict(structural_tag={}), "format"),
        (dict(structural_tag=tag(type="nope")), "format.type"),
        (dict(structural_tag=tag(type="triggered_tags", triggers=["<g"], tags=[TAG])), "tags[0].begin"),
    ],
)
def test_refused_with_the_place(compiler: GrammarCompiler, wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs") as caught:
        asyncio.run(compiler.check(StructuredOutputsParams(**wanted)))
    assert message in str(caught.value)
    assert caught.value.param == f"structured_outputs.{next(iter(wanted))}"


def test_a_panic_of_the_library_is_told_without_its_stack() -> None:
    """Such as its own on `root ::= ([èa] | "é" | [éèb])*` with more of the kind."""
    assert _shorten("panic: called `Option::unwrap()`\n<backtrace>\n  0: <unknown>") == "panic: called `Option::unwrap()`"


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "wanted",
    [
        dict(), dict(json={}, regex="a"), dict(json_object=False), dict(regex="a\0"), dict(json=nested(65)), dict(json='{"a":' * 5000),
        dict(json="[1]"), dict(json='{"a": NaN}'), dict(json={"a": float("nan")}), dict(choice=[]), dict(choice=["a", 1]), dict(grammar=""),
        dict(regex="\ud800"), dict(regex="a" * 20000), dict(json=True), dict(json="{}", thought_end_ids=[-1]),
    ],
)  # fmt: skip
def test_malformed_params_are_refused(wanted: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        StructuredOutputsParams(**wanted)


def test_params_take_what_fits() -> None:
    assert StructuredOutputsParams(json=nested(64)).kind == "json"
    assert StructuredOutputsParams(json={"const": 10**40}).json == json.dumps({"const": 10**40}, separators=(",", ":"))


def test_config() -> None:
    assert StructuredOutputsConfig.parse({"backend": "guidance"}).backend == "guidance"
    for value in ({"backend": "outlines"}, {"nope": 1}, {"backend": 1}, []):
        with pytest.raises(ConfigError):
            StructuredOutputsConfig.parse(value)


def test_a_backend_whose_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_outputs, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'canter\[xgrammar\]'"):
        StructuredOutputsConfig.parse({"backend": "xgrammar"})
    monkeypatch.setattr(structured_outputs, "find_spec", lambda name: object())
    assert StructuredOutputsConfig.parse({"backend": "xgrammar"}).jumps_forward is False


def test_where_nothing_may_be_raised_a_matcher_says_what_is_wrong(compiler: GrammarCompiler) -> None:
    good = compiler.get(StructuredOutputsParams(regex="ab")).matcher()
    bad = compiler.get(StructuredOutputsParams(regex="a(b")).matcher()
    assert "unclosed group" in (bad.error or "") and bad.accept(encode("a")) == 0 and bad.forced() == [] and not bad.may_end
    masks = np.full((2, mask_width(SIZE)), -1, np.int32)
    compiler.fill([(bad, 0), (good, 1)], masks)
    assert not masks[0].any() and masks[1].any()


def test_rollback_and_forced_tokens(compiler: GrammarCompiler) -> None:
    matcher = compiler.get(StructuredOutputsParams(regex="(abc|abd)+x")).matcher()
    before = allowed(matcher)
    assert matcher.accept(encode("abcz")) == 3
    matcher.rollback(3)
    assert allowed(matcher) == before
    for token in compiler.get(StructuredOutputsParams(regex="hello[0-9]")).matcher().forced():
        assert token in encode("hello")


def test_a_matcher_is_alone(compiler: GrammarCompiler) -> None:
    grammar = compiler.get(StructuredOutputsParams(regex="ab"))
    first, second = grammar.matcher(), grammar.matcher()
    first.accept(encode("a"))
    assert allowed(second) == encode("a") and allowed(first) == encode("b")


def test_equal_constraints_are_compiled_once(compiler: GrammarCompiler) -> None:
    assert compiler.get(StructuredOutputsParams(json={"type": "null"})) is compiler.get(StructuredOutputsParams(json='{"type":"null"}'))


def test_a_schema_of_500_properties(compiler: GrammarCompiler) -> None:
    names = [f"p{i}" for i in range(500)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    assert takes(compiler, json.dumps(dict.fromkeys(names, 7)), json=schema)


def test_the_cache_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2025-29770 and -32381: a cache that every new schema made longer, on disk or in memory."""
    monkeypatch.setattr(compiler_module, "CACHED_GRAMMARS", 4)
    compiler = GrammarCompiler(ascii_vocabulary)
    schemas = [StructuredOutputsParams(json={"const": i}) for i in range(20)]
    compiled = [compiler.get(schema) for schema in schemas]
    assert [compiler.get(schema) for schema in schemas[-4:]] == compiled[-4:]
    assert len(compiler._cache) == 4
    assert compiler.get(schemas[0]) is not compiled[0]
    monkeypatch.setattr(compiler_module, "CACHED_CHARS", 1000)
    for i in range(20):
        compiler.get(StructuredOutputsParams(json={"const": f"{i:0400}"}))
    assert compiler._cached_chars <= 1000 and len(compiler._cache) == 2
