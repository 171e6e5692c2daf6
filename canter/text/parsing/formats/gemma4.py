"""Gemma 4: thoughts in a channel, calls in a syntax of their own."""

from __future__ import annotations

from canter.text.parsing.args.brace_body import BraceArguments
from canter.text.parsing.format import CONTENT, NAME, REASONING, SKIP, Calls, Detection, Family, Rule, State, Thoughts, never

GEMMA4 = Calls(
    states={"PREAMBLE": SKIP, "NAME": NAME, "ARGUMENTS": State("body", body=BraceArguments)},
    rules=(
        Rule("CONTENT REASONING ARGUMENTS", "<|tool_call>", "PREAMBLE"),
        Rule("PREAMBLE", "call:", "NAME"),
        Rule("NAME", "{", "ARGUMENTS", keeps=True),
        Rule("PREAMBLE ARGUMENTS CONTENT", "<tool_call|>", "CONTENT"),
    ),
    preserved=('<|"|>',),
)

# The channel's name is the first line of the thought. Models forget its marker at the very beginning.
_THOUGHTS = Thoughts(
    starts=("<|channel>",),
    ends=("<channel|>",),
    opens=never,
    initial="BEGINNING",
    states={"CHANNEL": State("skip", on_text=REASONING), "BEGINNING": State("content", on_text=CONTENT)},
    rules=(
        Rule("CONTENT BEGINNING REASONING CHANNEL", "<|channel>", "CHANNEL"),
        Rule("CHANNEL", "thought\n", REASONING),
        Rule("CHANNEL", "thought", REASONING),
        Rule("CHANNEL", "<channel|>", CONTENT),
        Rule("BEGINNING", "thought\n", REASONING),
    ),
)

FAMILY = Family(
    calls={"gemma4": GEMMA4},
    thoughts={"gemma4": _THOUGHTS},
    detect=(Detection(calls="gemma4", thoughts="gemma4", template=("<|tool_call>", "<|channel>")),),
)
