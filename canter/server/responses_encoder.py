"""From the pipeline's outputs to a response object, and to the events that tell how it came about."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from canter.client.outputs import CompletionOutput, RequestOutput
from canter.core.messages import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP
from canter.server.logprobs import ChatLogprobsFormat
from canter.server.reading import FINISH_TOOL_CALLS
from canter.server.schemas.openai import TokenLogprob
from canter.server.schemas.responses import (
    ArgumentsDoneEvent,
    CallDeltaEvent,
    CustomCallItem,
    FunctionCallItem,
    IncompleteDetails,
    InputDoneEvent,
    InputTokensDetails,
    ItemEvent,
    LifecycleEvent,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    PartEvent,
    ReasoningDeltaEvent,
    ReasoningDoneEvent,
    ReasoningItem,
    ResponsesAnswer,
    ResponsesError,
    ResponsesUsage,
    TextDeltaEvent,
    TextDoneEvent,
)
from canter.server.schemas.responses import ReasoningText as ReasoningPart
from canter.server.tools import DeclaredTool
from canter.text.parsing.events import CallArguments, CallStart, ContentText, ReasoningText

INCOMPLETE_REASONS = {FINISH_LENGTH: "max_output_tokens"}
"""Finish reason -> why a response is incomplete; others keep their name."""


encode_json = msgspec.json.Encoder().encode


class ResponsesEncoder:
    """Writes one response. Each method returns the events that it gave rise to, encoded, one for each sequence number.

    The event of a whole answer is the same object that an answer without a stream has. `declared` are the request's functions by the
    names under which the model knows them. `with_events` False: nobody reads the events, so that empty bytes stand for them.
    """

    def __init__(
        self,
        response: ResponsesAnswer,
        num_prompt_tokens: int,
        logprobs_format: ChatLogprobsFormat | None = None,
        with_events: bool = True,
        declared: Mapping[str, DeclaredTool] | None = None,
    ) -> None:
        self._response = response
        self._num_prompt_tokens = num_prompt_tokens
        self._logprobs_format = logprobs_format
        self._with_events = with_events
        self._declared = declared or {}
        self._sequence = 0
        self._item: _Message | _Thought | _Call | None = None
        """The one that is being written."""
        self._num_tokens = 0
        self._num_reasoning = 0
        self._num_cached = 0

    def answer(self) -> ResponsesAnswer:
        """The response as it stands."""
        if self._item is not None:
            self._item.settle()
        return self._response

    def create(self) -> list[bytes]:
        """The first event."""
        return [self._lifecycle("created")] if self._sequence == 0 else []

    def feed(self, output: RequestOutput) -> list[bytes]:
        """What an output adds; the last one ends the response."""
        [choice] = output.outputs
        self._num_tokens += len(choice.token_ids)
        self._num_reasoning = max(self._num_reasoning, choice.num_reasoning_tokens)
        self._num_cached = output.num_cached_tokens
        events = self._begin()
        events += self._write(choice)
        if choice.finish_reason is not None:
            events += self._end(choice.finish_reason)
        return events

    def fail(self, error: ResponsesError) -> list[bytes]:
        """End with an error, keeping what was written."""
        events = self._begin()
        self._response.error = error
        self._cut_off("failed")
        return [*events, self._lifecycle("failed")]

    def cancel(self) -> list[bytes]:
        """End because somebody asked for it. OpenAI has no event for that: the stream ends as an incomplete one."""
        events = self._begin()
        self._cut_off("cancelled")
        return [*events, self._lifecycle("incomplete")]

    def _begin(self) -> list[bytes]:
        """The events before the first output."""
        events = self.create()
        if self._response.status == "queued" or events:
            self._response.status = "in_progress"
            events.append(self._lifecycle("in_progress"))
        return events

    def _write(self, choice: CompletionOutput) -> list[bytes]:
        logprobs = self._logprobs(choice)
        if choice.events is None:
            message, events = self._message()
            return events + message.write(choice.text, logprobs)
        events = []
        for told in choice.events:
            match told:
                case ContentText(text):
                    message, opened = self._message()
                    events += opened + message.write(text, logprobs)
                    logprobs = []  # those of the output's tokens come with its first text
                case ReasoningText(text):
                    if not isinstance(self._item, _Thought):
                        events += self._open(_Thought(self, len(self._response.output)))
                    if isinstance(self._item, _Thought):
                        events += self._item.write(text)
                case CallStart(_, call_id, name):
                    events += self._open(_Call(self, len(self._response.output), call_id, self._declared.get(name) or DeclaredTool(name)))
                case CallArguments(_, text):
                    if isinstance(self._item, _Call):
                        events += self._item.write(text)
                case _:
                    events += self._close("completed")
        return events

    def _message(self) -> tuple[_Message, list[bytes]]:
        """The message that is being written, or a new one."""
        if isinstance(self._item, _Message):
            return self._item, []
        message = _Message(self, len(self._response.output))
        return message, self._open(message)

    def _open(self, item: _Message | _Thought | _Call) -> list[bytes]:
        events = self._close("completed")
        self._item = item
        self._response.output.append(item.item)
        return events + item.open()

    def _close(self, status: str) -> list[bytes]:
        if self._item is None:
            return []
        item, self._item = self._item, None
        return item.close(status)

    def _end(self, finish_reason: str) -> list[bytes]:
        stopped = finish_reason in (FINISH_STOP, FINISH_TOOL_CALLS)
        self._response.status = "completed" if stopped else "cancelled" if finish_reason == FINISH_ABORT else "incomplete"
        events = [] if self._response.output else self._message()[1]  # an answer that says nothing still has a message
        events += self._close("completed" if stopped else "incomplete")
        if stopped:
            self._response.completed_at = int(time.time())
        elif finish_reason != FINISH_ABORT:
            self._response.incomplete_details = IncompleteDetails(INCOMPLETE_REASONS.get(finish_reason, finish_reason))
        self._response.usage = self._usage()
        return [*events, self._lifecycle("completed" if stopped else "incomplete")]

    def _cut_off(self, status: str) -> None:
        if self._item is not None:
            self._item.settle()
            self._item.item.status = "incomplete"
        self._response.status = status
        self._response.usage = self._usage()

    def _logprobs(self, choice: CompletionOutput) -> list[TokenLogprob]:
        if self._logprobs_format is None or choice.logprobs is None or not choice.token_ids:
            return []
        return self._logprobs_format.encode(choice.token_ids, choice.logprobs).content

    def _usage(self) -> ResponsesUsage:
        return ResponsesUsage(
            self._num_prompt_tokens,
            InputTokensDetails(self._num_cached),
            self._num_tokens,
            OutputTokensDetails(self._num_reasoning),
            self._num_prompt_tokens + self._num_tokens,
        )

    def _lifecycle(self, name: str) -> bytes:
        return self.event(LifecycleEvent(f"response.{name}", self.next_number(), self._response))

    def next_number(self) -> int:
        """The sequence number of the event that is about to be written."""
        self._sequence += 1
        return self._sequence - 1

    def event(self, body: Any) -> bytes:
        """A server-sent event, one of `schemas.responses`, with its type in front, as OpenAI writes them."""
        if not self._with_events:
            return b""
        kind: str = body.type
        return b"event: " + kind.encode() + b"\ndata: " + encode_json(body) + b"\n\n"

    def item_event(self, name: str, index: int, item: Any) -> bytes:
        return self.event(ItemEvent(f"response.output_item.{name}", self.next_number(), index, item))

    def part_event(self, name: str, index: int, item_id: str, part: Any) -> bytes:
        return self.event(PartEvent(f"response.content_part.{name}", self.next_number(), item_id, index, 0, part))


class _Message:
    """One message item with one part of text."""

    def __init__(self, owner: ResponsesEncoder, output_index: int) -> None:
        self.item = OutputMessage(new_item_id("msg"), "in_progress")
        self._owner = owner
        self._index = output_index
        self._part = OutputText()
        self._pieces: list[str] = []

    def open(self) -> list[bytes]:
        added = self._owner.item_event("added", self._index, self.item)  # encoded before the part is in it
        self.item.content.append(self._part)
        return [added, self._owner.part_event("added", self._index, self.item.id, self._part)]

    def write(self, text: str, logprobs: list[TokenLogprob]) -> list[bytes]:
        """Text and the logprobs of its tokens; a token without text, such as the end of a turn, has logprobs only."""
        if not text and not logprobs:
            return []
        self._pieces.append(text)
        self._part.logprobs.extend(logprobs)
        return [self._owner.event(TextDeltaEvent(self._owner.next_number(), self.item.id, self._index, 0, text, logprobs))]

    def close(self, status: str) -> list[bytes]:
        self.settle()
        done = TextDoneEvent(self._owner.next_number(), self.item.id, self._index, 0, self._part.text, self._part.logprobs)
        events = [self._owner.event(done), self._owner.part_event("done", self._index, self.item.id, self._part)]
        self.item.status = status
        return [*events, self._owner.item_event("done", self._index, self.item)]

    def settle(self) -> None:
        """Put the pieces written so far into the item."""
        self._pieces = ["".join(self._pieces)]
        self._part.text = self._pieces[0]


class _Thought:
    """One reasoning item with one part."""

    def __init__(self, owner: ResponsesEncoder, output_index: int) -> None:
        self.item = ReasoningItem(new_item_id("rs"), "in_progress")
        self._owner = owner
        self._index = output_index
        self._part = ReasoningPart()
        self._pieces: list[str] = []

    def open(self) -> list[bytes]:
        added = self._owner.item_event("added", self._index, self.item)
        self.item.content.append(self._part)
        return [added, self._owner.part_event("added", self._index, self.item.id, self._part)]

    def write(self, text: str) -> list[bytes]:
        self._pieces.append(text)
        return [self._owner.event(ReasoningDeltaEvent(self._owner.next_number(), self.item.id, self._index, 0, text))]

    def close(self, status: str) -> list[bytes]:
        self.settle()
        done = ReasoningDoneEvent(self._owner.next_number(), self.item.id, self._index, 0, self._part.text)
        events = [self._owner.event(done), self._owner.part_event("done", self._index, self.item.id, self._part)]
        self.item.status = status
        return [*events, self._owner.item_event("done", self._index, self.item)]

    def settle(self) -> None:
        self._pieces = ["".join(self._pieces)]
        self._part.text = self._pieces[0]


class _Call:
    """One call of a function, or of a custom tool, whose input is a text that the model writes as an argument."""

    def __init__(self, owner: ResponsesEncoder, output_index: int, call_id: str, tool: DeclaredTool) -> None:
        self.item: FunctionCallItem | CustomCallItem
        if tool.is_custom:
            self.item = CustomCallItem(new_item_id("ctc"), call_id, tool.name, "", "in_progress")
        else:
            namespace = UNSET if tool.namespace is None else tool.namespace
            self.item = FunctionCallItem(new_item_id("fc"), call_id, tool.name, "", "in_progress", namespace=namespace)
        self._owner = owner
        self._index = output_index
        self._pieces: list[str] = []

    def open(self) -> list[bytes]:
        return [self._owner.item_event("added", self._index, self.item)]

    def write(self, text: str) -> list[bytes]:
        self._pieces.append(text)
        if isinstance(self.item, CustomCallItem):
            return []  # what it says is known when the argument is whole
        return [self._delta("function_call_arguments", text)]

    def close(self, status: str) -> list[bytes]:
        self.settle()
        item, number = self.item, self._owner.next_number
        if isinstance(item, FunctionCallItem):
            events = [self._owner.event(ArgumentsDoneEvent(number(), item.id, self._index, item.name, item.arguments))]
        else:
            events = [self._delta("custom_tool_call_input", item.input)]
            events.append(self._owner.event(InputDoneEvent(number(), item.id, self._index, item.input)))
        item.status = status
        return [*events, self._owner.item_event("done", self._index, item)]

    def _delta(self, what: str, text: str) -> bytes:
        return self._owner.event(CallDeltaEvent(f"response.{what}.delta", self._owner.next_number(), self.item.id, self._index, text))

    def settle(self) -> None:
        self._pieces = ["".join(self._pieces)]
        if isinstance(self.item, FunctionCallItem):
            self.item.arguments = self._pieces[0]
        else:
            self.item.input = _custom_input(self._pieces[0])


def _custom_input(arguments: str) -> str:
    """The input of a custom tool; what can't be read as its argument is passed on as it is."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def new_item_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
