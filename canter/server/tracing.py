"""OpenTelemetry: a span for each request, under the span that the client's `traceparent` names. Needs the extra `otel`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextvars import ContextVar
from importlib import import_module
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from canter.client.outputs import RequestGroup, RequestState
from canter.client.protocol import RequestObserver
from canter.core.errors import ConfigError
from canter.core.messages import EngineStats

PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
PROTOCOL = "http/protobuf"
EXPORT_SECONDS = 5.0
"""For so long an export may take, and the last one at the end."""

_incoming: ContextVar[dict[str, str]] = ContextVar("canter.trace_context")


class Tracing:
    """A `RequestObserver` that makes spans. They are sent by a thread of their own, in batches; without a collector they are dropped.

    Raises `ConfigError` when the packages are missing, or for a protocol other than OTLP over HTTP.
    """

    def __init__(self, endpoint: str, model_name: str) -> None:
        protocol = os.environ.get(PROTOCOL_VARIABLE, PROTOCOL)
        if protocol != PROTOCOL:
            raise ConfigError(f"Traces are sent as {PROTOCOL} only, but {PROTOCOL_VARIABLE} is {protocol!r}.")
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"otlp_traces_endpoint must begin with http:// or https://, got {endpoint!r}.")
        sdk = load_sdk()
        exporter = sdk.exporter(endpoint=endpoint, timeout=EXPORT_SECONDS)
        resource = sdk.resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "canter")})
        self._provider = sdk.provider(resource=resource, shutdown_on_exit=False)  # `shutdown` does it, in bounded time
        self._provider.add_span_processor(sdk.processor(exporter))
        self._tracer = self._provider.get_tracer("canter")
        self._propagator = sdk.propagator()
        self._server_kind = sdk.server_kind
        self._model_name = model_name

    def shutdown(self) -> None:
        """Send what is left, but don't wait for a collector that is away."""
        thread = threading.Thread(target=self._provider.shutdown, name="canter-trace-end", daemon=True)
        thread.start()
        thread.join(EXPORT_SECONDS)

    def on_step(self, stats: EngineStats) -> None:
        """Steps belong to no request."""

    def on_engine_restart(self) -> None:
        """Nothing to do: requests go on, and so do their spans."""

    def on_tokens(self, state: RequestState, num_tokens: int, seconds: float | None, is_first: bool) -> None:
        """The span tells of the whole."""

    def on_state_end(self, state: RequestState, now: float) -> None:
        """The span ends with the last choice."""

    def on_group_end(self, group: RequestGroup) -> None:
        states = list(group.states.values())
        arrival = states[0].metrics.arrival_time
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(_incoming.get({})),
            kind=self._server_kind,
            start_time=int(arrival * 1e9),
            attributes=self._attributes(group, states),
        )
        span.end()

    def _attributes(self, group: RequestGroup, states: Sequence[RequestState]) -> dict[str, Any]:
        params, first = group.params, states[0].metrics
        found: dict[str, Any] = {
            "gen_ai.request.id": group.request_id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.finish_reasons": [state.finish_reason or "abort" for state in states],
            "gen_ai.usage.prompt_tokens": len(states[0].prompt_token_ids),
            "gen_ai.usage.completion_tokens": sum(state.metrics.num_generation_tokens for state in states),
            "gen_ai.usage.num_sequences": len(states),
            "gen_ai.latency.e2e": max(0.0, time.time() - first.arrival_time),
        }
        if params.max_tokens is not None:
            found["gen_ai.request.max_tokens"] = params.max_tokens
        if first.scheduled_ts:
            found["gen_ai.latency.time_in_queue"] = max(0.0, first.scheduled_ts - first.queued_ts)
        if first.first_token_ts:
            last = max(state.metrics.last_token_ts for state in states)
            found["gen_ai.latency.time_to_first_token"] = max(0.0, first.first_token_ts - first.arrival_time)
            found["gen_ai.latency.time_in_model_prefill"] = max(0.0, first.first_token_ts - first.scheduled_ts)
            found["gen_ai.latency.time_in_model_decode"] = max(0.0, last - first.first_token_ts)
            found["gen_ai.latency.time_in_model_inference"] = max(0.0, last - first.scheduled_ts)
        return found


class Observers:
    """Several `RequestObserver`s that are told the same."""

    def __init__(self, *observers: RequestObserver) -> None:
        self._observers = observers

    def on_step(self, stats: EngineStats) -> None:
        for observer in self._observers:
            observer.on_step(stats)

    def on_engine_restart(self) -> None:
        for observer in self._observers:
            observer.on_engine_restart()

    def on_tokens(self, state: RequestState, num_tokens: int, seconds: float | None, is_first: bool) -> None:
        for observer in self._observers:
            observer.on_tokens(state, num_tokens, seconds, is_first)

    def on_state_end(self, state: RequestState, now: float) -> None:
        for observer in self._observers:
            observer.on_state_end(state, now)

    def on_group_end(self, group: RequestGroup) -> None:
        for observer in self._observers:
            observer.on_group_end(group)


class TraceContextMiddleware:
    """Remembers the trace that a request belongs to, for the spans that are made on its way."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            # A task of its own for each request is what keeps this from others.
            _incoming.set({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})
        await self._app(scope, receive, send)


class _Sdk(NamedTuple):
    """The names of OpenTelemetry that are used here."""

    exporter: Any
    resource: Any
    provider: Any
    processor: Any
    propagator: Any
    server_kind: Any


def load_sdk() -> _Sdk:
    """Import it, which only servers with tracing pay for. Raises `ConfigError` when it isn't installed."""
    try:
        trace, exporters = import_module("opentelemetry.sdk.trace"), import_module("opentelemetry.sdk.trace.export")
        otlp = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        api, propagation = import_module("opentelemetry.trace"), import_module("opentelemetry.trace.propagation.tracecontext")
        resources = import_module("opentelemetry.sdk.resources")
    except ImportError:
        raise ConfigError("otlp_traces_endpoint needs OpenTelemetry: install it with pip install 'canter[otel]'.") from None
    return _Sdk(
        exporter=otlp.OTLPSpanExporter,
        resource=resources.Resource,
        provider=trace.TracerProvider,
        processor=exporters.BatchSpanProcessor,
        propagator=propagation.TraceContextTextMapPropagator,
        server_kind=api.SpanKind.SERVER,
    )
