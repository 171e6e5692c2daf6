"""Step 3: XML within tokens like DeepSeek's; Step 3.5: Qwen's XML, with blanks for some of its equal signs."""

from __future__ import annotations

from canter.text.parsing.argument_tags import WrittenArguments
from canter.text.parsing.call_tags import WrittenCalls
from canter.text.parsing.format import GAP, KEY, NAME, SKIP, Calls, Detection, Family, Rule, State, Thoughts
from canter.text.parsing.formats.qwen3 import xml_calls
from canter.text.parsing.formats.think import DEEPSEEK_R1

_INSIDE = "PARAMETERS VALUE"

STEP3 = Calls(
    states={
        "SECTION": SKIP,
        "NAME": NAME,
        "PARAMETERS": GAP,
        "KEY": KEY,
        "VALUE": State("value", trim="newline"),
        "BETWEEN": State("skip", on_text="CONTENT"),
    },
    rules=(
        Rule("CONTENT REASONING BETWEEN", "<｜tool_calls_begin｜>", "SECTION"),
        # A call's type, which is always this one, stands before its element.
        *(Rule(f"SECTION BETWEEN {_INSIDE}", word, "SECTION") for word in ("<｜tool_call_begin｜>", "<｜tool_sep｜>")),
        Rule("SECTION BETWEEN", "function", "SECTION"),
        Rule(f"SECTION BETWEEN {_INSIDE}", '<steptml:invoke name="', "NAME"),
        Rule("NAME", '">', "PARAMETERS"),
        Rule(_INSIDE, '<steptml:parameter name="', "KEY"),
        Rule("KEY", '">', "VALUE"),
        Rule("VALUE", "</steptml:parameter>", "PARAMETERS"),
        Rule(_INSIDE, "</steptml:invoke>", "BETWEEN"),
        Rule(f"SECTION BETWEEN {_INSIDE}", "<｜tool_call_end｜>", "BETWEEN"),
        Rule(f"SECTION BETWEEN CONTENT {_INSIDE}", "<｜tool_calls_end｜>", "CONTENT"),
    ),
    written=WrittenCalls(
        "<｜tool_calls_begin｜>",
        lambda name: f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n',
        "</steptml:invoke><｜tool_call_end｜>\n",
        section="<｜tool_calls_end｜>",
        opens=("<｜tool_calls_begin｜>\n",),
        arguments=WrittenArguments(
            '<steptml:parameter name="',
            '">',
            "</steptml:parameter>\n",
            ("</steptml:parameter>", '<steptml:parameter name="', "</steptml:invoke>", "<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
        ),
    ),
)

FAMILY = Family(
    calls={"step3": STEP3, "step3p5": xml_calls("<tool_call>", "</tool_call>", separators="= ")},
    thoughts={"step3": DEEPSEEK_R1, "step3p5": Thoughts(trims_start=True)},
    detect=(Detection(calls="step3", thoughts="step3", template=("<steptml:invoke",)),),
)
