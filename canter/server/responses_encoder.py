"""From the pipeline's outputs to a response object, and to the events that tell how it came about."""

from __future__ import annotations

import time
import uuid

import msgspec

from canter.client.outputs import CompletionOutput, RequestOutput
from canter.core.messages import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP
from canter.server.logprobs import ChatLogprobsFormat
from canter.server.schemas.openai import TokenLogprob
from canter.server.schemas.responses import (
    IncompleteDetails,
    InputTokensDetails,
    ItemEvent,
    LifecycleEvent,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    PartEvent,
    ResponsesAnswer,
    ResponsesError,
    ResponsesUsage,
    TextDeltaEvent,
    TextDoneEvent,
)

INCOMPLETE_REASONS = {FINISH_LENGTH: "max_output_tokens"}
"""Finish reason -> why a response is incomplete; others keep their name."""


encode_json = msgspec.json.Encoder().encode


class ResponsesEncoder:
    """Writes one response. Each method returns the events that it gave rise to, encoded, one for each sequence number.

    The event of a whole answer is the same object that an answer without a stream has. Today a response is one message;
    reasoning and tool calls will be further writers beside `_Message`, chosen in `_write` by what a parser makes of the text.
    `with_events` False: nobody reads the events, so that empty bytes stand for them.
    """

    def __init__(
        self,
        response: ResponsesAnswer,
        num_prompt_tokens: int,
        logprobs_format: ChatLogprobsFormat | None = None,
        with_events: bool = True,
    ) -> None:
        self._response = response
        self._num_prompt_tokens = num_prompt_tokens
        self._logprobs_format = logprobs_format
        self._with_events = with_events
        self._sequence = 0
        self._message: _Message | None = None
        self._num_tokens = 0
        self._num_cached = 0

    def answer(self) -> ResponsesAnswer:
        """The response as it stands."""
        if self._message is not None:
            self._message.settle()
        return self._response

    def create(self) -> list[bytes]:
        """The first event."""
        return [self._lifecycle("created")] if self._sequence == 0 else []

    def feed(self, output: RequestOutput) -> list[bytes]:
        """What an output adds; the last one ends the response."""
        [choice] = output.outputs
        self._num_tokens += len(choice.token_ids)
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
        events: list[bytes] = []
        if self._message is None:
            self._message = _Message(self, len(self._response.output))
            self._response.output.append(self._message.item)
            events += self._message.open()
        return events + self._message.write(choice.text, self._logprobs(choice))

    def _end(self, finish_reason: str) -> list[bytes]:
        self._response.status = {FINISH_STOP: "completed", FINISH_ABORT: "cancelled"}.get(finish_reason, "incomplete")
        complete = self._response.status == "completed"
        events = self._message.close("completed" if complete else "incomplete") if self._message is not None else []
        if complete:
            self._response.completed_at = int(time.time())
        elif finish_reason != FINISH_ABORT:
            self._response.incomplete_details = IncompleteDetails(INCOMPLETE_REASONS.get(finish_reason, finish_reason))
        self._response.usage = self._usage()
        return [*events, self._lifecycle("completed" if complete else "incomplete")]

    def _cut_off(self, status: str) -> None:
        if self._message is not None:
            self._message.settle()
            self._message.item.status = "incomplete"
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
            OutputTokensDetails(0),
            self._num_prompt_tokens + self._num_tokens,
        )

    def _lifecycle(self, name: str) -> bytes:
        return self.event(LifecycleEvent(f"response.{name}", self.next_number(), self._response))

    def next_number(self) -> int:
        """The sequence number of the event that is about to be written."""
        self._sequence += 1
        return self._sequence - 1

    def event(self, body: LifecycleEvent | ItemEvent | PartEvent | TextDeltaEvent | TextDoneEvent) -> bytes:
        """A server-sent event with its type in front, as OpenAI writes them."""
        if not self._with_events:
            return b""
        return b"event: " + body.type.encode() + b"\ndata: " + encode_json(body) + b"\n\n"


class _Message:
    """One message item with one part of text."""

    def __init__(self, owner: ResponsesEncoder, output_index: int) -> None:
        self.item = OutputMessage(new_item_id("msg"), "in_progress")
        self._owner = owner
        self._index = output_index
        self._part = OutputText()
        self._pieces: list[str] = []

    def open(self) -> list[bytes]:
        added = self._item_event("added")  # encoded before the part is in it
        self.item.content.append(self._part)
        return [added, self._part_event("added")]

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
        events = [self._owner.event(done), self._part_event("done")]
        self.item.status = status
        return [*events, self._item_event("done")]

    def settle(self) -> None:
        """Put the pieces written so far into the item."""
        self._pieces = ["".join(self._pieces)]
        self._part.text = self._pieces[0]

    def _item_event(self, name: str) -> bytes:
        return self._owner.event(ItemEvent(f"response.output_item.{name}", self._owner.next_number(), self._index, self.item))

    def _part_event(self, name: str) -> bytes:
        body = PartEvent(f"response.content_part.{name}", self._owner.next_number(), self.item.id, self._index, 0, self._part)
        return self._owner.event(body)


def new_item_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
