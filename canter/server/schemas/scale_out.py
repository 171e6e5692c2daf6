"""Bodies of the routes for servers that work together: prompts made in one, tokens in another, answers put together in a third.

Names follow vLLM's render, derender and token-in/token-out routes.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from canter.client.outputs import PositionLogprobs
from canter.server.schemas.anthropic import MessagesRequest
from canter.server.schemas.openai import (
    NOT_YET,
    ChatChunk,
    ChatLogprobs,
    ChatRequest,
    CompletionAnswer,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
    Usage,
)
from canter.server.schemas.responses import ResponsesRequest

NOT_GIVEN = msgspec.Raw(b"null")
"""Default of a body within a body, which is read by the rules of its own route."""

# --- render -----------------------------------------------------------------------------------------------------------

_NOT_RENDERED: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "vllm_xargs": (),
    "repetition_detection": (),
    "return_token_offsets": (False,),
    "return_assistant_tokens_mask": (False,),
    "return_loss_mask": (False,),
}


class RenderChatRequest(ChatRequest, kw_only=True):
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = ChatRequest.UNSUPPORTED | _NOT_RENDERED


class RenderCompletionRequest(CompletionRequest, kw_only=True):
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = CompletionRequest.UNSUPPORTED | _NOT_RENDERED


class RenderResponsesRequest(ResponsesRequest, kw_only=True):
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = ResponsesRequest.UNSUPPORTED | _NOT_RENDERED | {"background": (False,)}


class RenderMessagesRequest(MessagesRequest, kw_only=True):
    """`POST /v1/messages/render`."""


class RenderedRequest(Struct):
    """A body for `POST /inference/v1/generate`. Every sampling parameter is settled, so that the other server's defaults don't matter."""

    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    stream_options: StreamOptions | None
    cache_salt: str | None
    priority: int


# --- token-in/token-out -----------------------------------------------------------------------------------------------


class GenerateSampling(GenerationRequest, kw_only=True):
    """`sampling_params` of a body: the shared fields that sample. `stop_in_thoughts` false: neither stop strings nor what the answer must
    obey concern its thoughts; a rendered chat of a model that thinks says so."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = NOT_YET | {
        "echo": (False,),
        "best_of": (1,),
        "use_beam_search": (False,),
        "length_penalty": (1.0, 1),
        "truncation_side": ("left",),
        "response_format": (),
        "return_tokens_as_token_ids": (False,),
        "priority": (0,),
        "cache_salt": (),
    }

    logprobs: int | None = None
    detokenize: bool | None = None
    stop_in_thoughts: bool | None = None


class GenerateRequest(Struct, kw_only=True):
    """`POST /inference/v1/generate`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "features": (),
        "content_parts": (),
        "kv_transfer_params": (),
        "ec_transfer_params": (),
    }

    token_ids: list[int]
    sampling_params: msgspec.Raw = NOT_GIVEN
    request_id: str | None = None
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    output_mode: Literal["tokens", "text"] = "tokens"
    cache_salt: str | None = None
    priority: int | None = None


class AbortRequest(Struct, kw_only=True):
    """`POST /inference/v1/abort_requests`."""

    request_ids: list[str]


class TokenRank(Struct):
    token_id: int
    logprob: float
    rank: int | None = None


class GeneratedLogprob(TokenRank):
    """Ids in place of texts: whoever puts the answer together has the tokenizer."""

    top_logprobs: list[TokenRank] = msgspec.field(default_factory=list)


class GeneratedLogprobs(Struct):
    content: list[GeneratedLogprob] | None = None


class GeneratedChoice(Struct, kw_only=True):
    index: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    logprobs: GeneratedLogprobs | ChatLogprobs | None = None
    text: str | UnsetType = UNSET


class GenerateAnswer(Struct, kw_only=True):
    """An answer, and a chunk of a stream."""

    request_id: str
    model: str
    choices: list[GeneratedChoice]
    output_mode: str
    created: int | UnsetType = UNSET
    usage: Usage | None = None
    prompt_logprobs: list[PositionLogprobs | None] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: UnsetType | None = UNSET


# --- derender ---------------------------------------------------------------------------------------------------------


class GivenChoice(Struct, kw_only=True):
    """A choice as `POST /inference/v1/generate` answered it."""

    index: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    logprobs: GeneratedLogprobs | None = None


class GivenAnswer(Struct, kw_only=True):
    request_id: str
    choices: list[GivenChoice]
    output_mode: str = "tokens"
    usage: Usage | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    prompt_token_ids: list[int] | None = None


class StreamState(Struct, kw_only=True):
    """What a client carries from one chunk to the next, so that no server need remember a stream."""

    output_token_ids: list[int] = msgspec.field(default_factory=list)
    role_sent: bool = False


class DerenderChatRequest(Struct, kw_only=True):
    """`POST /v1/chat/completions/derender`: with `stream` one chunk, else a whole answer."""

    model: str | None = None
    stream: bool = False
    generate_response: GivenAnswer | None = None
    generate_chunk: GivenAnswer | None = None
    stream_state: StreamState | None = None
    prompt_tokens: int | None = None
    prompt_token_ids: list[int] | None = None
    chat_request: msgspec.Raw = NOT_GIVEN


class DerenderCompletionRequest(Struct, kw_only=True):
    """`POST /v1/completions/derender`: with `stream` one chunk, else an answer for each prompt."""

    model: str | None = None
    stream: bool = False
    generate_responses: list[GivenAnswer] | None = None
    generate_chunk: GivenAnswer | None = None
    stream_state: StreamState | None = None
    prompt_tokens: int | list[int] | None = None
    prompt_token_ids: list[int | list[int] | None] | None = None
    completion_request: msgspec.Raw = NOT_GIVEN


class DerenderedChatChunk(Struct):
    chunk: ChatChunk
    stream_state: StreamState


class DerenderedCompletionChunk(Struct):
    chunk: CompletionAnswer
    stream_state: StreamState
