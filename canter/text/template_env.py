"""The sandbox that chat templates run in: the Jinja environment which transformers gives them, with bounds on work and memory.

Templates come with models and, where the server allows it, with requests: they see plain data only, can't change it, can't
reach Python's internals, and can't run or grow without end.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from canter.core.errors import InvalidRequestError

MAX_OUTPUT_CHARS = 1 << 24
"""Most characters of a rendered prompt, and of any text that a template builds on the way."""
MAX_LOOP_STEPS = 1_000_000
"""Most loop iterations of one rendering, all loops together."""
_MAX_POWER_BITS = 4096
_MAX_FILTER_NUMBER = 1000
_GROWING = (str, bytes, list, tuple)
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:[0-9]{5}|\*)")
# The last colon before the digits is enough: looked for from each of many colons, it would take their number squared.
_WIDE_BRACES = re.compile(r":[^{}:]*(?:[0-9]{5}|\{)")


class RaisedByTemplateError(jinja2.TemplateError):
    """The template called `raise_exception`: its message is meant for the user."""


def _limit(what: str) -> NoReturn:
    raise InvalidRequestError(f"The chat template was stopped: it {what}.", "messages")


class _Steps:
    """Loop iterations that one rendering has left."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = MAX_LOOP_STEPS

    def take(self) -> None:
        self.left -= 1
        if self.left < 0:
            _limit(f"looped more than {MAX_LOOP_STEPS} times")


_steps: ContextVar[_Steps] = ContextVar("steps")


class _Counted:
    """What a loop runs over, counting."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        steps = _steps.get()
        for value in self._values:
            steps.take()
            yield value

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]


def _bounded(value: str) -> str:
    if len(value) > MAX_OUTPUT_CHARS:
        _limit("built a text or list that is too long")
    return value


class _AddBounds(NodeTransformer):
    """Wraps what loops run over, and what `~` builds."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filter(cast(nodes.Expr, node.iter), "canter_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(node, "canter_bounded")


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training: here its body alone counts."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """A namespace that keeps no names beginning with an underscore."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace can't hold {name!r}: it begins with an underscore")


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic whose result may be far larger than its operands."""
        if operator == "**" and isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_POWER_BITS:
            _limit("computed a power that is too large")
        if operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(value, _GROWING) and isinstance(count, int):
                    _check_length(len(value) * count, value)
        if operator == "%" and isinstance(left, str):
            _check_percent_format(left)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, _GROWING):
            _check_length(len(result), result)
        return result

    def call(self, context: Any, callee: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Methods of Python's own types whose result may be far larger than what they are given."""
        method = getattr(callee, "__wrapped__", callee)
        if isinstance(method, BuiltinMethodType):
            _check_method(method.__self__, method.__name__, (*args, *kwargs.values()))
        return super().call(context, callee, *args, **kwargs)


def _check_length(length: int, like: Any = "") -> None:
    """Refuse a text, or a list when `like` is one, of that length."""
    if length > (MAX_OUTPUT_CHARS if isinstance(like, (str, bytes)) else MAX_LOOP_STEPS):
        _limit("built a text or list that is too long")


def _check_method(owner: Any, name: str, args: tuple[Any, ...]) -> None:
    for value in args:
        if isinstance(value, int):
            _check_length(value * (len(owner) if name == "expandtabs" else 1))
    if not isinstance(owner, (str, bytes)):
        return
    if name in ("format", "format_map"):
        _check_brace_format(str(owner))
    elif name == "replace" and len(args) >= 2:
        _check_replace(owner, args[0], args[1])
    elif name == "join" and args:
        _check_join(owner, args[0])
    elif name == "translate":
        _limit("called translate, which templates may not")


def _check_percent_format(pattern: str) -> None:
    if _WIDE_PERCENT.search(pattern):
        _limit("formats with a width that is too large or not written out")


def _check_brace_format(pattern: str) -> None:
    if _WIDE_BRACES.search(pattern):
        _limit("formats with a width that is too large or not written out")


def _check_replace(text: Any, old: Any, new: Any) -> None:
    if isinstance(old, type(text)) and isinstance(new, type(text)):
        _check_length(text.count(old) * len(new))


def _check_join(separator: Any, values: Any) -> None:
    """Only lists can be long enough to matter: what a generator yields has been counted."""
    if isinstance(values, str):
        _check_length((len(separator) + 1) * len(values))
    elif isinstance(values, (list, tuple)):
        _check_length(len(separator) * len(values) + sum(len(value) for value in values if isinstance(value, (str, bytes))))


def _guarded(name: str, check: Callable[..., None]) -> Callable[..., Any]:
    """A built-in filter behind a check of its value and arguments."""
    plain = FILTERS[name]

    @functools.wraps(plain)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        values = [value for value in (*args, *kwargs.values()) if not isinstance(value, (jinja2.Environment, EvalContext, Context))]
        check(*values)
        return plain(*args, **kwargs)

    return guarded


def _check_numbers(*values: Any) -> None:
    """Widths, counts and precisions."""
    if any(isinstance(value, int) and abs(value) > _MAX_FILTER_NUMBER for value in values[1:]):
        _limit(f"gave a filter a number above {_MAX_FILTER_NUMBER}")


def _check_sum(_: Any, *more: Any) -> None:
    """Lists would be copied once for each of them."""
    if any(isinstance(start, (list, tuple)) for start in more):
        _limit("summed up what are no numbers")


def _check_indent(value: Any, width: Any = 4, *_: Any) -> None:
    text = str(value)
    _check_length(len(text) + (text.count("\n") + 1) * (len(width) if isinstance(width, str) else int(width)))


_GUARDED_FILTERS = {
    "center": _check_numbers,
    "round": _check_numbers,
    "batch": _check_numbers,
    "slice": _check_numbers,
    "truncate": _check_numbers,
    "indent": _check_indent,
    "sum": _check_sum,
    "format": lambda value, *_: _check_percent_format(str(value)),
    "replace": lambda value, old, new, *_: _check_replace(str(value), str(old), str(new)),
    "join": lambda values, separator="", *_: _check_join(str(separator), values),
}
# No chat template formats web pages; some of these can grow what they are given without bound, or take its length squared.
_DROPPED_FILTERS = ("wordwrap", "urlize", "xmlattr", "pprint", "striptags")


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Plain JSON, not escaped for HTML as Jinja's own filter does."""
    _check_numbers(value, indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise RaisedByTemplateError(str(message))


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def make_environment(now: Callable[[], datetime]) -> jinja2.Environment:
    """The environment of one chat template. `now` is the clock of `strftime_now`."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters |= {name: _guarded(name, check) for name, check in _GUARDED_FILTERS.items()}
    for name in _DROPPED_FILTERS:
        del environment.filters[name]
    environment.filters |= {"tojson": _tojson, "canter_counted": _Counted, "canter_bounded": _bounded}
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda pattern: now().strftime(pattern),
        "dict": _new_dict,
        "namespace": _Namespace,
    }
    del environment.globals["lipsum"]
    return environment


def compile_template(environment: jinja2.Environment, source: str) -> jinja2.Template:
    """Compile with bounds. Raises `jinja2.TemplateSyntaxError`."""
    tree = environment.parse(source)
    _AddBounds().visit(tree)
    return environment.from_string(tree)


def render_bounded(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Render; too much work or output raises `InvalidRequestError`, all else what Jinja and the template raise."""
    token = _steps.set(_Steps())
    try:
        pieces, length = [], 0
        for piece in template.generate(variables):
            length += len(piece)
            if length > MAX_OUTPUT_CHARS:
                _limit(f"wrote more than {MAX_OUTPUT_CHARS} characters")
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _steps.reset(token)
