"""Grammars of answers that may call strict functions: whatever they let through, the format reads as text and valid calls."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from canter.core.errors import InvalidRequestError
from canter.core.grammar import Grammar, Matcher, mask_width
from canter.server.tools import strict_calls
from canter.structured.compiler import GrammarCompiler
from canter.text.parsing.answer import ReadAnswer, gather
from canter.text.parsing.formats import CALLS
from canter.text.parsing.load import load_format, plain_format
from canter.text.parsing.options import ParseOptions, Tool
from tests.structured.test_real_outputs import closed, valid
from tests.text.parsing.reading import DIRECTORY
from tests.text.parsing.vocabulary import tiny_tokenizer


def _markers() -> dict[str, tuple[str, ...]]:
    """Of each format the tokens that its transcripts are written with."""
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted(DIRECTORY.glob("*.txt")):
        head = dict(line.split(": ", 1) for line in path.read_text().split("\n===")[0].splitlines() if ": " in line)
        if "calls" in head:
            listed = (json.loads(head.get(kind, "[]")) for kind in ("tokens", "special"))
            found.setdefault(json.loads(head["calls"]), tuple(token for tokens in listed for token in tokens))
    # Names that have no transcripts of their own: their markers are written with ordinary tokens.
    return {**dict.fromkeys(CALLS, ()), **found}


FORMATS = _markers()
DAYS = {"type": "integer", "minimum": 1, "maximum": 9}
WEATHER = closed(city={"enum": ["Rom", "Ulm", 'a"b']}, days=DAYS)
PING = closed(host={"type": "string"}, tags={"type": "array", "items": {"enum": ["x", None]}, "maxItems": 2})
MIXED = {
    **closed(
        unit={"anyOf": [{"enum": ["m", "s"]}, {"type": "null"}]},
        exact={"type": "boolean"},
        where={"$ref": "#/$defs/where"},
        note={"type": ["string", "null"]},
    ),
    "$defs": {"where": closed(x={"enum": [1, 2]}, y={"$ref": "#/$defs/y"}), "y": {"enum": ["left", None]}},
    "required": ["exact", "where"],
}
TOOLS = (Tool("weather", WEATHER, True), Tool("net.ping", PING, True), Tool("mixed", MIXED, True))
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}


def obeys(arguments: dict[str, Any], name: str) -> bool:
    """What `valid` can't say of references is said here."""
    where = arguments.get("where", {"x": 1, "y": None})
    return valid(arguments, dict(SCHEMAS[name])) and where["x"] in (1, 2) and where["y"] in ("left", None)


def said(tag: Any) -> Iterator[str]:
    """The texts that a structural tag is made of."""
    if isinstance(tag, dict):
        yield from (tag[key] for key in ("begin", "value", "separator") if isinstance(tag.get(key), str))
        yield from tag.get("triggers", [])
        ends = tag.get("end", "")
        yield from [ends] if isinstance(ends, str) else ends
    for inner in tag.values() if isinstance(tag, dict) else tag if isinstance(tag, list) else ():
        yield from said(inner)


def openings(tag: Any) -> list[str]:
    """What a part of a structural tag may begin with, as far as it says so."""
    kind = tag["type"]
    if kind == "tag":
        return [tag["begin"] + inner for inner in openings(tag["content"])]
    inner = tag.get("tags", []) if kind in ("tags_with_separator", "triggered_tags") else tag.get("elements", [])
    if inner and kind == "sequence":
        return openings(inner[0])
    return [text for item in inner for text in openings(item)] or [tag.get("value", "")]


class Bench:
    """A format, its grammar for some tools, and a compiler for its vocabulary."""

    def __init__(self, name: str) -> None:
        self.tokenizer = tiny_tokenizer(FORMATS[name], ("<|stop|>",))
        found = load_format(self.tokenizer, None, name)
        assert found is not None
        self.format = found
        self.size = self.tokenizer.vocab_size
        self.eos = self.tokenizer.token_to_id("<|stop|>") or 0
        self.compiler = GrammarCompiler(lambda: self.tokenizer.vocabulary(self.size, [self.eos]))

    def options(self, tools: tuple[Tool, ...] = TOOLS, parallel: bool = True) -> ParseOptions:
        return ParseOptions(tools=tools, tool_choice="auto", parallel_tool_calls=parallel)

    def read(self, token_ids: list[int], options: ParseOptions) -> ReadAnswer:
        parser = self.format.parser(options)
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return gather([*parser.feed(text, token_ids), *parser.finish()])

    def grammar(self, options: ParseOptions) -> Grammar:
        wanted = strict_calls(self.format, options)
        assert wanted is not None
        return self.compiler.get(wanted)

    def turns(self, options: ParseOptions) -> list[list[list[int]]]:
        """What random tokens would hardly ever come to: what calls begin with, and all the texts around them."""
        assert self.format.written_calls is not None
        tag = self.format.written_calls.tag(options.tools, options.parallel_tool_calls)
        return [
            [self.tokenizer.encode(text, add_special_tokens=False) for text in sorted(texts) if text]
            for texts in ({*openings(tag)}, {*said(tag), '"'})
        ]

    def walk(self, rng: random.Random, matcher: Matcher, turns: list[list[list[int]]]) -> list[int]:
        """An output that the grammar lets through, with a call now and then."""
        beginnings, around = turns
        mask = np.zeros(mask_width(self.size), np.int32)
        output: list[int] = []
        for step in range(3000):
            matcher.fill(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            if not allowed or (matcher.may_end and (step > 150 or rng.random() < 0.1)):
                break
            runs = [[rng.choice(allowed)]]
            if rng.random() < 0.4:
                runs = [rng.choice(beginnings), *rng.sample(around, min(len(around), 12)), *runs]
            for run in runs:
                taken = matcher.accept(run)
                if taken == len(run):
                    output += run
                    break
                matcher.rollback(taken)
        assert matcher.may_end
        return output


@cache
def bench(name: str) -> Bench:
    return Bench(name)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("walks", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_every_call_that_may_be_written_is_read_and_obeys(name: str, parallel: bool, walks: int) -> None:
    """Formats whose walks hardly come to a call get up to 60 of them."""
    rng, at = random.Random(1), bench(name)
    options = at.options(parallel=parallel)
    grammar, turns = at.grammar(options), at.turns(options)
    counts: list[int] = []
    while len(counts) < walks or (len(counts) < 60 and not (sum(counts) > 15 and 0 in counts)):
        answer = at.read(at.walk(rng, grammar.matcher(), turns), options)
        counts.append(len(answer.calls))
        for call in answer.calls:
            assert call.complete and obeys(json.loads(call.arguments), call.name), call
    assert sum(counts) > 15 and 0 in counts
    assert max(counts) > 1 if parallel else max(counts) == 1


FREE = (
    "Well, 1 < 2 <b>, ]<[ {x} [y] functools, function calls: a call:ping{} <function and `code`.\n",
    "[1, 2] is a list, [ping] a word.", '{"city": "Rom", "name": "ping"}', '{"name": "Ada", "arguments": 1}', '["name"]', "",
)  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_free_text_stays_free(name: str) -> None:
    for text in FREE:
        assert taken(name, text, TOOLS), text
        at = bench(name)
        answer = at.read(at.tokenizer.encode(text, add_special_tokens=False), at.options())
        assert not answer.calls and (answer.content or "").strip() == text.strip()


def taken(name: str, text: str, tools: tuple[Tool, ...]) -> bool:
    at = bench(name)
    matcher = at.grammar(at.options(tools)).matcher()
    ids = at.tokenizer.encode(text, add_special_tokens=False)
    return matcher.accept(ids) == len(ids) and matcher.may_end


def test_what_fits_and_what_does_not() -> None:
    tools = (Tool("weather", WEATHER, True), Tool("anything", {"type": "object", "properties": {"n": {"type": "integer"}}}))
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    assert taken("hermes", "Only text.", tools)
    two = call % ("weather", '{"city": "Rom", "days": 3}') + "\n" + call % ("weather", '{"city":"Ulm","days":1}')
    assert taken("hermes", f"First: {two} and text", tools)
    assert not taken("hermes", call % ("weather", '{"city": "Bonn", "days": 3}'), tools)
    assert not taken("hermes", call % ("weather", '{"days": 3}'), tools)
    assert not taken("hermes", call % ("unknown", "{}"), tools)
    assert taken("hermes", call % ("anything", '{"n": "no integer, but nobody asked for one"}'), tools)
    assert not taken("hermes", call % ("anything", "[]"), tools)


def test_arguments_one_by_one() -> None:
    call = "<tool_call>\n<function=mixed>\n%s</function>\n</tool_call>"
    value = "<parameter=%s>\n%s\n</parameter>\n"
    exact, where = value % ("exact", "true"), value % ("where", '{"x": 1, "y": "left"}')
    assert taken("qwen3_coder", call % (exact + where), TOOLS)
    assert taken("qwen3_coder", call % (value % ("unit", "null") + exact + where + value % ("note", "two\nlines > 1")), TOOLS)
    assert not taken("qwen3_coder", call % exact, TOOLS)
    assert not taken("qwen3_coder", call % (value % ("unit", "km") + exact + where), TOOLS)
    assert not taken("qwen3_coder", call % (value % ("exact", "yes") + where), TOOLS)
    free = (*TOOLS, Tool("free", {}))
    assert taken("qwen3_coder", "<tool_call>\n<function=free>\n<parameter=any>\n1\n</parameter>\n</function>\n</tool_call>", free)
    bounded = Tool("f", {"properties": {"code": {"type": "string", "pattern": "^[A-Z]+$"}}}, True)
    with pytest.raises(InvalidRequestError, match="the argument 'code' of 'f' can't be held"):
        taken("qwen3_coder", "", (bounded,))
    assert taken("hermes", '<tool_call>\n{"name": "f", "arguments": {"code": "AB"}}\n</tool_call>', (bounded,))


def test_nothing_is_strict_unless_asked_for() -> None:
    at = bench("hermes")
    assert strict_calls(at.format, at.options((Tool("weather", WEATHER),))) is None
    assert strict_calls(at.format, ParseOptions(tools=TOOLS, tool_choice="required")) is None


def test_a_format_that_does_not_say_how_it_is_written_is_refused() -> None:
    at = bench("hermes")
    unwritten = plain_format(at.tokenizer)
    assert strict_calls(unwritten, at.options((Tool("weather", WEATHER),))) is None
    with pytest.raises(InvalidRequestError, match="tools: this server doesn't know how to hold"):
        strict_calls(unwritten, at.options())


CALLED = {
    "llama3_json": '{"type": "function", "name": "weather", "parameters": {"city": "Rom", "days": %s}}',
    "pythonic": '[weather(city="Rom", days=%s)]',
    "granite": '[{"name": "weather", "arguments": {"city": "Rom", "days": %s}}]',
    "phi4_mini_json": 'Well, functools[{"name": "weather", "arguments": {"city": "Rom", "days": %s}}]',
    "gigachat3": 'function call<|role_sep|>\n{"name": "weather", "arguments": {"city": "Rom", "days": %s}}',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rom", "days": %s}}]',
    "openai": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rom", "days": %s}<|call|>',
    "inkling": '<|message_model|>weather<|content_invoke_tool_json|>{"name":"weather","args":{"city":"Rom","days":%s}}<|end_message|>',
    "muse_glimmer": ' to=weather<|message|><atem:function_calls>\n<atem:invoke name="weather">\n<atem:parameter name="city">Rom'
    '</atem:parameter>\n<atem:parameter name="days">%s</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>',
    "gemma4": '<|tool_call>call:weather{city:<|"|>Rom<|"|>,days:%s}<tool_call|>',
}


@pytest.mark.parametrize("name", CALLED)
def test_calls_of_many_spellings(name: str) -> None:
    at = bench(name)
    assert taken(name, CALLED[name] % "3", TOOLS)
    assert not taken(name, CALLED[name] % "12", TOOLS)
    ids = at.tokenizer.encode(CALLED[name] % "3", add_special_tokens=False)
    assert [json.loads(call.arguments) for call in at.read(ids, at.options()).calls] == [{"city": "Rom", "days": 3}]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "pattern": ("gemma4", closed(code={"type": "string", "pattern": "^a$"}), "the argument 'code' of 'f' can't be held"),
    "all": ("qwen3_coder", {**WEATHER, "minProperties": 1}, "'minProperties' is said of all of them"),
    "name": ("qwen3_coder", closed(**{"a>b": {"type": "null"}}), "its name can't be written"),
    "cycle": ("pythonic", {**closed(a={"$ref": "#/$defs/a"}), "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}}, "refers to itself"),
    "mixed": ("glm45", closed(a={"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}), "next to any string"),
    "enum": ("qwen3_coder", closed(a={"enum": ["true", False]}), "'true' would be read as True"),
    "object": ("gemma4", closed(a={"type": "object"}), "an object needs properties"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_spelling_can_not_be_held_to_is_refused(case: str) -> None:
    name, schema, message = REFUSED[case]
    with pytest.raises(InvalidRequestError, match=message):
        strict_calls(bench(name).format, bench(name).options((Tool("f", schema, True),)))


def test_a_required_argument_without_a_schema_is_written() -> None:
    call = "<tool_call>\n<function=f>\n%s</function>\n</tool_call>"
    tools = (Tool("f", {"type": "object", "required": ["x"]}, True),)
    assert not taken("qwen3_coder", call % "", tools)
    assert taken("qwen3_coder", call % "<parameter=x>\n1\n</parameter>\n", tools)
