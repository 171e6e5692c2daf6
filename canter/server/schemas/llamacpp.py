"""llama.cpp's bodies (`/completion`, `/slots`, `/props`). None in a request means: not given.

Fields that are not here are ignored, on purpose `cache_prompt`, `id_slot`, `n_keep`, `samplers` without samplers of theirs,
`min_keep`, `slot_id` and the tuning values of samplers that are off: prompts share the cache in any case, no slot owns a part of
it, and nothing is ever cut.
"""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec import UNSET, Struct, UnsetType


class CompletionRequest(Struct, kw_only=True):
    """`POST /completion`, and `/completions`. The fields that are refused belong to samplers and features that Canter lacks."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "grammar_lazy": (False,),
        "grammar_triggers": ([],),
        "dynatemp_range": (0, 0.0),
        "typical_p": (1, 1.0),
        "xtc_probability": (0, 0.0),
        "dry_multiplier": (0, 0.0),
        "mirostat": (0,),
        "top_n_sigma": (-1, -1.0, 0, 0.0),
        "n_indent": (0,),
        "t_max_predict_ms": (-1, 0),
        "image_data": ([],),
        "lora": ([],),
        "post_sampling_probs": (False,),
        "response_fields": ([],),
        "return_progress": (False,),
        "samplers": ([],),
        "n_cmpl": (1,),
        "n": (1,),
    }

    prompt: str | list[str | int]
    model: str | None = None
    n_predict: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float | bool] | list[tuple[int | str, float | bool]] | None = None
    n_probs: int | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    stream: bool = False
    return_tokens: bool = False
    timings_per_token: bool = False


# --- answers ----------------------------------------------------------------------------------------------------------


class TokenProbability(Struct):
    """A token at a position, and the likeliest there."""

    id: int
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TokenProbability] | UnsetType = UNSET


class Timings(Struct):
    """How long it took, as measured in the engine. `prompt_n` are the tokens that were computed, `cache_n` those that were cached."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class CompletionAnswer(Struct):
    """A whole answer, and an event of a stream; the fields from `model` on come with the end only."""

    content: str
    tokens: list[int]
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    index: int = 0
    id_slot: int = -1
    completion_probabilities: list[TokenProbability] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    model: str | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: str | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET


class Slot(Struct):
    """A place for a request that runs. Which request has which place means nothing here: the first are those in use."""

    id: int
    n_ctx: int
    is_processing: bool
    speculative: bool = False


class Props(Struct):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    modalities: dict[str, bool]
    is_sleeping: bool = False
