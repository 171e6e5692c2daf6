"""OpenAI's bodies, with vLLM's extra fields. None in a request means: not given."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from canter.client.outputs import PositionLogprobs

# --- requests ---------------------------------------------------------------------------------------------------------

NOT_YET: dict[str, tuple[Any, ...]] = {
    "watermarking": (False,),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "mm_processor_kwargs": (),
    "media_io_kwargs": (),
}
"""Fields of either route that this server can't honour, with the values that ask for nothing."""


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RepetitionDetection(Struct, kw_only=True):
    """See `core.sampling_params.RepetitionDetection`."""

    max_pattern_size: int | None = None
    min_pattern_size: int | None = None
    min_count: int | None = None


class GenerationRequest(Struct, kw_only=True):
    """What the two generation routes share."""

    model: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    echo: bool = False
    add_special_tokens: bool | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    best_of: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    logprob_token_ids: list[int] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetection | None = None
    stream_interval: int | None = None
    vllm_xargs: dict[str, Any] | None = None
    return_prompt_text: bool = False


class ContentPart(Struct, kw_only=True):
    """A part of a message. Only text can be read; the others are refused by name."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None


class FunctionCall(Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Struct, kw_only=True):
    function: FunctionCall
    id: str | None = None
    type: str = "function"


class ChatMessage(Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """`POST /v1/chat/completions`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = NOT_YET | {
        "prompt_embeds": (),
        "functions": (),
        "function_call": ("none",),
        "audio": (),
        "modalities": (["text"],),
        "prediction": (),
        "web_search_options": (),
    }

    messages: list[ChatMessage]
    logprobs: bool = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """`POST /v1/completions`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = NOT_YET | {"prompt_embeds": (), "suffix": ("",)}

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None


class TokenizeRequest(Struct, kw_only=True):
    """`POST /tokenize`: of `prompt` and `messages` exactly one."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {"mm_processor_kwargs": ()}

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


# --- answers ----------------------------------------------------------------------------------------------------------


class RequestTiming(Struct):
    """`metrics` of an answer: what took how long. None where it can't be told."""

    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    """`completion_tokens_details` come where thoughts are told from the rest."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]


class FunctionDelta(Struct, omit_defaults=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Struct, omit_defaults=True):
    """Id, type and name come with a call's first delta only."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class ChatDelta(Struct, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET
    metrics: RequestTiming | UnsetType = UNSET


class AnswerFunction(Struct):
    name: str
    arguments: str


class AnswerCall(Struct):
    id: str
    function: AnswerFunction
    type: str = "function"


class AnswerMessage(Struct):
    """`reasoning_content` repeats `reasoning` under its older name, where the server is told to."""

    role: str
    content: str | None
    refusal: str | None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[AnswerCall] = []
    reasoning: str | None = None
    reasoning_content: str | UnsetType | None = UNSET


class ChatChoice(Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    service_tier: str | None = None
    system_fingerprint: str | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: None = None
    prompt_text: str | UnsetType = UNSET
    metrics: RequestTiming | UnsetType = UNSET


class CompletionLogprobs(Struct):
    """One entry a token in each list. An entry of the first prompt token has no logprob: nothing predicts it."""

    text_offset: list[int] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    tokens: list[str] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)


class CompletionChoice(Struct):
    """A choice of an answer, and of a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[PositionLogprobs | None] | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET


class CompletionAnswer(Struct):
    """An answer, and a chunk of a stream: the object has one name for both."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType = UNSET
    system_fingerprint: str | UnsetType | None = UNSET
    metrics: RequestTiming | UnsetType = UNSET


class ModelPermission(Struct):
    """What OpenAI once told of a model; some clients still read it."""

    id: str
    created: int
    object: str = "model_permission"
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(Struct):
    id: str
    created: int
    root: str
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "canter"
    parent: str | None = None
    permission: list[ModelPermission] = []


class ModelList(Struct):
    data: list[ModelCard]
    object: str = "list"


class TokenizeAnswer(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(Struct):
    prompt: str
