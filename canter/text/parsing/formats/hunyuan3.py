"""Hy3 and Hy4: keys and values between tokens whose names end in a suffix that the tokenizer tells."""

from __future__ import annotations

import re
from functools import partial

from canter.text.parsing.argument_tags import WrittenArguments
from canter.text.parsing.call_tags import WrittenCalls
from canter.text.parsing.format import GAP, KEY, NAME, SKIP, VALUE, Calls, Detection, Family, Rule, State, Thoughts
from canter.text.parsing.options import ParseOptions
from canter.text.tokenizer import Tokenizer

_SUFFIXED = re.compile(r"<(?:think|tool_calls)(:[^<>]{1,64})>")


def token_suffix(tokenizer: Tokenizer) -> str:
    """What the names of this vocabulary's markers end in: nothing, or something like `:opensource`."""
    texts = (tokenizer.id_to_token(token_id) or "" for token_id in sorted(tokenizer.added_token_ids))
    return next((match[1] for match in map(_SUFFIXED.fullmatch, texts) if match), "")


def _calls(tokenizer: Tokenizer, line: str = "\n", separator: str = "tool_sep") -> Calls:
    """`line`: what the model writes between tags; `separator`: the tag behind a name, empty where there is none."""
    suffix = token_suffix(tokenizer)

    def tag(name: str) -> str:
        return f"<{name}{suffix}>"

    arguments = WrittenArguments(
        tag("arg_key"),
        f"{tag('/arg_key')}{line}{tag('arg_value')}",
        f"{tag('/arg_value')}{line}",
        tuple(map(tag, ("arg_key", "/arg_value", "tool_call", "/tool_call", "tool_calls", "/tool_calls"))),
    )
    return Calls(
        states={
            "SECTION": SKIP,
            "NAME": NAME,
            "ARGUMENTS": GAP,
            "KEY": KEY,
            "VALUE": VALUE,
            "BETWEEN": State("skip", on_text="CONTENT"),
        },
        rules=(
            Rule("CONTENT REASONING BETWEEN ARGUMENTS VALUE", tag("tool_calls"), "SECTION"),
            Rule("SECTION BETWEEN ARGUMENTS VALUE", tag("tool_call"), "NAME"),
            Rule("NAME", tag("tool_sep"), "ARGUMENTS"),
            Rule("NAME ARGUMENTS VALUE", tag("arg_key"), "KEY"),
            Rule("KEY", tag("/arg_key"), "ARGUMENTS"),
            Rule("KEY ARGUMENTS", tag("arg_value"), "VALUE"),
            Rule("VALUE", tag("/arg_value"), "ARGUMENTS"),
            Rule("NAME ARGUMENTS VALUE", tag("/tool_call"), "BETWEEN"),
            Rule("SECTION BETWEEN ARGUMENTS VALUE CONTENT", tag("/tool_calls"), "CONTENT"),
        ),
        written=WrittenCalls(
            tag("tool_calls"),
            lambda name: f"{tag('tool_call')}{name}{tag(separator) if separator else ''}{line}",
            f"{tag('/tool_call')}{line}",
            section=tag("/tool_calls"),
            opens=(f"{tag('tool_calls')}{line}",),
            arguments=arguments,
        ),
    )


def _thinks(options: ParseOptions) -> bool:
    effort = options.template_kwargs.get("reasoning_effort") or options.reasoning_effort
    return effort not in (None, "none", "no_think")


def _thoughts(tokenizer: Tokenizer) -> Thoughts:
    suffix = token_suffix(tokenizer)
    return Thoughts((f"<think{suffix}>",), (f"</think{suffix}>",), enabled=_thinks)


def _hy4_thoughts(tokenizer: Tokenizer) -> Thoughts:
    """As the prompt says, whatever the effort."""
    suffix = token_suffix(tokenizer)
    return Thoughts((f"<think{suffix}>",), (f"</think{suffix}>",), needs_opening=True)


FAMILY = Family(
    # Hy4 does without the separator after a name.
    calls={"hy_v3": _calls, "hy_v4": partial(_calls, line="", separator="")},
    thoughts={"hy_v3": _thoughts, "hy_v4": _hy4_thoughts},
    detect=(
        Detection(calls="hy_v3", thoughts="hy_v3", template=("<tool_calls", "<tool_sep", "<arg_key"), weight=1),
        Detection(calls="hy_v4", thoughts="hy_v4", template=("<tool_calls", "<arg_key"), without=("<tool_sep",), weight=1),
    ),
)
