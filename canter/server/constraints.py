"""What the dialects call by many names, as one constraint on an output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from canter.core.errors import InvalidRequestError
from canter.core.structured_outputs import PARAM, StructuredOutputsParams

FORMATS = ("text", "json_object", "json_schema", "structural_tag")
LEGACY = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's names of old; it ignores them today, and users lost their constraints without notice."""


def constraint_of(body: Any) -> StructuredOutputsParams | None:
    """The constraint that `response_format`, `structured_outputs` or one of the legacy fields of an OpenAI body asks for.

    Raises `InvalidRequestError` for more than one, or one that is not well formed.
    """
    legacy = [name for name in LEGACY if getattr(body, name) is not None]
    shape = response_constraint(body.response_format)
    given = [
        *(["response_format"] if shape is not None else []),
        *(["structured_outputs"] if body.structured_outputs is not None else []),
        *legacy,
    ]
    if len(given) > 1:
        raise InvalidRequestError(f"{' and '.join(given)} exclude each other: an output obeys one constraint.", given[1])
    if not given or shape is not None:
        if body.guided_whitespace_pattern is not None:
            raise InvalidRequestError("guided_whitespace_pattern needs guided_json.", "guided_whitespace_pattern")
        return shape
    if legacy:
        fields: dict[str, Any] = {LEGACY[legacy[0]]: getattr(body, legacy[0])}
        if body.guided_whitespace_pattern is not None:
            fields["whitespace_pattern"] = body.guided_whitespace_pattern
        return renamed(fields, {f"{PARAM}.{ours}": theirs for theirs, ours in LEGACY.items()})
    return renamed(body.structured_outputs, {})


def constraint_names(body: Any) -> dict[str, str]:
    """What the fields of `constraint_of`'s result are called in this body: for errors that are found when it is compiled."""
    names = {f"{PARAM}.{ours}": theirs for theirs, ours in LEGACY.items() if getattr(body, theirs) is not None}
    if body.response_format is not None:
        names[f"{PARAM}.json"] = "response_format.json_schema.schema"
        names[f"{PARAM}.structural_tag"] = "response_format"
    return names


def response_constraint(shape: Mapping[str, Any] | None, where: str = "response_format") -> StructuredOutputsParams | None:
    """The constraint of OpenAI's `response_format`; None for plain text."""
    if shape is None:
        return None
    kind = shape.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "structural_tag":
        return renamed({"structural_tag": dict(shape)}, {f"{PARAM}.structural_tag": where})
    if kind != "json_schema":
        raise InvalidRequestError(f"{where}.type must be one of {', '.join(FORMATS)}, got {kind!r:.80}.", f"{where}.type")
    named = shape.get("json_schema")
    if not isinstance(named, Mapping):
        raise InvalidRequestError(
            f"{where}.json_schema must be an object with a name and a schema, got {named!r:.80}.", f"{where}.json_schema"
        )
    schema = named.get("schema")
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(f"{where}.json_schema.schema must be a JSON schema, got {schema!r:.80}.", f"{where}.json_schema.schema")
    return schema_constraint(schema, f"{where}.json_schema.schema")


def schema_constraint(schema: Mapping[str, Any], where: str) -> StructuredOutputsParams:
    """JSON that obeys a schema."""
    return renamed({"json": dict(schema)}, {f"{PARAM}.json": where})


def renamed(fields: Mapping[str, Any], names: Mapping[str, str]) -> StructuredOutputsParams:
    """A constraint of fields by their own names; errors name what the user wrote."""
    unknown = sorted(set(fields) - set(_USERS_FIELDS))
    if unknown:
        raise InvalidRequestError(f"{PARAM} has no {unknown[0]!r:.80}. It has: {', '.join(_USERS_FIELDS)}.", PARAM)
    try:
        return StructuredOutputsParams(**{name: value for name, value in fields.items() if value is not None})
    except InvalidRequestError as error:
        theirs = names.get(error.param or "")
        if theirs is None:
            raise
        raise InvalidRequestError(str(error).replace(error.param or "", theirs, 1), theirs) from None


_USERS_FIELDS = (
    "json",
    "regex",
    "choice",
    "grammar",
    "json_object",
    "structural_tag",
    "disable_any_whitespace",
    "disable_additional_properties",
    "whitespace_pattern",
)
