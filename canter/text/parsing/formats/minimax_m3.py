"""MiniMax M3: elements named after the arguments, each tag after a mark that is a token of its own."""

from __future__ import annotations

import re
from functools import partial

from canter.text.parsing.args.element_body import ElementArguments
from canter.text.parsing.argument_tags import SpelledArguments
from canter.text.parsing.call_tags import WrittenCalls
from canter.text.parsing.format import NAME, SKIP, Calls, Detection, Family, Rule, State, Thoughts
from canter.text.parsing.options import ParseOptions

_MARK = "]<]minimax[>["
_START, _END, _INVOKE_END = f"{_MARK}<tool_call>", f"{_MARK}</tool_call>", f"{_MARK}</invoke>"
_INVOKE = tuple(f"{_MARK}<invoke name={quote}" for quote in ('"', "'", ""))


def _element(name: str) -> tuple[str, str]:
    return f"{_MARK}<{name}>", f"{_MARK}</{name}>"


_ARGUMENTS = SpelledArguments(
    _element,
    "",
    quotes=("", ""),
    never=(_MARK,),
    items=("", ""),
    item=_element("item"),
    entries=("", ""),
    names=re.compile(r"[^\W\d][\w.$-]{0,127}"),
)

# The mark stays in the text: tags are known by it and what follows it.
MINIMAX_M3 = Calls(
    states={
        "SECTION": SKIP,
        "NAME": NAME,
        "ARGUMENTS": State("body", body=partial(ElementArguments, mark=_MARK)),
        "BETWEEN": State("skip", on_text="CONTENT"),
    },
    rules=(
        Rule("CONTENT REASONING BETWEEN ARGUMENTS", _START, "SECTION"),
        *(Rule("SECTION BETWEEN ARGUMENTS", invoke, "NAME") for invoke in _INVOKE),
        *(Rule("NAME", close, "ARGUMENTS") for close in ('">', "'>", ">")),
        Rule("ARGUMENTS", _INVOKE_END, "BETWEEN"),
        Rule("SECTION BETWEEN ARGUMENTS CONTENT", _END, "CONTENT"),
    ),
    preserved=(_MARK,),
    written=WrittenCalls(_START, lambda name: f'\n{_INVOKE[0]}{name}">', _INVOKE_END, section=f"\n{_END}", arguments=_ARGUMENTS),
)


def _opens(options: ParseOptions) -> bool:
    return options.template_kwargs.get("thinking_mode") == "enabled"


FAMILY = Family(
    calls={"minimax_m3": MINIMAX_M3},
    thoughts={"minimax_m3": Thoughts(("<mm:think>",), ("</mm:think>",), opens=_opens)},
    detect=(Detection(calls="minimax_m3", thoughts="minimax_m3", template=("<mm:think>", "<invoke name=")),),
)
