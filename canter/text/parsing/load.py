"""The format of a model: the one that the user names, or the one that its chat template and vocabulary tell of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from canter.core.errors import ConfigError
from canter.text.parsing.detect import detect
from canter.text.parsing.format import Calls, Detection, Thoughts
from canter.text.parsing.formats import CALLS, THOUGHTS
from canter.text.parsing.names import REASONING_NAMES, TOOL_NAMES, check_name
from canter.text.parsing.output_format import ComposedFormat
from canter.text.tokenizer import Tokenizer

_Format = TypeVar("_Format", Calls, Thoughts)

TOOL_FLAG, REASONING_FLAG = "--tool-call-parser", "--reasoning-parser"
_RECOGNISED = "hf"
"""The name by which users ask for what the model's own files tell."""


def load_format(
    tokenizer: Tokenizer, chat_template_text: str | None, tool_call_parser: str | None = None, reasoning_parser: str | None = None
) -> ComposedFormat | None:
    """The format by which a model's outputs are read. With neither name it is recognised from the chat template and the
    tokenizer; None when they tell of none.

    Raises `ConfigError` for a name that no format answers to.
    """
    if tool_call_parser or reasoning_parser:
        return _named_format(tokenizer, chat_template_text or "", tool_call_parser or None, reasoning_parser or None)
    found = detect(tokenizer, chat_template_text or "")
    if found.calls is None and found.thoughts is None:
        return None
    return _compose(tokenizer, found.calls, found.thoughts, "recognised from the chat template")


def plain_format(tokenizer: Tokenizer) -> ComposedFormat:
    """For a model whose format isn't known: everything is content, except where a request requires a call, which is JSON then."""
    return ComposedFormat(tokenizer, None, None, "none: outputs are content")


def _named_format(tokenizer: Tokenizer, template: str, tool_call_parser: str | None, reasoning_parser: str | None) -> ComposedFormat:
    found = detect(tokenizer, template) if _RECOGNISED in (tool_call_parser, reasoning_parser) else Detection()
    if tool_call_parser == _RECOGNISED:
        tool_call_parser = _recognised(found.calls, TOOL_FLAG, "tool calls")
    if reasoning_parser == _RECOGNISED:
        reasoning_parser = _recognised(found.thoughts, REASONING_FLAG, "thoughts")
    if tool_call_parser is not None:
        check_name(tool_call_parser, TOOL_FLAG, CALLS, TOOL_NAMES)
    if reasoning_parser is not None:
        check_name(reasoning_parser, REASONING_FLAG, THOUGHTS, REASONING_NAMES)
    return _compose(tokenizer, tool_call_parser, reasoning_parser, "as asked for")


def _recognised(name: str | None, flag: str, what: str) -> str:
    if name is None:
        raise ConfigError(f"{flag} {_RECOGNISED}: the chat template tells of no {what} that Canter reads. Name their format instead.")
    return name


def _compose(tokenizer: Tokenizer, calls: str | None, thoughts: str | None, why: str) -> ComposedFormat:
    parts = [f"tool calls as {calls}"] if calls else []
    parts += [f"thoughts as {thoughts}"] if thoughts else []
    return ComposedFormat(
        tokenizer,
        _made(CALLS[calls], tokenizer) if calls else None,
        _made(THOUGHTS[thoughts], tokenizer) if thoughts else None,
        f"{' and '.join(parts)} ({why})",
    )


def _made(entry: _Format | Callable[[Tokenizer], _Format], tokenizer: Tokenizer) -> _Format:
    return entry if isinstance(entry, Calls | Thoughts) else entry(tokenizer)
