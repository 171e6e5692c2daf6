"""How busy the server is, told in the headers of an answer: for load balancers that choose by it (Open Request Cost Aggregation)."""

from __future__ import annotations

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from canter.client.protocol import EngineClient

ASKED = "endpoint-load-metrics-format"
ANSWERED = b"endpoint-load-metrics"


class LoadReportMiddleware:
    """Answers the header `endpoint-load-metrics-format: text` (or json) with `endpoint-load-metrics`."""

    def __init__(self, app: ASGIApp, client: EngineClient) -> None:
        self._app = app
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        form = Headers(scope=scope).get(ASKED, "").lower() if scope["type"] == "http" else ""
        if form not in ("text", "json"):
            await self._app(scope, receive, send)
            return

        async def report(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (ANSWERED, self._report(form))]
            await send(message)

        await self._app(scope, receive, report)

    def _report(self, form: str) -> bytes:
        stats = self._client.stats
        named = {
            "kv_cache_usage_perc": round(stats.cache_usage, 6),
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
        }
        if form == "json":
            return b"JSON " + msgspec.json.encode({"named_metrics": named})
        return b"TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items()).encode()
