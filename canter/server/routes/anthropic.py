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
from canter.core.structured_outputs import PARAM, StructuredOutputsParams
from canter.server.anthropic_messages import continues, template_messages, template_tools
from canter.server.body import read_json
from canter.server.constraints import schema_constraint
from canter.server.errors import describe, encode_error
from canter.server.generation import Generation, Job, Prompt, Wishes, fold
from canter.server.reading import FINISH_TOOL_CALLS
from canter.server.routes.common import field_names
from canter.server.schemas.anthropic import (
    AnswerBlock,
    Conversation,
    CountTokensAnswer,
    CountTokensRequest,
    InputDelta,
    MessageAnswer,
    MessagesRequest,
    SignatureDelta,
    StopDelta,
    StreamEvent,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    Usage,
)
from canter.server.sse import StreamForm, encoder, json_response, stream_response
from canter.server.state import server_state
from canter.server.tools import MAX_TOOLS, NO_TOOLS, ToolUse, arguments_object, forced_output
from canter.text.parsing.events import CallArguments, CallStart, ContentText, Event, ReasoningText
from canter.text.parsing.options import Choice, Tool

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
MIN_THINKING_TOKENS = 1024
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}", re.ASCII)
_FIELDS = {"stop": "stop_sequences", "prompt": "messages", "thinking_token_budget": "thinking.budget_tokens"}
_CHOICES: dict[str, Choice] = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


async def messages(request: Request) -> Response:
    """See Anthropic's API reference."""
    state = server_state(request)
    generation = state.generation()
    body = await read_json(request, MessagesRequest, state.server_args.max_body_bytes)
    model = state.model_name(body.model)
    made_id, engine_id = state.new_ids(request, "msg", None)
    job = await prepare_messages(generation, body, engine_id)
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


async def prepare_messages(generation: Generation, body: MessagesRequest, engine_id: str) -> Job:
    """Render the conversation and settle the parameters. Raises `InvalidRequestError` naming the field."""
    if body.max_tokens < 1:
        raise InvalidRequestError(f"max_tokens must be an integer of at least 1, got {body.max_tokens}.", "max_tokens")
    _check_tools(body)
    _check_thinking(body, body.max_tokens)
    use = _tool_use(body)
    constraint = _constraint(body, use)
    reading = generation.reading(
        use,
        template_kwargs=_template_kwargs(body),
        reasoning_effort=body.output_config.effort if body.output_config is not None else None,
        num_previous_calls=_num_calls(body),
        show_reasoning=body.thinking is None or body.thinking.type != "disabled",
    )
    given = {
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p,
        "stop": body.stop_sequences,
        "thinking_token_budget": body.thinking.budget_tokens if _thinks(body) and body.thinking else None,
    }
    sampling = {name: value for name, value in given.items() if value is not None}
    names = _FIELDS | {f"{PARAM}.json": "tools" if use.choice in ("required", "named") else "output_config.format.schema"}
    with field_names(names):
        prompt = await _prompt(generation, body, must_fit=True)
        wishes = Wishes(sampling=sampling, stream=body.stream, cache_salt=body.cache_salt, constraint=constraint, reading=reading)
        job = generation.prepare(engine_id, [prompt], wishes)
        await generation.admit(job)
    return job


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
    if body.thinking is not None and body.thinking.type != "adaptive":  # names that templates have for the switch
        for name in ("enable_thinking", "thinking"):
            kwargs.setdefault(name, _thinks(body))
    return kwargs


def _thinks(body: Conversation) -> bool:
    return body.thinking is not None and body.thinking.type == "enabled"


def _tool_use(body: Conversation) -> ToolUse:
    """The tools and the choice among them, checked before."""
    choice = body.tool_choice
    if not body.tools:
        return NO_TOOLS
    tools = tuple(Tool(tool.name, tool.input_schema or {}) for tool in body.tools)
    if choice is None:
        return ToolUse(tools, "auto")
    kind = _CHOICES[choice.type]
    return ToolUse(tools, kind, choice.name if kind == "named" else None, choice.disable_parallel_tool_use is not True)


def _constraint(body: Conversation, use: ToolUse) -> StructuredOutputsParams | None:
    shape = body.output_config.format if body.output_config is not None else None
    forced = forced_output(use)
    if shape is None:
        return forced
    if shape.get("type") != "json_schema" or not isinstance(shape.get("schema"), dict):
        raise InvalidRequestError('output_config.format must be {"type": "json_schema", "schema": {...}}.', "output_config.format")
    if forced is not None:
        raise InvalidRequestError("A call that is required excludes output_config.format: an answer obeys one constraint.", "tool_choice")
    return schema_constraint(shape["schema"], "output_config.format.schema")


def _num_calls(body: Conversation) -> int:
    blocks = [block for message in body.messages if isinstance(message.content, list) for block in message.content]
    return sum(block.type == "tool_use" for block in blocks)


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


def _stream_error(error: BaseException, scope: Scope) -> bytes:
    return b"event: error\ndata: " + encode_error(describe(error), scope) + b"\n\n"


def _event(event: StreamEvent) -> bytes:
    return b"event: " + event.type.encode() + b"\ndata: " + encoder.encode(event) + b"\n\n"


PING = _event(StreamEvent("ping"))
FORM = StreamForm(error=_stream_error, end=b"", ping=PING)


class MessageEncoder:
    """Turns the pipeline's outputs into Anthropic's message objects: blocks of thoughts, text and tool calls, one after the other."""

    def __init__(self, job: Job, shown_id: str, model: str) -> None:
        self._job = job
        self._id = shown_id
        self._model = model
        self._num_tokens = 0
        self._num_cached = 0
        self._kind: str | None = None
        """Of the block that is open."""
        self._num_blocks = 0

    async def answer(self, outputs: Outputs) -> MessageAnswer:
        """The whole answer."""
        async with aclosing(outputs):
            [result] = await fold(outputs)
        [choice] = result.outputs
        self._num_tokens, self._num_cached = len(choice.token_ids), result.num_cached_tokens
        stop = _stop(choice)
        return MessageAnswer(self._id, self._model, _blocks(choice), self._usage(), stop.stop_reason, stop.stop_sequence)

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
        return _event(StreamEvent("message_start", MessageAnswer(self._id, self._model, [], self._usage()))) + PING

    def _delta_events(self, choice: CompletionOutput) -> bytes:
        if choice.events is None:
            return self._in_block("text", TextBlock(""), TextDelta(choice.text)) if choice.text else b""
        return b"".join([self._told(told) for told in choice.events])

    def _told(self, told: Event) -> bytes:
        match told:
            case ReasoningText(text):
                return self._in_block("thinking", ThinkingBlock(""), ThinkingDelta(text))
            case ContentText(text):
                return self._in_block("text", TextBlock(""), TextDelta(text))
            case CallStart(_, call_id, name):
                return self._close_block() + self._open_block("tool_use", ToolUseBlock(call_id, name, {}))
            case CallArguments(_, text):
                return self._in_block("tool_use", None, InputDelta(text))
            case _:
                return self._close_block()

    def _in_block(self, kind: str, block: AnswerBlock | None, delta: object) -> bytes:
        """A delta in a block of its kind, which is opened if the one that is open is another."""
        events = b""
        if self._kind != kind and block is not None:
            events = self._close_block() + self._open_block(kind, block)
        return events + _event(StreamEvent("content_block_delta", index=self._num_blocks - 1, delta=delta))

    def _open_block(self, kind: str, block: AnswerBlock) -> bytes:
        self._kind = kind
        self._num_blocks += 1
        return _event(StreamEvent("content_block_start", index=self._num_blocks - 1, content_block=block))

    def _close_block(self) -> bytes:
        if self._kind is None:
            return b""
        index = self._num_blocks - 1
        signed = _event(StreamEvent("content_block_delta", index=index, delta=SignatureDelta())) if self._kind == "thinking" else b""
        self._kind = None
        return signed + _event(StreamEvent("content_block_stop", index=index))

    def _end_events(self, choice: CompletionOutput) -> bytes:
        events = self._close_block()
        if not self._num_blocks:  # an answer that says nothing still has a block
            events += self._open_block("text", TextBlock("")) + self._close_block()
        end = _event(StreamEvent("message_delta", delta=_stop(choice), usage=self._usage()))
        return events + end + _event(StreamEvent("message_stop"))

    def _usage(self) -> Usage:
        num_prompt = self._job.num_prompt_tokens
        return Usage(num_prompt - self._num_cached, self._num_tokens, self._num_cached)


def _blocks(choice: CompletionOutput) -> list[AnswerBlock]:
    """The blocks of a whole answer. They are those of a stream: a text behind a call is a block of its own."""
    if choice.events is None:
        return [TextBlock(choice.text)]
    blocks: list[AnswerBlock] = []
    arguments: dict[int, str] = {}
    places: dict[int, ToolUseBlock] = {}
    for told in choice.events:
        match told:
            case ReasoningText(text):
                last = blocks[-1] if blocks else None
                if isinstance(last, ThinkingBlock):
                    last.thinking += text
                else:
                    blocks.append(ThinkingBlock(text))
            case ContentText(text):
                last = blocks[-1] if blocks else None
                if isinstance(last, TextBlock):
                    last.text += text
                else:
                    blocks.append(TextBlock(text))
            case CallStart(index, call_id, name):
                places[index] = ToolUseBlock(call_id, name, {})
                arguments[index] = ""
                blocks.append(places[index])
            case CallArguments(index, text):
                arguments[index] += text
    for index, block in places.items():
        block.input = arguments_object(arguments[index])
    return blocks or [TextBlock("")]


def _stop(choice: CompletionOutput) -> StopDelta:
    if choice.finish_reason == FINISH_TOOL_CALLS:
        return StopDelta("tool_use", None)
    if choice.finish_reason == "length":
        return StopDelta("max_tokens", None)
    if isinstance(choice.stop_reason, str):
        return StopDelta("stop_sequence", choice.stop_reason)
    return StopDelta("end_turn", None)
