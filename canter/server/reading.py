"""Between the pipeline and the encoders: each choice's text read by the model's format, into thoughts, content and tool calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from canter.client.outputs import CompletionOutput, RequestOutput
from canter.core.messages import FINISH_STOP
from canter.text.parsing.events import CallEnd, ReasoningText
from canter.text.parsing.options import ParseOptions
from canter.text.parsing.parser import OutputFormat, OutputParser

FINISH_TOOL_CALLS = "tool_calls"
AT_ONCE = 2048
"""Tokens that are read on the event loop; more, which come with a whole answer, in a thread."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How the outputs of a request are to be read. Without `show_reasoning` nobody is told the thoughts."""

    format: OutputFormat
    options: ParseOptions
    show_reasoning: bool = True

    @property
    def is_forced(self) -> bool:
        """Whether a grammar makes the output a call."""
        return self.options.tool_choice in ("required", "named")


@dataclass(eq=False)
class _Reader:
    """One choice."""

    parser: OutputParser
    called: bool = field(default=False)

    def read(self, choice: CompletionOutput, show_reasoning: bool) -> None:
        """Fill in what the parser makes of the choice's new text, and with its end whether it ended in tool calls."""
        events = self.parser.feed(choice.text, choice.token_ids)
        if choice.finish_reason is not None:
            events = [*events, *self.parser.finish(choice.finish_reason != FINISH_STOP)]
        self.called = self.called or any(isinstance(event, CallEnd) for event in events)
        if choice.finish_reason == FINISH_STOP and self.called:
            choice.finish_reason = FINISH_TOOL_CALLS
        choice.events = events if show_reasoning else [event for event in events if not isinstance(event, ReasoningText)]
        choice.num_reasoning_tokens = self.parser.num_reasoning_tokens


async def read_outputs(
    outputs: AsyncGenerator[tuple[int, RequestOutput], None], reading: Reading, prompts: list[list[int]]
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of a job with `events` in every choice. `prompts`: the token ids of each."""
    readers: dict[tuple[int, int], _Reader] = {}
    async with aclosing(outputs):
        async for number, output in outputs:
            for choice in output.outputs:
                key = number, choice.index
                if key not in readers:
                    readers[key] = _Reader(reading.format.parser(reading.options, prompts[number]))
                if len(choice.token_ids) > AT_ONCE:
                    await asyncio.to_thread(readers[key].read, choice, reading.show_reasoning)
                else:
                    readers[key].read(choice, reading.show_reasoning)
            yield number, output
