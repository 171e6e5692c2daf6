"""How a model writes calls, turned round: not to read them, but to hold it to them where it begins one.

The result is a structural tag, as `structured` turns them into grammars: text is free until it comes to the marker of a call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from canter.core.errors import InvalidRequestError
from canter.text.parsing.args.coercion import resolved, types_of
from canter.text.parsing.options import Tool

_BOUNDS = ("pattern", "format", "minLength", "maxLength")


@dataclass(frozen=True, slots=True)
class WrittenArguments:
    """Arguments that are written one by one: `before`, the name, `between`, the value, `after`.

    A string stands there as it is, up to `after`, and holds none of the texts `never`; any other value is JSON.
    """

    before: str
    between: str
    after: str
    never: tuple[str, ...] = ()

    def elements(self, tool: Tool) -> list[dict[str, Any]]:
        """The arguments in the order in which the schema has them. Raises `InvalidRequestError` for one that can't be held to it."""
        required = tool.parameters.get("required") or ()
        properties = tool.parameters.get("properties") or {}
        found = []
        for name, schema in properties.items():
            begin = f"{self.before}{name}{self.between}"
            tag = {"type": "tag", "begin": begin, "content": self._value(tool, name, schema), "end": self.after}
            optional = {"type": "tags_with_separator", "tags": [tag], "separator": "", "stop_after_first": True}
            found.append(tag if name in required else optional)
        return found

    def _value(self, tool: Tool, name: str, schema: Any) -> dict[str, Any]:
        schema = resolved(schema, tool.parameters)
        if "string" not in types_of(schema):
            shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
            return {"type": "json_schema", "json_schema": {**shared, **(schema if isinstance(schema, Mapping) else {})}}
        texts = _texts(schema)
        if texts is None:
            if any(key in inner for inner in _alternatives(schema) for key in _BOUNDS):
                raise InvalidRequestError(
                    f"tools: the argument {name!r:.80} of {tool.name!r:.80} can't be held to its schema, for this model writes strings as "
                    f"they are: a strict function can't have {', '.join(_BOUNDS)} there.",
                    "tools",
                )
            return {"type": "any_text", "excludes": list(self.never)}
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]}


def _alternatives(schema: Any) -> list[Mapping[str, Any]]:
    """A schema and those that it lists as alternatives."""
    if not isinstance(schema, Mapping):
        return []
    listed = [inner for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list) for inner in schema[key]]
    return [schema, *(inner for inner in listed if isinstance(inner, Mapping))]


def _texts(schema: Any) -> list[str] | None:
    """How the values of a schema are written that allows only some; None for others."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [_written(schema["const"])]
    if isinstance(schema.get("enum"), list):
        return [_written(value) for value in schema["enum"]]
    if schema.get("type") == "null":
        return ["null"]
    listed = schema.get("anyOf") or schema.get("oneOf")
    parts = [_texts(inner) for inner in listed] if isinstance(listed, list) else [None]
    return [text for part in parts for text in part or ()] if None not in parts else None


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True, slots=True)
class WrittenCalls:
    """Calls in the spelling that the model was trained on. Their arguments are JSON unless `arguments` says how else.

    `trigger`: what a call begins with, and nothing else. `begin(name)`: everything before the arguments. `number`: a regex for what
    stands behind that, and `opening` the text behind this. `section`: the marker that ends all calls of an answer, where a format has
    such and `trigger` begins them; `separator`: what parts calls within.
    """

    trigger: str
    begin: Callable[[str], str]
    end: str
    number: str = ""
    opening: str = ""
    section: str | None = None
    separator: str = ""
    arguments: WrittenArguments | None = None

    def tag(self, tools: Sequence[Tool], parallel: bool) -> dict[str, Any]:
        """The structural tag of an answer that may call these functions: of strict ones the arguments obey the schema, of others they
        are any object, or any text. Raises `InvalidRequestError` for what can't be held to."""
        tags = [self._call(tool) for tool in tools]
        if self.section is None:
            return {"type": "triggered_tags", "triggers": [self.trigger], "tags": tags, "stop_after_first": not parallel}
        end = self.section
        calls = {"type": "tags_with_separator", "tags": tags, "separator": self.separator, "at_least_one": True}
        section = {"type": "tag", "begin": self.trigger, "content": {**calls, "stop_after_first": not parallel}, "end": end}
        return {"type": "triggered_tags", "triggers": [self.trigger], "tags": [section], "stop_after_first": True}

    def _call(self, tool: Tool) -> dict[str, Any]:
        begin = self.begin(tool.name)
        if self.arguments is None:
            return {"type": "tag", "begin": begin, "content": self._json(tool), "end": self.end}
        if not tool.strict:
            return {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": self.end}
        elements = [*self.arguments.elements(tool), {"type": "const_string", "value": self.end}]
        return {"type": "tag", "begin": begin, "content": {"type": "sequence", "elements": elements}, "end": ""}

    def _json(self, tool: Tool) -> dict[str, Any]:
        schema = {"type": "object", **tool.parameters} if tool.strict else {"type": "object"}
        content: dict[str, Any] = {"type": "json_schema", "json_schema": schema}
        if self.number:
            before = [{"type": "regex", "pattern": self.number}, {"type": "const_string", "value": self.opening}]
            content = {"type": "sequence", "elements": [*before, content]}
        return content
