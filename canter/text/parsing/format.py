"""The words in which formats are written down: states, rules, thoughts and calls. All of it is data; `machine` reads by it.

docs/guides/add-an-output-format.md shows how a format is added.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from canter.text.parsing.args.tagged import Trim, ValueType
from canter.text.parsing.call_tags import CallWriting
from canter.text.parsing.emitter import Emitter, NewId, random_id
from canter.text.parsing.options import ParseOptions
from canter.text.tokenizer import Tokenizer

CONTENT, REASONING = "CONTENT", "REASONING"
"""The states that every format has: what is meant for the user, and a thought."""

OPENED, ANSWER = "OPENED", "ANSWER"
"""The states after a thought's markers where `Thoughts.trims_start` is set: blank text is dropped, other text is thought or content."""

Kind = Literal["content", "reasoning", "skip", "drop", "name", "gap", "key", "value", "body"]

_NAME = re.compile(r"[^\s<>{}\[\]()\"'`,;]{1,256}")
_NAME_SO_FAR = re.compile(r"\s*[^\s<>{}\[\]()\"'`,;]*\s*")


class Body(Protocol):
    """Reads what has a syntax of its own: JSON, Python calls, ... One is made whenever its state is entered.

    It tells the emitter of calls (`name_call`, `open_call`, `arguments`, `close_call`), never later than it is sure.
    """

    @property
    def failed(self) -> bool:
        """What came is nothing that this body reads, and no call has begun: it becomes ordinary text."""
        ...

    @property
    def in_string(self) -> bool:
        """Whether the next character belongs to a string, in which text that looks like a marker is only text."""
        ...

    def feed(self, text: str) -> int:
        """Take text; returns how many characters were taken. Fewer than all: the rest isn't this body's (or it `failed` there)."""
        ...

    def end(self, complete: bool) -> None:
        """The body has ended. `complete` False: the output was cut off, so that an open call has no end."""
        ...


BodyFactory = Callable[[Emitter], Body]


@dataclass(frozen=True, slots=True)
class Named:
    """What the header of a call says: the function's name, and the call's id where the format writes one. `otherwise`: the function
    that is meant if none of that name is declared."""

    name: str
    id: str | None = None
    otherwise: str | None = None


ReadName = Callable[[str], Named | None]
"""Reads the text of a "name" state; None when it names no function."""


def plain_name(text: str) -> Named | None:
    """The name alone, blank around it."""
    name = text.strip()
    return Named(name) if _NAME.fullmatch(name) else None


@dataclass(frozen=True, slots=True)
class State:
    """What text means in a state, by its kind:

    content, reasoning: it is that.
    skip: outside of calls. Blank text is dropped; other text moves on to `on_text`, or, without that, means that no call comes: what
        was held becomes content, and what has nothing before it is dropped.
    drop: outside of calls: dropped, and so is what was held.
    name: it is the header of a call; entering the state begins one. `read_name` reads it when the state is left.
    gap: inside a call, between its parts: dropped.
    key, value: of an argument; `trim` and `value_type` say how a value is read.
    body: `body` reads it. Entered from "name", it reads the arguments of that call; from elsewhere, calls with their names.

    `on_text`: content and skip move to this state at the first text that isn't blank; a body when it takes no more. `route` of a name
    state: reads its header, and from the rule's target says into which state it leads, and which function it calls, if any. `header`:
    what a name state's text may begin with; with the first character that doesn't fit it is clear that no call comes, and a marker that
    doesn't means what it does where the header began.
    """

    kind: Kind
    on_text: str | None = None
    read_name: ReadName = plain_name
    trim: Trim = "none"
    value_type: ValueType = "schema"
    body: BodyFactory | None = None
    header: re.Pattern[str] | None = None
    route: Callable[[str, str], tuple[str, Named | None] | None] | None = None

    @property
    def in_call(self) -> bool:
        """Whether the state belongs to a call that a name state has begun."""
        return self.kind in ("name", "gap", "key", "value")


SKIP = State("skip")
DROP = State("drop")
NAME = State("name", header=_NAME_SO_FAR)
GAP = State("gap")
KEY = State("key")
VALUE = State("value")


@dataclass(frozen=True, slots=True)
class Rule:
    """In each of the states `sources` (parted by blanks) the terminal `literal` leads to `target`. `keeps`: the literal's text is
    the target's first text as well. `trims`: blank text before the literal belongs to it. `needs_calls`: holds only where the request
    has tools to call (`tool_choice` isn't none).

    A rule that leads from a name state to itself: the literal is text of the header. One from REASONING alone to CONTENT leads to the
    state in which content begins.
    """

    sources: str
    literal: str
    target: str
    keeps: bool = False
    needs_calls: bool = False
    trims: bool = False


@dataclass(frozen=True, slots=True)
class Calls:
    """How a model writes tool calls: the states beside CONTENT and REASONING, and the rules.

    Which literals are tokens of their own is found in the vocabulary: every literal that is an added token there is known by its
    id as soon as ids are given; the same text written with ordinary tokens is ordinary text then.

    `initial`: the state in which content begins, for calls without markers that are calls only at the very beginning. `frames`: markers
    around messages, which are never text, even if no call comes. `written`: how the model is held to a function's schema when it begins
    a call; None where nobody has said how.
    """

    states: Mapping[str, State]
    rules: tuple[Rule, ...]
    initial: str = CONTENT
    new_id: NewId = random_id
    preserved: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()
    written: CallWriting | None = None


def _always(options: ParseOptions) -> bool:
    return True


def never(options: ParseOptions) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Thoughts:
    """How a model writes thoughts.

    `starts`, `ends`: the markers, any of them. `enabled(options)` False: the model doesn't think, and the output is read as if there
    were no markers; a prompt that opens a thought says more than this. `opens(options)`: whether an output whose prompt says
    nothing begins in a thought. `needs_opening`: a prompt that is known and doesn't open the thought leaves it closed.
    `initial`: the state in which content begins, for thoughts that begin without their marker. `prefix`: text that the content begins
    with, though the model didn't write it. `answers`: whether a thought that nothing followed is given as content once more.
    `trims_start`: blank text after a marker belongs to it. `takes_strays` False: a marker that says what is so already is text.
    `in_prompt`: the markers are several tokens each; they are looked for in prompts, and `rules` say how an output has them.
    `states` and `rules` are for formats where more than two markers belong to thoughts; they may lead to `ANSWER`. `frames` as in `Calls`.
    """

    starts: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    enabled: Callable[[ParseOptions], bool] = _always
    opens: Callable[[ParseOptions], bool] = _always
    needs_opening: bool = False
    trims_end: bool = True
    trims_start: bool = False
    takes_strays: bool = True
    in_prompt: bool = False
    initial: str = CONTENT
    prefix: str = ""
    answers: Callable[[ParseOptions], bool] | None = None
    frames: tuple[str, ...] = ()
    states: Mapping[str, State] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()

    def all_rules(self, content: str) -> tuple[Rule, ...]:
        """Markers switch between content and thought; one that says what is so already is dropped. `content`: the state in which
        content begins."""
        if self.in_prompt:
            return self.rules
        rules = list(self.rules)
        opened, answer = (OPENED, ANSWER) if self.trims_start else (REASONING, content)
        rules += [Rule(f"{CONTENT} {content}", literal, opened) for literal in self.starts]
        rules += [Rule(REASONING, literal, answer) for literal in self.ends]
        if self.takes_strays:
            rules += [Rule(REASONING, literal, opened) for literal in self.starts]
            for literal in self.ends:
                rules += [Rule(content, literal, content), Rule(CONTENT, literal, CONTENT)]
        return tuple(rules)

    def all_states(self, content: str) -> dict[str, State]:
        """`states`, and those after the markers."""
        states = dict(self.states)
        if self.trims_start:
            states |= {OPENED: State("skip", on_text=REASONING), ANSWER: State("skip", on_text=content)}
        return states


@dataclass(frozen=True, slots=True)
class Family:
    """What a file of `formats` gives: formats by the names that users pass for them. A format that depends on the tokenizer
    (Hunyuan's suffix) is a function of it. `detect` recognises models from the chat template and the vocabulary."""

    calls: Mapping[str, Calls | Callable[[Tokenizer], Calls]] = field(default_factory=dict)
    thoughts: Mapping[str, Thoughts | Callable[[Tokenizer], Thoughts]] = field(default_factory=dict)
    detect: tuple[Detection, ...] = ()


@dataclass(frozen=True, slots=True)
class Detection:
    """A model of this kind is one whose template contains all of `template` and none of `without`, and whose vocabulary has all of
    `tokens` as added tokens. Among several that fit, the one with the highest `weight`, then the one that asks for most, wins."""

    calls: str | None = None
    thoughts: str | None = None
    template: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    weight: int = 0


def tools_on(options: ParseOptions) -> bool:
    return bool(options.tools)


def kwarg(options: ParseOptions, *names: str) -> bool | None:
    """What the template was told under any of these names, None when nothing."""
    for name in names:
        if name in options.template_kwargs:
            return bool(options.template_kwargs[name])
    return None


def on_unless_off(*names: str) -> Callable[[ParseOptions], bool]:
    """Thinking is on unless one of these template variables is false."""
    return lambda options: kwarg(options, *names) is not False


def off_unless_on(*names: str) -> Callable[[ParseOptions], bool]:
    """Thinking is off unless one of these template variables is true."""
    return lambda options: kwarg(options, *names) is True
