"""JSON Schemas on their way to the compiler: options laid in, annotations that constrain nothing taken out, faults located."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from canter.structured.constraint import Constraint

BOUNDED_WHITESPACE = r"[ \t]{0,2}(\r?\n[ \t]{0,40})?"
"""At most one line's end, and room for the indentation of twenty levels: no value goes on with whitespace forever."""
KNOWN_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Those that are held to. Any other is what the specification calls an annotation: it says what a text means, not how it looks."""
LOCAL = ("$defs", "definitions", "$schema", "$id")
MAX_LOOKS = 64

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SCHEMAS = ("items", "additionalItems", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")


def prepared(schema: dict[str, Any], constraint: Constraint) -> dict[str, Any]:
    """The schema as it is given to the compiler, options included."""
    options: dict[str, Any] = {"whitespace_flexible": constraint.any_whitespace}
    if constraint.any_whitespace:
        options["whitespace_pattern"] = constraint.whitespace_pattern or BOUNDED_WHITESPACE
    return {**_cleaned(schema, constraint.additional_properties), "x-guidance": options}


def _cleaned(schema: Any, additional: bool) -> Any:
    """Without what constrains nothing; with objects closed, unless they say that they are open, where `additional` is False."""
    if not isinstance(schema, dict):
        return schema
    cleaned = dict(schema)
    if cleaned.get("uniqueItems") is False:
        del cleaned["uniqueItems"]
    if isinstance(cleaned.get("format"), str) and cleaned["format"] not in KNOWN_FORMATS:
        del cleaned["format"]
    for key, child in _children(cleaned):
        cleaned[key] = _with_children(child, additional)
    if not additional and "additionalProperties" not in cleaned and ("properties" in cleaned or cleaned.get("type") == "object"):
        cleaned["additionalProperties"] = False
    return cleaned


def _children(schema: dict[str, Any]) -> list[tuple[str, Any]]:
    """The keywords of a schema that hold schemas, each with its value."""
    found = [(key, _ByName(schema[key])) for key in _SCHEMAS_BY_NAME if isinstance(schema.get(key), dict)]
    lists = [(key, schema[key]) for key in _LISTS_OF_SCHEMAS if isinstance(schema.get(key), list)]
    return [*found, *lists, *((key, schema[key]) for key in _SCHEMAS if isinstance(schema.get(key), dict))]


class _ByName(dict[str, Any]):
    """Schemas by name, which are no schema themselves."""


def _with_children(value: Any, additional: bool) -> Any:
    if isinstance(value, _ByName):
        return {name: _cleaned(child, additional) for name, child in value.items()}
    if isinstance(value, list):
        return [_cleaned(child, additional) for child in value]
    return _cleaned(value, additional)


def locate_fault(constraint: Constraint, fault: Callable[[Constraint], str | None]) -> str:
    """ " at <JSON pointer>" of the innermost part that is at fault by itself, or nothing where it is the whole."""
    schema: dict[str, Any] = json.loads(constraint.text)
    local = {key: schema[key] for key in LOCAL if key in schema}
    path, looks = "#", 0
    while True:
        for step, child in _parts(schema):
            looks += 1
            if looks > MAX_LOOKS:
                return f" at {path}" if path != "#" else ""
            text = json.dumps({**local, **child} if not local.keys() & child.keys() else child)
            if fault(dataclasses.replace(constraint, text=text)) is not None:
                path, schema = f"{path}/{step}", child
                break
        else:
            return f" at {path}" if path != "#" else ""


def _parts(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    parts: list[tuple[str, Any]] = []
    for key, value in _children(schema):
        if isinstance(value, _ByName):
            parts += [(f"{key}/{_escaped(name)}", child) for name, child in value.items()]
        elif isinstance(value, list):
            parts += [(f"{key}/{i}", child) for i, child in enumerate(value)]
        else:
            parts.append((key, value))
    return [(step, child) for step, child in parts if isinstance(child, dict)]


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
