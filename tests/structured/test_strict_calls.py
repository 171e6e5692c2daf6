"""Grammars of answers that may call strict functions: whatever they let through, the format reads as text and valid calls."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import numpy as np
import pytest

from canter.core.errors import InvalidRequestError
from canter.core.grammar import mask_width
from canter.server.tools import strict_calls
from canter.structured.compiler import GrammarCompiler
from canter.text.parsing.answer import ReadAnswer, gather
from canter.text.parsing.load import load_format
from canter.text.parsing.options import ParseOptions, Tool
from tests.structured.test_real_outputs import closed, valid
from tests.text.parsing.vocabulary import tiny_tokenizer

FORMATS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_json": (),  # the same markers, written with ordinary tokens
    "longcat": ("<longcat_tool_call>", "</longcat_tool_call>"),
    "kimi_k2": (
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "seed_oss": ("<seed:tool_call>", "</seed:tool_call>"),
    "glm45": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
}  # fmt: skip
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


class Bench:
    """A format, its grammar for some tools, and a compiler for its vocabulary."""

    def __init__(self, name: str) -> None:
        self.tokenizer = tiny_tokenizer(FORMATS[name])
        found = load_format(self.tokenizer, None, name)
        assert found is not None
        self.format = found
        self.size = self.tokenizer.vocab_size
        self.eos = self.tokenizer.token_to_id("<|end|>") or 0
        self.compiler = GrammarCompiler(lambda: self.tokenizer.vocabulary(self.size, [self.eos]))
        written = found.written_calls
        assert written is not None
        # What random tokens would hardly ever come to.
        texts = [written.trigger, written.arguments.after if written.arguments is not None else '"']
        self.turns = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]

    def options(self, tools: tuple[Tool, ...] = TOOLS, parallel: bool = True) -> ParseOptions:
        return ParseOptions(tools=tools, tool_choice="auto", parallel_tool_calls=parallel)

    def read(self, token_ids: list[int], options: ParseOptions) -> ReadAnswer:
        parser = self.format.parser(options)
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return gather([*parser.feed(text, token_ids), *parser.finish()])

    def walk(self, rng: random.Random, options: ParseOptions) -> list[int]:
        """An output that the grammar lets through, with a call now and then."""
        wanted = strict_calls(self.format, options)
        assert wanted is not None
        matcher = self.compiler.get(wanted).matcher()
        mask = np.zeros(mask_width(self.size), np.int32)
        output: list[int] = []
        for step in range(3000):
            matcher.fill(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            if not allowed or (matcher.may_end and (step > 150 or rng.random() < 0.15)):
                break
            run = rng.choice(self.turns) if rng.random() < 0.3 else [rng.choice(allowed)]
            taken = matcher.accept(run)
            if taken < len(run):
                matcher.rollback(taken)
            else:
                output += run
        assert matcher.may_end
        return output


@cache
def bench(name: str) -> Bench:
    return Bench(name)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("parallel", [True, False])
def test_every_call_that_may_be_written_is_read_and_obeys(name: str, parallel: bool) -> None:
    rng, at = random.Random(1), bench(name)
    counts = []
    for _ in range(60):
        answer = at.read(at.walk(rng, at.options(parallel=parallel)), at.options(parallel=parallel))
        counts.append(len(answer.calls))
        for call in answer.calls:
            assert call.complete and obeys(json.loads(call.arguments), call.name), call
    assert sum(counts) > 15 and 0 in counts
    assert max(counts) > 1 if parallel else max(counts) == 1


def taken(name: str, text: str, tools: tuple[Tool, ...]) -> bool:
    at = bench(name)
    wanted = strict_calls(at.format, at.options(tools))
    assert wanted is not None
    matcher = at.compiler.get(wanted).matcher()
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
    other = load_format(at.tokenizer, None, "mistral")
    assert other is not None and strict_calls(other, at.options()) is None
