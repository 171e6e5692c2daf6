"""Anthropic's bodies (`/v1/messages`). None in a request means: not given. Fields that are not here are ignored, as
`cache_control`, `metadata`, `service_tier` and `context_management` are on purpose: the prefix cache needs no marks, and
nothing is trimmed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from msgspec import UNSET, Struct, UnsetType

if TYPE_CHECKING:
    from canter.server.errors import ErrorInfo

# --- requests ---------------------------------------------------------------------------------------------------------

NOT_YET: dict[str, tuple[Any, ...]] = {"vllm_xargs": (), "container": (), "mcp_servers": ([],)}
"""Fields that this server can't honour, with the values that ask for nothing."""


class Source(Struct, kw_only=True):
    """Where a document's text is."""

    type: str
    data: str | None = None
    content: str | list[Block] | None = None


class Citations(Struct, kw_only=True):
    enabled: bool = False


class Block(Struct, kw_only=True):
    """A block of a message's content, of any type: each reads its own fields, and the types that can't be read are refused."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    source: Source | None = None
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class Message(Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Struct, kw_only=True):
    """A tool of the user's; those that Anthropic runs have another type, and are refused."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputConfig(Struct, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class Conversation(Struct, kw_only=True):
    """What the two routes share: all that makes the prompt."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = NOT_YET

    messages: list[Message]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(Conversation, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    cache_salt: str | None = None


class CountTokensRequest(Conversation, kw_only=True):
    """`POST /v1/messages/count_tokens`."""


# --- answers ----------------------------------------------------------------------------------------------------------


class TextBlock(Struct):
    text: str
    type: str = "text"


class ThinkingBlock(Struct):
    """The signature is what clients send back with a thought; nothing is signed here."""

    thinking: str
    signature: str = ""
    type: str = "thinking"


class ToolUseBlock(Struct):
    id: str
    name: str
    input: dict[str, Any]
    type: str = "tool_use"


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class Usage(Struct):
    """`input_tokens` are those of the prompt that were not in the cache; `cache_read_input_tokens` the others."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class MessageAnswer(Struct):
    """The whole answer, and in a stream its beginning."""

    id: str
    model: str
    content: list[Any]
    """Of `AnswerBlock`."""
    usage: Usage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    type: str = "message"
    role: str = "assistant"


class TextDelta(Struct):
    text: str
    type: str = "text_delta"


class ThinkingDelta(Struct):
    thinking: str
    type: str = "thinking_delta"


class SignatureDelta(Struct):
    signature: str = ""
    type: str = "signature_delta"


class InputDelta(Struct):
    partial_json: str
    type: str = "input_json_delta"


class StopDelta(Struct):
    stop_reason: str
    stop_sequence: str | None


class StreamEvent(Struct):
    """An event of a stream; each type has some of the fields."""

    type: str
    message: MessageAnswer | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: Any = UNSET
    """An `AnswerBlock`, empty."""
    delta: Any = UNSET
    """Of a block, or a `StopDelta`."""
    usage: Usage | UnsetType = UNSET


class CountTokensAnswer(Struct):
    input_tokens: int


class ErrorDetail(Struct):
    type: str
    message: str


class ErrorAnswer(Struct):
    error: ErrorDetail
    request_id: str
    type: str = "error"


ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Status -> `type` of the error. Others are invalid requests below 500, and faults of the server from there on."""


def envelope(info: ErrorInfo, request_id: str) -> ErrorAnswer:
    """The body of an error."""
    kind = ERROR_TYPES.get(info.code, "invalid_request_error" if info.code < 500 else "api_error")
    return ErrorAnswer(ErrorDetail(kind, info.message), request_id)
