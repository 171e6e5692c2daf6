"""Deadlines, full queues, streams with nothing to say, the access log, traces."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from canter.core.errors import ConfigError, EngineNotReadyError, QueueFullError
from canter.server.args import ServerArgs
from canter.server.sse import kept_alive
from canter.server.traffic import Traffic
from tests.fake_core import FakeCore
from tests.server.helpers import Harness, error_of, events, with_harness
from tests.server.test_app import samples, until


def test_a_request_that_gets_no_answer_in_time_is_told_so() -> None:
    async def body(h: Harness) -> None:
        h.engine.paused = True
        for fields in ({}, {"stream": True}, {"n": 2, "temperature": 1}):
            error = error_of(await h.complete("a", max_tokens=5, **fields), 504)
            assert error["type"] == "GatewayTimeoutError" and "0.05 seconds" in error["message"]
        assert not h.engine.core.requests and h.engine.hub.num_live == 0
        h.engine.resume()
        assert (await h.complete("a", max_tokens=1)).status_code == 200

    with_harness(body, request_timeout=0.05)


def test_a_stream_that_takes_too_long_ends_as_aborted() -> None:
    core = FakeCore()

    async def body(h: Harness) -> None:
        asking = asyncio.create_task(h.complete("ab", max_tokens=400, stream=True))
        await until(lambda: any(core._counts.values()))
        h.engine.paused = True
        got = events(await asking)
        assert got[-1]["choices"][0]["finish_reason"] == "abort"
        assert "".join(e["choices"][0]["text"] for e in got).startswith("a")
        assert not core.requests and h.engine.hub.num_live == 0

    with_harness(body, core, request_timeout=0.3)


def test_a_timely_request_leaves_no_timer_behind() -> None:
    async def body(h: Harness) -> None:
        for stream in (True, False):
            assert (await h.complete("a", max_tokens=3, stream=stream)).status_code == 200
        scheduled = [timer for timer in asyncio.get_running_loop()._scheduled if not timer.cancelled()]
        assert all("Traffic" not in repr(timer) for timer in scheduled)

    with_harness(body, request_timeout=100)


@pytest.mark.parametrize(("status", "kind"), [(503, "ServiceUnavailableError"), (429, "RateLimitError")])
def test_a_full_queue_answers_as_told_and_is_counted(status: int, kind: str) -> None:
    core = FakeCore()
    core.refuse = QueueFullError("The queue is full.", 7)

    async def body(h: Harness) -> None:
        for stream in (True, False):
            response = await h.chat(stream=stream)
            assert error_of(response, status)["type"] == kind
            assert int(response.headers["retry-after"]) >= 1
        got = samples((await h.http.get("/metrics")).text)
        assert got['vllm:admission_rejections_total{model_name="m",reason="queue_full"}'] == 2

    with_harness(body, core, queue_full_status=status)


def test_health_and_metrics_answer_when_the_queue_is_full() -> None:
    async def body(h: Harness) -> None:
        h.engine.paused = True
        h.engine.hub.max_live = 3
        waiting = [asyncio.create_task(h.complete("a", max_tokens=2)) for _ in range(3)]
        await until(lambda: len(h.engine.core.requests) == 3)
        error_of(await h.complete("a", max_tokens=2), 503)
        assert (await h.http.get("/health")).status_code == 200
        assert (await h.http.get("/metrics")).status_code == 200
        h.engine.resume()
        assert [(await task).status_code for task in waiting] == [200] * 3

    with_harness(body)


def test_the_gate_is_bounded_and_opens_for_the_end() -> None:
    async def source():
        yield 1

    async def ask(traffic: Traffic, name: str):
        return [item async for item in traffic.watch(0, name, source(), 1)]

    async def body(h: Harness) -> None:
        traffic = Traffic(h.engine)
        traffic.hold()
        held = asyncio.create_task(ask(traffic, "a"))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await ask(traffic, "b")
        traffic.turn_away(EngineNotReadyError("stopping"))
        for late in (held, ask(traffic, "c")):
            with pytest.raises(EngineNotReadyError):
                await late

    with_harness(body)


def test_a_silent_stream_is_kept_alive() -> None:
    gate = asyncio.Event()

    async def slow():
        await gate.wait()
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"

    async def main() -> list[bytes]:
        got = []
        async for chunk in kept_alive(slow(), 0.01):
            got.append(chunk)
            if got.count(b": keep-alive\n\n") == 2:
                gate.set()
        return got

    got = asyncio.run(main())
    assert got[:2] == [b": keep-alive\n\n"] * 2
    assert [chunk for chunk in got if chunk.startswith(b"data")] == [b"data: 1\n\n", b"data: 2\n\n"]


def test_leaving_a_kept_alive_stream_ends_its_source() -> None:
    ended = []

    async def endless():
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            ended.append(True)

    async def main() -> None:
        stream = kept_alive(endless(), 0.01)
        await anext(stream)
        await stream.aclose()

    asyncio.run(main())
    assert ended == [True]


def test_keep_alive_in_an_answer() -> None:
    async def body(h: Harness) -> None:
        h.engine.paused = True
        asking = asyncio.create_task(h.complete("a", max_tokens=2, stream=True))
        await asyncio.sleep(0.05)
        h.engine.resume()
        response = await asking
        assert response.status_code == 200 and response.text.startswith(": keep-alive\n\n")
        assert response.text.endswith("data: [DONE]\n\n")

    with_harness(body, sse_keep_alive_interval=0.01)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def access_lines(body, **options) -> list[str]:
    handler, logger = Lines(), logging.getLogger("canter.access")

    async def logged(h: Harness) -> None:
        await h.http.get("/health")  # builds the layers
        logger.addHandler(handler)
        await body(h)

    try:
        with_harness(logged, **options)
    finally:
        logger.removeHandler(handler)
    return handler.lines


def test_access_log_as_json() -> None:
    async def body(h: Harness) -> None:
        await h.complete("a", max_tokens=2)
        await h.http.get("/v1/models?x=%0Ay", headers={"X-Request-Id": "mine"})
        await h.http.get("/v1/models/quiet")
        for path in ("/health", "/metrics", "/ping", "/version"):
            await h.http.get(path)

    first, second = map(json.loads, access_lines(body, access_log_format="json", disable_access_log_for_endpoints="/v1/models/quiet, /x"))
    assert (first["method"], first["path"], first["status"], first["protocol"]) == ("POST", "/v1/completions", 200, "HTTP/1.1")
    assert first["bytes"] > 100 and first["seconds"] >= 0 and len(first["request_id"]) == 32
    assert (second["path"], second["request_id"]) == ("/v1/models?x=%0Ay", "mine")


def test_access_log_as_text_is_one_line() -> None:
    async def body(h: Harness) -> None:
        await h.http.get("/nowhere", headers={"X-Request-Id": "a\x1b[31m"})

    [line] = access_lines(body)
    assert '"GET /nowhere HTTP/1.1" 404' in line and line.isprintable()


def test_access_log_can_be_off() -> None:
    async def body(h: Harness) -> None:
        await h.http.get("/v1/models")

    assert access_lines(body, disable_uvicorn_access_log=True) == []
    assert access_lines(body, uvicorn_log_level="warning") == []


def test_more_metrics_of_vllm() -> None:
    async def body(h: Harness) -> dict[str, float]:
        await h.complete("a" * 20, max_tokens=1)
        return samples((await h.http.get("/metrics")).text)

    got = with_harness(body)
    for source, value in (("local_cache_hit", 16), ("local_compute", 4)):
        assert got[f'vllm:prompt_tokens_by_source_total{{engine="0",model_name="m",source="{source}"}}'] == value
    for reason in ("capacity", "deferred"):
        assert got[f'vllm:num_requests_waiting_by_reason{{engine="0",model_name="m",reason="{reason}"}}'] == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("request_timeout", 0), ("request_timeout", float("nan")), ("engine_stall_timeout", 0), ("sse_keep_alive_interval", -1),
     ("queue_full_status", 500), ("access_log_format", "xml"), ("disable_access_log_for_endpoints", "health"), ("uds_permissions", "9")],
)  # fmt: skip
def test_arguments_are_checked(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        ServerArgs.parse(**{name: value})
