"""Constraints as grammars in the dialect of Lark that llguidance reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

from canter.core.errors import InvalidRequestError
from canter.core.structured_outputs import PARAM
from canter.structured.constraint import Constraint
from canter.structured.ebnf import ebnf_to_lark, is_ebnf
from canter.structured.literals import text_literal
from canter.structured.schema import prepared
from canter.structured.tags import tags_to_lark


def to_lark(constraint: Constraint, markers: Mapping[str, int]) -> str:
    """The grammar of a constraint. Raises `InvalidRequestError` for one whose form is wrong; other faults show when it is compiled."""
    return _WRITERS[constraint.kind](constraint, markers)


def _json(constraint: Constraint, markers: Mapping[str, int]) -> str:
    return _json_rule(json.loads(constraint.text), constraint)


def _json_object(constraint: Constraint, markers: Mapping[str, int]) -> str:
    return _json_rule({"type": "object"}, constraint)


def _json_rule(schema: dict[str, Any], constraint: Constraint) -> str:
    return json.dumps({"grammars": [{"json_schema": prepared(schema, constraint)}]})


def _regex(constraint: Constraint, markers: Mapping[str, int]) -> str:
    return str(LLMatcher.grammar_from_regex(constraint.text))


def _choice(constraint: Constraint, markers: Mapping[str, int]) -> str:
    return "start: " + " | ".join(dict.fromkeys(map(text_literal, json.loads(constraint.text))))


def _grammar(constraint: Constraint, markers: Mapping[str, int]) -> str:
    text = constraint.text
    if is_ebnf(text):
        return ebnf_to_lark(text)
    if text.lstrip().startswith("{"):
        raise InvalidRequestError(f"{PARAM}.grammar must be Lark or EBNF, got what looks like JSON.", f"{PARAM}.grammar")
    return text


def _structural_tag(constraint: Constraint, markers: Mapping[str, int]) -> str:
    return tags_to_lark(json.loads(constraint.text), constraint, markers)


_WRITERS = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
