"""Kimi K2 to K2.7: JSON between tokens of their own, under headers that are the calls' ids."""

from __future__ import annotations

import re

from canter.text.parsing.args.json_body import JsonArguments
from canter.text.parsing.call_tags import WrittenCalls
from canter.text.parsing.emitter import kimi_id
from canter.text.parsing.format import DROP, SKIP, Calls, Detection, Family, Named, Rule, State, Thoughts, kwarg
from canter.text.parsing.options import ParseOptions

_HEADER = re.compile(r"(?:functions\.)?([^\s:]{1,256}):\d+")


def read_header(text: str) -> Named | None:
    """`functions.NAME:NUMBER`, which is the id of the call as it stands."""
    header = text.strip()
    match = _HEADER.fullmatch(header)
    return Named(match[1], header) if match else None


def thinks(options: ParseOptions) -> bool:
    """Whether the model thinks: off when the template's variables say so and none says otherwise."""
    given = [on for on in (kwarg(options, "thinking"), kwarg(options, "enable_thinking")) if on is not None]
    return any(given) or not given


KIMI_K2 = Calls(
    states={
        "SECTION": SKIP,
        "HEADER": State("name", read_name=read_header),
        "ARGUMENTS": State("body", body=JsonArguments),
        "BETWEEN": State("skip", on_text="CONTENT"),
        # Whatever follows the calls is not for the user.
        "DONE": DROP,
    },
    rules=(
        Rule("CONTENT REASONING DONE BETWEEN", "<|tool_calls_section_begin|>", "SECTION"),
        Rule("CONTENT SECTION BETWEEN DONE ARGUMENTS", "<|tool_call_begin|>", "HEADER"),
        Rule("HEADER", "<|tool_call_argument_begin|>", "ARGUMENTS"),
        Rule("ARGUMENTS", "<|tool_call_end|>", "BETWEEN"),
        Rule("CONTENT", "<|tool_call_end|>", "CONTENT"),
        Rule("CONTENT SECTION BETWEEN ARGUMENTS", "<|tool_calls_section_end|>", "DONE"),
    ),
    new_id=kimi_id,
    written=WrittenCalls(
        "<|tool_calls_section_begin|>",
        lambda name: f"<|tool_call_begin|>functions.{name}:",
        "<|tool_call_end|>",
        number="[0-9]{1,4}",
        opening=lambda _: "<|tool_call_argument_begin|>",
        section="<|tool_calls_section_end|>",
    ),
)

FAMILY = Family(
    calls={"kimi_k2": KIMI_K2},
    thoughts={"kimi_k2": Thoughts(enabled=thinks)},
    detect=(
        Detection(calls="kimi_k2", template=("<|tool_calls_section_begin|>",)),
        Detection(calls="kimi_k2", thoughts="kimi_k2", template=("<|tool_calls_section_begin|>", "<think>")),
    ),
)
