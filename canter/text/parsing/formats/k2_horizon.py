"""K2 Horizon: keys and values between tokens of their own, with the values' types where the template asks for them, or JSON."""

from __future__ import annotations

from canter.text.parsing.args.json_body import JsonCalls
from canter.text.parsing.argument_tags import WrittenArguments
from canter.text.parsing.call_tags import WrittenCalls
from canter.text.parsing.format import GAP, KEY, NAME, SKIP, VALUE, Calls, Detection, Family, Rule, State, Thoughts

_INSIDE = "ARGUMENTS VALUE"

# The type of a value is what the schema says already.
K2_HORIZON = Calls(
    states={
        "SECTION": SKIP,
        "CALL": State("skip", on_text="NAME"),
        "JSON": State("body", body=JsonCalls),
        "NAME": NAME,
        "ARGUMENTS": GAP,
        "KEY": KEY,
        "VALUE": VALUE,
        "BETWEEN": State("skip", on_text="CONTENT"),
    },
    rules=(
        Rule(f"CONTENT REASONING BETWEEN JSON {_INSIDE}", "<ifm|tool_calls>", "SECTION"),
        Rule(f"SECTION BETWEEN JSON {_INSIDE}", "<ifm|tool_call>", "CALL"),
        Rule("CALL", "{", "JSON", keeps=True),
        Rule(f"NAME {_INSIDE}", "<ifm|arg_key>", "KEY"),
        Rule("KEY", "</ifm|arg_key>", "ARGUMENTS"),
        Rule("KEY ARGUMENTS", "<ifm|arg_value>", "VALUE"),
        Rule("VALUE", "</ifm|arg_value>", "ARGUMENTS"),
        Rule(f"NAME JSON {_INSIDE}", "</ifm|tool_call>", "BETWEEN"),
        Rule(f"SECTION BETWEEN JSON CONTENT {_INSIDE}", "</ifm|tool_calls>", "CONTENT"),
    ),
    written=WrittenCalls(
        "<ifm|tool_calls>",
        lambda name: f"<ifm|tool_call>{name}",
        "</ifm|tool_call>",
        section="</ifm|tool_calls>",
        separator="\n",
        arguments=WrittenArguments(
            "<ifm|arg_key>",
            "</ifm|arg_key><ifm|arg_value>",
            "</ifm|arg_value>",
            ("<ifm|arg_key>", "</ifm|arg_value>", "<ifm|tool_call>", "</ifm|tool_call>", "<ifm|tool_calls>", "</ifm|tool_calls>"),
        ),
    ),
)

# One pair of markers for each effort.
_MARKERS = ("think", "think_fast", "think_faster")

FAMILY = Family(
    calls={"k2_horizon": K2_HORIZON},
    thoughts={"k2_horizon": Thoughts(tuple(f"<ifm|{name}>" for name in _MARKERS), tuple(f"</ifm|{name}>" for name in _MARKERS))},
    detect=(Detection(calls="k2_horizon", thoughts="k2_horizon", template=("<ifm|tool_calls>",)),),
)
