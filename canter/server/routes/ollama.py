"""Ollama's dialect: `/api/generate`, `/api/chat`, `/api/tags`, `/api/show`, `/api/ps` and `/api/version`."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from canter.client.outputs import CompletionOutput, RequestMetrics, RequestOutput
from canter.core.errors import InvalidRequestError
from canter.server.body import parse, read_json
from canter.server.errors import describe, encode_error
from canter.server.generation import Generation, Job, Prompt, Wishes, fold
from canter.server.messages import MAX_MESSAGES
from canter.server.routes.common import field_names, window_of_penalties
from canter.server.schemas.ollama import (
    Answer,
    AnswerMessage,
    ChatMessage,
    ChatRequest,
    Details,
    GenerateRequest,
    Model,
    ModelList,
    OllamaRequest,
    Options,
    ShowAnswer,
    ShowRequest,
    VersionAnswer,
)
from canter.server.sse import StreamForm, encoder, json_response, stream_response
from canter.server.state import ServerState, server_state

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
API_VERSION = "0.12.0"
"""The version of Ollama whose routes these are: clients compare it with the least that they work with."""
NEVER = "9999-12-31T23:59:59Z"

_SAMPLING = {
    "num_predict": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Option -> name of the sampling parameter."""
_OPTION_NAMES = {ours: f"options.{theirs}" for theirs, ours in _SAMPLING.items()}


async def generate(request: Request) -> Response:
    """A text that goes on from a prompt, or a turn of a conversation whose tokens the client keeps in `context`."""
    state = server_state(request)
    generation = state.generation()
    body = await read_json(request, GenerateRequest, state.server_args.max_body_bytes)
    model = _model_name(state, body.model)
    options = _options(body)
    _check_context(generation, options)
    if body.context and body.raw:
        raise InvalidRequestError("context can't be given with raw: true. Put the earlier text into the prompt.", "context")
    if not body.prompt:
        return json_response(_loaded(Answer(model, _now(), response="")))
    prompt = await _generate_prompt(generation, body)
    keep_context = not body.raw

    def make(choice: CompletionOutput) -> Answer:
        return Answer(model, _now(), response=choice.text)

    return _run(state, generation, request, body, options, prompt, make, keep_context)


async def chat(request: Request) -> Response:
    """The next message of a conversation."""
    state = server_state(request)
    generation = state.generation()
    body = await read_json(request, ChatRequest, state.server_args.max_body_bytes)
    model = _model_name(state, body.model)
    options = _options(body)
    _check_context(generation, options)
    if not body.messages:
        return json_response(_loaded(Answer(model, _now(), message=AnswerMessage(""))))
    going_on = body.messages[-1].role == "assistant"
    messages = _template_messages(body.messages)
    text = await generation.render(messages, {}, add_generation_prompt=not going_on, continue_final_message=going_on)
    prompt = await generation.encode(text, False, must_fit=True)

    def make(choice: CompletionOutput) -> Answer:
        return Answer(model, _now(), message=AnswerMessage(choice.text))

    return _run(state, generation, request, body, options, prompt, make, False)


def _run(
    state: ServerState,
    generation: Generation,
    request: Request,
    body: OllamaRequest,
    options: Options,
    prompt: Prompt,
    make: Callable[[CompletionOutput], Answer],
    keep_context: bool,
) -> Response:
    _, engine_id = state.new_ids(request, "ollama", None)
    with field_names({**_OPTION_NAMES, "stop": "options.stop"}):
        wishes = Wishes(sampling=_sampling(options), stream=body.stream, max_tokens_name="options.num_predict")
        job = generation.prepare(engine_id, [prompt], wishes)
    answers = AnswerEncoder(job, make, keep_context)
    outputs = generation.stream(job)
    return stream_response(answers.lines(outputs), FORM) if body.stream else json_response(answers.answer(outputs))


async def _loaded(answer: Answer) -> Answer:
    """What a request without a prompt gets, which asks to load the model: it is loaded."""
    answer.done, answer.done_reason = True, "load"
    return answer


async def _generate_prompt(generation: Generation, body: GenerateRequest) -> Prompt:
    if body.raw:
        return await generation.encode(body.prompt, True, must_fit=True)
    known = body.context or []
    generation.check_length(len(known))
    generation.check_token_ids(known, "context")
    system = [{"role": "system", "content": body.system}] if body.system else []
    text = await generation.render([*system, {"role": "user", "content": body.prompt}], {}, add_generation_prompt=True)
    prompt = await generation.encode(text, False, must_fit=True)
    if not known:
        return prompt
    new, tokenizer = prompt.token_ids, generation.text.tokenizer
    if new and tokenizer.bos_token is not None and tokenizer.id_to_token(new[0]) == tokenizer.bos_token:
        new = new[1:]  # the text has begun already
    return Prompt(None, known + new)


def _template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(f"messages may hold at most {MAX_MESSAGES} messages, got {len(messages)}.", "messages")
    result = []
    for i, message in enumerate(messages):
        if message.images:
            raise InvalidRequestError(f"messages[{i}].images are not supported: this model reads text only.", f"messages[{i}].images")
        fields = {
            "role": message.role,
            "content": message.content or "",
            "reasoning": message.thinking,
            "name": message.tool_name,
            "tool_call_id": message.tool_call_id,
            "tool_calls": [
                {"type": "function", "function": {"name": call.function.name, "arguments": call.function.arguments or {}}}
                | ({} if call.id is None else {"id": call.id})
                for call in message.tool_calls or ()
            ],
        }
        result.append({name: value for name, value in fields.items() if value not in (None, [])})
    return result


def _options(body: OllamaRequest) -> Options:
    try:
        return parse(bytes(body.options), Options)
    except InvalidRequestError as error:
        message = str(error).replace("The request body must", "must", 1) if error.param is None else str(error)
        separator = "." if error.param is not None else " "
        raise InvalidRequestError(f"options{separator}{message}", f"options.{error.param}" if error.param else "options") from None


def _check_context(generation: Generation, options: Options) -> None:
    """`num_ctx` reserves nothing here: every request may use the model's whole context."""
    context = generation.info.max_model_len
    if options.num_ctx is not None and not 1 <= options.num_ctx <= context:
        raise InvalidRequestError(
            f"options.num_ctx must be at least 1 and at most the server's context of {context} tokens, got {options.num_ctx}.",
            "options.num_ctx",
        )


def _sampling(options: Options) -> dict[str, Any]:
    """Sampling parameters that the options give. A negative `num_predict` means: until the model ends, or the context does."""
    given = {ours: getattr(options, theirs) for theirs, ours in _SAMPLING.items()}
    values = {name: value for name, value in given.items() if value is not None}
    if values.get("max_tokens", 0) < 0:
        del values["max_tokens"]
    return window_of_penalties(values, options.repeat_last_n, "options.repeat_last_n")


class AnswerEncoder:
    """Turns the pipeline's outputs into Ollama's objects: a line for each output, the last with counts and durations.

    Thoughts and tool calls become further fields of `make`'s message.
    """

    def __init__(self, job: Job, make: Callable[[CompletionOutput], Answer], keep_context: bool) -> None:
        self._prompt = job.prompts[0]
        self._make = make
        self._keep_context = keep_context
        self._started = time.time()
        self._num_tokens = 0
        self._token_ids: list[int] = []

    async def answer(self, outputs: Outputs) -> Answer:
        """The whole answer."""
        async with aclosing(outputs):
            [result] = await fold(outputs)
        self._count(result.outputs[0])
        return self._finished(result)

    async def lines(self, outputs: Outputs) -> AsyncGenerator[bytes, None]:
        """JSON, a line for each output that has a text, and one for the end, which has none."""
        async with aclosing(outputs):
            async for _, output in outputs:
                [choice] = output.outputs
                self._count(choice)
                lines = _line(self._make(choice)) if choice.text else b""
                if choice.finish_reason is not None:
                    choice.text = ""
                    lines += _line(self._finished(output))
                if lines:
                    yield lines

    def _count(self, choice: CompletionOutput) -> None:
        self._num_tokens += len(choice.token_ids)
        if self._keep_context:
            self._token_ids += choice.token_ids

    def _finished(self, output: RequestOutput) -> Answer:
        """The answer, or the line, that tells the end."""
        answer, metrics = self._make(output.outputs[0]), output.metrics or RequestMetrics()
        answer.done, answer.done_reason = True, output.outputs[0].finish_reason or UNSET
        answer.context = self._prompt.token_ids + self._token_ids if self._keep_context else UNSET
        answer.total_duration = _nanoseconds(self._started, time.time())
        answer.load_duration = 0
        answer.prompt_eval_count = len(self._prompt.token_ids)
        answer.prompt_eval_duration = _nanoseconds(metrics.scheduled_ts, metrics.first_token_ts)
        answer.eval_count = self._num_tokens
        answer.eval_duration = _nanoseconds(metrics.first_token_ts, metrics.last_token_ts)
        return answer


async def tags(request: Request) -> Response:
    """The names of the model."""
    state = server_state(request)
    return _json(ModelList([_card(state, name) for name in state.model_names]))


async def running(request: Request) -> Response:
    """The models in memory: the one there is, once it is loaded, and for as long as the server runs."""
    state = server_state(request)
    info = state.client.info
    if info is None:
        return _json(ModelList([]))
    cards = [_card(state, name) for name in state.model_names]
    for card in cards:
        card.context_length, card.expires_at = info.max_model_len, NEVER
    return _json(ModelList(cards))


async def show(request: Request) -> Response:
    """What is known of the model."""
    state = server_state(request)
    generation = state.generation()
    body = await read_json(request, ShowRequest, state.server_args.max_body_bytes)
    name = _model_name(state, body.model or body.name)
    info, text = generation.info, generation.text
    card = _card(state, name)
    parameters = "\n".join(f"{key} {value}" for key, value in text.defaults.items())
    model_info = {
        "general.architecture": info.architecture,
        f"{info.architecture}.context_length": info.max_model_len,
        f"{info.architecture}.vocab_size": info.vocab_size,
    }
    return _json(
        ShowAnswer(parameters, text.chat_template.source or "", card.details, model_info, card.modified_at, capabilities=["completion"])
    )


async def version(request: Request) -> Response:
    """The version of Ollama that the routes follow."""
    return _json(VersionAnswer(API_VERSION))


def _model_name(state: ServerState, asked: str | None) -> str:
    """Ollama's clients may add the tag `latest` to a name."""
    names: Mapping[str, str] = {f"{name}:latest": name for name in state.model_names}
    return state.model_name(names.get(asked, asked) if asked else asked)


def _card(state: ServerState, name: str) -> Model:
    info = state.client.info
    family = "" if info is None else info.architecture
    digest = hashlib.sha256(f"{state.engine_args.model}@{state.engine_args.revision or ''}".encode()).hexdigest()
    return Model(name, name, _time(state.created), digest, Details(family, [family] if family else []))


def _stream_error(error: BaseException, scope: Scope) -> bytes:
    return encode_error(describe(error), scope) + b"\n"


def _line(answer: Answer) -> bytes:
    return encoder.encode(answer) + b"\n"


def _json(body: object) -> Response:
    return Response(encoder.encode(body), media_type="application/json")


def _now() -> str:
    return _time(time.time())


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _nanoseconds(start: float, end: float) -> int:
    """Between two times, either of which may not have been reached (0)."""
    return max(0, round((end - start) * 1e9)) if start and end else 0


FORM = StreamForm("application/x-ndjson", _stream_error, b"")
