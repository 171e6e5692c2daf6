"""Ollama's dialect: `/api/generate`, `/api/chat`, `/api/tags`, `/api/show`, `/api/ps` and `/api/version`."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from canter.client.outputs import CompletionOutput, RequestMetrics, RequestOutput
from canter.core.errors import InvalidRequestError
from canter.core.messages import FINISH_STOP
from canter.core.structured_outputs import PARAM, StructuredOutputsParams
from canter.server.body import parse, read_json
from canter.server.constraints import schema_constraint
from canter.server.errors import describe, encode_error
from canter.server.generation import Generation, Job, Prompt, Wishes, fold
from canter.server.messages import MAX_MESSAGES
from canter.server.reading import FINISH_TOOL_CALLS, Reading
from canter.server.routes.common import field_names, window_of_penalties
from canter.server.schemas.ollama import (
    Answer,
    AnswerCall,
    AnswerFunction,
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
from canter.server.tools import NO_TOOLS, ToolUse, arguments_object, choose
from canter.text.parsing.events import CallArguments, CallEnd, CallStart, ContentText, Event, ReasoningText

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
_CONSTRAINT_NAMES = dict.fromkeys((PARAM, f"{PARAM}.json", f"{PARAM}.json_object"), "format")


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
    # What is raw goes to the model and comes from it as it is, unless thoughts are asked for.
    reading = _reading(generation, body, model) if body.think is not None or not body.raw else None
    prompt = await _generate_prompt(generation, body)
    keep_context = not body.raw

    def make(said: _Said) -> Answer:
        return Answer(model, _now(), response=said.text, thinking=said.thinking or UNSET)

    return await _run(state, generation, request, body, options, prompt, reading, make, keep_context)


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
    use = _tool_use(generation, body, model)
    num_calls = sum(len(message.tool_calls or ()) for message in body.messages)
    reading = _reading(generation, body, model, use, num_calls)
    text = await generation.render(
        messages,
        _template_kwargs(generation, body),
        add_generation_prompt=not going_on,
        continue_final_message=going_on,
        tools=body.tools or None,
    )
    prompt = await generation.encode(text, False, must_fit=True)

    def make(said: _Said) -> Answer:
        return Answer(model, _now(), message=AnswerMessage(said.text, thinking=said.thinking or UNSET, tool_calls=said.calls or UNSET))

    return await _run(state, generation, request, body, options, prompt, reading, make, False)


async def _run(
    state: ServerState,
    generation: Generation,
    request: Request,
    body: OllamaRequest,
    options: Options,
    prompt: Prompt,
    reading: Reading | None,
    make: Callable[[_Said], Answer],
    keep_context: bool,
) -> Response:
    _, engine_id = state.new_ids(request, "ollama", None)
    with field_names({**_OPTION_NAMES, **_CONSTRAINT_NAMES}):
        wishes = Wishes(
            sampling=_sampling(options),
            stream=body.stream,
            max_tokens_name="options.num_predict",
            constraint=_constraint(body.format),
            reading=reading,
        )
        job = generation.prepare(engine_id, [prompt], wishes)
        await generation.admit(job)
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
    messages = [*system, {"role": "user", "content": body.prompt}]
    text = await generation.render(messages, _template_kwargs(generation, body), add_generation_prompt=True)
    prompt = await generation.encode(text, False, must_fit=True)
    if not known:
        return prompt
    new, tokenizer = prompt.token_ids, generation.text.tokenizer
    if new and tokenizer.bos_token is not None and tokenizer.id_to_token(new[0]) == tokenizer.bos_token:
        new = new[1:]  # the text has begun already
    return Prompt(None, known + new)


def _tool_use(generation: Generation, body: ChatRequest, model: str) -> ToolUse:
    """The tools, among which the model chooses. Clients know a model that has no calls by Ollama's words for it."""
    if not body.tools:
        return NO_TOOLS
    use = choose(body.tools, None, None)
    known = generation.text.output_format
    if known is None or not known.reads_tools:
        raise InvalidRequestError(
            f'"{model}" does not support tools: it isn\'t known how it writes calls. Start the server with --tool-call-parser.', "tools"
        )
    return use


def _reading(
    generation: Generation, body: OllamaRequest, model: str, use: ToolUse = NO_TOOLS, num_previous_calls: int = 0
) -> Reading | None:
    """How the answer is read; None where all of it is content."""
    if body.think not in (None, False) and not _can_think(generation):
        raise InvalidRequestError(f'"{model}" does not support thinking, so that think must be false or left out.', "think")
    return generation.reading(
        use,
        template_kwargs=_template_kwargs(generation, body),
        reasoning_effort=body.think if isinstance(body.think, str) else None,
        num_previous_calls=num_previous_calls,
        show_reasoning=body.think is not False,
    )


def _can_think(generation: Generation) -> bool:
    known = generation.text.output_format
    return known is not None and known.reads_thoughts


def _template_kwargs(generation: Generation, body: OllamaRequest) -> dict[str, Any]:
    """The names that templates have for the switch and for how much. A model that can think does, unless told otherwise."""
    if not _can_think(generation):
        return {}
    kwargs: dict[str, Any] = dict.fromkeys(("enable_thinking", "thinking"), body.think is not False)
    return kwargs | ({"reasoning_effort": body.think} if isinstance(body.think, str) else {})


def _constraint(form: str | dict[str, Any] | None) -> StructuredOutputsParams | None:
    """The grammar of the answer."""
    if not form:
        return schema_constraint({}, "format") if form == {} else None
    if isinstance(form, dict):
        return schema_constraint(form, "format")
    if form != "json":
        raise InvalidRequestError(f'format must be "json" or a JSON schema, got {form!r:.80}.', "format")
    return StructuredOutputsParams(json_object=True)


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


@dataclass(slots=True)
class _Said:
    """What a line, or the answer, says. Calls come when they are complete."""

    text: str = ""
    thinking: str = ""
    calls: list[AnswerCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.thinking or self.calls)


class _Speaker:
    """Gathers events to what is said, a call's arguments until it is complete."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[CallStart, list[str]]] = {}

    def said(self, choice: CompletionOutput) -> list[_Said]:
        """One for each kind of thing, in order: thoughts stand before a text, and a text before calls."""
        if choice.events is None:
            return [_Said(choice.text)] if choice.text else []
        said: list[_Said] = []
        for told in choice.events:
            self._take(told, said)
        return [one for one in said if one]

    def whole(self, choice: CompletionOutput) -> _Said:
        """All that an answer says."""
        parts = self.said(choice)
        return _Said(
            "".join(part.text for part in parts),
            "".join(part.thinking for part in parts),
            [call for part in parts for call in part.calls],
        )

    def _take(self, told: Event, said: list[_Said]) -> None:
        match told:
            case ReasoningText(text):
                if not said or said[-1].text or said[-1].calls:
                    said.append(_Said())
                said[-1].thinking += text
            case ContentText(text):
                if not said or said[-1].calls:
                    said.append(_Said())
                said[-1].text += text
            case CallStart(index, _, _):
                self._open[index] = (told, [])
            case CallArguments(index, text):
                self._open[index][1].append(text)
            case CallEnd(index):
                start, pieces = self._open.pop(index)
                if not said:
                    said.append(_Said())
                said[-1].calls.append(AnswerCall(start.id, AnswerFunction(index, start.name, arguments_object("".join(pieces)))))


class AnswerEncoder:
    """Turns the pipeline's outputs into Ollama's objects: lines for each output, the last with counts and durations."""

    def __init__(self, job: Job, make: Callable[[_Said], Answer], keep_context: bool) -> None:
        self._prompt = job.prompts[0]
        self._make = make
        self._keep_context = keep_context
        self._started = time.time()
        self._num_tokens = 0
        self._token_ids: list[int] = []
        self._speaker = _Speaker()

    async def answer(self, outputs: Outputs) -> Answer:
        """The whole answer."""
        async with aclosing(outputs):
            [result] = await fold(outputs)
        self._count(result.outputs[0])
        return self._finished(result, self._speaker.whole(result.outputs[0]))

    async def lines(self, outputs: Outputs) -> AsyncGenerator[bytes, None]:
        """JSON, a line for all that an output says, and one for the end, which says nothing."""
        async with aclosing(outputs):
            async for _, output in outputs:
                [choice] = output.outputs
                self._count(choice)
                lines = b"".join([_line(self._make(said)) for said in self._speaker.said(choice)])
                if choice.finish_reason is not None:
                    lines += _line(self._finished(output, _Said()))
                if lines:
                    yield lines

    def _count(self, choice: CompletionOutput) -> None:
        self._num_tokens += len(choice.token_ids)
        if self._keep_context:
            self._token_ids += choice.token_ids

    def _finished(self, output: RequestOutput, said: _Said) -> Answer:
        """The answer, or the line, that tells the end."""
        answer, metrics = self._make(said), output.metrics or RequestMetrics()
        answer.done, answer.done_reason = True, _done_reason(output.outputs[0].finish_reason)
        answer.context = self._prompt.token_ids + self._token_ids if self._keep_context else UNSET
        answer.total_duration = _nanoseconds(self._started, time.time())
        answer.load_duration = 0
        answer.prompt_eval_count = len(self._prompt.token_ids)
        answer.prompt_eval_duration = _nanoseconds(metrics.scheduled_ts, metrics.first_token_ts)
        answer.eval_count = self._num_tokens
        answer.eval_duration = _nanoseconds(metrics.first_token_ts, metrics.last_token_ts)
        return answer


def _done_reason(finish_reason: str | None) -> str | UnsetType:
    """Ollama ends calls with stop."""
    return UNSET if finish_reason is None else FINISH_STOP if finish_reason == FINISH_TOOL_CALLS else finish_reason


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
    known = text.output_format
    capabilities = ["completion"]
    capabilities += ["tools"] if known is not None and known.reads_tools else []
    capabilities += ["thinking"] if known is not None and known.reads_thoughts else []
    return _json(ShowAnswer(parameters, text.chat_template.source or "", card.details, model_info, card.modified_at, capabilities))


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
