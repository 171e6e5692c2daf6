"""Calls written as Python: Llama 3.2 and 4, Olmo 3, LFM2."""

from __future__ import annotations

from functools import partial

from canter.text.parsing.args.python_body import PythonCalls
from canter.text.parsing.format import Calls, Detection, Family, Rule, State

_START = State("content", on_text="CONTENT")
_UNMARKED = State("body", body=partial(PythonCalls, declared_only=True), on_text="CONTENT")
_MARKED = State("body", body=PythonCalls, on_text="CONTENT")

PYTHONIC = Calls(
    states={"START": _START, "UNMARKED": _UNMARKED},
    rules=(Rule("START", "[", "UNMARKED", keeps=True),),
    initial="START",
)
LLAMA4_PYTHONIC = Calls(
    states={"START": _START, "UNMARKED": _UNMARKED, "MARKED": _MARKED},
    rules=(
        Rule("START", "[", "UNMARKED", keeps=True),
        Rule("CONTENT REASONING UNMARKED MARKED", "<|python_start|>", "MARKED"),
        Rule("CONTENT UNMARKED MARKED", "<|python_end|>", "CONTENT"),
    ),
    initial="START",
)


def _between(start: str, end: str) -> Calls:
    return Calls(
        states={"CALLS": State("body", body=PythonCalls)},
        rules=(Rule("CONTENT REASONING CALLS", start, "CALLS"), Rule("CONTENT CALLS", end, "CONTENT")),
    )


FAMILY = Family(
    calls={
        "pythonic": PYTHONIC,
        "llama4_pythonic": LLAMA4_PYTHONIC,
        "olmo3": _between("<function_calls>", "</function_calls>"),
        "lfm2": _between("<|tool_call_start|>", "<|tool_call_end|>"),
    },
    detect=(
        Detection(calls="llama4_pythonic", template=("<|python_start|>", "<|header_start|>")),
        Detection(calls="pythonic", template=("[func_name1(params_name1=params_value1",)),
        Detection(calls="olmo3", template=("<function_calls>",), without=("DSML",)),
        Detection(calls="lfm2", template=("<|tool_call_start|>",)),
    ),
)
