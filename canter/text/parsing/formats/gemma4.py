"""Gemma 4 and FunctionGemma: calls in a syntax of their own; thoughts in a channel."""

from __future__ import annotations

from functools import partial

from canter.text.parsing.args.brace_body import BraceArguments
from canter.text.parsing.argument_tags import SpelledArguments
from canter.text.parsing.call_tags import WrittenCalls
from canter.text.parsing.format import CONTENT, NAME, REASONING, SKIP, Calls, Detection, Family, Rule, State, Thoughts, never


def _around_key(name: str) -> tuple[str, str]:
    return f"{name}:", ""


def _brace_calls(start: str, end: str, quote: str) -> Calls:
    arguments = SpelledArguments(_around_key, ",", quotes=(quote, quote), never=(quote, start, end))
    return Calls(
        states={"PREAMBLE": SKIP, "NAME": NAME, "ARGUMENTS": State("body", body=partial(BraceArguments, quote=quote))},
        rules=(
            Rule("CONTENT REASONING ARGUMENTS", start, "PREAMBLE"),
            Rule("PREAMBLE", "call:", "NAME"),
            Rule("NAME", "{", "ARGUMENTS", keeps=True),
            Rule("PREAMBLE ARGUMENTS CONTENT", end, "CONTENT"),
        ),
        preserved=(quote,),
        written=WrittenCalls(start, lambda name: f"{start}call:{name}{{", f"}}{end}", arguments=arguments),
    )


GEMMA4 = _brace_calls("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _brace_calls("<start_function_call>", "<end_function_call>", "<escape>")

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
    calls={"gemma4": GEMMA4, "functiongemma": FUNCTION_GEMMA},
    thoughts={"gemma4": _THOUGHTS},
    detect=(
        Detection(calls="gemma4", thoughts="gemma4", template=("<|tool_call>", "<|channel>")),
        Detection(calls="functiongemma", template=("<start_function_call>",)),
    ),
)
