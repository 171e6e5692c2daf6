"""Calls as JSON objects between markers: Hermes, Qwen2.5, Qwen3, Longcat."""

from __future__ import annotations

from canter.text.parsing.args.json_body import JsonCalls
from canter.text.parsing.call_tags import WrittenCalls, quoted
from canter.text.parsing.format import Calls, Detection, Family, Rule, State


def _marked(start: str, end: str) -> Calls:
    return Calls(
        states={"CALLS": State("body", body=JsonCalls)},
        rules=(
            Rule("CONTENT REASONING CALLS", start, "CALLS"),
            Rule("CALLS", end, "CONTENT"),
        ),
        written=WrittenCalls(start, lambda name: f'{start}\n{{"name": {quoted(name)}, "arguments": ', f"}}\n{end}"),
    )


HERMES = _marked("<tool_call>", "</tool_call>")
LONGCAT = _marked("<longcat_tool_call>", "</longcat_tool_call>")

FAMILY = Family(
    calls={"hermes": HERMES, "qwen3_json": HERMES, "longcat": LONGCAT},
    detect=(
        Detection(calls="hermes", template=("<tool_call>", '"name"', '"arguments"'), without=("<function=", "<arg_key>")),
        Detection(calls="longcat", template=("<longcat_tool_call>",)),
    ),
)
