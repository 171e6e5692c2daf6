"""gpt-oss: harmony, messages under headers that say who they are for."""

from __future__ import annotations

import re

from canter.text.parsing.args.json_body import JsonArguments
from canter.text.parsing.format import CONTENT, DROP, REASONING, Calls, Detection, Family, Named, Rule, State, Thoughts, never

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_BUILT_IN = frozenset(("browser", "python", "container"))


def route(header: str) -> tuple[str, Named | None] | None:
    """Where the text after a header belongs: what is for a function is a call, the analysis is thought, the rest is content.

    What is for a tool that the model has built in is nobody's.
    """
    recipient = _RECIPIENT.search(header)
    if recipient is not None and recipient[1] not in ("assistant", "user"):
        name = recipient[1].removeprefix("functions.")
        if name == recipient[1] and name.partition(".")[0] in _BUILT_IN:
            return "BUILT_IN", None
        return "ARGUMENTS", Named(name)
    channel = _CHANNEL.search(header)
    return (REASONING if channel is not None and channel[1] == "analysis" else CONTENT), None


_STATES = {
    "HEADER": State("name", route=route),
    "ARGUMENTS": State("body", body=JsonArguments),
    "BUILT_IN": DROP,
    "BETWEEN": State("skip", on_text=CONTENT),
}
_MESSAGES = "CONTENT REASONING ARGUMENTS BUILT_IN"
_RULES = (
    Rule(f"{_MESSAGES} BETWEEN", "<|start|>", "HEADER"),
    Rule("HEADER", "<|start|>", "HEADER"),
    Rule("HEADER", "<|channel|>", "HEADER"),
    Rule("HEADER", "<|constrain|>", "HEADER"),
    Rule("HEADER", "<|message|>", CONTENT),
    # A header without its beginning.
    Rule(f"{_MESSAGES} BETWEEN", "<|channel|>", "HEADER", keeps=True),
    *(Rule(f"{_MESSAGES} BETWEEN", end, "BETWEEN") for end in ("<|end|>", "<|call|>", "<|return|>")),
)

HARMONY = Calls(_STATES, _RULES, initial="HEADER")
HARMONY_THOUGHTS = Thoughts((), (), opens=never, states=_STATES, rules=_RULES, initial="HEADER")

FAMILY = Family(
    calls={"openai": HARMONY},
    thoughts={"openai_gptoss": HARMONY_THOUGHTS},
    detect=(Detection(calls="openai", thoughts="openai_gptoss", template=("<|channel|>analysis", "<|message|>", "<|start|>")),),
)
