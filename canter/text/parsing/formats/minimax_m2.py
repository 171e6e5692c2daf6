"""MiniMax M2: XML with the names as attributes, in quotes or without."""

from __future__ import annotations

from canter.text.parsing.call_tags import WrittenArguments, WrittenCalls
from canter.text.parsing.format import GAP, KEY, NAME, SKIP, Calls, Detection, Family, Rule, State, Thoughts, never

_INVOKE = ('<invoke name="', "<invoke name='", "<invoke name=")
_PARAMETER = ('<parameter name="', "<parameter name='", "<parameter name=")
_CLOSE = ('">', "'>", ">")
_START, _END = "<minimax:tool_call>", "</minimax:tool_call>"

MINIMAX_M2 = Calls(
    states={
        "PREAMBLE": SKIP,
        "NAME": NAME,
        "PARAMETERS": GAP,
        "KEY": KEY,
        "VALUE": State("value", trim="newline"),
        "BETWEEN": State("skip", on_text="CONTENT"),
    },
    rules=(
        Rule("CONTENT REASONING BETWEEN PARAMETERS VALUE", _START, "PREAMBLE"),
        *(Rule("CONTENT PREAMBLE BETWEEN PARAMETERS", invoke, "NAME") for invoke in _INVOKE),
        *(Rule("NAME", close, "PARAMETERS") for close in _CLOSE),
        *(Rule("PARAMETERS VALUE", parameter, "KEY") for parameter in _PARAMETER),
        *(Rule("KEY", close, "VALUE") for close in _CLOSE),
        Rule("VALUE", "</parameter>", "PARAMETERS"),
        Rule("NAME PARAMETERS VALUE", "</invoke>", "BETWEEN"),
        Rule("PREAMBLE BETWEEN PARAMETERS VALUE CONTENT", _END, "CONTENT"),
    ),
    written=WrittenCalls(
        _START,
        lambda name: f'\n<invoke name="{name}">\n',
        "</invoke>",
        section=f"\n{_END}",
        arguments=WrittenArguments(
            '<parameter name="', '">', "</parameter>\n", ("</parameter>", "<parameter name=", "</invoke>", _START, _END)
        ),
    ),
)

FAMILY = Family(
    calls={"minimax_m2": MINIMAX_M2, "minimax": MINIMAX_M2},
    thoughts={
        "minimax_m2": Thoughts(),
        # Thoughts stay in the content; the marker that the prompt has written is put back before them.
        "minimax_m2_append_think": Thoughts((), (), enabled=never, prefix="<think>"),
    },
    detect=(Detection(calls="minimax_m2", thoughts="minimax_m2", template=("minimax:tool_call", "<invoke name=")),),
)
