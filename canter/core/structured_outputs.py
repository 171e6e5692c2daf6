"""What a request may ask of the form of its output: one constraint, checked for its size and shape before anyone compiles it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import msgspec

from canter.core.errors import ConfigError, InvalidRequestError

MAX_GRAMMAR_CHARS = 1 << 17
"""Of a schema, a grammar, a structural tag, or all choices together."""
MAX_REGEX_CHARS = 1 << 14
MAX_WHITESPACE_CHARS = 256
MAX_CHOICES = 4096
MAX_NESTING = 64
"""Levels of objects and arrays in a schema or a structural tag; the compilers descend into each."""
MAX_THOUGHT_TOKENS = 32
"""Tokens of a marker that begins or ends a thought."""

MAX_THOUGHTS = 8
"""Pairs of markers beside the first."""

BACKENDS = ("auto", "guidance", "xgrammar")
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
THOUGHTS = ("thought_start_ids", "thought_end_ids", "other_thoughts", "in_thought")
"""Fields of whoever knows the model, not of users."""
PARAM = "structured_outputs"
_TOO_DEEP = f"may be nested {MAX_NESTING} levels deep at most"


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The grammar that an output obeys: exactly one of `CONSTRAINTS`. Names follow vLLM.

    json: a JSON Schema, as an object or as its text. regex: the whole output matches it. choice: the output is one of these texts.
    grammar: Lark (rules `name: ...`, begun by `start`) or EBNF (rules `name ::= ...`, begun by `root`). json_object: any JSON object.
    structural_tag: free text with parts that obey a schema, as an object or as its text.

    disable_any_whitespace, disable_additional_properties and whitespace_pattern (a regex, what may stand between two parts of a
    JSON value) shape JSON; without them the pattern is bounded, so that no value goes on with whitespace forever.

    The last four fields are filled in by whoever knows the model, not by users. With `thought_end_ids` the output may begin with a
    thought, which is free; the constraint holds from the token behind that marker on. `thought_start_ids` may be empty for a model
    whose output is a thought until the end marker comes. `other_thoughts`: more pairs of such markers, by any of which a thought may
    begin; the end is that of the pair. `in_thought` says whether the prompt's end has a thought open; None: as
    its tokens say.

    A schema or tag given as an object is kept as its text, so that equal ones are one and any number in it fits a message.
    Raises `InvalidRequestError` naming the constraint.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    thought_start_ids: list[int] = msgspec.field(default_factory=list)
    thought_end_ids: list[int] = msgspec.field(default_factory=list)
    other_thoughts: list[tuple[list[int], list[int]]] = msgspec.field(default_factory=list)
    in_thought: bool | None = None

    def __post_init__(self) -> None:
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if getattr(self, name) is None:
                setattr(self, name, False)
            elif not isinstance(getattr(self, name), bool):
                raise _wrong(name, f"must be true or false, got {getattr(self, name)!r:.80}")
        self.kind  # noqa: B018  raises unless there is exactly one
        self._verify_texts()
        pairs = self.other_thoughts
        if not isinstance(pairs, list) or len(pairs) > MAX_THOUGHTS or not all(map(_is_pair, pairs)):
            raise _wrong("other_thoughts", f"must be at most {MAX_THOUGHTS} pairs of markers, got {pairs!r:.80}")
        markers = [("thought_start_ids", self.thought_start_ids), ("thought_end_ids", self.thought_end_ids)]
        for name, ids in [*markers, *(("other_thoughts", ids) for pair in pairs for ids in pair)]:
            if (
                not isinstance(ids, list)
                or len(ids) > MAX_THOUGHT_TOKENS
                or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids)
            ):
                raise _wrong(name, f"must be at most {MAX_THOUGHT_TOKENS} token ids, got {ids!r:.80}")

    @property
    def kind(self) -> str:
        """The one of `CONSTRAINTS` that is set. An explicit `json_object: false` asks for nothing."""
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            what = f"got {' and '.join(given)}" if given else "got none"
            raise InvalidRequestError(f"{PARAM} needs exactly one of {', '.join(CONSTRAINTS)}; {what}.", PARAM)
        return given[0]

    def _verify_texts(self) -> None:
        if self.json_object not in (None, True, False):
            raise _wrong("json_object", f"must be true or false, got {self.json_object!r:.80}")
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, _json_text(value, name))
        if self.regex is not None:
            _checked_text(self.regex, "regex", MAX_REGEX_CHARS)
            if "\0" in self.regex:
                raise _wrong("regex", "must not contain the character NUL")
        if self.grammar is not None:
            _checked_text(self.grammar, "grammar", MAX_GRAMMAR_CHARS)
        if self.whitespace_pattern is not None:
            _checked_text(self.whitespace_pattern, "whitespace_pattern", MAX_WHITESPACE_CHARS)
        if self.choice is not None:
            _check_choices(self.choice)


def _is_pair(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(value)


def _wrong(name: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{PARAM}.{name} {what}.", f"{PARAM}.{name}")


def _checked_text(value: object, name: str, limit: int) -> str:
    if not isinstance(value, str) or not value or len(value) > limit:
        got = f"one of {len(value)}" if isinstance(value, str) else repr(value)[:80]
        raise _wrong(name, f"must be a text of 1 to {limit} characters, got {got}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _wrong(name, f"must be text, but character {error.start} is a lone surrogate") from None
    return value


def _check_choices(choices: object) -> None:
    if not isinstance(choices, list) or not 1 <= len(choices) <= MAX_CHOICES or not all(isinstance(c, str) for c in choices):
        raise _wrong("choice", f"must be a list of 1 to {MAX_CHOICES} texts, got {choices!r:.80}")
    _checked_text("".join(choices), "choice", MAX_GRAMMAR_CHARS)


def _json_text(value: object, name: str) -> str:
    """The text of a JSON object, compact where it came as an object."""
    if isinstance(value, dict):
        _check_nesting(value, name)
        try:
            value = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise _wrong(name, f"is not JSON: {error}") from None
    text = _checked_text(value, name, MAX_GRAMMAR_CHARS)
    try:
        parsed = json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise _wrong(name, f"is not JSON: {error}") from None
    except RecursionError:
        raise _wrong(name, _TOO_DEEP) from None
    if not isinstance(parsed, dict):
        raise _wrong(name, f"must be a JSON object, got {text:.80}")
    _check_nesting(parsed, name)
    return text


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON value")


def _check_nesting(value: object, name: str) -> None:
    """Level by level, so that no depth makes this descend."""
    level = [value]
    for _ in range(MAX_NESTING):
        below: list[object] = []
        for item in level:
            below += item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()
        level = [item for item in below if isinstance(item, (dict, list, tuple))]
    if level:
        raise _wrong(name, _TOO_DEEP)


class StructuredOutputsConfig(msgspec.Struct, kw_only=True, frozen=True):
    """How a server serves constraints: `--structured-outputs-config`, names as in vLLM. The `disable_` switches hold for every
    request; `enable_in_reasoning` constrains thoughts, too. `disable_jump_forward`: a step for each token, also where a grammar leaves
    no choice (the name is SGLang's; tokens are the same either way), as with the backend xgrammar always."""

    backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    enable_in_reasoning: bool = False
    disable_jump_forward: bool = False

    @property
    def jumps_forward(self) -> bool:
        """xgrammar isn't asked what is forced: that would be a way to its process and back for each token."""
        return not self.disable_jump_forward and self.backend != "xgrammar"

    @classmethod
    def parse(cls, value: object) -> StructuredOutputsConfig:
        """From a JSON object. Raises `ConfigError`."""
        try:
            config = msgspec.convert(value, cls, strict=True)
        except msgspec.ValidationError as error:
            raise ConfigError(f"structured_outputs_config must be a JSON object of {', '.join(cls.__struct_fields__)}: {error}.") from None
        unknown = sorted(set(value if isinstance(value, dict) else ()) - set(cls.__struct_fields__))
        if unknown:
            raise ConfigError(f"structured_outputs_config has no {unknown[0]!r}. It has: {', '.join(cls.__struct_fields__)}.")
        if config.backend not in BACKENDS:
            raise ConfigError(
                f"structured_outputs_config.backend must be one of {', '.join(BACKENDS)} (guidance is llguidance, what auto takes), "
                f"got {config.backend!r}."
            )
        if config.backend == "xgrammar" and find_spec("xgrammar") is None:
            raise ConfigError(
                "structured_outputs_config.backend xgrammar needs its package: install it with pip install 'canter[xgrammar]', or leave "
                "the backend out for llguidance."
            )
        return config
