"""Beam search over HTTP. Each step asks the engine for one token of every live beam, as `LLM.beam_search` does."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from canter.beam_search import BeamSearch, BeamSearchParams, BeamSearchSequence, candidates, question
from canter.client.outputs import CompletionOutput, RequestMetrics, RequestOutput
from canter.client.protocol import EngineClient
from canter.core.errors import InvalidRequestError
from canter.core.messages import FINISH_ABORT, FINISH_LENGTH, EngineInfo
from canter.core.sampling_params import RepetitionDetection, SamplingParams
from canter.server.merging import merge_streams
from canter.text.detokenizer import IncrementalDetokenizer
from canter.text.tokenizer import Tokenizer

MAX_BEAM_WIDTH = 64
"""A step brings `2 * width * width` candidates, which the event loop must rank without keeping others waiting."""
HONOURED = frozenset(
    (
        "n",
        "max_tokens",
        "ignore_eos",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "seed",
        "stream_interval",
    )
)
"""Sampling fields that a search can honour: it draws nothing, so any seed gives the same, and it has no stream."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "logit_bias": ({},),
    "thinking_token_budget": (-1,),
    "logprob_token_ids": ([],),
    "extra_args": ({},),
    "repetition_detection": (RepetitionDetection(),),
}
"""Values of the others that ask for nothing."""


def beam_params(sampling: Mapping[str, Any], length_penalty: float, max_tokens: int) -> BeamSearchParams:
    """The search that a request describes. Raises `InvalidRequestError` naming a field that a search can't honour."""
    for name, value in sampling.items():
        if name not in HONOURED and value not in NEUTRAL.get(name, ()):
            name = "vllm_xargs" if name == "extra_args" else name
            raise InvalidRequestError(f"{name} can't be combined with use_beam_search, which ranks by the model's own logprobs.", name)
    width = sampling.get("n", 1)
    if not 1 <= width <= MAX_BEAM_WIDTH:
        raise InvalidRequestError(f"n, the width of the beam search, must be at least 1 and at most {MAX_BEAM_WIDTH}, got {width}.", "n")
    return BeamSearchParams(
        beam_width=width,
        max_tokens=max_tokens,
        ignore_eos=sampling.get("ignore_eos", False),
        length_penalty=length_penalty,
        include_stop_str_in_output=sampling.get("include_stop_str_in_output", False),
    )


class BeamRun:
    """One search through an engine client. `shown` says how its sequences become text."""

    def __init__(
        self,
        client: EngineClient,
        info: EngineInfo,
        tokenizer: Tokenizer,
        params: BeamSearchParams,
        shown: SamplingParams,
        **scheduling: Any,
    ) -> None:
        self._client = client
        self._info = info
        self._tokenizer = tokenizer
        self._params = params
        self._shown = shown
        self._question = question(params.beam_width, info.vocab_size)
        self._scheduling = scheduling
        self._metrics: RequestMetrics | None = None
        self._num_cached_tokens: int | None = None
        self._is_aborted = False
        self._asked: list[str] = []

    async def abort(self) -> None:
        """End it: `run` gives what the steps so far have found."""
        self._is_aborted = True
        await self._client.abort(self._asked)

    async def run(self, request_id: str, text: str | None, prompt_token_ids: list[int]) -> AsyncGenerator[RequestOutput, None]:
        """The only output, at the end: the best sequences, best first. Closing it aborts the requests of every live beam."""
        search = BeamSearch(prompt_token_ids, self._params, frozenset(self._shown.eos_token_ids))
        for step in range(self._params.max_tokens):
            if self._is_aborted or not search.beams or len(prompt_token_ids) + step >= self._info.max_model_len:
                break
            found = await self._ask(f"{request_id}-beam{step}", search.beams)
            if self._is_aborted:
                break
            search.advance(found)
        sequences = search.result(FINISH_ABORT if self._is_aborted else FINISH_LENGTH)
        outputs = [self._output(i, sequence, prompt_token_ids) for i, sequence in enumerate(sequences)]
        if self._metrics is not None:
            self._metrics.num_generation_tokens = sum(len(output.token_ids) for output in outputs)
        yield RequestOutput(request_id, text, prompt_token_ids, None, outputs, True, self._metrics, self._num_cached_tokens or 0)

    async def _ask(self, request_id: str, beams: list[BeamSearchSequence]) -> list[dict[int, float]]:
        """What may follow each beam. The first error ends the others' requests too."""
        found: list[dict[int, float]] = [{}] * len(beams)
        self._asked = [f"{request_id}-{i}" for i in range(len(beams))]
        questions = [self._ask_one(i, name, beam) for i, (name, beam) in enumerate(zip(self._asked, beams, strict=True))]
        async with aclosing(merge_streams(questions)) as answers:
            async for i, answer in answers:
                if any(output.finish_reason == FINISH_ABORT for output in answer.outputs):
                    self._is_aborted = True
                    continue
                found[i] = candidates(answer, self._params.beam_width)
                self._take_times(answer)
        return found

    async def _ask_one(self, number: int, request_id: str, beam: BeamSearchSequence) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        outputs = self._client.generate(request_id, beam.tokens, self._question, **self._scheduling)
        async with aclosing(outputs):
            async for output in outputs:
                yield number, output

    def _take_times(self, answer: RequestOutput) -> None:
        """The search begins with its first answer and ends with its last."""
        if self._num_cached_tokens is None:
            self._num_cached_tokens = answer.num_cached_tokens
        if self._metrics is None:
            self._metrics = answer.metrics
        elif answer.metrics is not None:
            self._metrics.last_token_ts = max(self._metrics.last_token_ts, answer.metrics.last_token_ts)

    def _output(self, index: int, sequence: BeamSearchSequence, prompt_token_ids: list[int]) -> CompletionOutput:
        token_ids = sequence.tokens[len(prompt_token_ids) :]
        shown = self._shown
        detokenizer = IncrementalDetokenizer(
            self._tokenizer, prompt_token_ids, shown.skip_special_tokens, shown.spaces_between_special_tokens
        )
        text = detokenizer.append(token_ids) + detokenizer.flush()
        return CompletionOutput(index, text, token_ids, sequence.cum_logprob, None, sequence.finish_reason)
