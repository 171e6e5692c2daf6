"""GLM-4.5 to GLM-5, Poolside, Ling 3: a name, then keys and values between tokens of their own."""

from __future__ import annotations

from dataclasses import replace

from canter.text.parsing.argument_tags import WrittenArguments
from canter.text.parsing.call_tags import WrittenCalls
from canter.text.parsing.format import (
    GAP,
    KEY,
    NAME,
    VALUE,
    Calls,
    Detection,
    Family,
    Named,
    Rule,
    Thoughts,
    on_unless_off,
    plain_name,
)  # fmt: skip
from canter.text.parsing.formats.kimi import thinks

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
# Poolside's models open their thoughts themselves where the prompt doesn't.
POOLSIDE_THOUGHTS = replace(THOUGHTS, needs_opening=True)


def _read_name(text: str) -> Named | None:
    r"""A name, after which Ling writes a line break, or the two characters `\n`, or nothing."""
    return plain_name(text.strip().removesuffix("\\n"))


LING3 = replace(GLM, states={**GLM.states, "NAME": replace(NAME, read_name=_read_name)})

FAMILY = Family(
    calls={"glm45": GLM, "glm47": GLM, "poolside_v1": GLM, "ling3": LING3},
    thoughts={"glm45": THOUGHTS, "glm47": THOUGHTS, "poolside_v1": POOLSIDE_THOUGHTS, "ling3": Thoughts(enabled=thinks)},
    detect=(
        Detection(calls="glm45", thoughts="glm45", template=("<tool_call>", "<arg_key>", "<arg_value>")),
        Detection(calls="poolside_v1", thoughts="poolside_v1", template=("<tool_call>", "<arg_key>", "<arg_value>", "<assistant>")),
    ),
)
