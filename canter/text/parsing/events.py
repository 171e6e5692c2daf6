"""What a parser tells of an output. Every dialect makes its own objects of these."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of the model's thoughts, without their markers."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """A piece of what is meant for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. Calls of an output count up from 0; the name is whole, and comes once."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments. All pieces of a call make up one JSON object, unless the output was cut off."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete."""

    index: int


Event = ReasoningText | ContentText | CallStart | CallArguments | CallEnd
