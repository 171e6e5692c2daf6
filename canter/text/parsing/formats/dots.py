"""dots: XML with the names as attributes, or a JSON object, between markers."""

from __future__ import annotations

from canter.text.parsing.args.json_body import JsonCalls
from canter.text.parsing.format import GAP, KEY, NAME, SKIP, Calls, Detection, Family, Rule, State
from canter.text.parsing.formats.minimax_m2 import CLOSE, INVOKE, PARAMETER

_START, _END = "<dots_function_call>", "</dots_function_call>"

DOTS = Calls(
    states={
        "SECTION": SKIP,
        "JSON": State("body", body=JsonCalls, on_text="CONTENT"),
        "NAME": NAME,
        "PARAMETERS": GAP,
        "KEY": KEY,
        "VALUE": State("value", trim="newline"),
        "BETWEEN": State("skip", on_text="CONTENT"),
    },
    rules=(
        Rule("CONTENT REASONING BETWEEN PARAMETERS VALUE JSON", _START, "SECTION"),
        *(Rule("SECTION", opener, "JSON", keeps=True) for opener in "[{"),
        *(Rule("SECTION BETWEEN PARAMETERS", invoke, "NAME") for invoke in INVOKE),
        *(Rule("NAME", close, "PARAMETERS") for close in CLOSE),
        *(Rule("PARAMETERS VALUE", parameter, "KEY") for parameter in PARAMETER),
        *(Rule("KEY", close, "VALUE") for close in CLOSE),
        Rule("VALUE", "</parameter>", "PARAMETERS"),
        Rule("PARAMETERS VALUE", "</invoke>", "BETWEEN"),
        Rule("SECTION BETWEEN PARAMETERS VALUE JSON CONTENT", _END, "CONTENT"),
    ),
)

FAMILY = Family(
    calls={"dots": DOTS},
    detect=(Detection(calls="dots", template=(_START,)),),
)
