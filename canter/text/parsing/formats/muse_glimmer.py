"""Muse Glimmer: messages under headers that say who they are for, with the calls of functions in XML."""

from __future__ import annotations

import re
from collections.abc import Sequence

from canter.text.parsing.argument_tags import WrittenArguments, any_text
from canter.text.parsing.call_tags import Tag, WrittenCalls
from canter.text.parsing.format import (
    CONTENT,
    GAP,
    KEY,
    NAME,
    REASONING,
    SKIP,
    VALUE,
    Calls,
    Detection,
    Family,
    Named,
    Rule,
    State,
    Thoughts,
    never,
    plain_name,
)
from canter.text.parsing.options import Tool

_START, _MESSAGE = "<|start|>", "<|message|>"
_ENDS = ("<|eom|>", "<|eot|>")
_CALLS, _CALLS_END = "<atem:function_calls>", "</atem:function_calls>"
_INVOKE, _INVOKE_END = '<atem:invoke name="', "</atem:invoke>"
_PARAMETER, _PARAMETER_END = '<atem:parameter name="', "</atem:parameter>"

_RECIPIENT = re.compile(r"to=([^\s<]+)")
_HEADER = re.compile(r"\s*(?:a(?:s(?:s(?:i(?:s(?:t(?:a(?:n(?:t)?)?)?)?)?)?)?)?)?\s*(?:t(?:o(?:=[^\s<]*)?)?)?\s*")
"""What `assistant to=NAME` begins with: every beginning of it fits, too."""


def route(header: str, target: str) -> tuple[str, Named | None]:
    """Where the text after a header belongs: to the thought, to the user, or to a function. What is for nobody may be either of the
    last two. Before another message's start stands no header."""
    if target != CONTENT:
        return target, None
    recipient = _RECIPIENT.search(header)
    return {"self": REASONING, "user": CONTENT}.get(recipient[1] if recipient else "", "MESSAGE"), None


def route_within(header: str, target: str) -> tuple[str, Named | None] | None:
    """The same of a header that stands in the midst of a text, which the model then didn't end: it is only one that names a function."""
    return None if header in ("", "self", "user") else (target, None)


def read_name(text: str) -> Named | None:
    """The template lists a function as `NAME.*`, so that the model may write its name twice."""
    named = plain_name(text)
    if named is None:
        return None
    first, _, second = named.name.partition(".")
    return Named(named.name, otherwise=first) if first == second else named


# The prompt has begun the first message, up to the recipient.
_STATES = {
    "START": State("name", header=_HEADER, route=route),
    "HEADER": State("name", header=_HEADER, route=route),
    "WITHIN": State("name", header=re.compile(r"[^\s<]*"), route=route_within),
    "MESSAGE": State("content"),
}
_RULES = (
    Rule("START HEADER", _MESSAGE, CONTENT),
    Rule(f"START MESSAGE {CONTENT} {REASONING}", _START, "HEADER"),
    Rule(f"{CONTENT} {REASONING}", "to=", "WITHIN"),
    Rule("WITHIN", _MESSAGE, "MESSAGE"),
    *(Rule(source, end, CONTENT) for source in (CONTENT, REASONING, "MESSAGE") for end in _ENDS),
)
_FRAMES = (_START, _MESSAGE, *_ENDS)
_INSIDE = "PREAMBLE BETWEEN PARAMETERS KEY VALUE"

_ARGUMENTS = WrittenArguments(_PARAMETER, '">', f"{_PARAMETER_END}\n", (_PARAMETER_END, _INVOKE_END))
_WRITTEN = WrittenCalls(_INVOKE, lambda name: f'{_INVOKE}{name}">\n', f"{_INVOKE_END}\n", arguments=_ARGUMENTS)


class WrittenMessages:
    """An answer as messages, the first of which the prompt has begun. See `call_tags.CallWriting`."""

    def tag(self, tools: Sequence[Tool], parallel: bool) -> Tag:
        messages = [_text(f" to={recipient}{_MESSAGE}", ()) for recipient in ("self", "user")]
        messages.append(_text(_MESSAGE, (_CALLS, _INVOKE)))
        messages += [_calls(tool, parallel) for tool in tools]
        answer = {"type": "tags_with_separator", "tags": messages, "separator": f"{_START}assistant", "at_least_one": True}
        # Without any header: the prompt may have begun the message itself.
        return {"type": "or", "elements": [answer, {"type": "any_text"}]}


def _text(header: str, excludes: tuple[str, ...]) -> Tag:
    return {"type": "tag", "begin": header, "content": any_text(excludes) if excludes else {"type": "any_text"}, "end": [*_ENDS, ""]}


def _calls(tool: Tool, parallel: bool) -> Tag:
    ends = [f"{_CALLS_END}{end}" for end in (*_ENDS, "")]
    return {"type": "tag", "begin": f" to={tool.name}{_MESSAGE}{_CALLS}\n", "content": _WRITTEN.calls((tool,), parallel), "end": ends}


MUSE_GLIMMER = Calls(
    states={
        **_STATES,
        "PREAMBLE": SKIP,
        "NAME": State("name", header=NAME.header, read_name=read_name),
        "PARAMETERS": GAP,
        "KEY": KEY,
        "VALUE": VALUE,
        "BETWEEN": State("skip", on_text="MESSAGE"),
    },
    rules=(
        *_RULES,
        Rule("MESSAGE BETWEEN", _CALLS, "PREAMBLE"),
        Rule("MESSAGE PREAMBLE BETWEEN", _INVOKE, "NAME"),
        Rule("NAME", '">', "PARAMETERS"),
        Rule("PARAMETERS", _PARAMETER, "KEY"),
        Rule("KEY", '">', "VALUE"),
        Rule("VALUE", _PARAMETER_END, "PARAMETERS"),
        Rule("PARAMETERS VALUE", _INVOKE_END, "BETWEEN"),
        Rule("PREAMBLE BETWEEN PARAMETERS MESSAGE", _CALLS_END, "MESSAGE"),
        Rule(_INSIDE, _START, "HEADER"),
        *(Rule(_INSIDE, end, CONTENT) for end in _ENDS),
    ),
    initial="START",
    frames=_FRAMES,
    written=WrittenMessages(),
)
# What is for a function is text where calls aren't read.
MUSE_GLIMMER_THOUGHTS = Thoughts(
    (f"to=self{_MESSAGE}",), _ENDS, opens=never, in_prompt=True, initial="START", frames=_FRAMES, states=_STATES, rules=_RULES
)

FAMILY = Family(
    calls={"muse_glimmer": MUSE_GLIMMER},
    thoughts={"muse_glimmer": MUSE_GLIMMER_THOUGHTS},
    detect=(Detection(calls="muse_glimmer", thoughts="muse_glimmer", template=(_CALLS, _START, _MESSAGE)),),
)
