"""Arguments that aren't JSON, turned into structural tags by a function's schema, for `call_tags`.

What a spelling can't hold a model to is refused: a strict function has arguments that obey, or none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from canter.core.errors import InvalidRequestError
from canter.text.parsing.args.coercion import coerce_text, inlined, type_of, types_of
from canter.text.parsing.options import Tool

Tag = dict[str, Any]

MAX_ITEMS = 64
"""Of a list whose items are counted."""
_MAX_DEPTH = 32
_BOUNDS = ("pattern", "format", "minLength", "maxLength")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_SAYS_NOTHING = frozenset((
    "title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id", "id",
    "$defs", "definitions", "nullable",
))  # fmt: skip
_OF_OBJECTS = _SAYS_NOTHING | {"type", "properties", "required", "additionalProperties", "strict"}
_OF_LISTS = _SAYS_NOTHING | {"type", "items", "minItems", "maxItems"}
_TYPES = ("string", "number", "boolean", "null", "array", "object")


class Arguments(Protocol):
    """How a format writes the arguments of a call."""

    def strict(self, tool: Tool, end: str) -> Tag:
        """`content` and `end` of a tag: arguments that obey the schema, and `end`. Raises `InvalidRequestError`."""
        ...

    def free(self, end: str) -> Tag:
        """The same of any arguments."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """An argument, for errors. Whatever of it can't be held to is refused."""

    tool: str
    name: str

    def refuse(self, why: str) -> NoReturn:
        raise InvalidRequestError(
            f"tools: the argument {self.name!r:.80} of {self.tool!r:.80} can't be held to its schema with this model: {why}.",
            "tools",
        )


def arguments_of(tool: Tool, names: re.Pattern[str]) -> list[tuple[Place, Any, bool]]:
    """Each argument with its schema, and whether it is required. Raises `InvalidRequestError` for what isn't said one by one, and for
    a name that doesn't match `names`, which the format can't write."""
    root = inlined(tool.parameters)
    unheld = sorted(root.keys() - _OF_OBJECTS)
    if unheld:
        raise InvalidRequestError(
            f"tools: the function {tool.name!r:.80} can't be strict with this model, which writes arguments one by one: {unheld[0]!r:.80} "
            "is said of all of them.",
            "tools",
        )
    found = []
    for name, schema, required in properties_of(root):
        place = Place(tool.name, name)
        if not names.fullmatch(name):
            place.refuse("its name can't be written")
        if schema is False:
            place.refuse("nothing satisfies it")
        found.append((place, schema, required))
    return found


def properties_of(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Of an object: the names, schemas, and whether they are required, in the schema's order."""
    named = schema.get("properties")
    properties = dict(named) if isinstance(named, Mapping) else {}
    listed = schema.get("required")
    required = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    others = schema.get("additionalProperties", {})
    for name in required:
        properties.setdefault(name, others)
    return [(name, inner, name in required) for name, inner in properties.items()]


def sequence(elements: list[tuple[Tag, bool]], separator: str = "") -> Tag:
    """Elements of which those that aren't required may be left out."""
    if not elements:
        return {"type": "regex", "pattern": ""}
    optional = [i for i, (_, required) in enumerate(elements) if not required]
    return {"type": "sequence", "elements": [tag for tag, _ in elements], "separator": separator, "optional": optional}


def by_type(schema: Any, place: Place, depth: int = 0) -> list[tuple[str, Mapping[str, Any]]]:
    """A schema as alternatives, each of one JSON type (integers are numbers) and, if it allows only some values, with an `enum`."""
    if schema is True or schema is None:
        schema = {}
    if depth > _MAX_DEPTH or not isinstance(schema, Mapping) or "$ref" in schema:
        place.refuse("it refers to itself, or to nothing")
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return [(_type_name(value), {"enum": [value]}) for value in values]
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            listed = schema[key]
            if schema.keys() - _SAYS_NOTHING - {key} or not isinstance(listed, list) or (key == "allOf" and len(listed) > 1):
                place.refuse(f"{key} stands beside other conditions")
            return [found for inner in listed for found in by_type(inner, place, depth + 1)]
    types = schema.get("type")
    names = types if isinstance(types, list) else [types] if types is not None else sorted(types_of(schema)) if _guess(schema) else _TYPES
    kinds = ["number" if name == "integer" else name for name in names]
    if not set(kinds) <= set(_TYPES):
        place.refuse(f"its type is {types!r:.80}")
    return [(kind, {**schema, "type": name}) for kind, name in zip(kinds, names, strict=True)]


def _guess(schema: Mapping[str, Any]) -> bool:
    return "properties" in schema or "items" in schema


def _type_name(value: object) -> str:
    name = type_of(value)
    return "number" if name == "integer" else name


def any_text(never: tuple[str, ...]) -> Tag:
    return {"type": "any_text", "excludes": list(never)}


def const(text: str) -> Tag:
    return {"type": "const_string", "value": text} if text else {"type": "regex", "pattern": ""}


def one_of(tags: list[Tag]) -> Tag:
    return tags[0] if len(tags) == 1 else {"type": "or", "elements": tags}


def plain_text(schema: Mapping[str, Any], place: Place, never: tuple[str, ...]) -> Tag:
    """A string that stands as it is, and holds none of the texts `never`."""
    found = [key for key in _BOUNDS if key in schema]
    if found:
        place.refuse(f"strings are written as they are, so that a strict function can't have {', '.join(_BOUNDS)} there")
    return any_text(never)


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_WORD = re.compile(r"[^\W\d][\w$-]{0,254}")
_XML_NAME = re.compile(r"[^\s<>\"'=](?:[^<>\"'\n=]{0,254}[^\s<>\"'=])?")


@dataclass(frozen=True, slots=True)
class WrittenArguments:
    """Arguments that are written one by one: `before`, the name, `between`, the value, `after`.

    A string stands there as it is, up to `after`, and holds none of the texts `never`; any other value is JSON. `typed(type)`: what
    stands in place of `between` where the format says each value's JSON type; without it the reader looks into the schema.
    """

    before: str
    between: str
    after: str
    never: tuple[str, ...] = ()
    typed: Callable[[str], str] | None = None

    def strict(self, tool: Tool, end: str) -> Tag:
        elements = []
        for place, schema, required in arguments_of(tool, _XML_NAME):
            shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
            begin = f"{self.before}{place.name}"
            if self.typed is None:
                tags = [self._tag(f"{begin}{self.between}", self._value(schema, place, shared))]
            else:
                alternatives = by_type(schema, place)
                tags = [self._tag(f"{begin}{self.typed(kind)}", self._typed(kind, inner, place, shared)) for kind, inner in alternatives]
            elements.append((one_of(tags), required))
        return {"content": sequence([*elements, (const(end), True)]), "end": ""}

    def free(self, end: str) -> Tag:
        return {"content": {"type": "any_text"}, "end": end}

    def _tag(self, begin: str, content: Tag) -> Tag:
        return {"type": "tag", "begin": begin, "content": content, "end": self.after}

    def _typed(self, kind: str, schema: Mapping[str, Any], place: Place, shared: Mapping[str, Any]) -> Tag:
        if kind != "string":
            return {"type": "json_schema", "json_schema": {**shared, **schema}}
        if "enum" in schema:
            return one_of([const(value) for value in schema["enum"]])
        return plain_text(schema, place, self.never)

    def _value(self, schema: Any, place: Place, shared: Mapping[str, Any]) -> Tag:
        types = types_of(schema)
        if "string" not in types:
            return {"type": "json_schema", "json_schema": {**shared, **(schema if isinstance(schema, Mapping) else {})}}
        alternatives = by_type(schema, place)
        if all("enum" in inner or kind == "null" for kind, inner in alternatives):
            return one_of([const(_read_back(value, schema, place)) for _, inner in alternatives for value in inner.get("enum", [None])])
        check_mixed(alternatives, place)
        strings = [inner for kind, inner in alternatives if kind == "string"]
        return plain_text({key: 1 for inner in strings for key in inner}, place, self.never)


def _read_back(value: Any, schema: Any, place: Place) -> str:
    """How a value is written that the reader types by its schema."""
    text = _written(value)
    read = coerce_text(text, schema)
    if type_of(read) != type_of(value) or read != value:
        place.refuse(f"{text!r:.80} would be read as {read!r:.80}")
    return text


def check_mixed(alternatives: list[tuple[str, Mapping[str, Any]]], place: Place) -> None:
    """Where any text may stand, what looks like another type is read as such: no such type may have conditions."""
    any_string = any(kind == "string" and "enum" not in inner for kind, inner in alternatives)
    if any_string and any(kind != "string" and inner.keys() - _SAYS_NOTHING - {"type"} for kind, inner in alternatives):
        place.refuse("next to any string, another type can't have conditions")


@dataclass(frozen=True, slots=True)
class SpelledArguments:
    """Arguments whose values are spelled in a way of the format's own, at every depth.

    `key(name)`: what stands around an argument. `separator`: between two. `quotes`: around a string, which stands there as it is and
    holds none of the texts `never`; None where strings are JSON's. `typed`: the reader types values by the schema. `words`: true,
    false and null. `items`: what a list begins and ends with; `item`: what each item does; `entries` and `entry` the same of an object.
    `any_arguments`: a regex of arguments that nothing is said of.
    """

    key: Callable[[str], tuple[str, str]]
    separator: str
    words: tuple[str, str, str] = ("true", "false", "null")
    quotes: tuple[str, str] | None = None
    never: tuple[str, ...] = ()
    typed: bool = True
    items: tuple[str, str] = ("[", "]")
    item: tuple[str, str] = ("", "")
    entries: tuple[str, str] = ("{", "}")
    entry: Callable[[str], tuple[str, str]] | None = None
    names: re.Pattern[str] = _WORD
    any_arguments: str = ""

    def strict(self, tool: Tool, end: str) -> Tag:
        found = arguments_of(tool, self.names)
        elements = [(self._around(self.key(place.name), self._value(schema, place)), required) for place, schema, required in found]
        return {"content": sequence(elements, self.separator), "end": end}

    def free(self, end: str) -> Tag:
        content = {"type": "regex", "pattern": self.any_arguments} if self.any_arguments else {"type": "any_text"}
        return {"content": content, "end": end}

    def _around(self, marks: tuple[str, str], content: Tag) -> Tag:
        return {"type": "tag", "begin": marks[0], "content": content, "end": marks[1]}

    def _value(self, schema: Any, place: Place, depth: int = 0) -> Tag:
        if depth > _MAX_DEPTH:
            place.refuse("it is nested too deeply")
        says_nothing = isinstance(schema, Mapping) and not schema.keys() - _SAYS_NOTHING
        # A string is what every schema allows that says nothing, and every format can write.
        alternatives = by_type({"type": "string"} if says_nothing and self.quotes is not None else schema, place)
        kinds = {kind for kind, _ in alternatives}
        if self.typed and self.quotes is not None:
            check_mixed(alternatives, place)
        if self.quotes == ("", ""):
            if {"array", "object"} <= kinds:
                place.refuse("a list and an object look the same where they are empty")
            # Any text stands for everything else that the schema allows.
            alternatives = [found for found in alternatives if found[0] == "string" and "enum" not in found[1]] or alternatives
        return one_of([self._of_type(kind, inner, schema, place, depth) for kind, inner in alternatives])

    def _of_type(self, kind: str, schema: Mapping[str, Any], outer: Any, place: Place, depth: int) -> Tag:
        if "enum" in schema:
            return const(self._literal(schema["enum"][0], outer, place))
        if kind == "string" and self.quotes is not None:
            content = plain_text(schema, place, self.never)
            return content if self.quotes == ("", "") else self._around(self.quotes, content)
        if kind in ("string", "number"):
            limits = {key: schema[key] for key in ("type", *_BOUNDS, *_NUMBERS) if key in schema}
            return {"type": "json_schema", "json_schema": limits}
        if kind == "boolean":
            return one_of([const(word) for word in self.words[:2]])
        if kind == "null":
            return const(self.words[2])
        if kind == "array":
            return self._list(schema, place, depth)
        return self._object(schema, place, depth)

    def _list(self, schema: Mapping[str, Any], place: Place, depth: int) -> Tag:
        if schema.keys() - _OF_LISTS or not isinstance(schema.get("items", {}), Mapping):
            place.refuse("of a list only items, minItems and maxItems can be held to")
        if "items" not in schema and self.quotes is None:
            return {"type": "json_schema", "json_schema": dict(schema)}
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(low, int) or low > MAX_ITEMS or (high is not None and (not isinstance(high, int) or high > MAX_ITEMS)):
            place.refuse(f"minItems and maxItems may count to {MAX_ITEMS}")
        item = self._around(self.item, self._value(schema.get("items", {}), place, depth + 1))
        counted = [(item, i < low) for i in range(high if high is not None else max(0, low - 1))]
        if high is None:
            tail = {"type": "tags_with_separator", "tags": [item], "separator": self.separator, "at_least_one": True}
            counted.append((tail, low > 0))
        return self._around(self.items, sequence(counted, self.separator))

    def _object(self, schema: Mapping[str, Any], place: Place, depth: int) -> Tag:
        if schema.keys() - _OF_OBJECTS:
            place.refuse("of an object only properties and required can be held to")
        properties = properties_of(schema)
        if not properties and schema.get("additionalProperties") is not False:
            if self.quotes is not None:
                place.refuse("an object needs properties")
            return {"type": "json_schema", "json_schema": dict(schema)}
        elements = []
        for name, inner, required in properties:
            if not self.names.fullmatch(name) or inner is False:
                place.refuse(f"{name!r:.80} in it can't be written")
            around = (self.entry or self.key)(name)
            elements.append((self._around(around, self._value(inner, place, depth + 1)), required))
        return self._around(self.entries, sequence(elements, self.separator))

    def _literal(self, value: Any, schema: Any, place: Place) -> str:
        """A value that the schema names."""
        if value is True or value is False or value is None:
            return self.words[(True, False, None).index(value)]
        if isinstance(value, list | dict):
            place.refuse("an enum may hold texts, numbers and constants")
        if not isinstance(value, str) or self.quotes is None:
            return json.dumps(value, ensure_ascii=False)
        if self.typed:
            _read_back(value, schema, place)
        if any(text in value for text in (*self.never, *filter(None, self.quotes))):
            place.refuse(f"{value!r:.80} can't be written")
        return f"{self.quotes[0]}{value}{self.quotes[1]}"
