"""MiniCPM 5: XML with the names as attributes, values as text or CDATA."""

from __future__ import annotations

from canter.text.parsing.argument_tags import WrittenArguments
from canter.text.parsing.call_tags import WrittenCalls
from canter.text.parsing.format import GAP, KEY, NAME, Calls, Detection, Family, Rule, State

MINICPM5 = Calls(
    states={
        "NAME": NAME,
        "PARAMETERS": GAP,
        "KEY": KEY,
        "VALUE": State("value", trim="newline"),
        "CDATA": State("value"),
        "BETWEEN": State("skip", on_text="CONTENT"),
    },
    rules=(
        Rule("CONTENT REASONING BETWEEN PARAMETERS VALUE", '<function name="', "NAME"),
        Rule("NAME", '">', "PARAMETERS"),
        Rule("PARAMETERS VALUE", '<param name="', "KEY"),
        Rule("KEY", '">', "VALUE"),
        *(Rule("KEY", f'">{blank}<![CDATA[', "CDATA") for blank in ("", "\n")),
        Rule("VALUE", "</param>", "PARAMETERS"),
        Rule("CDATA", "]]>", "PARAMETERS"),
        Rule("PARAMETERS VALUE", "</function>", "BETWEEN"),
    ),
    written=WrittenCalls(
        '<function name="',
        lambda name: f'<function name="{name}">',
        "</function>",
        arguments=WrittenArguments(
            '<param name="', '">', "</param>", ("</param>", '<param name="', "</function>", '<function name="', "<![CDATA[")
        ),
    ),
)

FAMILY = Family(
    calls={"minicpm5": MINICPM5},
    detect=(Detection(calls="minicpm5", template=('<function name="', '<param name="')),),
)
