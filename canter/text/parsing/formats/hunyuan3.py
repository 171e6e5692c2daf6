"""Hy3 and Hy4: keys and values between tokens whose names end in a suffix that the tokenizer tells."""

from __future__ import annotations

import re

from canter.text.parsing.format import GAP, KEY, NAME, SKIP, VALUE, Calls, Detection, Family, Rule, State, Thoughts
from canter.text.parsing.options import ParseOptions
from canter.text.tokenizer import Tokenizer

_SUFFIXED = re.compile(r"<(?:think|tool_calls)(:[^<>]{1,64})>")


def token_suffix(tokenizer: Tokenizer) -> str:
    """What the names of this vocabulary's markers end in: nothing, or something like `:opensource`."""
    texts = (tokenizer.id_to_token(token_id) or "" for token_id in sorted(tokenizer.added_token_ids))
    return next((match[1] for match in map(_SUFFIXED.fullmatch, texts) if match), "")


def _calls(tokenizer: Tokenizer) -> Calls:
    suffix = token_suffix(tokenizer)

    def tag(name: str) -> str:
        return f"<{name}{suffix}>"

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
    calls={"hy_v3": _calls, "hy_v4": _calls},
    thoughts={"hy_v3": _thoughts, "hy_v4": _hy4_thoughts},
    detect=(
        Detection(calls="hy_v3", thoughts="hy_v3", template=("<tool_calls", "<tool_sep", "<arg_key"), weight=1),
        Detection(calls="hy_v4", thoughts="hy_v4", template=("<tool_calls", "<arg_key"), without=("<tool_sep",), weight=1),
    ),
)
