"""The ASGI application: the route table, and the layers around it."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from canter.client.protocol import EngineClient
from canter.client.shared import SharedClient
from canter.core.config import EngineArgs
from canter.server.access_log import AccessLog
from canter.server.args import ServerArgs
from canter.server.auth import OPEN_PATHS, AuthMiddleware
from canter.server.errors import ErrorMiddleware, on_http_exception
from canter.server.load_report import LoadReportMiddleware
from canter.server.metrics import HttpMetricsMiddleware, Metrics
from canter.server.model_text import ModelText
from canter.server.openapi import ApiDocument
from canter.server.request_ids import made_request_id
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
from canter.server.state import ServerState
from canter.server.tracing import TraceContextMiddleware, Tracing

ANTHROPIC_PREFIX = "/v1/messages"
ANTHROPIC_REQUEST_ID = b"request-id"
"""Anthropic's clients read a request's id from this header, and show it with errors."""

ROUTES = (
    Route("/v1/chat/completions", chat.chat_completions, methods=["POST"]),
    Route("/v1/completions", completions.completions, methods=["POST"]),
    Route("/v1/models", models.list_models, methods=["GET"]),
    Route("/v1/models/{model:path}", models.get_model, methods=["GET"]),
    Route("/tokenize", tokens.tokenize, methods=["POST"]),
    Route("/detokenize", tokens.detokenize, methods=["POST"]),
    Route("/health", health.health, methods=["GET"]),
    Route("/ping", health.health, methods=["GET", "POST"]),
    Route("/version", health.version, methods=["GET"]),
    Route("/metrics", health.metrics, methods=["GET"]),
    Route("/v1/responses", responses.create_response, methods=["POST"]),
    Route("/v1/responses/{response_id}", responses.retrieve_response, methods=["GET"]),
    Route("/v1/responses/{response_id}", responses.delete_response, methods=["DELETE"]),
    Route("/v1/responses/{response_id}/cancel", responses.cancel_response, methods=["POST"]),
    Route("/v1/responses/{response_id}/input_items", responses.list_input_items, methods=["GET"]),
    Route("/v1/chat/completions/render", render.render_chat, methods=["POST"]),
    Route("/v1/completions/render", render.render_completions, methods=["POST"]),
    Route("/v1/responses/render", render.render_responses, methods=["POST"]),
    Route("/v1/chat/completions/derender", render.derender_chat, methods=["POST"]),
    Route("/v1/completions/derender", render.derender_completions, methods=["POST"]),
    Route("/inference/v1/generate", generate.generate_tokens, methods=["POST"]),
    Route("/inference/v1/abort_requests", generate.abort_requests, methods=["POST"]),
    # Other dialects: Anthropic's, Ollama's, llama.cpp's.
    Route("/v1/messages", anthropic.messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", anthropic.count_tokens, methods=["POST"]),
    Route("/v1/messages/render", render.render_messages, methods=["POST"]),
    Route("/api/generate", ollama.generate, methods=["POST"]),
    Route("/api/chat", ollama.chat, methods=["POST"]),
    Route("/api/tags", ollama.tags, methods=["GET"]),
    Route("/api/show", ollama.show, methods=["POST"]),
    Route("/api/ps", ollama.running, methods=["GET"]),
    Route("/api/version", ollama.version, methods=["GET"]),
    Route("/completion", llamacpp.completion, methods=["POST"]),
    Route("/completions", llamacpp.completion, methods=["POST"]),
    Route("/slots", llamacpp.slots, methods=["GET"]),
    Route("/props", llamacpp.props, methods=["GET"]),
)


def build_app(
    client: EngineClient,
    text: ModelText | None,
    *,
    engine_args: EngineArgs | None = None,
    server_args: ServerArgs | None = None,
    metrics: Metrics | None = None,
    tracing: Tracing | None = None,
    fellows: SharedClient | None = None,
) -> Starlette:
    """The server over an engine client. `text` None: still being read; set `app.state.server.text` when it is there.

    `metrics` must be the client's observer to see its requests. `fellows`: the client, where other frontend processes use the
    same engine.
    """
    engine_args, server_args = engine_args or EngineArgs(), server_args or ServerArgs()
    names = server_args.served_model_name or [engine_args.model]
    state = ServerState(client, engine_args, server_args, metrics or Metrics(names[0]), text, tracing=tracing, fellows=fellows)
    routes = [*ROUTES, *admin.routes(server_args), *page.routes(server_args), *docs.routes(server_args)]
    app = Starlette(routes=routes, middleware=_middleware(state, routes), exception_handlers={HTTPException: on_http_exception})
    app.router.redirect_slashes = False
    app.state.server = state
    app.state.api_document = ApiDocument(routes, OPEN_PATHS | page.OPEN_PATHS | docs.OPEN_PATHS, server_args.root_path)
    return app


def _middleware(state: ServerState, routes: Sequence[Route]) -> list[Middleware]:
    """Outermost first. Errors become answers inside the layers that add headers and count."""
    args = state.server_args
    handlers: dict[object, str] = {route.endpoint: route.path for route in reversed(routes)}
    log = None if args.disable_uvicorn_access_log else AccessLog(args.access_log_format, args.silent_paths, args.uvicorn_log_level)
    layers = [Middleware(HttpMetricsMiddleware, metrics=state.metrics.http, handlers=handlers, log=log)]
    if args.enable_request_id_headers:
        layers.append(Middleware(RequestIdMiddleware))
    layers.append(Middleware(RequestIdMiddleware, header=ANTHROPIC_REQUEST_ID, prefix=ANTHROPIC_PREFIX))
    if args.allowed_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=args.allowed_origins,
                allow_methods=args.allowed_methods,
                allow_headers=args.allowed_headers,
                allow_credentials=args.allow_credentials,
            )
        )
    if args.api_keys:
        layers.append(Middleware(AuthMiddleware, api_keys=args.api_keys, more_open_paths=page.OPEN_PATHS | docs.OPEN_PATHS))
    if state.tracing is not None:
        layers.append(Middleware(TraceContextMiddleware))
    layers.append(Middleware(LoadReportMiddleware, client=state.client))
    layers.append(Middleware(ErrorMiddleware, queue_full_status=args.queue_full_status, on_refused=state.metrics.on_refused))
    return layers


class RequestIdMiddleware:
    """Puts the request's id into every answer, or those of some paths: the one that came as X-Request-Id, or that the server made."""

    def __init__(self, app: ASGIApp, header: bytes = b"x-request-id", prefix: str = "") -> None:
        self._app = app
        self._header = header
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].removeprefix(scope.get("root_path", "")).startswith(self._prefix):
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id")
        if given is None:
            given = made_request_id(scope).encode()

        async def add_header(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (self._header, given)]
            await send(message)

        await self._app(scope, receive, add_header)
