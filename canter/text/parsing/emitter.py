"""What a machine has read becomes events: pieces are joined, blank text beside calls is left out, unwanted calls are muted."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from typing import Any

from canter.text.parsing.args.coercion import inlined
from canter.text.parsing.events import CallArguments, CallEnd, CallStart, ContentText, Event, ReasoningText
from canter.text.parsing.options import ParseOptions

_ALPHANUMERIC = string.ascii_letters + string.digits

NewId = Callable[[str, int], str]
"""The id of a call from its function's name and its number in the conversation, counted from 0."""


def random_id(name: str, number: int) -> str:
    return f"chatcmpl-tool-{secrets.token_hex(16)}"


def kimi_id(name: str, number: int) -> str:
    return f"functions.{name}:{number}"


def mistral_id(name: str, number: int) -> str:
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class Emitter:
    """Collects events. `held`: what may be a call, as it was written, None when there is nothing; see `hold`."""

    def __init__(
        self,
        options: ParseOptions,
        new_id: NewId = random_id,
        trims_thoughts: bool = True,
        thoughts_answer: bool = False,
        frames: frozenset[str] = frozenset(),
    ) -> None:
        """`thoughts_answer`: the content of an output that has neither content nor calls is its thought. `frames`: markers that are
        never text."""
        self.options = options
        self._new_id, self._trims_thoughts, self._frames = new_id, trims_thoughts, frames
        self._schemas = {tool.name: tool.parameters for tool in options.tools}
        self._events: list[Event] = []
        self._kind: type[ReasoningText] | type[ContentText] | type[CallArguments] = ContentText
        self._pieces: list[str] = []
        self._blank: list[str] = []  # blank end of the content or thought, until it is known what follows
        self._blank_kind: type[ReasoningText] | type[ContentText] = ContentText
        self._thought: list[str] | None = [] if thoughts_answer else None
        self._index = -1
        self._muted = False
        self._pending: tuple[str, str | None] | None = None
        self.call_is_open = False
        self.has_calls = False
        self.held: list[str] | None = None
        self.held_from = 0
        self._held_is_blank = True
        self._held_is_marked = False

    def take(self) -> list[Event]:
        """The events since the last time."""
        self._join()
        events, self._events = self._events, []
        return events

    def reasoning(self, text: str) -> None:
        self._text(ReasoningText, text)

    def content(self, text: str) -> None:
        self._text(ContentText, text)

    def end_output(self, truncated: bool) -> None:
        """Nothing follows. Blank text after calls says nothing."""
        if self._blank and self._blank_kind is ContentText and not self.has_calls:
            self._put(ContentText, "".join(self._blank))
            self._blank = []
        self.end_blank()
        if self._thought and not truncated:
            self._put(ContentText, "".join(self._thought))

    def end_blank(self) -> None:
        """Something else follows: the blank end of a content is dropped, that of a thought as the format says."""
        if self._blank and self._blank_kind is ReasoningText and not self._trims_thoughts:
            self._put(ReasoningText, "".join(self._blank))
        self._blank = []

    def _text(self, kind: type[ReasoningText] | type[ContentText], text: str) -> None:
        if self._blank and self._blank_kind is not kind:
            self.end_blank()
        self._blank_kind = kind
        kept = text.rstrip()
        if kept:
            if self._blank:
                self._put(kind, "".join(self._blank))
                self._blank = []
            self._put(kind, kept)
        if len(kept) < len(text):
            self._blank.append(text[len(kept) :])

    def _put(self, kind: type[ReasoningText] | type[ContentText] | type[CallArguments], text: str) -> None:
        if kind is not self._kind:
            self._join()
            self._kind = kind
        self._pieces.append(text)
        if self._thought is not None:
            if kind is ReasoningText:
                self._thought.append(text)
            else:
                self._thought = None

    def _join(self) -> None:
        if self._pieces:
            text = "".join(self._pieces)
            self._pieces = []
            if self._kind is ContentText:
                self._events.append(ContentText(text))
            elif self._kind is ReasoningText:
                self._events.append(ReasoningText(text))
            else:
                self._events.append(CallArguments(self._index, text))

    # Text that may be a call

    def hold(self, start: int = 0) -> None:
        """From here on, what may be a call is remembered as it was written, until a call has begun. `start`: the place in the text
        that a body is reading."""
        if self.held is None:
            self.held = []
            self.held_from = start
            self._held_is_blank = True
            self._held_is_marked = False

    def remember(self, text: str, is_marker: bool) -> None:
        if self.held is not None and text:
            if not is_marker or text not in self._frames:
                self.held.append(text)
            self._held_is_blank = self._held_is_blank and (is_marker or text.isspace())
            self._held_is_marked = self._held_is_marked or is_marker

    def release(self, with_markers: bool = False) -> str:
        """What was held, now that it is no call. Markers with nothing between them are nothing, unless they are asked for."""
        text = "" if self.held is None or (self._held_is_blank and not with_markers) else "".join(self.held)
        self.held = None
        self._pending = None
        return text

    def give_up(self) -> str:
        """What was held when the output was cut off: a marked call that had no name yet shows nothing."""
        is_call = self.held is not None and self._held_is_marked
        text = self.release()
        if is_call:
            self.end_blank()
        return "" if is_call else text

    # Calls

    def name_call(self, name: str, call_id: str | None = None) -> None:
        """A call is about to begin: it does with `open_call`."""
        self._pending = (name, call_id)

    def schema(self, name: str) -> Mapping[str, Any]:
        return inlined(self._schemas.get(name, {}))

    def is_declared(self, name: str) -> bool:
        return name in self._schemas

    @property
    def pending_schema(self) -> Mapping[str, Any]:
        """The parameters' schema of the call that is about to begin or has begun."""
        return self.schema(self._pending[0]) if self._pending is not None else {}

    def open_call(self) -> None:
        """The call is one: its name goes out."""
        if self._pending is None or self.call_is_open:
            return
        name, call_id = self._pending
        self.held = None
        self.end_blank()
        self.call_is_open = self.has_calls = True
        self._thought = None
        self._muted = self.options.tool_choice == "none" or (self._index >= 0 and not self.options.parallel_tool_calls)
        if self._muted:
            return
        self._index += 1
        self._join()
        if call_id is None:
            call_id = self._new_id(name, self.options.num_previous_calls + self._index)
        self._events.append(CallStart(self._index, call_id, name))

    def arguments(self, text: str) -> None:
        if text and self.call_is_open and not self._muted:
            self._put(CallArguments, text)

    def close_call(self) -> None:
        self._pending = None
        if not self.call_is_open:
            return
        self.call_is_open = False
        if not self._muted:
            self._join()
            self._events.append(CallEnd(self._index))
        self._muted = False
