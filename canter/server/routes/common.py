"""What the two generation routes have in common: reading the shared fields."""

from __future__ import annotations

from typing import Any

from canter.core.errors import InvalidRequestError
from canter.server.schemas.openai import GenerationRequest

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
)


def sampling_of(body: GenerationRequest) -> dict[str, Any]:
    """The sampling parameters that the body gives, under `SamplingParams`' names."""
    values = {name: getattr(body, name) for name in SAMPLING_FIELDS}
    return {name: value for name, value in values.items() if value is not None}


def check_shared(body: GenerationRequest) -> None:
    """Rules between fields. Raises `InvalidRequestError` naming the field."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options may only be given with stream: true.", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError("prompt_logprobs are not available with stream: true.", "prompt_logprobs")
    if body.response_format is not None and body.response_format.type != "text":
        raise InvalidRequestError(
            f"response_format of type {body.response_format.type!r:.80} is not supported by this server; only text is.", "response_format"
        )


def usage_wanted(body: GenerationRequest, forced: bool) -> tuple[bool, bool]:
    """(a last chunk with usage, usage in every chunk)."""
    options = body.stream_options
    at_end = forced or bool(options and options.include_usage)
    return at_end, at_end and bool(options and options.continuous_usage_stats)
