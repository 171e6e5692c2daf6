"""Inkling: messages of blocks, each between tokens that say what kind of text it is."""

from __future__ import annotations

from functools import partial

from canter.text.parsing.args.json_body import JsonCalls
from canter.text.parsing.call_tags import WrittenCalls, json_begin
from canter.text.parsing.format import CONTENT, NAME, REASONING, Calls, Detection, Family, Named, Rule, State, Thoughts, never

_MESSAGE, _THINKING, _CALL = "<|message_model|>", "<|content_thinking|>", "<|content_invoke_tool_json|>"
_TEXTS = ("<|content_text|>", "<|content_invoke_tool_text|>", "<|content_tool_error|>")
_END = "<|end_message|>"
_ENDS = (_END, "<|content_model_end_sampling|>")


def route(header: str, target: str) -> tuple[str, Named | None]:
    """A message's header is nothing, or a function's name, which its call repeats: nobody's text."""
    return target, None


_HEADER = State("name", header=NAME.header, route=route)

# A prompt ends behind a message's beginning; START is its header, or text if the prompt has begun that as well.
_STATES = {"START": _HEADER, "HEADER": _HEADER}
_RULES = (
    Rule(f"START {CONTENT} {REASONING}", _MESSAGE, "HEADER"),
    *(Rule("START HEADER", text, CONTENT) for text in _TEXTS),
    Rule("START HEADER", _THINKING, REASONING),
)
_FRAMES = (_MESSAGE, _CALL, *_ENDS)

INKLING = Calls(
    states={**_STATES, "CALLS": State("body", body=partial(JsonCalls, arguments=("args", "arguments", "parameters")))},
    rules=(
        *_RULES,
        Rule("CALLS", _MESSAGE, "HEADER"),
        *(Rule("CALLS", text, CONTENT) for text in _TEXTS),
        Rule("CALLS CONTENT", _THINKING, REASONING),
        Rule("START HEADER CONTENT REASONING CALLS", _CALL, "CALLS"),
        *(Rule(source, marker, CONTENT) for source in (CONTENT, REASONING) for marker in (*_ENDS, *_TEXTS)),
        *(Rule("CALLS", end, CONTENT) for end in _ENDS),
    ),
    initial="START",
    frames=_FRAMES,
    written=WrittenCalls(
        _CALL,
        json_begin(f'{_CALL}{{"name":', ',"args":'),
        f"}}{_END}",
        texts=tuple((marker, None) for marker in (_MESSAGE, _THINKING, *_TEXTS, *_ENDS)),
    ),
)
# What is for a function is text where calls aren't read.
INKLING_THOUGHTS = Thoughts(
    (_THINKING,), (*_ENDS, *_TEXTS), opens=never, initial="START", frames=_FRAMES, states=_STATES,
    rules=(*_RULES, Rule("START HEADER CONTENT REASONING", _CALL, CONTENT)),
)  # fmt: skip

FAMILY = Family(
    calls={"inkling": INKLING},
    thoughts={"inkling": INKLING_THOUGHTS},
    detect=(
        Detection(calls="inkling", thoughts="inkling", template=(_CALL, _THINKING)),
        Detection(calls="inkling", thoughts="inkling", tokens=(_MESSAGE, _THINKING, _CALL)),
    ),
)
