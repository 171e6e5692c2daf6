"""Calls written as Python: Llama 3.2 and 4, Olmo 3, LFM2."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from canter.text.parsing.args.python_body import PythonCalls
from canter.text.parsing.argument_tags import SpelledArguments
from canter.text.parsing.call_tags import BLANK, Unmarked, WrittenCalls
from canter.text.parsing.format import Calls, Detection, Family, Rule, State
from canter.text.parsing.options import Tool

_START = State("content", on_text="CONTENT")
_UNMARKED = State("body", body=partial(PythonCalls, declared_only=True), on_text="CONTENT")
_MARKED = State("body", body=PythonCalls, on_text="CONTENT")

_NESTED = r"[^()\"']|\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"
_ARGUMENTS = SpelledArguments(
    key=lambda name: (f"{name}=", ""),
    separator=", ",
    words=("True", "False", "None"),
    typed=False,
    entry=lambda name: (f"{json.dumps(name, ensure_ascii=False)}: ", ""),
    any_arguments=rf"(?s:(?:{_NESTED}|\((?:{_NESTED})*\))*)",
)


def _written(start: str, opening: str, end: str, separator: str = ", ") -> WrittenCalls:
    opens = (f"{start}{opening}",)
    return WrittenCalls(start, lambda name: f"{name}(", ")", section=end, opens=opens, separator=separator, arguments=_ARGUMENTS)


def _text_like(tools: Sequence[Tool]) -> str:
    names = "|".join(re.escape(tool.name) for tool in tools)
    return rf"(?s:{BLANK}*\[{BLANK}*(?:{names})\(.*)"


_UNMARKED_CALLS = Unmarked("[", "]", _text_like)

PYTHONIC = Calls(
    states={"START": _START, "UNMARKED": _UNMARKED},
    rules=(Rule("START", "[", "UNMARKED", keeps=True),),
    initial="START",
    written=replace(_written("", "[", "]"), unmarked=_UNMARKED_CALLS),
)
LLAMA4_PYTHONIC = Calls(
    states={"START": _START, "UNMARKED": _UNMARKED, "MARKED": _MARKED},
    rules=(
        Rule("START", "[", "UNMARKED", keeps=True),
        Rule("CONTENT REASONING UNMARKED MARKED", "<|python_start|>", "MARKED"),
        Rule("CONTENT UNMARKED MARKED", "<|python_end|>", "CONTENT"),
    ),
    initial="START",
    written=replace(_written("<|python_start|>", "[", "]<|python_end|>"), unmarked=_UNMARKED_CALLS),
)


def _between(start: str, end: str, written: WrittenCalls) -> Calls:
    return Calls(
        states={"CALLS": State("body", body=PythonCalls)},
        rules=(Rule("CONTENT REASONING CALLS", start, "CALLS"), Rule("CONTENT CALLS", end, "CONTENT")),
        written=written,
    )


FAMILY = Family(
    calls={
        "pythonic": PYTHONIC,
        "llama4_pythonic": LLAMA4_PYTHONIC,
        "olmo3": _between("<function_calls>", "</function_calls>", _written("<function_calls>", "\n", "\n</function_calls>", "\n")),
        "lfm2": _between("<|tool_call_start|>", "<|tool_call_end|>", _written("<|tool_call_start|>", "[", "]<|tool_call_end|>")),
    },
    detect=(
        Detection(calls="llama4_pythonic", template=("<|python_start|>", "<|header_start|>")),
        Detection(calls="pythonic", template=("[func_name1(params_name1=params_value1",)),
        Detection(calls="olmo3", template=("<function_calls>",), without=("DSML",)),
        Detection(calls="lfm2", template=("<|tool_call_start|>",)),
    ),
)
