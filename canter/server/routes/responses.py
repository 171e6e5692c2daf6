"""OpenAI's Responses: `POST /v1/responses` and what reads, cancels and deletes stored ones."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from canter.client.outputs import RequestOutput
from canter.core.errors import InvalidRequestError, NotFoundError, QueueFullError
from canter.core.structured_outputs import PARAM, StructuredOutputsParams
from canter.server.body import read_json
from canter.server.constraints import constraint_names, constraint_of, schema_constraint
from canter.server.errors import describe, log_error
from canter.server.generation import Generation, Job, Prompt, Wishes
from canter.server.logprobs import ChatLogprobsFormat
from canter.server.request_ids import made_request_id
from canter.server.responses_encoder import ResponsesEncoder, encode_json
from canter.server.responses_input import chat_messages, declared_tools, fit, item_decoder, read_items, read_tools
from canter.server.responses_store import ResponseStore, StoredResponse
from canter.server.routes.common import LOGPROBS_NAMES, check_shared, field_names, priority_of, sampling_of
from canter.server.schemas.responses import (
    AnswerFormat,
    AnswerReasoning,
    AnswerText,
    DeletedResponse,
    InputItem,
    InputItemList,
    ResponsesAnswer,
    ResponsesError,
    ResponsesRequest,
    TextFormat,
)
from canter.server.sse import StreamForm, json_response, stream_response
from canter.server.state import ServerState, server_state
from canter.server.tools import ToolUse, choose, forced_output

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]

LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_LABEL_CHARS = 512
MAX_PAGE = 100
DEFAULT_PAGE = 20
_SAFE_ID = re.compile(r"[\w.:@+-]{1,128}", re.ASCII)
FORM = StreamForm(end=b"")  # the last event says that it is the last


# --- create -----------------------------------------------------------------------------------------------------------


async def create_response(request: Request) -> Response:
    """See OpenAI's API reference; vLLM's extra fields are understood too."""
    state = server_state(request)
    generation = state.generation()
    body = await read_json(request, ResponsesRequest, state.server_args.max_body_bytes)
    body.priority = priority_of(request, body.priority)
    model = state.model_name(body.model)
    store = _store_of(state, body)
    turn = read_turn(body, store, state.server_args.no_store_reason)
    if store is not None and body.store is not False:
        store.check_fits(turn.conversation)
    _, engine_id = state.new_ids(request, "resp", body.request_id)
    job = await prepare_response(generation, body, turn, engine_id)
    encoder = _encoder(state, generation, request, body, job, model, store)
    outputs = generation.stream(job)
    if store is not None and body.background:
        record = await _run_in_background(store, encoder, outputs, turn, body.stream, request.scope)
        return _stream(record.events_after(-1)) if body.stream else _raw(record.body())
    run = _Foreground(encoder, outputs, turn, store, request.scope)
    return _stream(run.events()) if body.stream else json_response(run.answer())


@dataclass(frozen=True, slots=True)
class Turn:
    """What a response is about to go on from."""

    items: list[InputItem]
    conversation: list[bytes]


def read_turn(body: ResponsesRequest, store: ResponseStore | None, why_not: str | None) -> Turn:
    """The conversation: what the previous response had and wrote, and the input. Instructions are not part of it: each turn has its own.

    `why_not`: the clause that says why there is no store.
    """
    items = read_items(body.input)
    encoded = [encode_json(item) for item in items]
    if body.previous_response_id is None:
        return Turn(items, encoded)
    if store is None:
        raise InvalidRequestError(f"previous_response_id needs the store of responses, {why_not}.", "previous_response_id")
    previous = store.get(body.previous_response_id, "previous_response_id")
    if not previous.finished:
        raise InvalidRequestError(f"The response {previous.id!r} is not finished yet.", "previous_response_id")
    before = previous.whole_conversation()
    return Turn([*map(item_decoder.decode, before), *items], before + encoded)


async def prepare_response(generation: Generation, body: ResponsesRequest, turn: Turn, engine_id: str) -> Job:
    """Render the conversation and settle the parameters. Raises `InvalidRequestError` naming the field."""
    _check(body)
    tools = read_tools(body.tools) or None
    use = choose(tools, _chat_choice(body), body.parallel_tool_calls)
    constraint = _constraint(body, use)
    messages = chat_messages(turn.items, body.instructions)
    if not messages:
        raise InvalidRequestError("input holds nothing that the model could read.", "input")
    sampling = sampling_of(body)
    num_logprobs = _num_logprobs(body)
    if num_logprobs is not None:
        sampling["logprobs"] = num_logprobs
    if body.max_output_tokens is not None:
        sampling["max_tokens"] = body.max_output_tokens
    kwargs = dict(body.chat_template_kwargs or {})
    effort = body.reasoning.effort if body.reasoning is not None else None
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
    reading = generation.reading(
        use,
        template_kwargs=kwargs,
        reasoning_effort=effort,
        num_previous_calls=sum(item.type in ("function_call", "custom_tool_call") for item in turn.items),
        show_reasoning=body.include_reasoning is not False,
        keep_special_tokens=body.skip_special_tokens is False,
        request_type="responses",
    )
    wishes = Wishes(
        sampling=sampling,
        stream=body.stream or body.background,  # what runs in the background shows how far it has come
        max_tokens_name="max_output_tokens",
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        constraint=constraint,
        reading=reading,
    )
    may_cut = body.truncation == "auto"

    async def encode(some: list[dict[str, Any]]) -> Prompt:
        text = await generation.render(some, kwargs, add_generation_prompt=True, tools=tools)
        return await generation.encode(text, bool(body.add_special_tokens), must_fit=not may_cut)

    limit = generation.info.max_model_len - (body.max_output_tokens or 1)
    prompt = await fit(messages, limit, encode) if may_cut else await encode(messages)
    names = LOGPROBS_NAMES | constraint_names(body)
    if use.choice in ("required", "named"):
        names[f"{PARAM}.json"] = "tools"
    elif body.text is not None and body.text.format is not None:
        names[f"{PARAM}.json"] = "text.format.schema"
    with field_names(names):
        job = generation.prepare(engine_id, [prompt], wishes)
        await generation.admit(job)
    return job


def _chat_choice(body: ResponsesRequest) -> object:
    """`tool_choice` as chat requests have it. Raises `InvalidRequestError` for one that is not well formed."""
    choice = body.tool_choice
    if not body.tools and choice == "auto":
        return None
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if not isinstance(kind, str):
        raise InvalidRequestError("tool_choice.type is required.", "tool_choice.type")
    if kind not in ("function", "custom"):
        raise InvalidRequestError(f"tool_choice of type {kind!r:.80} is not supported by this server.", "tool_choice.type")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _constraint(body: ResponsesRequest, use: ToolUse) -> StructuredOutputsParams | None:
    """What the answer must obey: the form that the request asks for, or that of a call that it requires."""
    asked, forced = constraint_of(body), forced_output(use)
    shape = body.text.format if body.text is not None else None
    if shape is not None and shape.type != "text":
        if asked is not None:
            raise InvalidRequestError("text.format and structured_outputs exclude each other.", "text.format")
        asked = _format_constraint(shape)
    if asked is not None and forced is not None:
        raise InvalidRequestError("A call that is required excludes text.format: an output obeys one constraint.", "tool_choice")
    return forced or asked


def _format_constraint(shape: TextFormat) -> StructuredOutputsParams | None:
    if shape.type == "json_schema" and shape.schema is None:
        raise InvalidRequestError("text.format.schema is required for a format of type 'json_schema'.", "text.format.schema")
    if shape.type == "json_schema" and shape.schema is not None:
        return schema_constraint(shape.schema, "text.format.schema")
    if shape.type != "json_object":
        raise InvalidRequestError(f"text.format.type must be text, json_object or json_schema, got {shape.type!r:.80}.", "text.format.type")
    return StructuredOutputsParams(json_object=True)


def _store_of(state: ServerState, body: ResponsesRequest) -> ResponseStore | None:
    """The store, if this response is to use it."""
    why_not = state.server_args.no_store_reason
    if why_not is not None:
        for name in ("store", "background"):
            if getattr(body, name):
                raise InvalidRequestError(f"{name} needs the store of responses, {why_not}.", name)
        return None
    if body.background and body.store is False:
        raise InvalidRequestError("background needs store: true.", "background")
    return state.responses


def _encoder(
    state: ServerState, generation: Generation, request: Request, body: ResponsesRequest, job: Job, model: str, store: ResponseStore | None
) -> ResponsesEncoder:
    params = job.params[0]
    reasoning, top = body.reasoning, body.top_logprobs or 0
    response = ResponsesAnswer(
        id="",
        created_at=int(time.time()),
        model=model,
        status="queued" if body.background else "in_progress",
        background=body.background,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=AnswerReasoning() if reasoning is None else AnswerReasoning(reasoning.effort, reasoning.summary),
        safety_identifier=body.safety_identifier,
        store=store is not None and body.store is not False,
        temperature=params.temperature,
        text=AnswerText(_answer_format(body)),
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=body.tools or [],
        top_logprobs=top,
        top_p=params.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )
    wants_logprobs = _num_logprobs(body) is not None
    logprobs_format = ChatLogprobsFormat(generation.text.tokenizer, top, body.return_tokens_as_token_ids) if wants_logprobs else None
    declared = declared_tools(body.tools)
    encoder = ResponsesEncoder(response, job.num_prompt_tokens, logprobs_format, with_events=body.stream, declared=declared)
    asked = (body.request_id or "").removeprefix("resp_")
    response.id = f"resp_{asked}"
    if not _SAFE_ID.fullmatch(asked) or not state.responses.claim(response.id, encoder):
        # Whoever has a response's id can read it: unless the client chose one, it can't be guessed.
        response.id = f"resp_{made_request_id(request.scope)}"
        state.responses.claim(response.id, encoder)
    return encoder


def _answer_format(body: ResponsesRequest) -> AnswerFormat:
    """`text.format` as it is told back."""
    shape = body.text.format if body.text is not None else None
    if shape is None:
        return AnswerFormat()
    told = {name: value for name in ("name", "schema", "strict") if (value := getattr(shape, name)) is not None}
    return AnswerFormat(shape.type, **told)


class _Foreground:
    """A response whose client waits for it, and that is given up when the client goes away. What ends well is stored."""

    def __init__(self, encoder: ResponsesEncoder, outputs: Outputs, turn: Turn, store: ResponseStore | None, scope: Scope) -> None:
        self._encoder = encoder
        self._outputs = outputs
        self._turn = turn
        self._store = store
        self._scope = scope

    async def answer(self) -> ResponsesAnswer:
        """The whole response."""
        async for _ in self._pieces():
            continue
        self._keep()
        return self._encoder.answer()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Its events. An error before the first is the caller's; a later one ends the response as failed."""
        begun = False
        try:
            async with aclosing(self._pieces()) as pieces:
                async for piece in pieces:
                    begun = True
                    yield piece
        except Exception as error:  # a stream that has begun ends with the failure as an event, whatever it is
            if not begun:
                raise
            log_error(error, self._scope)
            yield b"".join(self._encoder.fail(_failure(error)))
        self._keep()

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._outputs) as outputs:
            async for _, output in outputs:
                yield b"".join(self._encoder.feed(output))

    def _keep(self) -> None:
        response = self._encoder.answer()
        if self._store is not None and response.store:
            self._store.finish(StoredResponse(response.id, self._encoder, self._turn.conversation, background=False, keep_events=False))


async def _run_in_background(
    store: ResponseStore, encoder: ResponsesEncoder, outputs: Outputs, turn: Turn, keep_events: bool, scope: Scope
) -> StoredResponse:
    """Start a response that goes on without its client. Raises what the engine's client refuses it with at once."""
    record = StoredResponse(encoder.answer().id, encoder, turn.conversation, background=True, keep_events=keep_events)
    store.add_running(record)
    refusals: list[Exception] = []
    store.add_events(record, encoder.create())
    record.task = asyncio.create_task(_background(store, record, encoder, outputs, scope, refusals))
    await asyncio.sleep(0)  # as far as the request's way to the engine
    if refusals:
        store.delete(record)
        raise refusals[0]
    return record


async def _background(
    store: ResponseStore, record: StoredResponse, encoder: ResponsesEncoder, outputs: Outputs, scope: Scope, refusals: list[Exception]
) -> None:
    try:
        async with aclosing(outputs):
            async for _, output in outputs:
                store.add_events(record, encoder.feed(output))
    except asyncio.CancelledError:
        store.add_events(record, encoder.cancel())
    except Exception as error:  # nobody awaits this task: who asks for the answer later is told that it failed
        log_error(error, scope)
        refusals.append(error)
        store.add_events(record, encoder.fail(_failure(error)))
    store.finish(record)


def _failure(error: Exception) -> ResponsesError:
    """An error as a response tells of it, under OpenAI's codes."""
    code = "rate_limit_exceeded" if isinstance(error, QueueFullError) else "server_error"
    return ResponsesError("invalid_prompt" if isinstance(error, InvalidRequestError) else code, describe(error).message)


def _stream(events: AsyncGenerator[bytes, None]) -> Response:
    return stream_response(events, FORM)


# --- stored responses -------------------------------------------------------------------------------------------------


async def retrieve_response(request: Request) -> Response:
    """A stored response as it stands, or with `stream` its events, from the first after `starting_after`."""
    record = _record(request)
    stream = _flag(request, "stream")
    after = _number(request, "starting_after", 0, None)
    if not stream:
        if after is not None:
            raise InvalidRequestError("starting_after may only be given with stream=true.", "starting_after")
        return _raw(record.body())
    if record.events is None:
        raise InvalidRequestError("Only a response made with background: true and stream: true can be streamed again.", "stream")
    return _stream(record.events_after(-1 if after is None else after))


async def cancel_response(request: Request) -> Response:
    """End a response that runs in the background. One that has ended already is answered as it is."""
    record = _record(request)
    if not record.background:
        raise InvalidRequestError("Only a response made with background: true can be cancelled.", "response_id")
    if record.task is not None:
        task = record.task
        task.cancel()
        await asyncio.wait((task,))
    return _raw(record.body())


async def delete_response(request: Request) -> Response:
    """Forget a response; one that runs is cancelled."""
    record = _record(request)
    server_state(request).responses.delete(record)
    return _raw(encode_json(DeletedResponse(record.id)))


async def list_input_items(request: Request) -> Response:
    """The items that a response was given, those of earlier turns included, newest first unless `order` is asc."""
    record = _record(request)
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order must be asc or desc, got {order!r:.80}.", "order")
    limit = _number(request, "limit", 1, MAX_PAGE) or DEFAULT_PAGE
    items = [item_decoder.decode(item) for item in record.conversation]
    if order == "desc":
        items.reverse()
    after = request.query_params.get("after")
    if after:
        places = [i for i, item in enumerate(items) if item.id == after]
        if not places:
            raise InvalidRequestError(f"after: the response has no item {after!r:.100}.", "after")
        items = items[places[0] + 1 :]
    page = items[:limit]
    ids = [item.id for item in page]
    return _raw(encode_json(InputItemList(page, ids[0] if ids else None, ids[-1] if ids else None, len(items) > len(page))))


def _record(request: Request) -> StoredResponse:
    state = server_state(request)
    if state.server_args.no_store_reason is not None:
        raise NotFoundError(f"A response that was stored needs the store of responses, {state.server_args.no_store_reason}.", "response_id")
    return state.responses.get(request.path_params["response_id"])


def _flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise InvalidRequestError(f"{name} must be true or false, got {value!r:.80}.", name)
    return value in ("true", "1")


def _number(request: Request, name: str, least: int, most: int | None) -> int | None:
    value = request.query_params.get(name)
    if value is None:
        return None
    digits = re.fullmatch(r"[0-9]{1,18}", value, re.ASCII)
    if digits is None or int(value) < least or (most is not None and int(value) > most):
        limit = "" if most is None else f" and at most {most}"
        raise InvalidRequestError(f"{name} must be an integer of at least {least}{limit}, got {value!r:.80}.", name)
    return int(value)


def _raw(body: bytes) -> Response:
    return Response(body, media_type="application/json")


# --- checks -----------------------------------------------------------------------------------------------------------


def _check(body: ResponsesRequest) -> None:
    """Rules for single fields, and between them. Raises `InvalidRequestError` naming the field."""
    check_shared(body)
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise InvalidRequestError("stream_options.include_obfuscation is not supported by this server. Leave it out.", "stream_options")
    for name in ("max_output_tokens", "max_tool_calls"):
        value = getattr(body, name)
        if value is not None and value < 1:
            raise InvalidRequestError(f"{name} must be an integer of at least 1, got {value}.", name)
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        if len(getattr(body, name) or "") > MAX_LABEL_CHARS:
            raise InvalidRequestError(f"{name} may have at most {MAX_LABEL_CHARS} characters.", name)
    _check_metadata(body.metadata or {})
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise InvalidRequestError("text.verbosity: only medium is supported by this server.", "text.verbosity")
    for name in ("summary", "generate_summary"):
        if body.reasoning is not None and getattr(body.reasoning, name) not in (None, "auto"):
            raise InvalidRequestError(f"reasoning.{name}: only auto is supported by this server.", f"reasoning.{name}")


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise InvalidRequestError(f"metadata may hold at most {MAX_METADATA} entries, got {len(metadata)}.", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise InvalidRequestError(
                f"metadata may have keys of at most {MAX_METADATA_KEY} characters and values of at most {MAX_METADATA_VALUE}.", "metadata"
            )


def _num_logprobs(body: ResponsesRequest) -> int | None:
    """How many logprobs to compute for each token, or None for none."""
    top = body.top_logprobs
    if top is not None and top < 0:
        raise InvalidRequestError(f"top_logprobs must be an integer of at least 0, got {top}.", "top_logprobs")
    return top or 0 if top or LOGPROBS in (body.include or ()) else None
