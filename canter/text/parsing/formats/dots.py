"""dots: MiniMax M2's XML, or a JSON object, between markers of its own."""

from __future__ import annotations

from dataclasses import replace

from canter.text.parsing.args.json_body import JsonCalls
from canter.text.parsing.format import Calls, Detection, Family, Rule, State
from canter.text.parsing.formats.minimax_m2 import invoke_calls

_START, _END = "<dots_function_call>", "</dots_function_call>"
_ELEMENTS = invoke_calls(_START, _END)

DOTS: Calls = replace(
    _ELEMENTS,
    states={**_ELEMENTS.states, "JSON": State("body", body=JsonCalls, on_text="CONTENT")},
    rules=(
        *_ELEMENTS.rules,
        *(Rule("PREAMBLE", opener, "JSON", keeps=True) for opener in "[{"),
        Rule("JSON", _START, "PREAMBLE"),
        Rule("JSON", _END, "CONTENT"),
    ),
)

FAMILY = Family(
    calls={"dots": DOTS},
    detect=(Detection(calls="dots", template=(_START,)),),
)
