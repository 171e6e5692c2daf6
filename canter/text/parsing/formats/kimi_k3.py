"""Kimi K3: elements whose tags are words between tokens, the type of each argument in an attribute."""

from __future__ import annotations

import html
import re

from canter.text.parsing.argument_tags import WrittenArguments
from canter.text.parsing.call_tags import WrittenCalls
from canter.text.parsing.format import CONTENT, DROP, GAP, KEY, REASONING, SKIP, Calls, Detection, Family, Named, Rule, State, Thoughts
from canter.text.parsing.formats.kimi import thinks

_OPEN, _CLOSE, _END_OF_TAG = "<|open|>", "<|close|>", "<|sep|>"
_CALL = re.compile(r'([^"]{1,256})"(?:\s+index="[^"]*")?\s*')


def read_call(text: str) -> Named | None:
    """What stands after `call tool="`: the name, its end, and the call's number."""
    match = _CALL.fullmatch(text)
    return Named(html.unescape(match[1])) if match is not None else None


# The states of a tag begin with TAG; what it is of is known by its first word, and it counts once its end has come.
_STATES = {
    "TAG": SKIP,
    "TAG_THINK": SKIP,
    "TAG_RESPONSE": SKIP,
    "TAG_TOOLS": SKIP,
    "TAG_CALL": SKIP,
    "NAME": State("name", read_name=read_call),
    "TAG_ARGUMENT": GAP,
    "KEY": KEY,
    "TAG_TEXT": GAP,
    "TAG_JSON": GAP,
    "TAG_UNTYPED": GAP,
    "TAG_END": SKIP,
    "TAG_ENDED": SKIP,
    "TAG_END_OF_CALL": DROP,
    "TAG_END_OF_ARGUMENT": GAP,
    "TOOLS": SKIP,
    "ARGUMENTS": GAP,
    "TEXT": State("value", value_type="text"),
    "JSON": State("value", value_type="json"),
    "UNTYPED": State("value"),
    "BETWEEN": State("skip", on_text=CONTENT),
}
_VALUES = "TEXT JSON UNTYPED"
_RULES = (
    Rule("CONTENT REASONING BETWEEN", _OPEN, "TAG"),
    Rule("TAG", "think", "TAG_THINK"),
    Rule("TAG_THINK", _END_OF_TAG, REASONING),
    Rule("TAG", "response", "TAG_RESPONSE"),
    Rule("TAG_RESPONSE", _END_OF_TAG, CONTENT),
    Rule("TAG", "tools", "TAG_TOOLS"),
    Rule("TAG_TOOLS", _END_OF_TAG, "TOOLS"),
    Rule("TOOLS", _OPEN, "TAG_CALL"),
    Rule("TAG TAG_CALL TAG_ARGUMENT", 'call tool="', "NAME"),
    Rule("NAME", _END_OF_TAG, "ARGUMENTS"),
    Rule(f"ARGUMENTS {_VALUES}", _OPEN, "TAG_ARGUMENT"),
    Rule("TAG_ARGUMENT", 'argument key="', "KEY"),
    Rule("KEY", '" type="string"', "TAG_TEXT"),
    Rule("KEY", '" type="', "TAG_JSON"),
    Rule("KEY", '"', "TAG_UNTYPED"),
    Rule("TAG_TEXT", _END_OF_TAG, "TEXT"),
    Rule("TAG_JSON", _END_OF_TAG, "JSON"),
    Rule("TAG_UNTYPED", _END_OF_TAG, "UNTYPED"),
    Rule(_VALUES, _CLOSE, "TAG_END_OF_ARGUMENT"),
    Rule("TAG_END_OF_ARGUMENT", _END_OF_TAG, "ARGUMENTS"),
    Rule("ARGUMENTS", _CLOSE, "TAG_END_OF_CALL"),
    Rule("TAG_END_OF_CALL", _END_OF_TAG, "TOOLS"),
    Rule("CONTENT REASONING TOOLS BETWEEN", _CLOSE, "TAG_END"),
    *(Rule("TAG_END", word, "TAG_ENDED") for word in ("think", "response", "tools", "call", "message")),
    Rule("TAG_ENDED", _END_OF_TAG, "BETWEEN"),
)


def _tag(words: str) -> str:
    return f"{_OPEN}{words}{_END_OF_TAG}"


def _end(word: str) -> str:
    return f"{_CLOSE}{word}{_END_OF_TAG}"


KIMI_K3 = Calls(
    _STATES,
    _RULES,
    written=WrittenCalls(
        _tag("tools"),
        lambda name: f'{_OPEN}call tool="{html.escape(name)}" index="',
        _end("call"),
        number="[0-9]{1,4}",
        opening=lambda _: f'"{_END_OF_TAG}',
        section=_end("tools"),
        arguments=WrittenArguments(
            f'{_OPEN}argument key="', "", _end("argument"), (_OPEN, _CLOSE), lambda kind: f'" type="{kind}"{_END_OF_TAG}'
        ),
        texts=((_tag("response"), _end("response")), (_end("response"), None), (_end("message"), None)),
    ),
)
KIMI_K3_THOUGHTS = Thoughts(
    (f"{_OPEN}think{_END_OF_TAG}",), (f"{_CLOSE}think{_END_OF_TAG}",), opens=thinks, needs_opening=True, in_prompt=True,
    states=_STATES, rules=_RULES,
)  # fmt: skip

FAMILY = Family(
    calls={"kimi_k3": KIMI_K3},
    thoughts={"kimi_k3": KIMI_K3_THOUGHTS},
    detect=(Detection(calls="kimi_k3", thoughts="kimi_k3", template=(_OPEN, _END_OF_TAG, "think")),),
)
