"""An answer as a whole: the sum of its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from canter.text.parsing.events import CallArguments, CallEnd, CallStart, ContentText, Event, ReasoningText


@dataclass(slots=True)
class ReadCall:
    """A tool call. `arguments` is JSON text, cut off where the output was."""

    id: str
    name: str
    arguments: str = ""
    complete: bool = False


@dataclass(slots=True)
class ReadAnswer:
    """None stands for nothing said: no thought, no content."""

    reasoning: str | None = None
    content: str | None = None
    calls: list[ReadCall] = field(default_factory=list)


def gather(events: Iterable[Event]) -> ReadAnswer:
    """The sum of an output's events."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: dict[int, ReadCall] = {}
    arguments: dict[int, list[str]] = {}
    for event in events:
        match event:
            case ContentText(text):
                content.append(text)
            case ReasoningText(text):
                reasoning.append(text)
            case CallStart(index, call_id, name):
                calls[index] = ReadCall(call_id, name)
                arguments[index] = []
            case CallArguments(index, text):
                arguments[index].append(text)
            case CallEnd(index):
                calls[index].complete = True
    for index, call in calls.items():
        call.arguments = "".join(arguments[index])
    answer_calls = [calls[index] for index in sorted(calls)]
    return ReadAnswer("".join(reasoning) or None, "".join(content) or None, answer_calls)
