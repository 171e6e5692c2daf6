"""Calls as XML with one element a parameter: Qwen3-Coder, Qwen3.5, Nemotron 3, Seed-OSS; and the thoughts of these models."""

from __future__ import annotations

from canter.text.parsing.argument_tags import WrittenArguments
from canter.text.parsing.call_tags import WrittenCalls
from canter.text.parsing.format import GAP, KEY, NAME, SKIP, Calls, Detection, Family, Rule, State, Thoughts, on_unless_off
from canter.text.parsing.options import ParseOptions


def xml_calls(start: str, end: str, separators: str = "=") -> Calls:
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>` between markers, which may be missing before a function.

    `separators`: what may stand between an element and its name; only the equal sign tells a function that has no marker before it.
    """
    arguments = WrittenArguments("<parameter=", ">\n", "\n</parameter>\n", ("</parameter>", "<parameter=", "</function>", start, end))
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
            Rule("CONTENT", "<function=", "NAME"),
            *(Rule("PREAMBLE BETWEEN PARAMETERS", f"<function{separator}", "NAME") for separator in separators),
            Rule("NAME", ">", "PARAMETERS"),
            Rule("NAME PARAMETERS VALUE", "</function>", "BETWEEN"),
            *(Rule("PARAMETERS VALUE", f"<parameter{separator}", "KEY") for separator in separators),
            Rule("KEY", ">", "VALUE"),
            Rule("VALUE", "</parameter>", "PARAMETERS"),
            Rule("PREAMBLE BETWEEN PARAMETERS VALUE CONTENT", end, "CONTENT"),
        ),
        written=WrittenCalls(
            start,
            lambda name: f"{start}\n<function={name}>\n",
            f"</function>\n{end}",
            arguments=arguments,
            also=(WrittenCalls("<function=", lambda name: f"<function={name}>\n", "</function>", arguments=arguments),),
        ),
    )


QWEN3_XML = xml_calls("<tool_call>", "</tool_call>")
SEED_OSS = xml_calls("<seed:tool_call>", "</seed:tool_call>")

QWEN3_THOUGHTS = Thoughts(enabled=on_unless_off("enable_thinking"), needs_opening=True, trims_end=False)


def _needs_content(options: ParseOptions) -> bool:
    return options.template_kwargs.get("enable_thinking") is False or bool(options.template_kwargs.get("force_nonempty_content"))


def _seed_thinks(options: ParseOptions) -> bool:
    return options.template_kwargs.get("thinking_budget") != 0


FAMILY = Family(
    calls={"qwen3_coder": QWEN3_XML, "qwen3_xml": QWEN3_XML, "mimo": QWEN3_XML, "seed_oss": SEED_OSS},
    thoughts={
        "qwen3": QWEN3_THOUGHTS,
        "mimo": QWEN3_THOUGHTS,
        "nemotron_v3": Thoughts(enabled=on_unless_off("enable_thinking"), answers=_needs_content),
        "seed_oss": Thoughts(("<seed:think>",), ("</seed:think>",), enabled=_seed_thinks),
    },
    detect=(
        Detection(calls="qwen3_coder", template=("<tool_call>", "<function=", "<parameter=")),
        Detection(thoughts="qwen3", template=("enable_thinking", "<think>", "<|im_start|>")),
        Detection(calls="seed_oss", thoughts="seed_oss", template=("<seed:tool_call>", "<seed:think>")),
    ),
)
