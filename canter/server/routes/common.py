"""What the two generation routes have in common: reading the shared fields."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request

from canter.core.errors import InvalidRequestError
from canter.core.sampling_params import RepetitionDetection
from canter.server.schemas.openai import GenerationRequest

PRIORITY_HEADER = "X-Vllm-Priority"
_PRIORITY = re.compile(r"\s*[+-]?[0-9]{1,10}\s*", re.ASCII)

SAMPLING_FIELDS = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logprob_token_ids",
    "thinking_token_budget",
    "stream_interval",
)


def sampling_of(body: GenerationRequest) -> dict[str, Any]:
    """The sampling parameters that the body gives, under `SamplingParams`' names."""
    values = {name: getattr(body, name) for name in SAMPLING_FIELDS}
    values["extra_args"] = body.vllm_xargs
    values["repetition_detection"] = _repetition_detection(body)
    return {name: value for name, value in values.items() if value is not None}


def _repetition_detection(body: GenerationRequest) -> RepetitionDetection | None:
    given = body.repetition_detection
    if given is None:
        return None
    return RepetitionDetection(
        max_pattern_size=given.max_pattern_size or 0, min_pattern_size=given.min_pattern_size or 0, min_count=given.min_count or 0
    )


def priority_of(request: Request, given: int | None) -> int:
    """The body's priority, or else the header's. Raises `InvalidRequestError` for a header that is no integer."""
    header = request.headers.get(PRIORITY_HEADER)
    if given is not None or header is None:
        return given or 0
    if not _PRIORITY.fullmatch(header):
        raise InvalidRequestError(f"The header {PRIORITY_HEADER} must be an integer of 32 bits, got {header!r:.80}.", "priority")
    return int(header)


def check_shared(body: GenerationRequest) -> None:
    """Rules between fields. Raises `InvalidRequestError` naming the field."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options may only be given with stream: true.", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError("prompt_logprobs are not available with stream: true.", "prompt_logprobs")
    if body.best_of not in (None, body.n or 1):
        raise InvalidRequestError(
            "best_of is not supported by this server, nor by vLLM any more: ask for n choices with logprobs, and take the best.", "best_of"
        )


def usage_wanted(body: GenerationRequest, forced: bool) -> tuple[bool, bool]:
    """(a last chunk with usage, usage in every chunk)."""
    options = body.stream_options
    at_end = forced or bool(options and options.include_usage)
    return at_end, at_end and bool(options and options.continuous_usage_stats)


LOGPROBS_NAMES = {"logprobs": "top_logprobs"}
"""Where `logprobs` is a switch, and the number of them is another field."""


@contextmanager
def field_names(names: Mapping[str, str]) -> Generator[None, None, None]:
    """Errors raised within name fields as the user wrote them: `names` leads from the pipeline's names to a dialect's."""
    try:
        yield
    except InvalidRequestError as error:
        theirs = names.get(error.param or "")
        if theirs is None:
            raise
        message = re.sub(rf"^{re.escape(error.param or '')}\b", theirs, str(error))
        raise InvalidRequestError(message, theirs) from None


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def window_of_penalties(sampling: dict[str, Any], last_n: int | None, name: str) -> dict[str, Any]:
    """Apply `repeat_last_n` of Ollama and llama.cpp: how many tokens penalties look back on. Here they look at all of them (-1);
    0 turns them off; another number with a penalty can't be honoured, and raises `InvalidRequestError`."""
    if last_n is None or last_n == -1:
        return sampling
    rest = {key: value for key, value in sampling.items() if key not in PENALTIES}
    if last_n == 0 or len(rest) == len(sampling):
        return rest
    raise InvalidRequestError(
        f"{name} must be -1, penalties look at the whole text, or 0, which turns them off; got {last_n}. Leave it out.", name
    )
