"""Llama 3 and 4: calls are JSON objects that make up the whole answer, with or without a token before them."""

from __future__ import annotations

from canter.text.parsing.args.json_body import JsonCalls
from canter.text.parsing.emitter import Emitter
from canter.text.parsing.format import Calls, Detection, Family, Rule, State


def _unmarked(emitter: Emitter) -> JsonCalls:
    return JsonCalls(emitter, separators=";,", declared_only=True)


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
)

FAMILY = Family(
    calls={"llama3_json": LLAMA3_JSON, "llama4_json": LLAMA4_JSON},
    detect=(Detection(calls="llama3_json", template=("<|python_tag|>", '"parameters"')),),
)
