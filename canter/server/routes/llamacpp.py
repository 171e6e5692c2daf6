"""What maps cleanly of llama.cpp's own dialect: `/completion` (and its other name `/completions`), `/slots` and `/props`."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from canter.client.outputs import CompletionOutput, PositionLogprobs, RequestMetrics, RequestOutput
from canter.core.errors import InvalidRequestError, QueueFullError
from canter.core.sampling_params import SamplingParams
from canter.core.structured_outputs import PARAM, StructuredOutputsParams
from canter.server.body import read_json
from canter.server.constraints import schema_constraint
from canter.server.generation import Generation, Job, Prompt, Wishes, fold
from canter.server.logprobs import LOWEST
from canter.server.routes.common import field_names, window_of_penalties
from canter.server.schemas.llamacpp import CompletionAnswer, CompletionRequest, Props, Slot, Timings, TokenProbability
from canter.server.sse import StreamForm, encoder, event, json_response, stream_response
from canter.server.state import server_state
from canter.version import __version__

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
MAX_PARTS = 1024
BANNED = -100.0
"""The bias that keeps a token out."""
FORM = StreamForm(end=b"")
_SAMPLING = {
    "n_predict": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "ignore_eos": "ignore_eos",
}
"""Field -> name of the sampling parameter."""
_FIELD_NAMES = {ours: theirs for theirs, ours in _SAMPLING.items()} | {
    "logprobs": "n_probs",
    f"{PARAM}.grammar": "grammar",
    f"{PARAM}.json": "json_schema",
}
_ROOT = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)
"""What every GBNF has: without it a grammar would be taken for another kind."""


async def completion(request: Request) -> Response:
    """A text that goes on from a prompt."""
    state = server_state(request)
    generation = state.generation()
    body = await read_json(request, CompletionRequest, state.server_args.max_body_bytes)
    model = state.model_name(body.model)
    _, engine_id = state.new_ids(request, "llamacpp", None)
    sampling = _sampling(generation, body)
    prompt = await _prompt(generation, body.prompt)
    with field_names(_FIELD_NAMES):
        wishes = Wishes(sampling=sampling, stream=body.stream, max_tokens_name="n_predict", constraint=_constraint(body))
        job = generation.prepare(engine_id, [prompt], wishes)
        await generation.admit(job)
    answers = CompletionEncoder(generation, body, job, model)
    outputs = generation.stream(job)
    return stream_response(answers.chunks(outputs), FORM) if body.stream else json_response(answers.answer(outputs))


async def slots(request: Request) -> Response:
    """As many places as requests may run at once. With `fail_on_no_slot=1` 503 when all are in use."""
    state = server_state(request)
    info, num_running = state.generation().info, state.client.stats.num_running
    if request.query_params.get("fail_on_no_slot") == "1" and num_running >= info.max_num_seqs:
        raise QueueFullError(f"All {info.max_num_seqs} slots are in use.")
    return _json([Slot(i, info.max_model_len, i < num_running) for i in range(info.max_num_seqs)])


async def props(request: Request) -> Response:
    """What the server serves, and with which defaults."""
    state = server_state(request)
    generation = state.generation()
    info, tokenizer = generation.info, generation.text.tokenizer
    settings = {"n_ctx": info.max_model_len, "params": _settings(SamplingParams(**generation.text.defaults))}
    return _json(
        Props(
            settings,
            info.max_num_seqs,
            state.model_names[0],
            state.engine_args.model,
            generation.text.chat_template.source or "",
            tokenizer.bos_token or "",
            tokenizer.eos_token or "",
            f"canter-{__version__}",
            {"vision": False, "audio": False},
        )
    )


async def _prompt(generation: Generation, given: str | list[str | int]) -> Prompt:
    """A text, or pieces of which each is a text or a token id."""
    if isinstance(given, str):
        return await generation.encode(given, True, must_fit=True)
    generation.check_length(len(given))
    if all(isinstance(part, int) for part in given):
        return generation.check_token_ids([part for part in given if isinstance(part, int)], "prompt")
    if sum(isinstance(part, str) for part in given) > MAX_PARTS:
        raise InvalidRequestError(f"prompt may hold at most {MAX_PARTS} texts.", "prompt")
    token_ids: list[int] = []
    for i, part in enumerate(given):
        new = [part] if isinstance(part, int) else (await generation.encode(part, i == 0, must_fit=True)).token_ids
        token_ids += new
        generation.check_length(len(token_ids))
    return generation.check_token_ids(token_ids, "prompt")


def _sampling(generation: Generation, body: CompletionRequest) -> dict[str, Any]:
    """Sampling parameters that the body gives. A negative `n_predict` means: until the model ends, or the context does."""
    if body.max_tokens is not None and body.n_predict is not None and body.max_tokens != body.n_predict:
        raise InvalidRequestError("max_tokens is another name of n_predict: give one of them.", "max_tokens")
    given = {ours: getattr(body, theirs) for theirs, ours in _SAMPLING.items()}
    values = {name: value for name, value in given.items() if value is not None}
    if body.max_tokens is not None:
        values["max_tokens"] = body.max_tokens
    if values.get("max_tokens", 0) < 0:
        del values["max_tokens"]
    if body.n_probs:
        values["logprobs"] = body.n_probs
    if body.logit_bias is not None:
        values["logit_bias"] = _bias(generation, body.logit_bias)
    return window_of_penalties(values, body.repeat_last_n, "repeat_last_n")


def _constraint(body: CompletionRequest) -> StructuredOutputsParams | None:
    """The grammar of the answer, which holds from its first token on."""
    if body.grammar and body.json_schema is not None:
        raise InvalidRequestError("grammar and json_schema exclude each other: an answer obeys one of them.", "json_schema")
    if body.json_schema is not None:
        return schema_constraint(body.json_schema, "json_schema")
    if not body.grammar:
        return None
    if _ROOT.search(body.grammar) is None:
        raise InvalidRequestError("grammar must be GBNF with a rule 'root ::= ...', which is where an answer begins.", "grammar")
    return StructuredOutputsParams(grammar=body.grammar)


def _bias(generation: Generation, given: dict[str, float | bool] | list[tuple[int | str, float | bool]]) -> dict[str, float]:
    """By token id; `false` keeps a token out. Texts would be biased token by token, which is seldom what is meant, and are refused."""
    result = {}
    for key, value in given.items() if isinstance(given, dict) else given:
        if value is True or not str(key).isdecimal():
            raise InvalidRequestError(f"logit_bias must give token ids a number or false, got {key!r:.80}: {value!r:.80}.", "logit_bias")
        result[str(key)] = BANNED if value is False else float(value)
    return result


def _settings(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters under llama.cpp's names."""
    shown = {theirs: getattr(params, ours) for theirs, ours in _SAMPLING.items()}
    return shown | {"seed": -1 if params.seed is None else params.seed, "stop": params.stop_strings, "n_probs": params.logprobs or 0}


class CompletionEncoder:
    """Turns the pipeline's outputs into llama.cpp's completion objects."""

    def __init__(self, generation: Generation, body: CompletionRequest, job: Job, model: str) -> None:
        self._tokenizer = generation.text.tokenizer
        self._body = body
        self._prompt = job.prompts[0]
        self._params = job.params[0]
        self._model = model
        self._num_tokens = 0
        self._has_new_line = False

    async def answer(self, outputs: Outputs) -> CompletionAnswer:
        """The whole answer."""
        async with aclosing(outputs):
            [result] = await fold(outputs)
        return self._next(result)

    async def chunks(self, outputs: Outputs) -> AsyncGenerator[bytes, None]:
        """Server-sent events, one for each output with a text; the last has the counts, and no text."""
        async with aclosing(outputs):
            async for _, output in outputs:
                [choice] = output.outputs
                events, reason = b"", choice.finish_reason
                if choice.token_ids or choice.text:
                    choice.finish_reason = None
                    events = event(self._next(output))
                if reason is not None:
                    output.outputs = [CompletionOutput(0, "", [], finish_reason=reason, stop_reason=choice.stop_reason)]
                    events += event(self._next(output))
                if events:
                    yield events

    def _next(self, output: RequestOutput) -> CompletionAnswer:
        [choice] = output.outputs
        self._num_tokens += len(choice.token_ids)
        self._has_new_line = self._has_new_line or "\n" in choice.text
        finished = choice.finish_reason is not None
        answer = CompletionAnswer(
            choice.text,
            choice.token_ids if self._body.stream or self._body.return_tokens else [],
            finished,
            self._num_tokens,
            len(self._prompt.token_ids),
            completion_probabilities=self._probabilities(choice),
        )
        if finished or self._body.timings_per_token:
            answer.timings = self._timings(output)
        if finished:
            self._finish(answer, choice)
        return answer

    def _finish(self, answer: CompletionAnswer, choice: CompletionOutput) -> None:
        text = self._prompt.text
        answer.model = self._model
        answer.prompt = self._tokenizer.decode(self._prompt.token_ids, skip_special_tokens=False) if text is None else text
        answer.generation_settings = _settings(self._params)
        answer.has_new_line = self._has_new_line
        answer.truncated = False
        answer.stop_type, answer.stopping_word = _stop(choice)
        answer.tokens_cached = len(self._prompt.token_ids) + self._num_tokens

    def _timings(self, output: RequestOutput) -> Timings:
        metrics, cached = output.metrics or RequestMetrics(), output.num_cached_tokens
        prompt_n, prompt_ms = len(self._prompt.token_ids) - cached, _milliseconds(metrics.scheduled_ts, metrics.first_token_ts)
        predicted_ms = _milliseconds(metrics.first_token_ts, metrics.last_token_ts)
        return Timings(
            cached,
            prompt_n,
            prompt_ms,
            *_rates(prompt_n, prompt_ms),
            self._num_tokens,
            predicted_ms,
            *_rates(self._num_tokens, predicted_ms),
        )

    def _probabilities(self, choice: CompletionOutput) -> list[TokenProbability] | UnsetType:
        if choice.logprobs is None or not choice.token_ids:
            return UNSET
        return [self._probability(token_id, at) for token_id, at in zip(choice.token_ids, choice.logprobs, strict=True)]

    def _probability(self, token_id: int, position: PositionLogprobs) -> TokenProbability:
        ranked: Sequence[int] = sorted(position, key=lambda i: position[i].logprob, reverse=True)
        result = self._entry(token_id, position)
        result.top_logprobs = [self._entry(i, position) for i in ranked[: self._body.n_probs]]
        return result

    def _entry(self, token_id: int, position: PositionLogprobs) -> TokenProbability:
        table, text = self._tokenizer.token_bytes, position[token_id].decoded_token or ""
        exact = text.encode() if table is None else table.bytes_of(token_id)
        return TokenProbability(token_id, text, list(exact), max(position[token_id].logprob, LOWEST))


def _stop(choice: CompletionOutput) -> tuple[str, str]:
    """(`stop_type`, `stopping_word`)."""
    if isinstance(choice.stop_reason, str):
        return "word", choice.stop_reason
    return {"length": "limit", "stop": "eos"}.get(choice.finish_reason or "", "none"), ""


def _milliseconds(start: float, end: float) -> float:
    """Between two times, either of which may not have been reached (0)."""
    return max(0.0, (end - start) * 1e3) if start and end else 0.0


def _rates(number: int, milliseconds: float) -> tuple[float, float]:
    """(milliseconds for each, number in a second)."""
    return (milliseconds / number if number else 0.0), (number / milliseconds * 1e3 if milliseconds else 0.0)


def _json(body: object) -> Response:
    return Response(encoder.encode(body), media_type="application/json")
