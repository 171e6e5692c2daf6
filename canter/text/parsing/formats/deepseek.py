"""DeepSeek V3, R1 and V3.1: JSON between tokens of their own."""

from __future__ import annotations

from collections.abc import Callable

from canter.text.parsing.args.json_body import JsonArguments
from canter.text.parsing.call_tags import WrittenCalls
from canter.text.parsing.format import (
    NAME,
    SKIP,
    Calls,
    Detection,
    Family,
    Named,
    Rule,
    State,
    Thoughts,
    off_unless_on,
    plain_name,
)

_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def _read_typed_name(text: str) -> Named | None:
    """`function`, the separator, the name."""
    _, separator, name = text.partition(_SEPARATOR)
    return plain_name(name) if separator else None


def _section(name: State, arguments: str, begin: Callable[[str], str], end: str, separator: str = "") -> Calls:
    """`arguments`: what parts a call's header from its arguments; `begin`, `end`: what the model writes around these."""
    return Calls(
        states={
            "SECTION": SKIP,
            "NAME": name,
            "ARGUMENTS": State("body", body=JsonArguments),
            "BETWEEN": State("skip", on_text="CONTENT"),
        },
        rules=(
            Rule("CONTENT REASONING", _SECTION, "SECTION"),
            Rule("CONTENT SECTION BETWEEN ARGUMENTS", _CALL, "NAME"),
            Rule("NAME", arguments, "ARGUMENTS"),
            Rule("ARGUMENTS", _CALL_END, "BETWEEN"),
            Rule("CONTENT", _CALL_END, "CONTENT"),
            Rule("SECTION BETWEEN ARGUMENTS CONTENT", _SECTION_END, "CONTENT"),
        ),
        written=WrittenCalls(_SECTION, begin, end, section=_SECTION_END, separator=separator),
    )


def _v3_header(name: str) -> str:
    return f"{_CALL}function{_SEPARATOR}{name}\n```json\n"


V3 = _section(State("name", read_name=_read_typed_name), "```json", _v3_header, f"\n```{_CALL_END}", "\n")
V31 = _section(NAME, _SEPARATOR, lambda name: f"{_CALL}{name}{_SEPARATOR}", _CALL_END)

FAMILY = Family(
    calls={"deepseek_v3": V3, "deepseek_v31": V31},
    thoughts={"deepseek_v3": Thoughts(enabled=off_unless_on("thinking", "enable_thinking"))},
    detect=(
        Detection(calls="deepseek_v3", template=(_CALL, "```json")),
        Detection(calls="deepseek_v3", thoughts="deepseek_r1", template=(_CALL, "```json", "<｜Assistant｜><think>")),
        Detection(calls="deepseek_v31", template=(_CALL,), without=("```json",)),
        Detection(calls="deepseek_v31", thoughts="deepseek_v3", template=(_CALL, "thinking", "</think>"), without=("```json",)),
    ),
)
