"""Between the pipeline and the encoders: each choice's text read by the model's format, into thoughts, content and tool calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from canter.client.outputs import CompletionOutput, RequestOutput
from canter.core.messages import FINISH_STOP
from canter.text.parsing.events import CallArguments, CallEnd, CallStart, ReasoningText
from canter.text.parsing.options import ParseOptions
from canter.text.parsing.parser import OutputFormat, OutputParser

FINISH_TOOL_CALLS = "tool_calls"
AT_ONCE = 2048
"""Tokens that are read on the event loop; more, which come with a whole answer, in a thread."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How the outputs of a request are to be read. Without `show_reasoning` nobody is told the thoughts. `request_type` is what
    metrics call the dialect."""

    format: OutputFormat
    options: ParseOptions
    show_reasoning: bool = True
    request_type: str = "other"

    @property
    def reads_calls(self) -> bool:
        """Whether calls are looked for."""
        return bool(self.options.tools) and self.options.tool_choice != "none"

    @property
    def is_forced(self) -> bool:
        """Whether a grammar makes the output a call."""
        return self.options.tool_choice in ("required", "named")


@dataclass(eq=False)
class Reader:
    """Reads one choice."""

    reading: Reading
    parser: OutputParser
    called: bool = field(default=False)

    @classmethod
    def of(cls, reading: Reading, prompt: list[int]) -> Reader:
        """A reader of an answer to this prompt."""
        return cls(reading, reading.format.parser(reading.options, prompt))

    def read(self, choice: CompletionOutput) -> bool:
        """Fill in what the parser makes of the choice's new text, and with its end whether it ended in tool calls. Returns whether a
        call, or a part of one, is new."""
        events = self.parser.feed(choice.text, choice.token_ids)
        if choice.finish_reason is not None:
            events = [*events, *self.parser.finish(choice.finish_reason != FINISH_STOP)]
        self.called = self.called or any(isinstance(event, CallEnd) for event in events)
        if choice.finish_reason == FINISH_STOP and self.called:
            choice.finish_reason = FINISH_TOOL_CALLS
        shown = self.reading.show_reasoning
        choice.events = events if shown else [event for event in events if not isinstance(event, ReasoningText)]
        choice.num_reasoning_tokens = self.parser.num_reasoning_tokens
        return any(isinstance(event, CallStart | CallArguments | CallEnd) for event in events)


async def read_outputs(
    outputs: AsyncGenerator[tuple[int, RequestOutput], None],
    reading: Reading,
    prompts: list[list[int]],
    on_read: Callable[[bool], None] | None = None,
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of a job with `events` in every choice. `prompts`: the token ids of each. `on_read` is told of everything that was
    read for calls, whether one was there."""
    readers: dict[tuple[int, int], Reader] = {}
    async with aclosing(outputs):
        async for number, output in outputs:
            for choice in output.outputs:
                key = number, choice.index
                if key not in readers:
                    readers[key] = Reader.of(reading, prompts[number])
                if len(choice.token_ids) > AT_ONCE:
                    found = await asyncio.to_thread(readers[key].read, choice)
                else:
                    found = readers[key].read(choice)
                if on_read is not None:
                    on_read(found)
            yield number, output
