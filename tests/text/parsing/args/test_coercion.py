"""What texts become by a JSON Schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from canter.text.parsing.args.coercion import coerce_text, coerce_value, dump, is_text, types_of

INT, NUM, BOOL, STR, NULL = ({"type": name} for name in ("integer", "number", "boolean", "string", "null"))
OBJ = {"type": "object", "properties": {"year": INT, "name": STR, "tags": {"type": "array", "items": NUM}}}
LIST = {"type": "array", "items": INT}

CASES: list[tuple[str, Any, Any]] = [
    # no schema, and schemas that say nothing of types
    ("5", None, "5"), ("true", None, "true"), ("null", None, "null"), ('{"a": 1}', None, '{"a": 1}'), ("5", {}, "5"),
    ("5", {"description": "a number"}, "5"), ("", None, ""), ("5", "no schema", "5"), ("5", {"type": 7}, "5"), ("x", {"type": []}, "x"),
    # string
    ("5", STR, "5"), ("null", STR, "null"), (" a ", STR, " a "), ("[1]", STR, "[1]"), ("NaN", STR, "NaN"), ("", STR, ""),
    # integer
    ("5", INT, 5), (" 5\n", INT, 5), ("-5", INT, -5), ("+5", INT, 5), ("0", INT, 0), ("007", INT, 7), ("5.0", INT, 5), ("1e3", INT, 1000),
    ("5.5", INT, 5.5), ("five", INT, "five"), ("", INT, ""), ("1_000", INT, "1_000"), ("12345678901234567890", INT, 12345678901234567890),
    ("Infinity", INT, "Infinity"), ("true", INT, True), ('"5"', INT, "5"),
    # number
    ("5", NUM, 5), ("5.0", NUM, 5), ("5.5", NUM, 5.5), ("-1e-3", NUM, -0.001), (".5", NUM, 0.5), ("1e400", NUM, "1e400"),
    ("NaN", NUM, "NaN"), ("-inf", NUM, "-inf"), ("five", NUM, "five"), ("null", NUM, None), ("1e2", NUM, 100),
    # boolean
    ("true", BOOL, True), ("True", BOOL, True), ("FALSE", BOOL, False), ("1", BOOL, True), ("0", BOOL, False), ("yes", BOOL, "yes"),
    (" true ", BOOL, True), ("2", BOOL, 2),
    # null
    ("null", NULL, None), ("None", NULL, None), ("NULL", NULL, None), ("x", NULL, "x"),
    # objects and lists
    ('{"a": 1}', {"type": "object"}, {"a": 1}), ("[1, 2]", {"type": "array"}, [1, 2]), ("{", {"type": "object"}, "{"),
    ("[1", {"type": "array"}, "[1"), ("[1]", {"type": "object"}, [1]), ("5", {"type": "object"}, 5), ('"[1]"', {"type": "array"}, [1]),
    ('{"a": NaN}', {"type": "object"}, '{"a": NaN}'), ('{"a": 1e999}', {"type": "object"}, '{"a": 1e999}'), ("[]", LIST, []),
    ('{"year": "2024", "name": "5"}', OBJ, {"year": 2024, "name": "5"}), ('{"tags": ["1", "2.5", "x"]}', OBJ, {"tags": [1, 2.5, "x"]}),
    ('["1", "2"]', LIST, [1, 2]), ('{"other": "1"}', OBJ, {"other": "1"}),
    ('{"a": "1"}', {"type": "object", "additionalProperties": INT}, {"a": 1}),
    ('{"a": "1"}', {"type": "object", "additionalProperties": True}, {"a": "1"}),
    ('{"a": {"b": ["1"]}}', {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": LIST}}}}, {"a": {"b": [1]}}),
    ('{"year": 1}', {"properties": {"year": INT}}, {"year": 1}), ("[1]", {"items": INT}, [1]), ("é🎉", STR, "é🎉"),
    # lists of types
    ("null", {"type": ["integer", "null"]}, None), ("5", {"type": ["integer", "null"]}, 5), ("x", {"type": ["integer", "null"]}, "x"),
    ("null", {"type": ["string", "null"]}, None), ("nullx", {"type": ["string", "null"]}, "nullx"),
    ("5", {"type": ["string", "null"]}, "5"),
    ("5", {"type": ["string", "integer"]}, 5), ("x", {"type": ["string", "integer"]}, "x"), ("1", {"type": ["boolean", "integer"]}, 1),
    ("true", {"type": ["boolean", "string"]}, True),
    ("[1]", {"type": ["array", "string"]}, [1]), ("[x", {"type": ["array", "string"]}, "[x"),
    # alternatives
    ("5", {"anyOf": [INT, NULL]}, 5), ("null", {"anyOf": [INT, NULL]}, None), ("x", {"anyOf": [STR, NULL]}, "x"),
    ("5", {"oneOf": [STR, INT]}, 5), ("5", {"allOf": [INT, {"minimum": 1}]}, 5), ("5", {"anyOf": [{"anyOf": [INT]}, NULL]}, 5),
    ('{"year": "1"}', {"anyOf": [OBJ, NULL]}, {"year": 1}), ('["1"]', {"oneOf": [LIST, STR]}, [1]), ("x", {"anyOf": "wrong"}, "x"),
    # enum and const
    ("a", {"enum": ["a", "b"]}, "a"), ("1", {"enum": [1, 2]}, 1), ("1", {"enum": ["1", "2"]}, "1"), ("null", {"enum": ["a", None]}, None),
    ("true", {"enum": [True, False]}, True), ("1.5", {"enum": [1.5]}, 1.5), ("3", {"const": 3}, 3), ("3", {"const": "3"}, "3"),
    ("[1]", {"enum": [[1]]}, [1]), ('{"a": 1}', {"enum": [{"a": 1}]}, {"a": 1}),
    # other names of types
    ("5", {"type": "int"}, 5), ("5", {"type": "int32"}, 5), ("5", {"type": "unsigned"}, 5), ("5", {"type": "long"}, 5),
    ("5", {"type": "uint8"}, 5), ("1.5", {"type": "float64"}, 1.5), ("1.5", {"type": "double"}, 1.5), ("1.5", {"type": "num"}, 1.5),
    ("true", {"type": "bool"}, True), ("1", {"type": "binary"}, True), ('{"a": 1}', {"type": "dict"}, {"a": 1}),
    ("[1]", {"type": "list"}, [1]), ("[1]", {"type": "arr"}, [1]),
    ("[1]", {"type": "list[int]"}, [1]), ("5", {"type": "str"}, "5"),
    ("5", {"type": "varchar"}, "5"), ("5", {"type": "Integer"}, 5),
    ("5", {"type": "whatever"}, "5"), ('{"a": 1}', {"type": "map"}, {"a": 1}),
]  # fmt: skip


def test_there_are_a_hundred() -> None:
    assert len(CASES) >= 100


@pytest.mark.parametrize(("text", "schema", "value"), CASES, ids=[f"{t}-{json.dumps(s)}" for t, s, _ in CASES])
def test_a_text_becomes_what_its_schema_says(text: str, schema: Any, value: Any) -> None:
    found = coerce_text(text, schema)
    assert (found, type(found)) == (value, type(value))
    assert json.loads(dump(found)) == value


def test_nothing_but_finite_numbers_is_written() -> None:
    assert dump([float("nan"), {"a": float("inf")}, 1.5]) == '[null, {"a": null}, 1.5]'


def test_only_what_must_be_a_string_may_be_passed_on_early() -> None:
    assert is_text(STR) and is_text(None) and is_text({"enum": ["a"]})
    assert not is_text({"type": ["string", "null"]}) and not is_text({"anyOf": [STR, INT]})


def test_schemas_without_end_are_followed_so_far_only() -> None:
    schema: dict[str, Any] = {}
    schema["anyOf"] = [schema]
    schema["items"] = schema
    assert types_of(schema) == {"array"}
    value: Any = "1"
    for _ in range(200):
        value = [value]
    assert coerce_value(value, schema) == value
    assert coerce_text("[" * 100_000, {"type": "array"}) == "[" * 100_000
