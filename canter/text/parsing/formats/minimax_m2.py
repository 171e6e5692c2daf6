"""MiniMax M2: XML with the names as attributes, in quotes or without."""

from __future__ import annotations

from canter.text.parsing.argument_tags import WrittenArguments
from canter.text.parsing.call_tags import WrittenCalls
from canter.text.parsing.format import GAP, KEY, NAME, SKIP, Calls, Detection, Family, Rule, State, Thoughts, never

# The three ways to quote, the longest first: the names of a function and of a parameter, and the end of either.
_INVOKE = ('<invoke name="', "<invoke name='", "<invoke name=")
_PARAMETER = ('<parameter name="', "<parameter name='", "<parameter name=")
_CLOSE = ('">', "'>", ">")


def invoke_calls(start: str, end: str, unmarked: bool = False) -> Calls:
    """`<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>` between markers. `unmarked`: in content an
    element counts without one, too."""
    states = "PREAMBLE BETWEEN PARAMETERS" + (" CONTENT" if unmarked else "")
    arguments = WrittenArguments('<parameter name="', '">', "</parameter>\n", ("</parameter>", "<parameter name=", "</invoke>", start, end))
    bare = WrittenCalls("<invoke name=", lambda name: f'<invoke name="{name}">\n', "</invoke>", arguments=arguments)
    return Calls(
        states={
            "PREAMBLE": SKIP,
            "NAME": NAME,
            "PARAMETERS": GAP,
            "KEY": KEY,
            "VALUE": State("value", trim="newline"),
            "BETWEEN": State("skip", on_text="CONTENT"),
        },
        rules=(
            Rule("CONTENT REASONING BETWEEN PARAMETERS VALUE", start, "PREAMBLE"),
            *(Rule(states, invoke, "NAME") for invoke in _INVOKE),
            *(Rule("NAME", close, "PARAMETERS") for close in _CLOSE),
            *(Rule("PARAMETERS VALUE", parameter, "KEY") for parameter in _PARAMETER),
            *(Rule("KEY", close, "VALUE") for close in _CLOSE),
            Rule("VALUE", "</parameter>", "PARAMETERS"),
            Rule("NAME PARAMETERS VALUE", "</invoke>", "BETWEEN"),
            Rule("PREAMBLE BETWEEN PARAMETERS VALUE CONTENT", end, "CONTENT"),
        ),
        written=WrittenCalls(
            start,
            lambda name: f'\n<invoke name="{name}">\n',
            "</invoke>",
            section=f"\n{end}",
            arguments=arguments,
            also=(bare,) if unmarked else (),
        ),
    )


MINIMAX_M2 = invoke_calls("<minimax:tool_call>", "</minimax:tool_call>", unmarked=True)

FAMILY = Family(
    calls={"minimax_m2": MINIMAX_M2},
    thoughts={
        "minimax_m2": Thoughts(),
        # Thoughts stay in the content; the marker that the prompt has written is put back before them.
        "minimax_m2_append_think": Thoughts((), (), enabled=never, prefix="<think>"),
    },
    detect=(Detection(calls="minimax_m2", thoughts="minimax_m2", template=("minimax:tool_call", "<invoke name=")),),
)
