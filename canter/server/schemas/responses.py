"""OpenAI's Responses bodies, with vLLM's extra fields. None in a request means: not given."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from canter.server.schemas.openai import NOT_YET, GenerationRequest, StreamOptions, TokenLogprob

# --- requests ---------------------------------------------------------------------------------------------------------

Includable = Literal[
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""Of these only logprobs exist here; the others ask for parts of items that this server does not make."""


class InputPart(Struct, kw_only=True, omit_defaults=True):
    """A part of a message, of a reasoning item or of a tool's output. Only text can be read; other types are refused by name."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None


class InputItem(Struct, kw_only=True, omit_defaults=True):
    """One item of a conversation, of any type; `server/responses_input.py` says which fields each type needs."""

    type: str | None = None
    id: str | None = None
    role: Literal["user", "system", "developer", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[InputPart] | None = None


class ResponsesStreamOptions(StreamOptions, kw_only=True):
    """Usage is in the last event, asked for or not."""

    include_obfuscation: bool | None = None


class TextFormat(Struct, kw_only=True):
    """Plain text, any JSON object, or JSON that obeys `schema`."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Struct, kw_only=True):
    """`effort` goes to the chat template. A summary is nothing this server makes: "auto" leaves it to us, others are refused."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(GenerationRequest, kw_only=True):
    """`POST /v1/responses`. Of the fields that it shares with the other routes, those that sample act here too."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = NOT_YET | {
        "n": (1,),
        "best_of": (1,),
        "use_beam_search": (False,),
        "length_penalty": (1.0, 1),
        "truncation_side": ("left",),
        "return_prompt_text": (False,),
        "max_tokens": (),
        "prompt_logprobs": (),
        "truncate_prompt_tokens": (),
        "response_format": (),
        "echo": (False,),
        "return_token_ids": (False,),
        "prompt": (),
        "conversation": (),
        "context_management": (),
        "moderation": (),
        "service_tier": ("auto", "default"),
        "prompt_cache_retention": ("in_memory",),
        "enable_response_messages": (False,),
        "previous_input_messages": (),
    }

    input: str | list[InputItem]
    instructions: str | None = None
    background: bool = False
    store: bool | None = None
    previous_response_id: str | None = None
    include: list[Includable] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream_options: ResponsesStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


# --- answers ----------------------------------------------------------------------------------------------------------


class OutputText(Struct):
    text: str = ""
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)
    annotations: list[Any] = msgspec.field(default_factory=list)
    type: str = "output_text"


class OutputMessage(Struct):
    id: str
    status: str
    content: list[OutputText] = msgspec.field(default_factory=list)
    role: str = "assistant"
    type: str = "message"


class ReasoningText(Struct):
    text: str = ""
    type: str = "reasoning_text"


class ReasoningItem(Struct):
    """A thought. Nobody sums it up: `summary` stays empty."""

    id: str
    status: str
    content: list[ReasoningText] = msgspec.field(default_factory=list)
    summary: list[Any] = msgspec.field(default_factory=list)
    encrypted_content: str | None = None
    type: str = "reasoning"


class FunctionCallItem(Struct):
    """`namespace` is that of a function which was declared in one."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str
    type: str = "function_call"
    namespace: str | UnsetType = UNSET


class CustomCallItem(Struct):
    """A call of a custom tool, whose input is a text."""

    id: str
    call_id: str
    name: str
    input: str
    status: str
    type: str = "custom_tool_call"


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomCallItem


class InputTokensDetails(Struct):
    """Prefixes are cached without being asked, so that nothing is ever written at a user's wish."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponsesUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponsesError(Struct):
    code: str
    message: str


class IncompleteDetails(Struct):
    reason: str


class AnswerFormat(Struct):
    type: str = "text"
    name: str | UnsetType = UNSET
    schema: dict[str, Any] | UnsetType = UNSET
    strict: bool | UnsetType = UNSET


class AnswerText(Struct):
    format: AnswerFormat = msgspec.field(default_factory=AnswerFormat)
    verbosity: str = "medium"


class AnswerReasoning(Struct):
    effort: str | None = None
    summary: str | None = None


class ResponsesAnswer(Struct, kw_only=True):
    """The response object: in answers, in events, and as it is stored."""

    id: str
    created_at: int
    model: str
    status: str
    object: str = "response"
    background: bool = False
    completed_at: int | None = None
    error: ResponsesError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    output: list[Any] = msgspec.field(default_factory=list)
    """Of `OutputItem`."""
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: AnswerReasoning = msgspec.field(default_factory=AnswerReasoning)
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float | None = None
    text: AnswerText = msgspec.field(default_factory=AnswerText)
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None = None


class InputItemList(Struct):
    """A page of `GET /v1/responses/{id}/input_items`."""

    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class DeletedResponse(Struct):
    id: str
    object: str = "response"
    deleted: bool = True


# --- events of a stream -----------------------------------------------------------------------------------------------


class LifecycleEvent(Struct):
    """`response.created`, `.in_progress`, `.completed`, `.incomplete`, `.failed`."""

    type: str
    sequence_number: int
    response: ResponsesAnswer


class ItemEvent(Struct):
    """`response.output_item.added` and `.done`."""

    type: str
    sequence_number: int
    output_index: int
    item: Any
    """An `OutputItem`."""


class PartEvent(Struct):
    """`response.content_part.added` and `.done`."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: Any
    """An `OutputText` or a `ReasoningText`."""


class TextDeltaEvent(Struct):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[TokenLogprob]
    type: str = "response.output_text.delta"


class TextDoneEvent(Struct):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[TokenLogprob]
    type: str = "response.output_text.done"


class ReasoningDeltaEvent(Struct):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    type: str = "response.reasoning_text.delta"


class ReasoningDoneEvent(Struct):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    type: str = "response.reasoning_text.done"


class CallDeltaEvent(Struct):
    """`response.function_call_arguments.delta` and `response.custom_tool_call_input.delta`."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneEvent(Struct):
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str
    type: str = "response.function_call_arguments.done"


class InputDoneEvent(Struct):
    sequence_number: int
    item_id: str
    output_index: int
    input: str
    type: str = "response.custom_tool_call_input.done"
