"""Prompts without answers, and answers without prompts: `…/render` and `…/derender`, with --enable-scale-out only.

Another dialect is rendered by a function of four lines: read its body, `prepare_…`, `rendered`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from canter.client.outputs import CompletionOutput, Logprob, PositionLogprobs, TokenTexts
from canter.core.errors import InvalidRequestError, PermissionDeniedError
from canter.core.messages import FINISH_STOP
from canter.core.sampling_params import MAX_N, SamplingParams
from canter.core.structured_outputs import PARAM, THOUGHTS
from canter.server.body import parse, read_json
from canter.server.generation import Job
from canter.server.logprobs import ChatLogprobsFormat, completion_logprobs
from canter.server.reading import Reader, Reading
from canter.server.routes.anthropic import prepare_messages
from canter.server.routes.chat import chat_deltas, chat_finish, chat_message, chat_reading, prepare_chat
from canter.server.routes.common import SAMPLING_FIELDS
from canter.server.routes.completions import MAX_PROMPTS, prepare_completions
from canter.server.routes.responses import prepare_response, read_turn
from canter.server.schemas.openai import (
    AnswerMessage,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
)
from canter.server.schemas.scale_out import (
    NOT_GIVEN,
    DerenderChatRequest,
    DerenderCompletionRequest,
    DerenderedChatChunk,
    DerenderedCompletionChunk,
    GeneratedLogprob,
    GivenAnswer,
    GivenChoice,
    RenderChatRequest,
    RenderCompletionRequest,
    RenderedRequest,
    RenderMessagesRequest,
    RenderResponsesRequest,
    StreamState,
)
from canter.server.sse import json_response
from canter.server.state import ServerState, make_usage, server_state
from canter.server.tools import choose
from canter.text.detokenizer import IncrementalDetokenizer
from canter.text.parsing.events import ContentText, Event, ReasoningText
from canter.text.prepare import eos_token_ids

T = TypeVar("T", bound=msgspec.Struct)
MAX_PROMPT_TOKENS = 2**31


def scale_out_state(request: Request) -> ServerState:
    """The state, for a route that --enable-scale-out opens. Raises `PermissionDeniedError` without it."""
    state = server_state(request)
    if not state.server_args.enable_scale_out:
        raise PermissionDeniedError(f"{request.url.path} is closed: start the server with --enable-scale-out to open it.")
    return state


def nested(raw: msgspec.Raw, kind: type[T], name: str) -> T | None:
    """A body within a body, read by the same rules; None where it isn't given. Errors name the field with `name` before it."""
    if raw == NOT_GIVEN:
        return None
    with _within(name):
        return parse(bytes(raw), kind)


@contextmanager
def _within(name: str) -> Iterator[None]:
    """Errors raised within are those of a body within the body."""
    try:
        yield
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{name}: {error}", name if error.param is None else f"{name}.{error.param}") from None


# --- render -----------------------------------------------------------------------------------------------------------


async def render_chat(request: Request) -> Response:
    """What `/v1/chat/completions` would have the model run."""
    state = scale_out_state(request)
    generation = state.generation()
    body = await read_json(request, RenderChatRequest, state.server_args.max_body_bytes)
    model = state.model_name(body.model)
    shown_id, _ = state.new_ids(request, "chatcmpl", body.request_id)

    async def answer() -> RenderedRequest:
        job = await prepare_chat(generation, body, shown_id, state.server_args)
        return rendered(job, model, body.stream, body.stream_options)[0]

    return json_response(answer())


async def render_completions(request: Request) -> Response:
    """What `/v1/completions` would have the model run, for each prompt."""
    state = scale_out_state(request)
    generation = state.generation()
    body = await read_json(request, RenderCompletionRequest, state.server_args.max_body_bytes)
    model = state.model_name(body.model)
    shown_id, _ = state.new_ids(request, "cmpl", body.request_id)

    async def answer() -> list[RenderedRequest]:
        return rendered(await prepare_completions(generation, body, shown_id), model, body.stream, body.stream_options)

    return json_response(answer())


async def render_responses(request: Request) -> Response:
    """What `/v1/responses` would have the model run; a previous response is looked up in this server's store."""
    state = scale_out_state(request)
    generation = state.generation()
    body = await read_json(request, RenderResponsesRequest, state.server_args.max_body_bytes)
    model = state.model_name(body.model)
    shown_id, _ = state.new_ids(request, "resp", body.request_id)
    why_not = state.server_args.no_store_reason
    turn = read_turn(body, state.responses if why_not is None else None, why_not)

    async def answer() -> RenderedRequest:
        return rendered(await prepare_response(generation, body, turn, shown_id), model, body.stream)[0]

    return json_response(answer())


async def render_messages(request: Request) -> Response:
    """What `/v1/messages` would have the model run."""
    state = scale_out_state(request)
    generation = state.generation()
    body = await read_json(request, RenderMessagesRequest, state.server_args.max_body_bytes)
    model = state.model_name(body.model)
    shown_id, _ = state.new_ids(request, "msg", None)

    async def answer() -> RenderedRequest:
        return rendered(await prepare_messages(generation, body, shown_id), model, body.stream)[0]

    return json_response(answer())


def rendered(job: Job, model: str, stream: bool, stream_options: StreamOptions | None = None) -> list[RenderedRequest]:
    """A job as bodies for the server that computes."""
    several = len(job.prompts) > 1
    return [
        RenderedRequest(
            f"{job.request_id}-{i}" if several else job.request_id,
            prompt.token_ids,
            _settled(params),
            model,
            stream,
            stream_options,
            job.cache_salt,
            job.priority,
        )
        for i, (prompt, params) in enumerate(zip(job.prompts, job.params, strict=True))
    ]


def _settled(params: SamplingParams) -> dict[str, Any]:
    """The parameters as the server that computes takes them; what begins and ends a thought it knows itself."""
    settled = {name: value for name in (*SAMPLING_FIELDS, "logprobs") if (value := getattr(params, name)) is not None}
    if params.structured_outputs is not None:
        wanted = msgspec.to_builtins(params.structured_outputs)
        settled[PARAM] = {name: value for name, value in wanted.items() if name not in THOUGHTS}
    if not params.stop_in_thoughts:
        settled["stop_in_thoughts"] = False
    return settled


# --- derender ---------------------------------------------------------------------------------------------------------


async def derender_chat(request: Request) -> Response:
    """Generated tokens as a chat answer, or with `stream` a generated chunk as a chunk of one."""
    state = scale_out_state(request)
    body = await read_json(request, DerenderChatRequest, state.server_args.max_body_bytes)
    model = state.model_name(body.model)
    original = nested(body.chat_request, ChatRequest, "chat_request")
    derenderer = _ChatDerenderer(state, original)
    work = derenderer.chunk if body.stream else derenderer.answer
    return json_response(asyncio.to_thread(work, body, model))


async def derender_completions(request: Request) -> Response:
    """Generated tokens of each prompt as one answer, or with `stream` a generated chunk as a chunk of one."""
    state = scale_out_state(request)
    body = await read_json(request, DerenderCompletionRequest, state.server_args.max_body_bytes)
    model = state.model_name(body.model)
    original = nested(body.completion_request, CompletionRequest, "completion_request")
    derenderer = _CompletionDerenderer(state, original, None if original is None else original.logprobs)
    work = derenderer.chunk if body.stream else derenderer.answer
    return json_response(asyncio.to_thread(work, body, model))


class _Derenderer:
    """Tokens to text, as the request that they answer wanted it. Everything given is bounded before it is decoded."""

    def __init__(self, state: ServerState, original: GenerationRequest | None, num_top: int | None) -> None:
        self._generation = state.generation()
        self._role = state.server_args.response_role
        self._original = original or GenerationRequest()
        self._num_top = -1 if num_top is None else num_top
        self._max_logprobs = state.engine_args.max_logprobs
        text = self._generation.text
        self._tokenizer = text.tokenizer
        self._eos = eos_token_ids(text.tokenizer, text.generation_config, self._generation.info.vocab_size)

    def _check(self, given: GivenAnswer, name: str) -> None:
        if given.output_mode != "tokens":
            raise InvalidRequestError(f"{name}.output_mode must be tokens, got {given.output_mode!r:.80}.", f"{name}.output_mode")
        if len(given.choices) > MAX_N:
            raise InvalidRequestError(f"{name}.choices may hold at most {MAX_N} choices, got {len(given.choices)}.", f"{name}.choices")
        context = self._generation.info.max_model_len
        if len(given.prompt_logprobs or ()) > context:
            raise InvalidRequestError(f"{name}.prompt_logprobs may hold at most {context} positions.", f"{name}.prompt_logprobs")
        for i, choice in enumerate(given.choices):
            where = f"{name}.choices[{i}]"
            self._check_ids(choice.token_ids or [], f"{where}.token_ids")
            self._check_logprobs(choice, f"{where}.logprobs")

    def _check_ids(self, token_ids: Sequence[int], name: str) -> None:
        context = self._generation.info.max_model_len
        if len(token_ids) > context:
            raise InvalidRequestError(f"{name} may hold at most {context} tokens, got {len(token_ids)}.", name)
        self._generation.check_token_ids(token_ids, name)

    def _check_logprobs(self, choice: GivenChoice, name: str) -> None:
        content = choice.logprobs.content if choice.logprobs is not None else None
        if content is None:
            return
        if [entry.token_id for entry in content] != (choice.token_ids or []):
            raise InvalidRequestError(f"{name} must have an entry for each of the tokens, in order.", name)
        most = max((len(entry.top_logprobs) for entry in content), default=0)
        if most > self._max_logprobs + 1 and self._max_logprobs >= 0:
            raise InvalidRequestError(f"{name} may have at most {self._max_logprobs + 1} top_logprobs a token, got {most}.", name)
        for entry in content:
            self._generation.check_token_ids([top.token_id for top in entry.top_logprobs], name)

    def _text(self, choice: GivenChoice, prompt: Sequence[int], before: Sequence[int] = ()) -> tuple[int, str]:
        """(length of the text before, text of the choice's own tokens): without the token or the string that ended it."""
        own = choice.token_ids or []
        detokenizer = self._detokenizer(prompt, self._original.skip_special_tokens is not False)
        start = len(detokenizer.append(before))
        detokenizer.append(own[:-1] if self._hides_last(choice) else own)
        if choice.finish_reason is not None:
            detokenizer.flush()
        return start, detokenizer.text[start : self._end(choice, detokenizer.text)]

    def _detokenizer(self, prompt: Sequence[int], skip_special: bool) -> IncrementalDetokenizer:
        spaces = self._original.spaces_between_special_tokens is not False
        return IncrementalDetokenizer(self._tokenizer, prompt, skip_special, spaces)

    def _hides_last(self, choice: GivenChoice) -> bool:
        """Whether the last token ended the answer and isn't shown."""
        ids, reason = choice.token_ids, choice.stop_reason
        if choice.finish_reason != FINISH_STOP or self._original.include_stop_str_in_output or not ids:
            return False
        return ids[-1] == reason or (reason is None and ids[-1] in self._eos)

    def _end(self, choice: GivenChoice, text: str) -> int | None:
        """Where a stop string ended the text; None where none did."""
        if choice.finish_reason != FINISH_STOP or not isinstance(choice.stop_reason, str) or choice.stop_reason not in text:
            return None
        return text.rfind(choice.stop_reason) + len(choice.stop_reason) * bool(self._original.include_stop_str_in_output)

    def _positions(self, choice: GivenChoice) -> list[PositionLogprobs] | None:
        if choice.logprobs is None or choice.logprobs.content is None:
            return None
        texts = TokenTexts(self._tokenizer)
        return [self._position(entry, texts) for entry in choice.logprobs.content]

    @staticmethod
    def _position(entry: GeneratedLogprob, texts: TokenTexts) -> PositionLogprobs:
        position = {entry.token_id: Logprob(entry.logprob, entry.rank, texts[entry.token_id])}
        for top in entry.top_logprobs:
            position.setdefault(top.token_id, Logprob(top.logprob, top.rank, texts[top.token_id]))
        return position

    def _chunk_of(self, chunk: GivenAnswer | None, state: StreamState | None) -> tuple[GivenAnswer, StreamState]:
        """A chunk and the state before it, checked."""
        if chunk is None:
            raise InvalidRequestError("generate_chunk is required.", "generate_chunk")
        state = state or StreamState()
        self._check(chunk, "generate_chunk")
        if len(chunk.choices) > 1:
            raise InvalidRequestError("generate_chunk.choices may hold at most one choice.", "generate_chunk.choices")
        new = [token for choice in chunk.choices for token in choice.token_ids or ()]
        self._check_ids([*state.output_token_ids, *new], "stream_state.output_token_ids")
        return chunk, state


def _count(given: int | None, prompt: Sequence[int]) -> int:
    """How many tokens the prompt had."""
    if given is not None and not 0 <= given < MAX_PROMPT_TOKENS:
        raise InvalidRequestError(
            f"prompt_tokens must be an integer of at least 0 and below {MAX_PROMPT_TOKENS}, got {given}.", "prompt_tokens"
        )
    return len(prompt) if given is None else given


class _ChatDerenderer(_Derenderer):
    """With the request that is answered, tool calls and thoughts are read as they would have been where it was rendered."""

    def __init__(self, state: ServerState, original: ChatRequest | None) -> None:
        super().__init__(state, original, None if original is None else original.top_logprobs or 0)
        self._reading: Reading | None = None
        self._old_name = state.server_args.enable_reasoning_content
        if original is not None:
            with _within("chat_request"):
                use = choose(original.tools, original.tool_choice, original.parallel_tool_calls)
                self._reading = chat_reading(self._generation, original, use)

    def answer(self, body: DerenderChatRequest, model: str) -> ChatAnswer:
        given = body.generate_response
        if given is None:
            raise InvalidRequestError("generate_response is required.", "generate_response")
        self._check(given, "generate_response")
        prompt = self._prompt(body, given)
        num_reasoning = 0
        choices = []
        for choice in given.choices:
            read = self._read(choice, prompt)
            num_reasoning += read.num_reasoning_tokens
            events, role = read.events, self._role
            choices.append(
                ChatChoice(
                    choice.index,
                    AnswerMessage(role, read.text, tool_calls=[]) if events is None else chat_message(events, role, "", self._old_name),
                    self._logprobs(choice),
                    chat_finish(read.finish_reason, self._reading),
                    choice.stop_reason,
                    choice.token_ids or [] if self._original.return_token_ids else UNSET,
                )
            )
        num_prompt = _count(body.prompt_tokens, prompt)
        reads_thoughts = self._reading is not None and self._reading.format.reads_thoughts
        num_tokens = sum(len(choice.token_ids or ()) for choice in given.choices)
        usage = make_usage(num_prompt, num_tokens, None, num_reasoning if reads_thoughts else None)
        return ChatAnswer(given.request_id, int(time.time()), model, choices, usage, prompt_logprobs=given.prompt_logprobs)

    def chunk(self, body: DerenderChatRequest, model: str) -> DerenderedChatChunk:
        chunk, state = self._chunk_of(body.generate_chunk, body.stream_state)
        prompt = self._prompt(body, chunk)
        choices = []
        for choice in chunk.choices:
            read = self._read(choice, prompt, state.output_token_ids)
            delta = self._delta(read)
            if not state.role_sent:
                delta.role = self._role
                delta.content = "" if delta.content is UNSET else delta.content
            stop_reason = choice.stop_reason if choice.finish_reason is not None else UNSET
            finish = chat_finish(read.finish_reason, self._reading)
            choices.append(ChatChunkChoice(choice.index, delta, self._logprobs(choice), finish, stop_reason))
            state = StreamState(output_token_ids=state.output_token_ids + (choice.token_ids or []), role_sent=True)
        usage = UNSET if chunk.usage is None else chunk.usage
        return DerenderedChatChunk(ChatChunk(chunk.request_id, int(time.time()), model, choices, usage=usage), state)

    def _delta(self, read: CompletionOutput) -> ChatDelta:
        """All that a chunk says in one delta: clients read its thoughts first, and its calls last."""
        if read.events is None:
            return ChatDelta(content=read.text or UNSET)
        ranks = {ReasoningText: 0, ContentText: 1}
        deltas = chat_deltas(sorted(read.events, key=lambda event: ranks.get(type(event), 2)), self._old_name)
        return deltas[0] if deltas else ChatDelta()

    def _read(self, choice: GivenChoice, prompt: list[int], before: Sequence[int] = ()) -> CompletionOutput:
        """What a choice's own tokens say behind those before."""
        own = choice.token_ids or []
        if self._reading is None:
            return CompletionOutput(choice.index, self._text(choice, prompt, before)[1], own, finish_reason=choice.finish_reason)
        # Token by token, however they are cut into chunks: so that what has been said before is the same in every chunk.
        detokenizer, reader = self._detokenizer(prompt, False), Reader.of(self._reading, prompt)
        for token_id in before:
            reader.read(CompletionOutput(choice.index, detokenizer.append([token_id]), [token_id]))
        start = len(detokenizer.text)
        hidden = own[-1:] if self._hides_last(choice) else []
        pieces = [detokenizer.append([token_id]) for token_id in own[: len(own) - len(hidden)]]
        pieces += ["" for _ in hidden]
        rest = detokenizer.flush() if choice.finish_reason is not None else ""
        end = self._end(choice, detokenizer.text)
        room = None if end is None else max(0, end - start)
        events: list[Event] = []
        for token_id, piece in zip(own, pieces, strict=True):
            shown = piece if room is None else piece[:room]
            room = None if room is None else room - len(shown)
            read = CompletionOutput(choice.index, shown, [token_id])
            reader.read(read)
            events += read.events or ()
        read = CompletionOutput(choice.index, rest if room is None else rest[:room], [], finish_reason=choice.finish_reason)
        reader.read(read)
        read.events = [*events, *(read.events or ())]
        return read

    def _prompt(self, body: DerenderChatRequest, given: GivenAnswer) -> list[int]:
        """The prompt, where it is known: a word at the beginning of the answer may owe its space to it."""
        prompt = body.prompt_token_ids or given.prompt_token_ids or []
        self._check_ids(prompt, "prompt_token_ids")
        return prompt

    def _logprobs(self, choice: GivenChoice) -> ChatLogprobs | None:
        positions = self._positions(choice)
        if not positions:
            return None
        return ChatLogprobsFormat(self._tokenizer, self._num_top, False).encode(choice.token_ids or [], positions)


class _CompletionDerenderer(_Derenderer):
    def answer(self, body: DerenderCompletionRequest, model: str) -> CompletionAnswer:
        answers = body.generate_responses
        if not answers or len(answers) > MAX_PROMPTS:
            raise InvalidRequestError(f"generate_responses must hold 1 to {MAX_PROMPTS} answers.", "generate_responses")
        counts = self._for_each(body.prompt_tokens, "prompt_tokens", len(answers))
        prompts = self._for_each(body.prompt_token_ids, "prompt_token_ids", len(answers))
        choices: list[CompletionChoice] = []
        num_prompt = 0
        for i, given in enumerate(answers):
            self._check(given, f"generate_responses[{i}]")
            prompt = self._prompt(prompts[i], given)
            num_prompt += _count(counts[i], prompt)
            for choice in given.choices:
                choices.append(self._choice(choice, i * len(given.choices), prompt))
                choices[-1].prompt_logprobs = UNSET if given.prompt_logprobs is None else given.prompt_logprobs
        num_tokens = sum(len(choice.token_ids or ()) for given in answers for choice in given.choices)
        usage = make_usage(num_prompt, num_tokens, None)
        return CompletionAnswer(answers[0].request_id, int(time.time()), model, choices, usage=usage, system_fingerprint=None)

    def chunk(self, body: DerenderCompletionRequest, model: str) -> DerenderedCompletionChunk:
        chunk, state = self._chunk_of(body.generate_chunk, body.stream_state)
        prompt = self._prompt(body.prompt_token_ids, chunk)
        choices = []
        for choice in chunk.choices:
            choices.append(self._choice(choice, 0, prompt, state.output_token_ids))
            state = StreamState(output_token_ids=state.output_token_ids + (choice.token_ids or []), role_sent=True)
        usage = UNSET if chunk.usage is None else chunk.usage
        return DerenderedCompletionChunk(CompletionAnswer(chunk.request_id, int(time.time()), model, choices, usage=usage), state)

    def _choice(self, choice: GivenChoice, first: int, prompt: list[int], before: Sequence[int] = ()) -> CompletionChoice:
        start, text = self._text(choice, prompt, before)
        token_ids = choice.token_ids or []
        return CompletionChoice(
            first + choice.index,
            text,
            self._logprobs(choice, start),
            choice.finish_reason,
            choice.stop_reason,
            token_ids=token_ids if self._original.return_token_ids else UNSET,
        )

    def _prompt(self, prompt: Any, given: GivenAnswer) -> list[int]:
        prompt = prompt or given.prompt_token_ids or []
        if not isinstance(prompt, list) or any(not isinstance(token, int) for token in prompt):
            raise InvalidRequestError(
                "prompt_token_ids must be a list of token ids for each answer, or for a chunk one.", "prompt_token_ids"
            )
        self._check_ids(prompt, "prompt_token_ids")
        return prompt

    def _logprobs(self, choice: GivenChoice, start: int) -> CompletionLogprobs | None:
        positions = self._positions(choice)
        if not positions:
            return None
        token_ids = choice.token_ids or []
        return completion_logprobs(token_ids, positions, self._num_top, False, start, [""] * len(token_ids))[0]

    @staticmethod
    def _for_each(given: Any, name: str, count: int) -> list[Any]:
        """A value for each answer, None where it isn't given."""
        if given is None:
            return [None] * count
        if not isinstance(given, list) or len(given) != count:
            raise InvalidRequestError(f"{name} must be a list with a value for each of the {count} answers.", name)
        return given
