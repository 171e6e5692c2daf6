"""Spans of requests, against a collector in a thread."""

from __future__ import annotations

import http.server
import sys
import threading
import time

import pytest

from canter.core.errors import ConfigError
from canter.server.args import ServerArgs
from canter.server.metrics import Metrics
from canter.server.tracing import Observers, Tracing
from tests.server.helpers import Harness, with_harness

ENDPOINT = "http://127.0.0.1:9/v1/traces"


def test_without_the_packages_the_start_fails_with_a_sentence(monkeypatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"canter\[otel\]"):
        Tracing(ENDPOINT, "m")


def test_other_protocols_and_urls_are_refused(monkeypatch) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint"):
        Tracing("collector:4317", "m")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is 'grpc'"):
        Tracing(ENDPOINT, "m")


class Collector(http.server.ThreadingHTTPServer):
    """Keeps the spans that it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[bytes] = []

    def spans(self) -> list:
        service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        requests = [service.ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [s for request in requests for resource in request.resource_spans for scope in resource.scope_spans for s in scope.spans]


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def collector():
    pytest.importorskip("opentelemetry.sdk.trace")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    server = Collector()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def traced(body, endpoint: str) -> None:
    tracing = Tracing(endpoint, "m")

    async def with_tracing(h: Harness) -> None:
        from canter.server.app import build_app

        h.engine.hub.observer = Observers(Metrics("m"), tracing)
        h.app = build_app(h.engine, h.app.state.server.text, server_args=ServerArgs(served_model_name=["m"]), tracing=tracing)
        h.http._transport.app = h.app
        await body(h)

    with_harness(with_tracing)
    tracing.shutdown()


def values(span) -> dict:
    kinds = {"string_value", "int_value", "double_value"}
    found = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        found[pair.key] = getattr(pair.value, kind) if kind in kinds else [v.string_value for v in pair.value.array_value.values]
    return found


def test_a_span_tells_of_a_request_and_continues_the_clients_trace(collector: Collector) -> None:
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

    async def body(h: Harness) -> None:
        headers = {"traceparent": f"00-{trace_id}-{parent}-01", "X-Request-Id": "mine"}
        fields = {"prompt": "abc", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "n": 2}
        assert (await h.http.post("/v1/completions", json=fields, headers=headers)).status_code == 200
        assert (await h.complete("abc", max_tokens=1)).status_code == 200

    traced(body, f"http://127.0.0.1:{collector.server_port}/v1/traces")
    with_parent, alone = sorted(collector.spans(), key=lambda span: span.start_time_unix_nano)
    assert with_parent.name == alone.name == "llm_request" and with_parent.kind == 2
    assert (with_parent.trace_id.hex(), with_parent.parent_span_id.hex()) == (trace_id, parent)
    assert alone.parent_span_id == b"" and alone.trace_id.hex() != trace_id
    got = values(with_parent)
    assert got["gen_ai.request.id"].startswith("cmpl-mine")
    assert got["gen_ai.response.model"] == "m" and got["gen_ai.response.finish_reasons"] == ["length", "length"]
    for name, value in {"request.n": 2, "request.max_tokens": 4, "usage.prompt_tokens": 3, "usage.completion_tokens": 8,
                        "usage.num_sequences": 2, "request.temperature": 0.5, "request.top_p": 0.9}.items():  # fmt: skip
        assert got[f"gen_ai.{name}"] == value
    for name in ("time_in_queue", "time_to_first_token", "e2e", "time_in_model_prefill", "time_in_model_decode", "time_in_model_inference"):
        assert got[f"gen_ai.latency.{name}"] >= 0
    assert with_parent.end_time_unix_nano > with_parent.start_time_unix_nano > (time.time() - 600) * 1e9


def test_a_collector_that_is_away_holds_up_nothing(collector: Collector) -> None:
    async def body(h: Harness) -> None:
        for _ in range(5):
            assert (await h.complete("abc", max_tokens=2)).status_code == 200

    traced(body, ENDPOINT)  # nobody listens there
    assert collector.bodies == []
