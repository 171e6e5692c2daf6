"""The interface between whoever has outputs to read and the formats that can read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from canter.text.parsing.call_tags import CallWriting
from canter.text.parsing.events import Event
from canter.text.parsing.options import ParseOptions


class OutputParser(Protocol):
    """Reads one output. However the output is cut into pieces, the events add up to the same texts and calls."""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Event]:
        """The next piece: text with the special tokens in it, and the ids of its tokens. The text may lag behind the ids. Both
        may be empty. Never raises, whatever a model writes."""
        ...

    def finish(self, truncated: bool = False) -> list[Event]:
        """The output has ended; what was held back comes out. `truncated`: it was cut off, so that an open call has no end."""
        ...

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of thoughts so far, as far as ids were given."""
        ...


class OutputFormat(Protocol):
    """How the served model writes: its tool calls in one way, its thoughts in another, or both in one."""

    @property
    def description(self) -> str:
        """What `canter serve` says of it: the names, and whether they were asked for or recognised."""
        ...

    @property
    def reads_tools(self) -> bool: ...

    @property
    def reads_thoughts(self) -> bool: ...

    @property
    def written_calls(self) -> CallWriting | None:
        """How calls are written, for holding an answer to the schemas of its functions; None where that isn't known."""
        ...

    def without_calls(self) -> OutputFormat:
        """For requests that offer no tools: what looks like a call is content."""
        ...

    def parser(self, options: ParseOptions, prompt_token_ids: Sequence[int] = (), prompt_tail: str = "") -> OutputParser:
        """A parser of one output. The prompt's end tells whether a thought is open already."""
        ...
