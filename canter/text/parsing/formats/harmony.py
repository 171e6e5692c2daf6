"""gpt-oss: harmony, messages under headers that say who they are for."""

from __future__ import annotations

import re
from collections.abc import Sequence

from canter.text.parsing.args.json_body import JsonArguments
from canter.text.parsing.call_tags import Tag, json_arguments
from canter.text.parsing.format import CONTENT, DROP, REASONING, Calls, Detection, Family, Named, Rule, State, Thoughts, never
from canter.text.parsing.options import Tool

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_BUILT_IN = frozenset(("browser", "python", "container"))


def route(header: str, target: str) -> tuple[str, Named | None] | None:
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


class WrittenMessages:
    """An answer as messages: thoughts, content and calls. The prompt has begun the first one; a call ends the answer, or another
    message follows. See `call_tags.CallWriting`."""

    def tag(self, tools: Sequence[Tool], parallel: bool) -> Tag:
        texts = [_text(f"<|channel|>{channel}<|message|>") for channel in ("analysis", "commentary", "final")]
        messages = [*texts, *(call for tool in tools for call in _calls(tool))]
        answer = {"type": "tags_with_separator", "tags": messages, "separator": "<|start|>assistant", "at_least_one": True}
        # Without any header: the prompt may have begun the message itself.
        return {"type": "or", "elements": [answer, {"type": "any_text"}]}


def _text(header: str) -> Tag:
    return {"type": "tag", "begin": header, "content": {"type": "any_text"}, "end": ["<|end|>", ""]}


def _calls(tool: Tool) -> list[Tag]:
    """The recipient stands before the channel or behind it; the arguments' type, if at all, before the text."""
    to = f" to=functions.{tool.name}"
    headers = [header for channel in ("commentary", "analysis") for header in (f"<|channel|>{channel}{to}", f"{to}<|channel|>{channel}")]
    kinds = [{"type": "const_string", "value": kind} for kind in (" <|constrain|>json", "<|constrain|>json", " json", " code")]
    message = {"type": "const_string", "value": "<|message|>"}
    content = {"type": "sequence", "elements": [{"type": "or", "elements": kinds}, message, json_arguments(tool)], "optional": [0]}
    return [{"type": "tag", "begin": header, "content": content, "end": ["<|call|>", ""]} for header in headers]


HARMONY = Calls(_STATES, _RULES, initial="HEADER", written=WrittenMessages())
HARMONY_THOUGHTS = Thoughts((), (), opens=never, states=_STATES, rules=_RULES, initial="HEADER")

FAMILY = Family(
    calls={"openai": HARMONY},
    thoughts={"openai_gptoss": HARMONY_THOUGHTS},
    detect=(Detection(calls="openai", thoughts="openai_gptoss", template=("<|channel|>analysis", "<|message|>", "<|start|>")),),
)
