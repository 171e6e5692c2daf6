"""`POST /inference/v1/generate`, token ids in and token ids out, and `POST /inference/v1/abort_requests`; with --enable-scale-out only."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from canter.client.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from canter.core.errors import InvalidRequestError
from canter.core.structured_outputs import CONSTRAINTS, PARAM, StructuredOutputsParams
from canter.server.body import read_json
from canter.server.constraints import constraint_names, constraint_of
from canter.server.generation import Generation, Job, Wishes, fold
from canter.server.logprobs import LOWEST, ChatLogprobsFormat, finite_prompt_logprobs
from canter.server.routes.common import field_names, priority_of, sampling_of
from canter.server.routes.render import nested, scale_out_state
from canter.server.schemas.openai import ChatLogprobs, Usage
from canter.server.schemas.scale_out import (
    AbortRequest,
    GenerateAnswer,
    GeneratedChoice,
    GeneratedLogprob,
    GeneratedLogprobs,
    GenerateRequest,
    GenerateSampling,
    TokenRank,
)
from canter.server.sse import event, json_response, stream_response
from canter.server.state import ServerState

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
MAX_ABORTS = 4096


async def generate_tokens(request: Request) -> Response:
    """Continue token ids. Texts come too with `output_mode: "text"`."""
    state = scale_out_state(request)
    generation = state.generation()
    body = await read_json(request, GenerateRequest, state.server_args.max_body_bytes)
    body.priority = priority_of(request, body.priority)
    model = state.model_name(body.model)
    shown_id, engine_id = state.new_ids(request, "generate-tokens", body.request_id)
    sampling = nested(body.sampling_params, GenerateSampling, "sampling_params") or GenerateSampling()
    job = prepare_tokens(generation, body, sampling, engine_id)
    fields = {f"{PARAM}.{name}": f"{PARAM}.{name}" for name in CONSTRAINTS} | constraint_names(sampling)
    with field_names({ours: f"sampling_params.{theirs}" for ours, theirs in fields.items()}):
        await generation.admit(job)
    encoder = _Encoder(state, generation, body, sampling, job, shown_id, model)
    outputs = generation.stream(job)
    return stream_response(encoder.chunks(outputs)) if body.stream else json_response(encoder.answer(outputs))


async def abort_requests(request: Request) -> Response:
    """End requests by the ids that their answers show; unknown ones are passed over. Their clients get what there is."""
    state = scale_out_state(request)
    body = await read_json(request, AbortRequest, state.server_args.max_body_bytes)
    if len(body.request_ids) > MAX_ABORTS:
        raise InvalidRequestError(f"request_ids may hold at most {MAX_ABORTS} ids, got {len(body.request_ids)}.", "request_ids")
    await state.everywhere("abort", body.request_ids)
    return Response()


def prepare_tokens(generation: Generation, body: GenerateRequest, sampling: GenerateSampling, engine_id: str) -> Job:
    """Check the ids and settle the parameters. Raises `InvalidRequestError` naming the field."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options may only be given with stream: true.", "stream_options")
    if sampling.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError(
            "sampling_params: prompt_logprobs are not available with stream: true.", "sampling_params.prompt_logprobs"
        )
    if body.output_mode == "text" and sampling.detokenize is False:
        raise InvalidRequestError("output_mode text needs sampling_params.detokenize to be true.", "output_mode")
    if not body.token_ids:
        raise InvalidRequestError("token_ids must hold at least one token.", "token_ids")
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise InvalidRequestError(
            f"sampling_params: max_tokens must be an integer of at least 1, got {sampling.max_tokens}.", "sampling_params.max_tokens"
        )
    values = sampling_of(sampling)
    if sampling.logprobs is not None:
        values["logprobs"] = sampling.logprobs
    if sampling.stop_in_thoughts is not None:
        values["stop_in_thoughts"] = sampling.stop_in_thoughts
    # Stop strings are found in text, so that they need it made also where nobody reads it.
    values["detokenize"] = body.output_mode == "text" or bool(sampling.stop)
    wishes = Wishes(
        sampling=values,
        stream=body.stream,
        truncate_prompt_tokens=sampling.truncate_prompt_tokens,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        constraint=_constraint(sampling),
    )
    return generation.prepare(engine_id, [generation.check_token_ids(body.token_ids, "token_ids")], wishes)


def _constraint(sampling: GenerateSampling) -> StructuredOutputsParams | None:
    try:
        return constraint_of(sampling)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"sampling_params: {error}", f"sampling_params.{error.param}") from None


class _Encoder:
    """Turns the pipeline's outputs into answers of token ids."""

    def __init__(
        self,
        state: ServerState,
        generation: Generation,
        body: GenerateRequest,
        sampling: GenerateSampling,
        job: Job,
        shown_id: str,
        model: str,
    ) -> None:
        self._state = state
        self._body = body
        self._prompt = job.prompts[0]
        self._id = shown_id
        self._model = model
        self._with_text = body.output_mode == "text"
        self._num_top = sampling.logprobs or 0
        self._text_logprobs = ChatLogprobsFormat(generation.text.tokenizer, self._num_top, False)

    async def answer(self, outputs: Outputs) -> GenerateAnswer:
        """The whole answer."""
        async with aclosing(outputs):
            [result] = await fold(outputs)
        num_tokens = sum(len(choice.token_ids) for choice in result.outputs)
        return GenerateAnswer(
            request_id=self._id,
            model=self._model,
            created=int(time.time()),
            choices=[self._choice(choice) for choice in result.outputs],
            output_mode=self._body.output_mode,
            usage=self._usage(num_tokens, result.num_cached_tokens),
            prompt_logprobs=finite_prompt_logprobs(result.prompt_logprobs),
            prompt_token_ids=self._prompt.token_ids if self._body.return_token_ids else UNSET,
            kv_transfer_params=None,
        )

    async def chunks(self, outputs: Outputs) -> AsyncGenerator[bytes, None]:
        """Server-sent events, one for each choice of each output."""
        num_tokens = num_cached = 0
        first = True
        async with aclosing(outputs):
            async for _, output in outputs:
                num_cached = output.num_cached_tokens
                for choice in output.outputs:
                    num_tokens += len(choice.token_ids)
                    with_prompt = first and self._body.return_token_ids
                    first = False
                    yield event(self._chunk([self._choice(choice)], self._prompt.token_ids if with_prompt else UNSET))
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield event(self._chunk([], UNSET, self._usage(num_tokens, num_cached)))

    def _chunk(self, choices: list[GeneratedChoice], prompt: list[int] | UnsetType, usage: Usage | None = None) -> GenerateAnswer:
        return GenerateAnswer(
            request_id=self._id,
            model=self._model,
            choices=choices,
            output_mode=self._body.output_mode,
            usage=usage,
            prompt_token_ids=prompt,
        )

    def _choice(self, choice: CompletionOutput) -> GeneratedChoice:
        return GeneratedChoice(
            index=choice.index,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids,
            logprobs=self._logprobs(choice),
            text=choice.text if self._with_text else UNSET,
        )

    def _logprobs(self, choice: CompletionOutput) -> GeneratedLogprobs | ChatLogprobs | None:
        if choice.logprobs is None or not choice.token_ids:
            return None
        if self._with_text:
            return self._text_logprobs.encode(choice.token_ids, choice.logprobs)
        return _logprobs_by_id(choice.token_ids, choice.logprobs, self._num_top != 0)

    def _usage(self, num_tokens: int, num_cached: int) -> Usage:
        return self._state.usage(len(self._prompt.token_ids), num_tokens, num_cached)


def _logprobs_by_id(token_ids: Sequence[int], positions: Sequence[PositionLogprobs], with_top: bool) -> GeneratedLogprobs:
    """An entry for each token; among the best of its position it stands first itself."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        top = [TokenRank(i, max(entry.logprob, LOWEST), entry.rank) for i, entry in position.items()]
        own = position[token_id]
        content.append(GeneratedLogprob(token_id, max(own.logprob, LOWEST), own.rank, top if with_top else []))
    return GeneratedLogprobs(content)
