"""Structural tags: free text with parts that obey a grammar, as xgrammar and vLLM write them, turned into one grammar.

Free text holds no marker of the model, such as the token that opens a tool call, unless the tag names it. Where free text ends at a
text (a trigger, the end of a tag), it ends at the first place where that stands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from canter.core.errors import InvalidRequestError
from canter.core.structured_outputs import PARAM
from canter.structured.constraint import Constraint
from canter.structured.ebnf import ebnf_to_lark, is_ebnf
from canter.structured.literals import Markers, regex_literal
from canter.structured.schema import prepared

MAX_TAGS = 1024
"""Formats in one structural tag, those inside others included."""
TEXT = r"(.|\n)*"


def tags_to_lark(tag: dict[str, Any], constraint: Constraint, markers: Mapping[str, int]) -> str:
    """A grammar for `{"format": ...}`, or for the older `{"structures": [...], "triggers": [...]}`. Raises `InvalidRequestError`."""
    writer = _Writer(constraint, Markers(markers))
    if "format" in tag:
        start = writer.write(_object(tag["format"], "format"), "format")
    elif "structures" in tag:
        start = writer.write(_from_structures(tag), "structures")
    else:
        raise _wrong("needs a format, or structures and triggers")
    rules = "\n".join(["start: " + (start or '""'), *writer.rules])
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": rules}, *writer.grammars]})


def _from_structures(tag: dict[str, Any]) -> dict[str, Any]:
    tags = []
    for i, item in enumerate(_list(tag["structures"], "structures")):
        found = _object(item, f"structures[{i}]")
        content = {"type": "json_schema", "json_schema": found.get("schema") or {}}
        tags.append({"begin": found.get("begin"), "content": content, "end": found.get("end", "")})
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _Writer:
    """Writes formats as expressions; rules and whole grammars that these refer to gather in `rules` and `grammars`."""

    def __init__(self, constraint: Constraint, markers: Markers) -> None:
        self.rules: list[str] = []
        self.grammars: list[dict[str, str]] = []
        self._constraint = constraint
        self._markers = markers
        self._num_formats = 0
        self._writers: dict[str, Callable[[dict[str, Any], str], str]] = {
            "const_string": lambda item, path: self._markers.literal(_text(item, "value", path)),
            "json_schema": self._json_schema,
            "any_text": lambda item, path: self._free(item, None, path),
            "regex": self._regex,
            "grammar": self._grammar,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def write(self, item: dict[str, Any], path: str) -> str:
        """The expression of a format; empty for one that writes nothing."""
        self._num_formats += 1
        if self._num_formats > MAX_TAGS:
            raise _wrong(f"may hold at most {MAX_TAGS} formats")
        kind = item.get("type")
        if kind not in self._writers:
            raise _wrong(f"{path}.type must be one of {', '.join(self._writers)}, got {kind!r:.80}")
        return self._writers[kind](item, path)

    def _rule(self, body: str, name: str = "part", options: str = "") -> str:
        name = f"{name}_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def _json_schema(self, item: dict[str, Any], path: str) -> str:
        schema = item.get("json_schema")
        if schema is True or schema == {}:
            schema = {}
        return self._rule("%json " + json.dumps(prepared(_object(schema, f"{path}.json_schema"), self._constraint)), "json")

    def _regex(self, item: dict[str, Any], path: str) -> str:
        pattern = _text(item, "pattern", path, empty=True)
        return regex_literal(pattern) if pattern else ""

    def _grammar(self, item: dict[str, Any], path: str) -> str:
        text = _text(item, "grammar", path)
        name = f"grammar_{len(self.grammars)}"
        self.grammars.append({"name": name, "lark_grammar": ebnf_to_lark(text) if is_ebnf(text) else text})
        return f"@{name}"

    def _free(self, item: dict[str, Any], until: str | None, path: str) -> str:
        """Free text, up to and with the text `until` where there is one."""
        excluded = [_text({"e": text}, "e", f"{path}.excludes") for text in _list(item.get("excludes") or [], f"{path}.excludes")]
        body = regex_literal(TEXT)
        if excluded:
            # No text that holds one of them.
            words = "|".join(map(_escaped, excluded))
            body = f"{body} & ~{regex_literal(f'{TEXT}({words}){TEXT}')}"
        if "unlike" in item:
            body = f"{body} & ~{regex_literal(_text(item, 'unlike', path))}"
        name = self._rule(body, "TEXT")
        if until is None:
            return name
        pieces = self._markers.split(until)
        if not any(piece in self._markers.ids for piece in pieces):
            return self._rule(f"{name} {self._markers.literal(until)}", "until", "[lazy]")
        # The marker says that the text has ended: what looks like the text before it may stand anywhere.
        if pieces[0] not in self._markers.ids:
            name = self._rule(f"{name} {self._markers.literal(pieces.pop(0))}", "TEXT")
        return f"{name} {self._markers.literal(''.join(pieces))}"

    def _sequence(self, item: dict[str, Any], path: str) -> str:
        elements = [_object(e, f"{path}.elements[{i}]") for i, e in enumerate(_list(item.get("elements"), f"{path}.elements"))]
        if item.get("optional") or item.get("separator"):
            return self._listed(item, elements, path)
        parts: list[str] = []
        until_next = False
        for i, element in enumerate(elements):
            where = f"{path}.elements[{i}]"
            if until_next:
                until_next = False
                if element.get("type") == "tag":  # the text before has written its beginning
                    parts.append(self._tag_after_begin(element, where))
                continue
            follower = elements[i + 1] if i + 1 < len(elements) else {}
            key = {"const_string": "value", "tag": "begin"}.get(str(follower.get("type")))
            if element.get("type") == "any_text" and key is not None and follower.get(key):
                parts.append(self._free(element, _text(follower, key, f"{path}.elements[{i + 1}]"), where))
                until_next = True
            else:
                parts.append(self.write(element, where))
        return " ".join(filter(None, parts))

    def _listed(self, item: dict[str, Any], elements: list[dict[str, Any]], path: str) -> str:
        """A sequence some of whose elements may be left out, with a separator between those that are there."""
        optional = item.get("optional") or []
        if not isinstance(optional, list) or not all(isinstance(i, int) and 0 <= i < len(elements) for i in optional):
            raise _wrong(f"{path}.optional must be a list of the places of elements, got {optional!r:.80}")
        separator = self._markers.literal(_text({"separator": "", **item}, "separator", path, empty=True))
        first = then = '""'  # what may follow where nothing has been written yet, and where something has
        for i in reversed(range(len(elements))):
            element = self._rule(self.write(elements[i], f"{path}.elements[{i}]") or '""', "element")
            begun, added = f"{element} {then}", f"{separator} {element} {then}"
            if i in optional:
                first, then = self._any_of([begun, first]), self._any_of([added, then])
            else:
                first, then = self._rule(begun), self._rule(added)
        return first

    def _or(self, item: dict[str, Any], path: str) -> str:
        elements = _list(item.get("elements"), f"{path}.elements")
        return self._any_of([self.write(_object(e, f"{path}.elements[{i}]"), f"{path}.elements[{i}]") for i, e in enumerate(elements)])

    def _any_of(self, expressions: list[str]) -> str:
        return self._rule(" | ".join(expression or '""' for expression in expressions), "any")

    def _tag(self, item: dict[str, Any], path: str) -> str:
        begin = self._markers.literal(_text(item, "begin", path, empty=True))
        return " ".join(filter(None, (begin, self._tag_after_begin(item, path))))

    def _tag_after_begin(self, item: dict[str, Any], path: str) -> str:
        """A tag's content and end."""
        content = _object(item.get("content"), f"{path}.content")
        ends = item.get("end", "")
        ends = [_text({"end": end}, "end", path, empty=True) for end in (ends if isinstance(ends, list) else [ends])]
        if not ends:
            raise _wrong(f"{path}.end must not be an empty list")
        if content.get("type") == "any_text" and all(ends):
            return self._any_of([self._free(content, end, f"{path}.content") for end in ends])
        end = self._markers.literal(ends[0]) if len(ends) == 1 else self._any_of([self._markers.literal(end) for end in ends])
        return " ".join(filter(None, (self.write(content, f"{path}.content"), end)))

    def _triggered(self, item: dict[str, Any], path: str) -> str:
        triggers = [_text({"t": t}, "t", f"{path}.triggers") for t in _list(item.get("triggers"), f"{path}.triggers")]
        by_trigger: dict[str, list[str]] = {}
        whole: list[str] = []
        for i, value in enumerate(_list(item.get("tags"), f"{path}.tags")):
            where = f"{path}.tags[{i}]"
            tag = _object(value, where)
            begin = _text(tag, "begin", where)
            trigger = max((t for t in triggers if begin.startswith(t)), key=len, default=None)
            if trigger is None:
                raise _wrong(f"{where}.begin must begin with one of the triggers, got {begin!r:.80}")
            trigger = self._whole_markers(begin, trigger)
            body = self._rule(self._tag_after_begin(tag, where) or '""', "tag")
            rest = self._markers.literal(begin[len(trigger) :])
            by_trigger.setdefault(trigger, []).append(f"{rest} {body}".strip())
            whole.append(f"{self._markers.literal(begin)} {body}")
        tag_after_text = self._any_of(
            [f"{self._free(item, trigger, path)} {self._any_of(bodies)}" for trigger, bodies in by_trigger.items()]
        )
        tail = self._free(item, None, path)
        if item.get("at_least_one"):
            first = self._any_of(whole)
            return first if item.get("stop_after_first") else f"{first} {tag_after_text}* {tail}"
        return self._any_of([tag_after_text, tail]) if item.get("stop_after_first") else f"{tag_after_text}* {tail}"

    def _whole_markers(self, begin: str, trigger: str) -> str:
        """The trigger, with all of the marker that it ends within: a model writes the marker at once."""
        end = 0
        for piece in self._markers.split(begin):
            end += len(piece)
            if end >= len(trigger):
                return begin[:end] if piece in self._markers.ids else trigger
        return trigger

    def _separated(self, item: dict[str, Any], path: str) -> str:
        tags = _list(item.get("tags"), f"{path}.tags")
        one = self._any_of([self._tag(_object(tag, f"{path}.tags[{i}]"), f"{path}.tags[{i}]") for i, tag in enumerate(tags)])
        separator = self._markers.literal(_text(item, "separator", path, empty=True))
        several = one if item.get("stop_after_first") else f"{one} ({separator} {one})*"
        return several if item.get("at_least_one") else f"({several})?"


def _escaped(text: str) -> str:
    """A text as a regex that matches it alone."""
    return "".join(f"\\x{{{ord(char):x}}}" if not char.isalnum() else char for char in text)


def _wrong(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{PARAM}.structural_tag: {what}.", f"{PARAM}.structural_tag")


def _object(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(f"{path} must be an object, got {value!r:.80}")
    return value


def _list(value: object, path: str) -> list[Any]:
    if not isinstance(value, list) or (not value and not path.endswith("excludes")):
        raise _wrong(f"{path} must be a list that is not empty, got {value!r:.80}")
    return value


def _text(item: Mapping[str, Any], key: str, path: str, empty: bool = False) -> str:
    value = item.get(key)
    if not isinstance(value, str) or not (value or empty):
        raise _wrong(f"{path}.{key} must be a text{'' if empty else ' that is not empty'}, got {value!r:.80}")
    return value
