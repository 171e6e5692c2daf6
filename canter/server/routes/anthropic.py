"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's dialect."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from canter.client.outputs import CompletionOutput, RequestOutput
from canter.core.errors import InvalidRequestError
from canter.server.anthropic_messages import continues, template_messages, template_tools
from canter.server.body import read_json
from canter.server.errors import describe, encode_error
from canter.server.generation import Generation, Job, Prompt, Wishes, fold
from canter.server.routes.common import field_names
from canter.server.schemas.anthropic import (
    Conversation,
    CountTokensAnswer,
    CountTokensRequest,
    MessageAnswer,
    MessagesRequest,
    StopDelta,
    StreamEvent,
    TextBlock,
    TextDelta,
    Usage,
)
from canter.server.sse import StreamForm, encoder, json_response, stream_response
from canter.server.state import server_state

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
MAX_TOOLS = 1024
MIN_THINKING_TOKENS = 1024
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}", re.ASCII)
_FIELDS = {"stop": "stop_sequences", "prompt": "messages"}


async def messages(request: Request) -> Response:
    """See Anthropic's API reference."""
    state = server_state(request)
    generation = state.generation()
    body = await read_json(request, MessagesRequest, state.server_args.max_body_bytes)
    model = state.model_name(body.model)
    made_id, engine_id = state.new_ids(request, "msg", None)
    job = await _prepare(generation, body, engine_id)
    message_encoder = MessageEncoder(job, made_id.replace("msg-", "msg_", 1), model)
    outputs = generation.stream(job)
    if body.stream:
        return stream_response(message_encoder.chunks(outputs), FORM)
    return json_response(message_encoder.answer(outputs))


async def count_tokens(request: Request) -> Response:
    """The tokens of the prompt that a request would have, tools included."""
    state = server_state(request)
    generation = state.generation()
    body = await read_json(request, CountTokensRequest, state.server_args.max_body_bytes)
    state.model_name(body.model)
    _check_tools(body)
    _check_thinking(body, None)

    async def answer() -> CountTokensAnswer:
        return CountTokensAnswer(len((await _prompt(generation, body, must_fit=False)).token_ids))

    return json_response(answer())


async def _prepare(generation: Generation, body: MessagesRequest, engine_id: str) -> Job:
    """Render the conversation and settle the parameters. Raises `InvalidRequestError` naming the field."""
    if body.max_tokens < 1:
        raise InvalidRequestError(f"max_tokens must be an integer of at least 1, got {body.max_tokens}.", "max_tokens")
    _check_tools(body)
    _check_thinking(body, body.max_tokens)
    _refuse_what_needs_parsers(body)
    given = {
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p,
        "stop": body.stop_sequences,
    }
    sampling = {name: value for name, value in given.items() if value is not None}
    with field_names(_FIELDS):
        prompt = await _prompt(generation, body, must_fit=True)
        return generation.prepare(engine_id, [prompt], Wishes(sampling=sampling, stream=body.stream, cache_salt=body.cache_salt))


async def _prompt(generation: Generation, body: Conversation, must_fit: bool) -> Prompt:
    going_on = continues(body)
    text = await generation.render(
        template_messages(body),
        _template_kwargs(body),
        add_generation_prompt=not going_on,
        continue_final_message=going_on,
        tools=template_tools(body.tools),
    )
    return await generation.encode(text, False, must_fit)


def _template_kwargs(body: Conversation) -> dict[str, Any]:
    """The user's template variables; templates of models that reason read the effort as one."""
    kwargs = dict(body.chat_template_kwargs or {})
    if body.output_config is not None and body.output_config.effort is not None:
        kwargs.setdefault("reasoning_effort", body.output_config.effort)
    return kwargs


def _check_tools(body: Conversation) -> None:
    tools, choice = body.tools or [], body.tool_choice
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools may hold at most {MAX_TOOLS} entries, got {len(tools)}.", "tools")
    for i, tool in enumerate(tools):
        name = f"tools[{i}]"
        if tool.type not in (None, "custom"):
            raise InvalidRequestError(
                f"{name}: a tool of type {tool.type!r:.80} is not supported: this server runs no tools of its own.", f"{name}.type"
            )
        if not _TOOL_NAME.fullmatch(tool.name):
            raise InvalidRequestError(f"{name}.name must have 1 to 128 letters, digits, _ or -, got {tool.name!r:.80}.", f"{name}.name")
        if tool.input_schema is None:
            raise InvalidRequestError(f"{name}.input_schema is required.", f"{name}.input_schema")
    if choice is None or choice.type == "none":
        return
    if not tools:
        raise InvalidRequestError("tool_choice needs tools.", "tool_choice")
    if choice.type == "tool" and choice.name not in {tool.name for tool in tools}:
        raise InvalidRequestError(f"tool_choice.name must be the name of one of the tools, got {choice.name!r:.80}.", "tool_choice.name")


def _check_thinking(body: Conversation, max_tokens: int | None) -> None:
    if body.thinking is None or body.thinking.type != "enabled":
        return
    budget = body.thinking.budget_tokens
    if budget is None or budget < MIN_THINKING_TOKENS or (max_tokens is not None and budget >= max_tokens):
        raise InvalidRequestError(
            f"thinking.budget_tokens must be an integer of at least {MIN_THINKING_TOKENS} and less than max_tokens, got {budget}.",
            "thinking.budget_tokens",
        )


def _refuse_what_needs_parsers(body: Conversation) -> None:
    """What has to act on the answer and can't yet. Rendered into a prompt, as for `count_tokens`, it does no harm."""
    if body.tools and (body.tool_choice is None or body.tool_choice.type != "none"):
        raise InvalidRequestError("tools are not supported by this server yet, except with tool_choice none.", "tools")
    if body.thinking is not None and body.thinking.type == "enabled":
        raise InvalidRequestError("thinking is not supported by this server yet. Leave it out.", "thinking")
    if body.output_config is not None and body.output_config.format is not None:
        raise InvalidRequestError("output_config.format is not supported by this server. Leave it out.", "output_config.format")


def _stream_error(error: BaseException, scope: Scope) -> bytes:
    return b"event: error\ndata: " + encode_error(describe(error), scope) + b"\n\n"


def _event(event: StreamEvent) -> bytes:
    return b"event: " + event.type.encode() + b"\ndata: " + encoder.encode(event) + b"\n\n"


PING = _event(StreamEvent("ping"))
FORM = StreamForm(error=_stream_error, end=b"", ping=PING)


class MessageEncoder:
    """Turns the pipeline's outputs into Anthropic's message objects: one block of text for now.

    Blocks of thoughts and of tool calls begin and end in `_delta_events`, where a choice's text is told apart.
    """

    def __init__(self, job: Job, shown_id: str, model: str) -> None:
        self._job = job
        self._id = shown_id
        self._model = model
        self._num_tokens = 0
        self._num_cached = 0

    async def answer(self, outputs: Outputs) -> MessageAnswer:
        """The whole answer."""
        async with aclosing(outputs):
            [result] = await fold(outputs)
        [choice] = result.outputs
        self._num_tokens, self._num_cached = len(choice.token_ids), result.num_cached_tokens
        stop = _stop(choice)
        return MessageAnswer(self._id, self._model, [TextBlock(choice.text)], self._usage(), stop.stop_reason, stop.stop_sequence)

    async def chunks(self, outputs: Outputs) -> AsyncGenerator[bytes, None]:
        """Server-sent events: the message's start with the first output, then what each output adds."""
        started = False
        async with aclosing(outputs):
            async for _, output in outputs:
                [choice] = output.outputs
                self._num_cached = output.num_cached_tokens
                events = b"" if started else self._start_events()
                started = True
                self._num_tokens += len(choice.token_ids)
                events += self._delta_events(choice)
                if choice.finish_reason is not None:
                    events += self._end_events(choice)
                if events:
                    yield events

    def _start_events(self) -> bytes:
        message = MessageAnswer(self._id, self._model, [], self._usage())
        return (
            _event(StreamEvent("message_start", message))
            + _event(StreamEvent("content_block_start", index=0, content_block=TextBlock("")))
            + PING
        )

    def _delta_events(self, choice: CompletionOutput) -> bytes:
        return _event(StreamEvent("content_block_delta", index=0, delta=TextDelta(choice.text))) if choice.text else b""

    def _end_events(self, choice: CompletionOutput) -> bytes:
        end = _event(StreamEvent("message_delta", delta=_stop(choice), usage=self._usage()))
        return _event(StreamEvent("content_block_stop", index=0)) + end + _event(StreamEvent("message_stop"))

    def _usage(self) -> Usage:
        num_prompt = self._job.num_prompt_tokens
        return Usage(num_prompt - self._num_cached, self._num_tokens, self._num_cached)


def _stop(choice: CompletionOutput) -> StopDelta:
    if choice.finish_reason == "length":
        return StopDelta("max_tokens", None)
    if isinstance(choice.stop_reason, str):
        return StopDelta("stop_sequence", choice.stop_reason)
    return StopDelta("end_turn", None)
