"""`POST /v1/completions`: one or many prompts, as text or token ids."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from canter.client.outputs import CompletionOutput, PositionLogprobs, RequestMetrics, RequestOutput
from canter.core.errors import InvalidRequestError
from canter.server.body import read_json
from canter.server.constraints import constraint_names, constraint_of
from canter.server.generation import Generation, Job, Prompt, Wishes, fold
from canter.server.logprobs import completion_logprobs, finite_prompt_logprobs
from canter.server.routes.common import check_shared, field_names, priority_of, sampling_of, usage_wanted
from canter.server.schemas.openai import (
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    RequestTiming,
    Usage,
)
from canter.server.sse import event, json_response, stream_response
from canter.server.state import ServerState, server_state

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16


async def completions(request: Request) -> Response:
    """See OpenAI's API reference (legacy completions); vLLM's extra fields are understood too."""
    state = server_state(request)
    generation = state.generation()
    body = await read_json(request, CompletionRequest, state.server_args.max_body_bytes)
    model = state.model_name(body.model)
    shown_id, engine_id = state.new_ids(request, "cmpl", body.request_id)
    body.priority = priority_of(request, body.priority)
    job = await prepare_completions(generation, body, engine_id)
    with field_names(constraint_names(body)):
        await generation.admit(job)
    encoder = CompletionEncoder(state, generation, body, job, shown_id, model)
    outputs = generation.stream(job)
    if body.stream:
        return stream_response(encoder.chunks(outputs))
    return json_response(encoder.answer(outputs))


async def prepare_completions(generation: Generation, body: CompletionRequest, engine_id: str) -> Job:
    """Tokenise the prompts and settle the parameters. Raises `InvalidRequestError` naming the field."""
    check_shared(body)
    prompts = await _prompts(generation, body)
    sampling = sampling_of(body)
    if body.logprobs is not None:
        sampling["logprobs"] = body.logprobs
        if body.echo and body.prompt_logprobs is None:
            sampling["prompt_logprobs"] = body.logprobs
    elif body.logprob_token_ids:
        raise InvalidRequestError("logprob_token_ids needs logprobs: 0.", "logprob_token_ids")
    if only_echo(body):
        sampling["max_tokens"] = 1  # the engine runs the prompt; the token it adds is not shown
    elif sampling.get("max_tokens", 1) < 1:
        raise InvalidRequestError(
            f"max_tokens must be an integer of at least 1, or 0 together with echo, got {body.max_tokens}.", "max_tokens"
        )
    wishes = Wishes(
        sampling=sampling,
        stream=body.stream,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "left",
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        use_beam_search=body.use_beam_search,
        length_penalty=body.length_penalty,
        constraint=constraint_of(body),
    )
    return generation.prepare(engine_id, prompts, wishes)


def only_echo(body: CompletionRequest) -> bool:
    """Whether the prompt comes back with nothing added."""
    return body.echo and body.max_tokens == 0


async def _prompts(generation: Generation, body: CompletionRequest) -> list[Prompt]:
    """The four forms of `prompt`: text, texts, token ids, lists of token ids."""
    given = body.prompt
    special = True if body.add_special_tokens is None else body.add_special_tokens
    must_fit = body.truncate_prompt_tokens is None
    if isinstance(given, str):
        return [await generation.encode(given, special, must_fit)]
    if not given:
        raise InvalidRequestError("prompt must not be empty.", "prompt")
    # Before anything looks at each item: there may be millions.
    if not isinstance(given[0], int) and len(given) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt may hold at most {MAX_PROMPTS} prompts, got {len(given)}.", "prompt")
    if isinstance(given[0], int) and must_fit:
        generation.check_length(len(given))
    kinds = {type(item) for item in given}
    if kinds == {int}:
        return [generation.check_token_ids([item for item in given if isinstance(item, int)], "prompt")]
    if len(kinds) > 1:
        raise InvalidRequestError(
            "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids.", "prompt"
        )
    if kinds == {str}:
        return await generation.encode_all([item for item in given if isinstance(item, str)], special, must_fit)
    return [generation.check_token_ids(item, "prompt") for item in given if isinstance(item, list)]


@dataclass(eq=False)
class _Progress:
    """What a stream has sent so far: tokens, hits by prompt, the text offset after each choice, and the times of finished prompts."""

    num_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)
    offsets: dict[int, int] = field(default_factory=dict)
    metrics: list[RequestMetrics | None] = field(default_factory=list)

    @property
    def num_cached(self) -> int:
        return sum(self.cached.values())


class CompletionEncoder:
    """Turns the pipeline's outputs into OpenAI's completion objects. A choice's index is prompt number * n + its own."""

    def __init__(self, state: ServerState, generation: Generation, body: CompletionRequest, job: Job, shown_id: str, model: str) -> None:
        self._state = state
        self._generation = generation
        self._tokenizer = generation.text.tokenizer
        self._body = body
        self._job = job
        self._id = shown_id
        self._model = model
        self._created = int(time.time())
        self._only_echo = only_echo(body)
        self._named = body.logprob_token_ids or ()
        self._prompt_texts: dict[int, str] = {}
        self._usage_at_end, self._usage_always = usage_wanted(body, state.server_args.enable_force_include_usage)

    async def answer(self, outputs: Outputs) -> CompletionAnswer:
        """The whole answer."""
        async with aclosing(outputs):
            results = await fold(outputs)
        progress = _Progress()
        choices = []
        for number, result in enumerate(results):
            progress.cached[number] = result.num_cached_tokens
            for choice in result.outputs:
                choices.append(self._choice(number, choice, result.prompt_logprobs, progress))
                choices[-1].prompt_logprobs = (
                    finite_prompt_logprobs(result.prompt_logprobs) if self._body.prompt_logprobs is not None else None
                )
        answer = CompletionAnswer(self._id, self._created, self._model, choices, usage=self._usage(progress), system_fingerprint=None)
        answer.metrics = self._timing([result.metrics for result in results])
        return answer

    async def chunks(self, outputs: Outputs) -> AsyncGenerator[bytes, None]:
        """Server-sent events, one for each choice of each output."""
        progress = _Progress()
        async with aclosing(outputs):
            async for number, output in outputs:
                progress.cached[number] = output.num_cached_tokens
                parts = [self._chunk(number, choice, output, progress) for choice in output.outputs]
                if output.finished:
                    progress.metrics.append(output.metrics)
                    if len(progress.metrics) == len(self._job.prompts) and not self._usage_at_end:
                        parts[-1].metrics = self._timing(progress.metrics)
                yield b"".join(map(event, parts))
        if self._usage_at_end:
            answer = CompletionAnswer(self._id, self._created, self._model, [], usage=self._usage(progress))
            answer.metrics = self._timing(progress.metrics)
            yield event(answer)

    def _chunk(self, number: int, choice: CompletionOutput, output: RequestOutput, progress: _Progress) -> CompletionAnswer:
        encoded = self._choice(number, choice, output.prompt_logprobs, progress)
        usage = self._usage(progress) if self._usage_always else UNSET
        return CompletionAnswer(self._id, self._created, self._model, [encoded], usage=usage)

    def _choice(
        self, number: int, choice: CompletionOutput, prompt_logprobs: list[PositionLogprobs | None] | None, progress: _Progress
    ) -> CompletionChoice:
        """One choice, or the next piece of it; a choice's first piece carries the prompt when that is echoed."""
        index = number * self._job.params[number].n + choice.index
        is_first = index not in progress.offsets
        progress.offsets.setdefault(index, 0)
        if self._only_echo:
            choice = CompletionOutput(choice.index, "", [], None, None if choice.logprobs is None else [], choice.finish_reason)
            choice.finish_reason = choice.finish_reason and "length"
        progress.num_tokens += len(choice.token_ids)
        echo = self._prompt_text(number) if is_first and self._body.echo else ""
        encoded = CompletionChoice(
            index,
            echo + choice.text,
            self._logprobs(number, index, choice, prompt_logprobs, is_first, progress),
            choice.finish_reason,
            choice.stop_reason,
        )
        if self._body.return_token_ids:
            encoded.token_ids = choice.token_ids
            encoded.prompt_token_ids = self._job.prompts[number].token_ids if is_first else UNSET
        if self._body.return_prompt_text and is_first:
            encoded.prompt_text = self._prompt_text(number)
        return encoded

    def _logprobs(
        self,
        number: int,
        index: int,
        choice: CompletionOutput,
        prompt_logprobs: list[PositionLogprobs | None] | None,
        is_first: bool,
        progress: _Progress,
    ) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        token_ids, positions = list(choice.token_ids), list[PositionLogprobs | None](choice.logprobs or [])
        if is_first and self._body.echo:
            prompt_ids = self._job.prompts[number].token_ids
            token_ids = prompt_ids + token_ids
            positions = (prompt_logprobs or [None] * len(prompt_ids)) + positions
        if not token_ids:
            return None
        texts = ["" if position is not None else self._token_text(t) for t, position in zip(token_ids, positions, strict=True)]
        offset = progress.offsets[index]
        as_ids = self._body.return_tokens_as_token_ids
        result, progress.offsets[index] = completion_logprobs(token_ids, positions, self._body.logprobs, as_ids, offset, texts, self._named)
        return result

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def _prompt_text(self, number: int) -> str:
        if number not in self._prompt_texts:
            self._prompt_texts[number] = self._generation.prompt_text(self._job.prompts[number])
        return self._prompt_texts[number]

    def _timing(self, metrics: list[RequestMetrics | None]) -> RequestTiming | UnsetType:
        return self._state.timing(metrics, sum(params.n for params in self._job.params))

    def _usage(self, progress: _Progress) -> Usage:
        return self._state.usage(self._job.num_prompt_tokens, progress.num_tokens, progress.num_cached)
