"""GLM-4.5 to GLM-5: a name, then keys and values between tokens of their own."""

from __future__ import annotations

from canter.text.parsing.call_tags import WrittenArguments, WrittenCalls
from canter.text.parsing.format import GAP, KEY, NAME, VALUE, Calls, Detection, Family, Rule, Thoughts, on_unless_off

GLM = Calls(
    states={"NAME": NAME, "ARGUMENTS": GAP, "KEY": KEY, "VALUE": VALUE},
    rules=(
        Rule("CONTENT REASONING ARGUMENTS VALUE", "<tool_call>", "NAME"),
        Rule("NAME ARGUMENTS VALUE", "<arg_key>", "KEY"),
        Rule("KEY", "</arg_key>", "ARGUMENTS"),
        Rule("KEY ARGUMENTS", "<arg_value>", "VALUE"),
        Rule("VALUE", "</arg_value>", "ARGUMENTS"),
        Rule("NAME ARGUMENTS VALUE", "</tool_call>", "CONTENT"),
    ),
    written=WrittenCalls(
        "<tool_call>",
        lambda name: f"<tool_call>{name}\n",
        "</tool_call>",
        arguments=WrittenArguments(
            "<arg_key>",
            "</arg_key>\n<arg_value>",
            "</arg_value>\n",
            ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_value>"),
        ),
    ),
)
THOUGHTS = Thoughts(enabled=on_unless_off("enable_thinking"))

FAMILY = Family(
    calls={"glm45": GLM, "glm47": GLM},
    thoughts={"glm45": THOUGHTS, "glm47": THOUGHTS},
    detect=(Detection(calls="glm45", thoughts="glm45", template=("<tool_call>", "<arg_key>", "<arg_value>")),),
)
