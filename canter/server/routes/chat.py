"""`POST /v1/chat/completions`: schema in, pipeline, chunks or one answer out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from canter.client.outputs import CompletionOutput, RequestOutput
from canter.core.errors import InvalidRequestError
from canter.core.messages import FINISH_STOP
from canter.core.structured_outputs import PARAM, StructuredOutputsParams
from canter.server.args import ServerArgs
from canter.server.body import read_json
from canter.server.constraints import constraint_names, constraint_of
from canter.server.generation import Generation, Job, Prompt, Wishes, fold
from canter.server.logprobs import ChatLogprobsFormat, finite_prompt_logprobs
from canter.server.messages import plain_text, template_messages
from canter.server.reading import FINISH_TOOL_CALLS, Reading
from canter.server.routes.common import LOGPROBS_NAMES, check_shared, field_names, priority_of, sampling_of, usage_wanted
from canter.server.schemas.openai import (
    AnswerCall,
    AnswerFunction,
    AnswerMessage,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    FunctionDelta,
    RequestTiming,
    ToolCallDelta,
    Usage,
)
from canter.server.sse import encoder, event, json_response, stream_response
from canter.server.state import ServerState, server_state
from canter.server.tools import MAX_TOOLS, ToolUse, choose, forced_output
from canter.text.chat_template import request_chat_template
from canter.text.parsing.answer import gather
from canter.text.parsing.events import CallArguments, CallStart, ContentText, Event, ReasoningText

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]


async def chat_completions(request: Request) -> Response:
    """See OpenAI's API reference; vLLM's extra fields are understood too."""
    state = server_state(request)
    generation = state.generation()
    body = await read_json(request, ChatRequest, state.server_args.max_body_bytes)
    model = state.model_name(body.model)
    shown_id, engine_id = state.new_ids(request, "chatcmpl", body.request_id)
    body.priority = priority_of(request, body.priority)
    job = await prepare_chat(generation, body, engine_id, state.server_args)
    with field_names(constraint_names(body) if job.reading is None or not job.reading.is_forced else {f"{PARAM}.json": "tools"}):
        await generation.admit(job)
    encoder = ChatEncoder(state, generation, body, job, shown_id, model)
    outputs = generation.stream(job)
    if body.stream:
        return stream_response(encoder.chunks(outputs))
    return json_response(encoder.answer(outputs))


async def prepare_chat(generation: Generation, body: ChatRequest, engine_id: str, server_args: ServerArgs) -> Job:
    """Render the conversation and settle the parameters. Raises `InvalidRequestError` naming the field."""
    check_shared(body)
    use = choose(body.tools, body.tool_choice, body.parallel_tool_calls)
    constraint = _constraint(body, use)
    if use.choice == "none" and server_args.exclude_tools_when_tool_choice_none:
        body.tools = None
    reading = chat_reading(generation, body, use)
    num_logprobs = _num_logprobs(body)
    prompt = await chat_prompt(generation, body, server_args.trust_request_chat_template)
    sampling = sampling_of(body)
    if num_logprobs is not None:
        sampling["logprobs"] = num_logprobs
    name = "max_tokens"
    if body.max_completion_tokens is not None:
        name = "max_completion_tokens"
        sampling["max_tokens"] = body.max_completion_tokens
    if sampling.get("max_tokens", 1) < 1:
        raise InvalidRequestError(f"{name} must be an integer of at least 1, got {sampling['max_tokens']}.", name)
    wishes = Wishes(
        sampling=sampling,
        stream=body.stream,
        max_tokens_name=name,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "left",
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        use_beam_search=body.use_beam_search,
        length_penalty=body.length_penalty,
        constraint=constraint,
        reading=reading,
    )
    with field_names(LOGPROBS_NAMES):
        return generation.prepare(engine_id, [prompt], wishes)


def chat_reading(generation: Generation, body: ChatRequest, use: ToolUse) -> Reading | None:
    """How the answer to a chat body with these tools is read; None where all of it is content."""
    return generation.reading(
        use,
        template_kwargs=_template_kwargs(body),
        reasoning_effort=body.reasoning_effort,
        num_previous_calls=sum(len(message.tool_calls or ()) for message in body.messages),
        show_reasoning=body.include_reasoning is not False,
        keep_special_tokens=body.skip_special_tokens is False,
        request_type="chat_completions",
    )


async def chat_prompt(generation: Generation, body: Any, trust_template: bool) -> Prompt:
    """The conversation of a chat or tokenize body as a prompt. The template writes the special tokens; adding more is up to the user."""
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other: set add_generation_prompt to false.",
            "continue_final_message",
        )
    if body.chat_template is not None and not trust_template:
        raise InvalidRequestError(
            "chat_template is not accepted from requests; start the server with --trust-request-chat-template to allow it.", "chat_template"
        )
    for name in ("tools", "documents"):
        given = getattr(body, name, None) or ()
        if len(given) > MAX_TOOLS:
            raise InvalidRequestError(f"{name} may hold at most {MAX_TOOLS} entries, got {len(given)}.", name)
    template = None
    if body.chat_template is not None:  # in a thread: it is compiled and tried
        template = await asyncio.to_thread(request_chat_template, generation.text.tokenizer, body.chat_template)
    text = await generation.render(
        template_messages(body.messages),
        _template_kwargs(body),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=body.tools,
        documents=getattr(body, "documents", None),
        template=template,
    )
    must_fit = getattr(body, "truncate_prompt_tokens", -1) is None
    return await generation.encode(text, bool(body.add_special_tokens), must_fit)


def _template_kwargs(body: Any) -> dict[str, Any]:
    """The user's template variables; reasoning models' templates read `reasoning_effort` as one."""
    kwargs = dict(body.chat_template_kwargs or {})
    effort = getattr(body, "reasoning_effort", None)
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
    return kwargs


def _constraint(body: ChatRequest, use: ToolUse) -> StructuredOutputsParams | None:
    """What the answer must obey: the form that the request asks for, or that of a call that it requires."""
    asked, forced = constraint_of(body), forced_output(use)
    if asked is not None and forced is not None:
        raise InvalidRequestError(
            "A call that is required excludes response_format and structured_outputs: an output obeys one constraint.", "tool_choice"
        )
    return forced or asked


def _num_logprobs(body: ChatRequest) -> int | None:
    """How many logprobs to compute for each token, or None for none."""
    top = body.top_logprobs
    if top is not None and top < -1:
        raise InvalidRequestError(
            f"top_logprobs must be an integer of at least 0, or -1 for the whole vocabulary, got {top}.", "top_logprobs"
        )
    if top and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true.", "top_logprobs")
    if body.logprob_token_ids and not body.logprobs:
        raise InvalidRequestError("logprob_token_ids needs logprobs: true.", "logprob_token_ids")
    return (top or 0) if body.logprobs else None


def chat_message(events: Sequence[Event], role: str, echo: str = "", old_name: bool = False) -> AnswerMessage:
    """What all events of an answer come to. `echo` stands before its content."""
    answer = gather(events)
    content = echo + (answer.content or "")
    calls = [AnswerCall(call.id, AnswerFunction(call.name, call.arguments)) for call in answer.calls]
    return AnswerMessage(
        role,
        content if content or not calls else None,
        tool_calls=calls,
        reasoning=answer.reasoning,
        reasoning_content=answer.reasoning if old_name else UNSET,
    )


def chat_deltas(events: Sequence[Event], old_name: bool = False) -> list[ChatDelta]:
    """What events come to: as few deltas as keep their order, for clients read a delta's thoughts first, and its calls last."""
    deltas: list[ChatDelta] = []
    ranks: list[int] = []
    for event_ in events:
        match event_:
            case ReasoningText(text):
                delta = _delta(deltas, ranks, 0)
                delta.reasoning = text if delta.reasoning is UNSET else delta.reasoning + text
                if old_name:
                    delta.reasoning_content = delta.reasoning
            case ContentText(text):
                delta = _delta(deltas, ranks, 1)
                delta.content = text if delta.content is UNSET else delta.content + text
            case CallStart(index, call_id, name):
                calls = _calls(_delta(deltas, ranks, 2))
                calls.append(ToolCallDelta(index, call_id, "function", FunctionDelta(name, "")))
            case CallArguments(index, text):
                calls = _calls(_delta(deltas, ranks, 2))
                if not calls or calls[-1].index != index:
                    calls.append(ToolCallDelta(index, function=FunctionDelta(arguments="")))
                function = calls[-1].function
                if isinstance(function, FunctionDelta):
                    function.arguments = text if function.arguments is UNSET else function.arguments + text
    return deltas


def chat_finish(finish_reason: str | None, reading: Reading | None) -> str | None:
    """OpenAI ends a call of the function that the request names with stop."""
    is_named = reading is not None and reading.options.tool_choice == "named"
    return FINISH_STOP if is_named and finish_reason == FINISH_TOOL_CALLS else finish_reason


def _delta(deltas: list[ChatDelta], ranks: list[int], rank: int) -> ChatDelta:
    if not ranks or ranks[-1] > rank:
        deltas.append(ChatDelta())
        ranks.append(rank)
    ranks[-1] = rank
    return deltas[-1]


def _calls(delta: ChatDelta) -> list[ToolCallDelta]:
    if isinstance(delta.tool_calls, UnsetType):
        delta.tool_calls = []
    return delta.tool_calls


@dataclass(eq=False)
class _Progress:
    """What a stream has sent so far. `timing` is known at its end."""

    num_tokens: int = 0
    num_cached: int = 0
    num_reasoning: dict[int, int] = field(default_factory=dict)
    """Of each choice."""
    timing: RequestTiming | UnsetType = UNSET
    started: set[int] = field(default_factory=set)
    frames: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """Of each choice's plain chunks."""


class ChatEncoder:
    """Turns the pipeline's outputs into OpenAI's chat objects."""

    def __init__(self, state: ServerState, generation: Generation, body: ChatRequest, job: Job, shown_id: str, model: str) -> None:
        self._state = state
        self._body = body
        self._prompt = job.prompts[0]
        self._num_choices = job.params[0].n
        self._id = shown_id
        self._model = model
        self._created = int(time.time())
        self._role = state.server_args.response_role
        self._logprobs_format = ChatLogprobsFormat(
            generation.text.tokenizer, body.top_logprobs or 0, body.return_tokens_as_token_ids, body.logprob_token_ids or ()
        )
        self._prompt_text = generation.prompt_text(self._prompt) if body.return_prompt_text else UNSET
        reading = job.reading
        self._old_name = state.server_args.enable_reasoning_content
        self._reading = reading
        self._reads_thoughts = reading is not None and reading.format.reads_thoughts
        self._usage_at_end, self._usage_always = usage_wanted(body, state.server_args.enable_force_include_usage)

    async def answer(self, outputs: Outputs) -> ChatAnswer:
        """The whole answer."""
        async with aclosing(outputs):
            [result] = await fold(outputs)
        num_tokens = sum(len(choice.token_ids) for choice in result.outputs)
        num_reasoning = sum(choice.num_reasoning_tokens for choice in result.outputs)
        return ChatAnswer(
            self._id,
            self._created,
            self._model,
            [self._choice(choice) for choice in result.outputs],
            self._usage(num_tokens, result.num_cached_tokens, num_reasoning),
            prompt_logprobs=finite_prompt_logprobs(result.prompt_logprobs),
            prompt_token_ids=self._prompt.token_ids if self._body.return_token_ids else UNSET,
            prompt_text=self._prompt_text,
            metrics=self._state.timing([result.metrics], len(result.outputs)),
        )

    async def chunks(self, outputs: Outputs) -> AsyncGenerator[bytes, None]:
        """Server-sent events, at least one for each output; what an output says of several choices goes out at once."""
        progress = _Progress()
        async with aclosing(outputs):
            async for _, output in outputs:
                progress.num_cached = output.num_cached_tokens
                if output.finished:
                    progress.timing = self._state.timing([output.metrics], self._num_choices)
                last = None if self._usage_at_end else len(output.outputs) - 1
                yield b"".join([self._choice_events(choice, progress, i == last) for i, choice in enumerate(output.outputs)])
        if self._usage_at_end:
            chunk = self._chunk([], progress, with_usage=True)
            chunk.metrics = progress.timing
            yield event(chunk)

    def _choice_events(self, choice: CompletionOutput, progress: _Progress, is_last: bool) -> bytes:
        events = b""
        if self._is_plain(choice) and choice.index in progress.started:
            progress.num_tokens += len(choice.token_ids)
            before, after = progress.frames.get(choice.index) or self._frame(choice.index, progress)
            return before + encoder.encode(choice.text) + after
        if choice.index not in progress.started:
            progress.started.add(choice.index)
            events = self._first_events(choice.index, progress, len(progress.started) == 1)
        progress.num_tokens += len(choice.token_ids)
        progress.num_reasoning[choice.index] = choice.num_reasoning_tokens
        if choice.events is None:
            deltas = [ChatDelta(content=choice.text) if choice.text else ChatDelta()]
        else:
            deltas = chat_deltas(choice.events, self._old_name)
            tells = choice.finish_reason is not None or choice.logprobs is not None or self._body.return_token_ids
            deltas = deltas or ([ChatDelta()] if tells else [])
        for i, delta in enumerate(deltas):
            first, last = i == 0, i == len(deltas) - 1  # what an output says of its tokens comes once
            ends = last and choice.finish_reason is not None
            chunk_choice = ChatChunkChoice(
                choice.index,
                delta,
                self._logprobs(choice) if first else None,
                chat_finish(choice.finish_reason, self._reading) if ends else None,
                choice.stop_reason if ends else UNSET,
                choice.token_ids if self._body.return_token_ids and first else UNSET,
            )
            chunk = self._chunk([chunk_choice], progress, self._usage_always)
            if is_last and last:
                chunk.metrics = progress.timing
            events += event(chunk)
        return events

    def _is_plain(self, choice: CompletionOutput) -> bool:
        """Whether a chunk says nothing of a choice but its text, as nearly all do."""
        has_more = not choice.text or choice.finish_reason is not None or choice.logprobs is not None or choice.events is not None
        return not (has_more or self._usage_always or self._body.return_token_ids)

    def _frame(self, index: int, progress: _Progress) -> tuple[bytes, bytes]:
        """What stands before and behind the text in such a chunk: the same each time, so that it is encoded once."""
        chunk = self._chunk([ChatChunkChoice(index, ChatDelta(content=""))], progress, False)
        before, name, after = event(chunk).partition(b'"content":')
        frame = progress.frames[index] = before + name, after.removeprefix(b'""')
        return frame

    def _first_events(self, index: int, progress: _Progress, first_of_all: bool) -> bytes:
        """The chunk with the role, and the text to echo."""
        chunk = self._chunk([ChatChunkChoice(index, ChatDelta(self._role, ""))], progress, self._usage_always)
        if self._body.return_token_ids and first_of_all:
            chunk.prompt_token_ids = self._prompt.token_ids
        if first_of_all:
            chunk.prompt_text = self._prompt_text
        events = event(chunk)
        echo = self._echo_text()
        if echo:
            events += event(self._chunk([ChatChunkChoice(index, ChatDelta(content=echo))], progress, self._usage_always))
        return events

    def _chunk(self, choices: list[ChatChunkChoice], progress: _Progress, with_usage: bool) -> ChatChunk:
        num_reasoning = sum(progress.num_reasoning.values())
        usage = self._usage(progress.num_tokens, progress.num_cached, num_reasoning) if with_usage else UNSET
        return ChatChunk(self._id, self._created, self._model, choices, usage=usage)

    def _choice(self, choice: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            choice.index,
            self._message(choice),
            self._logprobs(choice),
            chat_finish(choice.finish_reason, self._reading),
            choice.stop_reason,
            choice.token_ids if self._body.return_token_ids else UNSET,
        )

    def _message(self, choice: CompletionOutput) -> AnswerMessage:
        if choice.events is None:
            return AnswerMessage(self._role, self._echo_text() + choice.text, tool_calls=[])
        return chat_message(choice.events, self._role, self._echo_text(), self._old_name)

    def _logprobs(self, choice: CompletionOutput) -> ChatLogprobs | None:
        if choice.logprobs is None or not choice.token_ids:
            return None
        return self._logprobs_format.encode(choice.token_ids, choice.logprobs)

    def _usage(self, num_tokens: int, num_cached: int, num_reasoning: int) -> Usage:
        return self._state.usage(len(self._prompt.token_ids), num_tokens, num_cached, num_reasoning if self._reads_thoughts else None)

    def _echo_text(self) -> str:
        """With `echo`, the last message of the conversation, if the answer's role wrote it."""
        last = self._body.messages[-1] if self._body.messages else None
        if not self._body.echo or last is None or last.role != self._role:
            return ""
        return plain_text(last)
