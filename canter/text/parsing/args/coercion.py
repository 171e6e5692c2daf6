"""Values that a format writes as plain text, typed by a tool's JSON Schema."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

_ALIASES = {
    "str": "string", "text": "string", "varchar": "string", "char": "string", "enum": "string",
    "long": "integer", "short": "integer", "bool": "boolean", "binary": "boolean",
    "dict": "object", "map": "object", "list": "array", "arr": "array", "sequence": "array",
}  # fmt: skip
_PREFIXES = (("int", "integer"), ("uint", "integer"), ("unsigned", "integer"), ("num", "number"), ("float", "number"),
             ("double", "number"), ("dict", "object"), ("list", "array"))  # fmt: skip
_TYPES = frozenset(("null", "integer", "number", "boolean", "object", "array", "string"))
_INTEGER = re.compile(r"[+-]?\d{1,4000}")
_MAX_DEPTH = 32
"""Levels of anyOf, properties and items that are followed: schemas are a stranger's."""

_MAX_REFERENCES = 8
_MAX_INLINED = 10_000
"""Parts of a schema whose references are followed."""

_MISSING = object()


def types_of(schema: object, depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows: those it names, those of its enum and const, those of its alternatives."""
    found = _named_types(schema, depth)
    return found or frozenset(("string",))


def is_text(schema: object) -> bool:
    """Whether a value can only be a string, so that it can be passed on while it grows."""
    return types_of(schema) == {"string"}


def is_declared_text(schema: object) -> bool:
    """Whether the schema says so itself, instead of saying nothing."""
    return _named_types(schema, 0) == {"string"}


def coerce_text(text: str, schema: object) -> Any:
    """The value that a text stands for: the first of null, integer, number, boolean, object or array, string that the schema
    allows and the text can be; what is written wrong stays text."""
    types = types_of(schema)
    stripped = text.strip()
    for read in _READERS:
        value = read(stripped, types)
        if value is not _MISSING:
            return coerce_value(value, schema)
    if "string" in types:
        return text
    value = _load(stripped)
    return text if value is _MISSING else coerce_value(value, schema)


def coerce_value(value: Any, schema: object, depth: int = 0) -> Any:
    """A value read as JSON or like it: texts within it are typed by `properties`, `additionalProperties` and `items`."""
    if depth > _MAX_DEPTH or not isinstance(schema, Mapping):
        return value
    if isinstance(value, dict):
        return {key: _coerce_inner(inner, _property(schema, key), depth + 1) for key, inner in value.items()}
    if isinstance(value, list):
        items = _keyword(schema, "items")
        return [_coerce_inner(inner, items, depth + 1) for inner in value]
    return value


def dump(value: Any) -> str:
    """A value as JSON that every reader takes: no NaN, no Infinity."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def load_json(text: str) -> Any:
    """What a JSON text says. Raises `ValueError` for anything else, numbers that aren't finite and too deep nesting included."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite_float)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def property_schema(parameters: object, key: str) -> object:
    """The schema of one argument; None where the tool says nothing of it."""
    return resolved(_property(parameters, key), parameters) if isinstance(parameters, Mapping) else None


def resolved(schema: object, root: Mapping[str, Any]) -> object:
    """A schema that is nothing but a reference within `root`, followed."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        place: object = root
        for step in reference[2:].split("/"):
            place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
        schema = place
    return schema


def inlined(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema with what its references refer to in their place. References that come back to themselves stay, and all of them do in a
    schema that would grow too large."""
    if not _refers(schema):
        return schema
    budget = [_MAX_INLINED]
    try:
        found = _inlined(schema, schema, (), budget)
    except RecursionError:
        return schema
    return found if budget[0] > 0 and isinstance(found, Mapping) else schema


def _refers(schema: Mapping[str, Any]) -> bool:
    todo: list[object] = [schema]
    while todo:
        inner = todo.pop()
        if isinstance(inner, Mapping):
            if "$ref" in inner:
                return True
            todo += inner.values()
        elif isinstance(inner, list):
            todo += inner
    return False


def _inlined(schema: object, root: Mapping[str, Any], path: tuple[str, ...], budget: list[int]) -> object:
    """`path`: the references that lead here."""
    budget[0] -= 1
    if budget[0] <= 0:
        return schema
    if isinstance(schema, list):
        return [_inlined(inner, root, path, budget) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in path:
        target = resolved({"$ref": reference}, root)
        if isinstance(target, Mapping) and "$ref" not in target:
            beside = {key: value for key, value in schema.items() if key != "$ref"}
            return _inlined({**target, **beside}, root, (*path, reference), budget)
    skipped = ("$defs", "definitions") if schema is root else ()
    return {key: inner if key in skipped else _inlined(inner, root, path, budget) for key, inner in schema.items()}


def item_schema(schema: object) -> object:
    """The schema of a list's items."""
    return _keyword(schema, "items")


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return value


def _coerce_inner(value: Any, schema: object, depth: int) -> Any:
    if isinstance(value, str) and _named_types(schema, 0) and not is_text(schema):
        return coerce_text(value, schema)
    return coerce_value(value, schema, depth)


def _alternatives(schema: Mapping[str, Any]) -> Iterator[object]:
    for keyword in ("anyOf", "oneOf", "allOf"):
        listed = schema.get(keyword)
        if isinstance(listed, list):
            yield from listed


def _keyword(schema: object, keyword: str, depth: int = 0) -> object:
    """A keyword of a schema, or of the first of its alternatives that has it."""
    if depth > _MAX_DEPTH or not isinstance(schema, Mapping):
        return None
    if keyword in schema:
        return schema[keyword]
    for inner in _alternatives(schema):
        found = _keyword(inner, keyword, depth + 1)
        if found is not None:
            return found
    return None


def _property(schema: object, key: str, depth: int = 0) -> object:
    if depth > _MAX_DEPTH or not isinstance(schema, Mapping):
        return None
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    for inner in _alternatives(schema):
        found = _property(inner, key, depth + 1)
        if found is not None:
            return found
    more = schema.get("additionalProperties")
    return more if isinstance(more, Mapping) else None


def _named_types(schema: object, depth: int) -> frozenset[str]:
    if depth > _MAX_DEPTH or not isinstance(schema, Mapping):
        return frozenset()
    found: set[str] = set()
    named = schema.get("type")
    for name in named if isinstance(named, list) else [named]:
        if isinstance(name, str):
            found.add(_canonical(name))
    enum = schema.get("enum")
    if isinstance(enum, list):
        found.update(map(type_of, enum))
    if "const" in schema:
        found.add(type_of(schema["const"]))
    for inner in _alternatives(schema):
        found |= _named_types(inner, depth + 1)
    if not found:
        if isinstance(schema.get("properties"), Mapping):
            found.add("object")
        if "items" in schema:
            found.add("array")
    return frozenset(found)


def _canonical(name: str) -> str:
    lowered = name.strip().lower()
    if lowered in _TYPES:
        return lowered
    if lowered in _ALIASES:
        return _ALIASES[lowered]
    return next((kind for prefix, kind in _PREFIXES if lowered.startswith(prefix)), "string")


def type_of(value: object) -> str:
    """The JSON type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "object" if isinstance(value, Mapping) else "array" if isinstance(value, list) else "string"


def _read_null(text: str, types: frozenset[str]) -> Any:
    return None if "null" in types and text.lower() in ("null", "none") else _MISSING


def _read_integer(text: str, types: frozenset[str]) -> Any:
    return int(text) if "integer" in types and _INTEGER.fullmatch(text) else _MISSING


def _read_number(text: str, types: frozenset[str]) -> Any:
    if not types & {"number", "integer"}:
        return _MISSING
    if "number" in types and _INTEGER.fullmatch(text):
        return int(text)
    try:
        value = float(text)
    except ValueError:
        return _MISSING
    if not math.isfinite(value) or "_" in text:
        return _MISSING
    if value.is_integer():
        return int(value)
    return value if "number" in types else _MISSING


def _read_boolean(text: str, types: frozenset[str]) -> Any:
    lowered = text.lower()
    if "boolean" not in types or lowered not in ("true", "false", "1", "0"):
        return _MISSING
    return lowered in ("true", "1")


def _read_nested(text: str, types: frozenset[str]) -> Any:
    if not types & {"object", "array"}:
        return _MISSING
    value = _load(text)
    if isinstance(value, str):
        value = _load(value)  # written as a text of JSON once more
    fits = (isinstance(value, dict) and "object" in types) or (isinstance(value, list) and "array" in types)
    return value if fits else _MISSING


def _load(text: str) -> Any:
    try:
        return load_json(text)
    except ValueError:
        return _MISSING


_READERS = (_read_null, _read_integer, _read_number, _read_boolean, _read_nested)
