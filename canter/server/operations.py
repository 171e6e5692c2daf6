"""What each route takes and gives, for people and for the OpenAPI document: one entry an endpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from canter.server.errors import ErrorBody
from canter.server.routes import (
    admin,
    anthropic,
    chat,
    completions,
    docs,
    generate,
    health,
    llamacpp,
    models,
    ollama,
    page,
    render,
    responses,
    tokens,
)
from canter.server.schemas import anthropic as anthropic_schemas
from canter.server.schemas import llamacpp as llamacpp_schemas
from canter.server.schemas import ollama as ollama_schemas
from canter.server.schemas import openai, scale_out
from canter.server.schemas import responses as responses_schemas

JSON = "application/json"
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class Operation:
    """An endpoint's entry; its docstring is the description.

    `body` and `answer` are types of JSON bodies (several answers: a tuple), `chunk` those of a stream's events. `query` has
    the types of query parameters, `statuses` the answers that are neither 200 nor errors.
    """

    summary: str
    tag: str
    body: type[msgspec.Struct] | None = None
    answer: Any = None
    chunk: Any = None
    media_type: str | None = JSON
    stream_type: str = EVENTS
    error: type[msgspec.Struct] = ErrorBody
    body_required: bool = True
    query: Mapping[str, Any] = field(default_factory=dict)
    statuses: Mapping[int, Any] = field(default_factory=dict)


def _anthropic(summary: str, **more: Any) -> Operation:
    return Operation(summary, "Anthropic", error=anthropic_schemas.ErrorAnswer, **more)


def _ollama(summary: str, **more: Any) -> Operation:
    return Operation(summary, "Ollama", error=ollama_schemas.ErrorAnswer, stream_type=LINES, **more)


def _nothing(summary: str, tag: str, **more: Any) -> Operation:
    """An answer without a body."""
    return Operation(summary, tag, media_type=None, **more)


_RESPONSE_EVENTS = (
    responses_schemas.LifecycleEvent,
    responses_schemas.ItemEvent,
    responses_schemas.PartEvent,
    responses_schemas.TextDeltaEvent,
    responses_schemas.TextDoneEvent,
)

OPERATIONS: dict[Callable[..., Any], Operation] = {
    # OpenAI
    chat.chat_completions: Operation("Answer a conversation", "OpenAI", openai.ChatRequest, openai.ChatAnswer, openai.ChatChunk),
    completions.completions: Operation(
        "Continue one or more prompts", "OpenAI", openai.CompletionRequest, openai.CompletionAnswer, openai.CompletionAnswer
    ),
    models.list_models: Operation("List the names of the model", "OpenAI", answer=openai.ModelList),
    models.get_model: Operation("Describe one name of the model", "OpenAI", answer=openai.ModelCard),
    responses.create_response: Operation(
        "Create a response", "OpenAI", responses_schemas.ResponsesRequest, responses_schemas.ResponsesAnswer, _RESPONSE_EVENTS
    ),
    responses.retrieve_response: Operation(
        "Read a stored response",
        "OpenAI",
        answer=responses_schemas.ResponsesAnswer,
        chunk=_RESPONSE_EVENTS,
        query={"stream": bool, "starting_after": int},
    ),
    responses.delete_response: Operation("Delete a stored response", "OpenAI", answer=responses_schemas.DeletedResponse),
    responses.cancel_response: Operation("Cancel a response in the background", "OpenAI", answer=responses_schemas.ResponsesAnswer),
    responses.list_input_items: Operation(
        "List what a stored response was given",
        "OpenAI",
        answer=responses_schemas.InputItemList,
        query={"order": Literal["asc", "desc"], "limit": int, "after": str},
    ),
    # Tokens
    tokens.tokenize: Operation("Text or conversation to token ids", "Tokens", openai.TokenizeRequest, openai.TokenizeAnswer),
    tokens.detokenize: Operation("Token ids to text", "Tokens", openai.DetokenizeRequest, openai.DetokenizeAnswer),
    # Scale-out
    render.render_chat: Operation("Render a conversation", "Scale-out", scale_out.RenderChatRequest, scale_out.RenderedRequest),
    render.render_completions: Operation("Render prompts", "Scale-out", scale_out.RenderCompletionRequest, list[scale_out.RenderedRequest]),
    render.render_responses: Operation(
        "Render the input of a response", "Scale-out", scale_out.RenderResponsesRequest, scale_out.RenderedRequest
    ),
    render.render_messages: Operation(
        "Render a conversation of Anthropic's form",
        "Scale-out",
        scale_out.RenderMessagesRequest,
        scale_out.RenderedRequest,
        error=anthropic_schemas.ErrorAnswer,
    ),
    render.derender_chat: Operation(
        "Generated tokens to a chat answer", "Scale-out", scale_out.DerenderChatRequest, (openai.ChatAnswer, scale_out.DerenderedChatChunk)
    ),
    render.derender_completions: Operation(
        "Generated tokens to a completion",
        "Scale-out",
        scale_out.DerenderCompletionRequest,
        (openai.CompletionAnswer, scale_out.DerenderedCompletionChunk),
    ),
    generate.generate_tokens: Operation(
        "Token ids to token ids", "Scale-out", scale_out.GenerateRequest, scale_out.GenerateAnswer, scale_out.GenerateAnswer
    ),
    generate.abort_requests: _nothing("End requests by their ids", "Scale-out", body=scale_out.AbortRequest),
    # Other dialects
    anthropic.messages: _anthropic(
        "Answer a conversation",
        body=anthropic_schemas.MessagesRequest,
        answer=anthropic_schemas.MessageAnswer,
        chunk=anthropic_schemas.StreamEvent,
    ),
    anthropic.count_tokens: _anthropic(
        "Count the tokens of a conversation", body=anthropic_schemas.CountTokensRequest, answer=anthropic_schemas.CountTokensAnswer
    ),
    ollama.generate: _ollama(
        "Continue a prompt", body=ollama_schemas.GenerateRequest, answer=ollama_schemas.Answer, chunk=ollama_schemas.Answer
    ),
    ollama.chat: _ollama(
        "Answer a conversation", body=ollama_schemas.ChatRequest, answer=ollama_schemas.Answer, chunk=ollama_schemas.Answer
    ),
    ollama.tags: _ollama("List the names of the model", answer=ollama_schemas.ModelList),
    ollama.show: _ollama("Describe the model", body=ollama_schemas.ShowRequest, answer=ollama_schemas.ShowAnswer),
    ollama.running: _ollama("List what is loaded", answer=ollama_schemas.ModelList),
    ollama.version: _ollama("The version", answer=ollama_schemas.VersionAnswer),
    llamacpp.completion: Operation(
        "Continue a prompt",
        "llama.cpp",
        llamacpp_schemas.CompletionRequest,
        llamacpp_schemas.CompletionAnswer,
        llamacpp_schemas.CompletionAnswer,
    ),
    llamacpp.slots: Operation(
        "The places for requests", "llama.cpp", answer=list[llamacpp_schemas.Slot], query={"fail_on_no_slot": Literal["0", "1"]}
    ),
    llamacpp.props: Operation("The server's properties", "llama.cpp", answer=llamacpp_schemas.Props),
    # Operations
    health.health: _nothing("Whether requests are served", "Operations", statuses={503: dict[str, Any]}),
    health.version: Operation("The version", "Operations", answer=dict[str, str]),
    health.metrics: Operation("Figures for Prometheus", "Operations", media_type="text/plain"),
    admin.load: Operation("Requests under way", "Operations", answer=dict[str, int]),
    admin.tokenizer_info: Operation("The tokenizer's configuration", "Operations", answer=dict[str, Any]),
    admin.start_profile: Operation("Begin a profile", "Operations", admin.ProfileBody, dict[str, str], body_required=False),
    admin.stop_profile: Operation("End a profile", "Operations", answer=dict[str, str]),
    admin.server_info: Operation(
        "Arguments of the server", "Operations", answer=dict[str, Any], query={"config_format": Literal["text", "json"]}
    ),
    admin.reset_prefix_cache: Operation("Forget cached prefixes", "Operations", answer=dict[str, bool]),
    admin.pause: Operation(
        "Pause the engine",
        "Operations",
        answer=dict[str, str],
        query={"mode": Literal["abort", "wait", "keep"], "clear_cache": bool},
    ),
    admin.resume: Operation("Go on", "Operations", answer=dict[str, str]),
    admin.is_paused: Operation("Whether the engine is paused", "Operations", answer=dict[str, bool]),
    admin.abort_requests: Operation(
        "End requests by their ids, or all", "Operations", admin.AbortBody, dict[str, int], body_required=False
    ),
    # Pages
    page.page: Operation("The built-in page", "Pages", media_type="text/html"),
    page.page_file: Operation("A file of the page", "Pages", media_type="*/*", statuses={304: None}),
    docs.docs: Operation("This document, to read", "Pages", media_type="text/html"),
    docs.openapi: Operation("This document, as OpenAPI", "Pages", answer=dict[str, Any]),
}
