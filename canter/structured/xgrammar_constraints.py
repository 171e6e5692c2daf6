"""What xgrammar is asked to compile, and what it must not be asked for: nothing here needs the package.

xgrammar lets much of JSON Schema through unread, and reads some of a regex otherwise than others do. So a schema or regex may hold only
what is known to bind its output; everything else is left to llguidance, with the place of the reason. What xgrammar writes may be less
than a schema allows (properties come in the schema's order, and no others where some are declared), but is never more. A grammar is
written anew from what Canter has read, so that both libraries are given the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import msgspec

from canter.structured.constraint import Constraint
from canter.structured.ebnf import is_ebnf, read_ebnf
from canter.structured.ebnf_tree import ALL_CHARS, Node, complement
from canter.structured.schema import KNOWN_FORMATS

ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator", "$comment", "$schema", "$id"}
)
"""Keywords that constrain nothing."""
DEFINITIONS = ("$defs", "definitions")
WHOLE = ("$ref", "anyOf", "enum", "const")
"""Keywords beside which xgrammar reads no other."""
TYPES: dict[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset(),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset(),
    "boolean": frozenset(),
    "null": frozenset(),
}
"""The keywords that xgrammar holds to, by the type that they bind. A string whose length is bound may hold bare control characters."""
_ESCAPED = r"""\\(?:[nrtfv!-/:;=?@\[-`{-~]|x[0-7][0-9A-Fa-f]|u[0-9A-Fa-f]{4})"""
_IN_CLASS = r"[^\\\[\]&~-]|&(?!&)|~(?!~)|-(?!-)|" + _ESCAPED
_RANGE = re.compile(rf"({_IN_CLASS})(?:-({_IN_CLASS}))?")
_CODES = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
_PIECE = re.compile(
    "|".join(
        (
            r"\A\^",
            r"\$\Z",
            r"[^\\\[\](){}*+?|^$]",
            _ESCAPED,
            r"\\[dws]",
            r"\((?:\?:|(?!\?))",
            r"[)|]",
            r"(?:[*+?]|\{\d+(?:,\d*)?\})\??(?![*+?{])",
            rf"\[(?!\^)(?:{_IN_CLASS}|\\[dws])+\]",
            rf"\[\^(?:{_IN_CLASS})+\]",
        )
    )
)
r"""What xgrammar and llguidance read alike of a regex: xgrammar has a part of what \d, \w and \s mean, so that they may not be negated."""
SURROGATES = (0xD800, 0xDFFF)
"""No text, but xgrammar would let them be written."""
MAX_WHITESPACE = 42
"""Characters of whitespace between two parts of a JSON value: room for a line's end and the indentation of twenty levels."""


class Job(msgspec.Struct, frozen=True, array_like=True):
    """What the worker compiles: a JSON schema, a regex or a grammar in EBNF."""

    kind: str
    text: str
    any_whitespace: bool = True


class NotTaken(Exception):
    """xgrammar can't be held to a constraint, or refuses it."""


def job_of(constraint: Constraint) -> Job:
    """What to compile of a constraint that llguidance takes. Raises `NotTaken` with the place of what xgrammar can't be held to.
    Structural tags, those of tool calls among them, and Lark are llguidance's dialects."""
    if constraint.whitespace_pattern is not None:
        raise NotTaken("it has a whitespace_pattern")
    if constraint.kind not in _JOBS:
        raise NotTaken(f"it is a {constraint.kind}")
    return _JOBS[constraint.kind](constraint)


def _json(constraint: Constraint) -> Job:
    return Job("json", json.dumps(_Reader(json.loads(constraint.text), constraint).read()), constraint.any_whitespace)


def _json_object(constraint: Constraint) -> Job:
    return Job("json", '{"type": "object", "additionalProperties": true}', constraint.any_whitespace)


def _choice(constraint: Constraint) -> Job:
    return Job("ebnf", "root ::= " + " | ".join(map(_literal, dict.fromkeys(json.loads(constraint.text)))))


def _literal(text: str) -> str:
    """A text as EBNF spells it."""
    return '"' + "".join(char if char.isalnum() or char == " " else f"\\U{ord(char):08x}" for char in text) + '"'


def _regex(constraint: Constraint) -> Job:
    """A regex whose every piece means the same to both. `.`, which xgrammar lets be a line's end, and classes of all but some are spelled
    out, without surrogates."""
    text = constraint.text
    pieces: list[str] = []
    at = 0
    while at < len(text):
        found = _PIECE.match(text, at)
        if found is None:
            raise NotTaken(f"xgrammar may read its character {at + 1} otherwise")
        pieces.append(_negated("\\n") if found[0] == "." else _negated(found[0][2:-1]) if found[0].startswith("[^") else found[0])
        at = found.end()
    if "|" in pieces and ("^" in pieces or "$" in pieces):
        raise NotTaken("xgrammar may read its ^ or $ otherwise")
    return Job("regex", "".join(pieces))


def _negated(items: str) -> str:
    """The class of all characters but these."""
    ranges = [(_code(found[1]), _code(found[2] or found[1])) for found in _RANGE.finditer(items)]
    return "[" + "".join(f"\\u{{{low:x}}}-\\u{{{high:x}}}" for low, high in complement((*ranges, SURROGATES))) + "]"


def _code(item: str) -> int:
    """The code of a character of a class."""
    if item[0] != "\\":
        return ord(item)
    return int(item[2:], 16) if item[1] in "xu" else _CODES.get(item[1], ord(item[1]))


def _grammar(constraint: Constraint) -> Job:
    if not is_ebnf(constraint.text):
        raise NotTaken("it is in Lark")
    rules = read_ebnf(constraint.text)
    names = {name: "root" if name == "root" else f"r{i}" for i, name in enumerate(rules)}
    return Job("ebnf", "\n".join(f"{names[name]} ::= {_written(body, names)}" for name, body in rules.items()))


def _written(node: Node, names: Mapping[str, str]) -> str:
    """A node in EBNF that can be read in one way only: each character as its code."""
    if node.kind == "text":
        return '"' + "".join(f"\\U{ord(char):08x}" for char in node.value) + '"'
    if node.kind in ("class", "any"):
        chars = complement((*complement(node.ranges if node.kind == "class" else ALL_CHARS), SURROGATES))
        return "[" + "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in chars) + "]"
    if node.kind == "ref":
        return names[node.value]
    inner = [_written(part, names) for part in node.parts]
    if node.kind == "repeat":
        return f"({inner[0]}){node.value}"
    return "(" + (" | " if node.kind == "choice" else " ").join(inner) + ")" if inner else '""'


_JOBS: dict[str, Callable[[Constraint], Job]] = {
    "json": _json,
    "json_object": _json_object,
    "choice": _choice,
    "regex": _regex,
    "grammar": _grammar,
}


class _Reader:
    """Reads one schema, and writes what xgrammar is to make of it."""

    def __init__(self, schema: dict[str, Any], constraint: Constraint) -> None:
        self._root = schema
        self._open = constraint.additional_properties

    def read(self) -> Any:
        return self._schema(self._root, "#")

    def _schema(self, schema: Any, path: str) -> Any:
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            _refuse("is not a schema that xgrammar can be held to", path)
        written = {key: self._by_name(schema[key], f"{path}/{key}") for key in DEFINITIONS if key in schema}
        given = {key: value for key, value in schema.items() if key not in ANNOTATIONS and key not in DEFINITIONS}
        if given.get("uniqueItems") is False:
            del given["uniqueItems"]
        if isinstance(given.get("format"), str) and given["format"] not in KNOWN_FORMATS:
            del given["format"]  # what the specification calls an annotation
        whole = [key for key in WHOLE if key in given]
        return {**written, **(self._whole(whole[0], given, path) if whole else self._typed(given, path))}

    def _by_name(self, schemas: Any, path: str) -> dict[str, Any]:
        if not isinstance(schemas, dict):
            _refuse("must be an object", path)
        return {name: self._schema(schema, f"{path}/{_escaped(name)}") for name, schema in schemas.items()}

    def _whole(self, key: str, given: dict[str, Any], path: str) -> dict[str, Any]:
        """A schema of one keyword, which nothing may stand beside. What a type leaves of given values is found here."""
        beside = set(given) - {key}
        if key in ("enum", "const") and beside == {"type"}:
            values = [value for value in self._values(key, given, path) if _is_of(value, self._types(given, path))]
            if not values:
                _refuse("holds no value of its type", f"{path}/{key}")
            return {"enum": values}
        if beside:
            _refuse(f"{sorted(beside)[0]} is ignored by xgrammar where {key} stands beside it", path)
        if key == "$ref":
            self._check_reference(given[key], f"{path}/$ref")
            return {key: given[key]}
        if key == "anyOf":
            return {key: self._each(given[key], f"{path}/anyOf")}
        return {"enum": self._values(key, given, path)}

    def _values(self, key: str, given: dict[str, Any], path: str) -> list[Any]:
        values = [given[key]] if key == "const" else given[key]
        if not isinstance(values, list) or not values:
            _refuse("must be a list of values", f"{path}/{key}")
        return values

    def _check_reference(self, reference: Any, path: str) -> None:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            _refuse(f"must point into this schema, got {reference!r:.80}", path)
        found: Any = self._root
        for step in reference.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                _refuse(f"points to nothing: {reference!r:.80}", path)
            found = found[name]

    def _each(self, schemas: Any, path: str) -> list[Any]:
        if not isinstance(schemas, list) or not schemas:
            _refuse("must be a list of schemas", path)
        return [self._schema(schema, f"{path}/{i}") for i, schema in enumerate(schemas)]

    def _types(self, given: dict[str, Any], path: str) -> list[str]:
        types = given["type"] if isinstance(given["type"], list) else [given["type"]]
        if not types or not all(isinstance(name, str) and name in TYPES for name in types):
            _refuse(f"must be of {', '.join(TYPES)}, got {given['type']!r:.80}", f"{path}/type")
        return types

    def _typed(self, given: dict[str, Any], path: str) -> dict[str, Any]:
        """A schema by types. Each of several types is an option of its own, with its keywords."""
        if not given:
            return {}
        if "type" in given:
            types = self._types(given, path)
        else:
            types = [name for name, keywords in TYPES.items() if keywords & set(given)][:1]
        bound = frozenset().union(*(TYPES[name] for name in types))
        if unknown := sorted(set(given) - bound - {"type"}):
            _refuse(f"{unknown[0]} is not held to by xgrammar", path)
        options = [{"type": name, **self._keywords(name, given, path)} for name in dict.fromkeys(types)]
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _keywords(self, name: str, given: dict[str, Any], path: str) -> dict[str, Any]:
        if name == "object":
            return self._object(given, path)
        if name == "array":
            return self._array(given, path)
        found = {key: given[key] for key in TYPES[name] if key in given}
        for key, value in found.items():
            if not isinstance(value, int) or isinstance(value, bool):
                _refuse(f"must be a whole number, got {value!r:.80}", f"{path}/{key}")
        return found

    def _object(self, given: dict[str, Any], path: str) -> dict[str, Any]:
        """Declared properties and no others, or others alone: beside others a declared name may come spelled with an escape, unread."""
        properties = self._by_name(given.get("properties", {}), f"{path}/properties")
        required = given.get("required", [])
        if not isinstance(required, list):
            _refuse("must be a list of names", f"{path}/required")
        if missing := [name for name in required if name not in properties]:
            _refuse(f"{missing[0]!r:.80} is ignored by xgrammar, as it is none of the properties", f"{path}/required")
        others = given.get("additionalProperties", self._open and not properties)
        if properties:
            if others not in (False, True):
                _refuse("is not held to by xgrammar where there are properties", f"{path}/additionalProperties")
            return {"properties": properties, "required": required, "additionalProperties": False}
        return {"additionalProperties": others if isinstance(others, bool) else self._schema(others, f"{path}/additionalProperties")}

    def _array(self, given: dict[str, Any], path: str) -> dict[str, Any]:
        found: dict[str, Any] = {key: given[key] for key in ("minItems", "maxItems") if key in given}
        for key, value in found.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                _refuse(f"must be a whole number, got {value!r:.80}", f"{path}/{key}")
        if "prefixItems" in given:
            found["prefixItems"] = self._each(given["prefixItems"], f"{path}/prefixItems")
        items = given.get("items", True)
        found["items"] = items if items is False else self._schema(items, f"{path}/items")
        return found


def _is_of(value: Any, types: list[str]) -> bool:
    return any(_IS_OF[name](value) for name in types)


_IS_OF: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer()),
    "number": lambda value: not isinstance(value, bool) and isinstance(value, (int, float)),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}


def _refuse(what: str, path: str) -> NoReturn:
    raise NotTaken(f"{path}: {what}")


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
