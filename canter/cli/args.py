"""Flags made from argument dataclasses, and the parser that every subcommand uses.

A field `max_num_seqs: int` becomes `--max-num-seqs N`; its documentation, choices, short form and group come from the
field's metadata (`core.config.arg`). Only flags that were given end up in the namespace, so that a dataclass keeps
its own defaults. The spellings `--max_num_seqs` and `--hf-overrides.rope_theta 1e6` work as they do in vLLM.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from canter.cli.status import USAGE_ERROR
from canter.core.config import EngineArgs, parse_bytes
from canter.core.errors import ConfigError
from canter.core.vllm_names import explain_unknown

BYTE_FIELDS = frozenset({"kv_cache_memory_bytes", "max_body_bytes", "responses_store_bytes"})
"""Fields that take 512M, 2G and the like."""

COUNT_FIELDS = frozenset({"max_model_len", "max_num_batched_tokens"})
"""Fields that take 32k (thousands) and 32K (times 1024)."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are two lines: what is wrong, and where help is."""

    def __init__(self, prog: str, description: str, examples: str = "") -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} [flags]",
            description=description,
            epilog=f"examples:\n{examples}" if examples else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message}\nTry '{self.prog} --help'.\n")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse; an unknown flag ends the program with the nearest known one, or with why Canter lacks it."""
        known = set(self._option_string_actions)
        namespace, rest = self.parse_known_args(fold_dotted([canonical(word) for word in argv]))
        for word in rest:
            if word.startswith("-") and word not in known:
                self.error(explain_unknown(word.split("=")[0], [flag for flag in known if flag.startswith("--")], "flag"))
        if rest:
            self.error(f"Unexpected {rest[0]!r}.")
        return namespace


def canonical(word: str) -> str:
    """`--max_num_seqs=4` -> `--max-num-seqs=4`; values, and what follows a dot, stay as they are."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    name, dot, key = flag.partition(".")
    return name.replace("_", "-") + dot + key + equals + value


def fold_dotted(argv: Sequence[str]) -> list[str]:
    """Gather `--flag.key value` (and deeper keys) into one `--flag {"key": value}`; values are JSON or else plain text."""
    plain: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        name, dot, path = flag.partition(".")
        if not (word.startswith("--") and dot):
            plain.append(word)
            continue
        text = value if equals else next(words, "true")
        place = objects.setdefault(name, {})
        *parents, last = path.split(".")
        for key in parents:
            place = place.setdefault(key, {})
        place[last] = _json_or_text(text)
    for name, content in objects.items():
        plain += [name, json.dumps(content)]
    return plain


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def json_object(text: str) -> dict[str, Any]:
    """The value of a flag that takes a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object such as '{{\"key\": 1}}', got {text!r} ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


def byte_count(text: str) -> int:
    """The value of a flag that takes a number of bytes."""
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def token_count(text: str) -> int:
    """ "4096", "32k" (32,000) or "32K" (32,768)."""
    factor = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20}.get(text[-1:], 1)
    try:
        return int(float(text[:-1]) * factor) if factor != 1 else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number such as 4096, 32k or 32K, got {text!r}") from None


def add_flags(parser: argparse.ArgumentParser, arguments: type, skip: Sequence[str] = ()) -> None:
    """Add a flag for each field of a dataclass, in the groups that its metadata names."""
    hints = typing.get_type_hints(arguments)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in dataclasses.fields(arguments):
        if field.name in skip:
            continue
        name = field.metadata.get("group", "options")
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        _add_flag(groups[name], field, hints[field.name])


def _add_flag(group: argparse._ArgumentGroup, field: dataclasses.Field[Any], hint: Any) -> None:
    flags = [f"--{field.name.replace('_', '-')}"]
    short = field.metadata.get("short")
    if short and short not in group._option_string_actions:  # a command's own short form wins
        flags.insert(0, short)
    options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": help_text(field)}
    kind = value_type(hint)
    if kind is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
        return
    options["metavar"] = _metavar(field, kind)
    if kind in (list, tuple):
        options["nargs"] = "+"
        options["action"] = ListAction
    else:
        options["type"] = _converter(field.name, kind)
    if field.metadata.get("choices"):
        options["choices"] = field.metadata["choices"]
    group.add_argument(*flags, **options)


class ListAction(argparse.Action):
    """Gathers the names of all uses of a flag; one that is a JSON list stands for its members."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        names = [name for value in values for name in self._names(value)]
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest, None) or []), *names])

    def _names(self, text: str) -> list[str]:
        if not text.startswith("["):
            return [text]
        try:
            names = json.loads(text)
        except ValueError:
            names = None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise argparse.ArgumentError(self, f"expected names, or a JSON list of strings, got {text!r}")
        return names


def value_type(hint: Any) -> Any:
    """The type of a field's value: `int | None` -> int, `dict[str, Any]` -> dict."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    return typing.get_origin(hint) or hint


def _converter(name: str, kind: Any) -> Any:
    if name in BYTE_FIELDS:
        return byte_count
    if name in COUNT_FIELDS:
        return token_count
    return json_object if kind is dict else kind


def _metavar(field: dataclasses.Field[Any], kind: Any) -> str:
    if field.metadata.get("choices"):
        return "{" + ",".join(map(str, field.metadata["choices"])) + "}"
    if field.name in BYTE_FIELDS:
        return "BYTES"
    names = {int: "N", float: "X", dict: "JSON", list: "NAME", tuple: "NAME"}
    return names.get(kind, "TEXT")


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The value that a field has when it is not given."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def help_text(field: dataclasses.Field[Any]) -> str:
    """A field's documentation, with its default where the sentence does not name one. Percent signs are escaped for argparse."""
    doc = str(field.metadata.get("doc", ""))
    default = default_of(field)
    if default not in (None, {}, [], ()) and default != "" and "default:" not in doc.lower():
        doc += f" Default: {_shown(default)}."
    return doc.replace("%", "%%")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def given(namespace: argparse.Namespace, arguments: type) -> dict[str, Any]:
    """The fields of a dataclass that flags were given for."""
    names = {field.name for field in dataclasses.fields(arguments)}
    return {name: value for name, value in vars(namespace).items() if name in names}


def add_number(group: argparse._ActionsContainer, *flags: str, default: float, doc: str, least: float = 0) -> None:
    """A flag that takes a number like its default, which its help names, and not below `least`."""
    metavar = "N" if isinstance(default, int) else "X"
    converter = number_from(type(default), least)
    group.add_argument(*flags, type=converter, default=default, metavar=metavar, help=f"{doc} Default: {default}.")


def number_from(kind: type[int] | type[float], least: float) -> Callable[[str], float]:
    """A converter of flag values: a number of this kind that is at least `least`."""
    what = "a whole number" if kind is int else "a number"

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not value >= least:  # so that NaN is refused too
            raise argparse.ArgumentTypeError(f"expected {what} of at least {least:g}, got {text!r}")
        return value

    return convert


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """The model as a positional argument or `--model`, and every other engine argument."""
    parser.usage = f"{parser.prog} [MODEL] [flags]"
    parser.add_argument("model_position", metavar="MODEL", nargs="?", help="The model: the same as --model.")
    add_flags(parser, EngineArgs)


def engine_args(namespace: argparse.Namespace) -> EngineArgs:
    """The engine arguments that flags describe. Raises `ConfigError`."""
    keywords = given(namespace, EngineArgs)
    position = getattr(namespace, "model_position", None)
    if position is not None:
        if keywords.get("model", position) != position:
            raise ConfigError(f"The model is named twice: {position!r} and --model {keywords['model']!r}. Name it once.")
        keywords["model"] = position
    return EngineArgs.parse(**keywords)


def flag_words(arguments: Any) -> list[str]:
    """The flags that make `arguments` (a dataclass value) again: for starting a server with them. Defaults are left out."""
    words: list[str] = []
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name)
        if value == default_of(field):
            continue
        flag = f"--{field.name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, (list, tuple)):
            words += [flag, *map(str, value)]
        else:
            words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words
