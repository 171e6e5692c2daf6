"""How a model writes calls, turned round: not to read them, but to hold it to them where it begins one.

The result is a structural tag, as `structured` turns them into grammars: text is free until it comes to the marker of a call.
`argument_tags` says the same of arguments that aren't JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from canter.text.parsing.argument_tags import Arguments
from canter.text.parsing.options import Tool

Tag = dict[str, Any]
"""A format of a structural tag."""

BLANK = r"[\s\x1c-\x1f]"
"""Blank text as the readers see it, in a regex."""


class CallWriting(Protocol):
    """How a format writes an answer that may call functions."""

    def tag(self, tools: Sequence[Tool], parallel: bool) -> Tag:
        """The structural tag of an answer that may call these functions: of strict ones the arguments obey the schema, of others they
        are any object, or any text. Raises `InvalidRequestError` for what can't be held to."""
        ...


@dataclass(frozen=True, slots=True)
class Unmarked:
    """Calls that nothing announces but their place at the answer's beginning: `opens` before the first one, `end` behind the last.
    `text_like(tools)`: a regex of the answers that may be read as such, which no free text matches then."""

    opens: str
    end: str
    text_like: Callable[[Sequence[Tool]], str] | None = None


@dataclass(frozen=True, slots=True)
class WrittenCalls:
    """Calls in the spelling that the model was trained on. Their arguments are JSON unless `arguments` says how else.

    `trigger`: what a call begins with, and nothing else; empty where only `unmarked` calls are. `begin(name)`: everything before the
    arguments; several where the model writes it in several ways. `number`: a regex for what stands behind that, and `opening(name)`
    the text behind this.

    `section`: what ends all calls of an answer, where a format has such and `trigger` begins them; `opens`: all that stands before the
    first call, if more than `trigger` does; `separator`: what parts calls within; None for one call only.

    `unlike`: a regex of texts that aren't free, for they would be read as calls. `unmarked`: calls without the trigger. `texts`: other
    markers that an answer may hold, with those that end the text behind them; None where nothing stands there. `also`: calls in other
    spellings.
    """

    trigger: str
    begin: Callable[[str], str | tuple[str, ...]]
    end: str
    number: str = ""
    opening: Callable[[str], str] | None = None
    section: str | None = None
    opens: tuple[str, ...] = ()
    separator: str | None = ""
    unlike: str = ""
    arguments: Arguments | None = None
    unmarked: Unmarked | None = None
    texts: tuple[tuple[str, str | None], ...] = ()
    also: tuple[WrittenCalls, ...] = ()

    def tag(self, tools: Sequence[Tool], parallel: bool) -> Tag:
        """See `CallWriting`."""
        ways = (self, *self.also)
        tags = [tag for way in ways for tag in way.announced(tools, parallel)]
        for begin, end in self.texts:
            content: Tag = {"type": "any_text"} if end is not None else {"type": "regex", "pattern": ""}
            tags.append({"type": "tag", "begin": begin, "content": content, "end": end or ""})
        triggers = [*(way.trigger for way in ways), *(begin for begin, _ in self.texts)]
        once = not self.texts and (not parallel or all(way.section is not None for way in ways))
        answer: Tag = {"type": "triggered_tags", "triggers": triggers, "tags": tags, "stop_after_first": once}
        if self.unlike:
            answer["unlike"] = self.unlike
        if self.unmarked is None:
            return answer
        if not self.trigger:
            answer = {"type": "any_text"}
        if self.unmarked.text_like is not None:
            answer["unlike"] = self.unmarked.text_like(tools)
        return {"type": "or", "elements": [self._unmarked(self.unmarked, tools, parallel), answer]}

    def _unmarked(self, unmarked: Unmarked, tools: Sequence[Tool], parallel: bool) -> Tag:
        # What opens the calls and the first one's name are one text: only all of it tells a call from free text.
        first = [{**tag, "begin": unmarked.opens + tag["begin"]} for tool in tools for tag in self._call(tool)]
        calls: Tag = {"type": "or", "elements": first}
        if parallel and self.separator is not None:
            elements = [calls, self.calls(tools, parallel)]
            calls = {"type": "sequence", "elements": elements, "separator": self.separator, "optional": [1]}
        return {"type": "tag", "begin": "", "content": calls, "end": unmarked.end}

    def announced(self, tools: Sequence[Tool], parallel: bool) -> list[Tag]:
        """The tags that begin with the trigger."""
        if self.section is None:
            return [tag for tool in tools for tag in self._call(tool)]
        calls = self.calls(tools, parallel)
        return [{"type": "tag", "begin": begin, "content": calls, "end": self.section} for begin in self.opens or (self.trigger,)]

    def calls(self, tools: Sequence[Tool], parallel: bool) -> Tag:
        """Calls without what is around all of them."""
        tags = [tag for tool in tools for tag in self._call(tool)]
        calls = {"type": "tags_with_separator", "tags": tags, "separator": self.separator or "", "at_least_one": True}
        return {**calls, "stop_after_first": not parallel or self.separator is None}

    def _call(self, tool: Tool) -> list[Tag]:
        begins = self.begin(tool.name)
        if self.arguments is None:
            rest = {"content": json_arguments(tool), "end": self.end}
        else:
            rest = self.arguments.strict(tool, self.end) if tool.strict else self.arguments.free(self.end)
        if self.opening is not None:
            number = {"type": "regex", "pattern": self.number}
            numbered = {"type": "tag", "begin": self.opening(tool.name), **rest}
            rest = {"content": {"type": "sequence", "elements": [number, numbered]}, "end": ""}
        return [{"type": "tag", "begin": begin, **rest} for begin in ((begins,) if isinstance(begins, str) else begins)]


def json_arguments(tool: Tool) -> Tag:
    """The arguments of a call as one object."""
    schema = {"type": "object", **tool.parameters} if tool.strict else {"type": "object"}
    return {"type": "json_schema", "json_schema": schema}


def json_list(start: str, end: str, *, before: str = '{"name": ', between: str = ', "arguments": ', blank: str = "") -> WrittenCalls:
    """A list of objects between markers. `blank`: what may stand between the first marker and the list."""
    opens = tuple(f"{start}{space}[" for space in sorted({"", blank}))
    return WrittenCalls(start, json_begin(before, between), "}", section=f"]{end}", opens=opens, separator=", ")


def json_begin(before: str = '{"name": ', between: str = ', "arguments": ') -> Callable[[str], str]:
    """What an object has around the function's name, which comes first."""
    return lambda name: f"{before}{quoted(name)}{between}"


def quoted(text: str) -> str:
    """A text as JSON."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def objects_like(before: str) -> Callable[[Sequence[Tool]], str]:
    """See `Unmarked.text_like`: objects that may be calls, for what they begin with, behind `before` (a regex).

    An answer in JSON stays free, unless its first key is one that calls have; behind `name` one that names no function does.
    """

    def pattern(tools: Sequence[Tool]) -> str:
        names = "|".join(re.escape(tool.name) for tool in tools)
        name = rf'name"{BLANK}*(?:[^:\s\x1c-\x1f]|:{BLANK}*(?:[^"\s\x1c-\x1f]|"(?:[^"\\]*\\|{BLANK}*(?:{names}){BLANK}*")))'
        return rf'(?s:{BLANK}*{before}{BLANK}*\{{[\s\x1c-\x1f,]*"(?:{name}|(?:arguments|parameters|type|id)"|[^"\\]*\\).*)'

    return pattern
