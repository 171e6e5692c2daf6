"""Llama 3 and 4: calls are JSON objects that make up the whole answer, with or without a token before them."""

from __future__ import annotations

from dataclasses import replace

from canter.text.parsing.args.json_body import JsonCalls
from canter.text.parsing.call_tags import Unmarked, WrittenCalls, json_begin, objects_like
from canter.text.parsing.emitter import Emitter
from canter.text.parsing.format import Calls, Detection, Family, Rule, State


def _unmarked(emitter: Emitter) -> JsonCalls:
    return JsonCalls(emitter, separators=";,", declared_only=True)


_UNMARKED_CALLS = Unmarked("", "", objects_like(""))


def _begins(name: str) -> tuple[str, ...]:
    """The form of the prompt's example, and that in which the prompt lists the functions."""
    return tuple(json_begin(before, ', "parameters": ')(name) for before in ('{"name": ', '{"type": "function", "name": '))


def _written(start: str, end: str) -> WrittenCalls:
    return WrittenCalls(start, _begins, "}", section=end, separator="; ")


LLAMA3_JSON = Calls(
    states={
        "START": State("content", on_text="CONTENT"),
        "MARKED": State("body", body=JsonCalls, on_text="CONTENT"),
        "UNMARKED": State("body", body=_unmarked, on_text="CONTENT"),
    },
    rules=(
        Rule("CONTENT REASONING UNMARKED MARKED", "<|python_tag|>", "MARKED"),
        Rule("START", "{", "UNMARKED", keeps=True),
    ),
    initial="START",
    written=replace(_written("<|python_tag|>", ""), unmarked=_UNMARKED_CALLS),
)

# Llama 4 has tokens of its own around what is no prose.
LLAMA4_JSON = Calls(
    states=LLAMA3_JSON.states,
    rules=(
        *LLAMA3_JSON.rules,
        Rule("CONTENT REASONING UNMARKED MARKED", "<|python_start|>", "MARKED"),
        Rule("CONTENT UNMARKED MARKED", "<|python_end|>", "CONTENT"),
    ),
    initial="START",
    written=replace(
        _written("<|python_start|>", "<|python_end|>"),
        unmarked=_UNMARKED_CALLS,
        also=(_written("<|python_tag|>", ""),),
    ),
)

FAMILY = Family(
    calls={"llama3_json": LLAMA3_JSON, "llama4_json": LLAMA4_JSON},
    detect=(Detection(calls="llama3_json", template=("<|python_tag|>", '"parameters"')),),
)
