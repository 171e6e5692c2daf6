"""Several frontend processes on one port: what holds for one holds for all of them together, whoever of them dies."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from canter.core.errors import ConfigError
from canter.server.args import ServerArgs
from canter.server.figures import Sum, figures
from canter.server.metrics import Metrics
from tests.server.test_reliability import metric, stream, wait_until
from tests.server.test_serve import Process, live_requests, server, wait_gone


def children(process: Process, part: str) -> list[int]:
    """Child processes whose command line has `part`, oldest first."""
    found = []
    for word in Path(f"/proc/{process.process.pid}/task/{process.process.pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            if part in Path(f"/proc/{word}/cmdline").read_text():
                found.append(int(word))
    return found


def frontends(process: Process) -> list[int]:
    return children(process, "canter.server.frontend")


def engine(process: Process) -> int:
    [pid] = children(process, "fake_engine")
    return pid


@contextlib.contextmanager
def fleet(*flags: str, count: int = 2, **options) -> Iterator[Process]:
    with server(*flags, api_server_count=count, **options) as process:
        for number in range(count):
            process.wait_for_line(f"frontend {number}: ready: m")
        yield process


@contextlib.contextmanager
def only(process: Process, pid: int) -> Iterator[None]:
    """Connections that are made now are this frontend's: the others are stopped."""
    others = [other for other in frontends(process) if other != pid]
    for other in others:
        os.kill(other, signal.SIGSTOP)
    try:
        yield
    finally:
        for other in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(other, signal.SIGCONT)


class Streams:
    """Streams under way, so many at each frontend."""

    def __init__(self, process: Process, pool: ThreadPoolExecutor, each: int, **body) -> None:
        self.by_frontend: dict[int, list[Future]] = {}
        for pid in frontends(process):
            begun = threading.Barrier(each + 1)
            with only(process, pid):
                self.by_frontend[pid] = [pool.submit(stream, process, begun, **body) for _ in range(each)]
                begun.wait(30)

    def texts(self, *but: int) -> list[str]:
        return [future.result()[0] for pid, futures in self.by_frontend.items() if pid not in but for future in futures]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as made:
        yield made


def test_streams_through_each_of_three_and_one_sum_of_figures(pool: ThreadPoolExecutor) -> None:
    with fleet("--delay", "0.01", count=3, enable_server_load_tracking=True) as process:
        streams = Streams(process, pool, 2, max_tokens=300)
        wait_until(lambda: live_requests(process.url) == 6, "every frontend's requests")
        assert httpx.get(process.url + "/load").json() == {"server_load": 6}
        assert set(streams.texts()) == {"ab" * 150}
        assert metric(process, "vllm:request_success_total") == 6
        for pid in frontends(process):
            with only(process, pid):
                seen = httpx.get(process.url + "/metrics").text
                counted = re.findall(r"^vllm:generation_tokens_total\{[^}]*\} (\S+)$", seen, re.MULTILINE)
                assert list(map(float, counted)) == [1800.0], "one sample, whoever answers"
        assert metric(process, "vllm:request_success_total") == 6
        assert metric(process, "vllm:e2e_request_latency_seconds_count") == 6
        assert metric(process, "vllm:num_requests_running") == 0
        assert httpx.get(process.url + "/load").json() == {"server_load": 0}


def test_all_streams_outlive_a_killed_engine(pool: ThreadPoolExecutor) -> None:
    with fleet("--delay", "0.01") as process:
        streams = Streams(process, pool, 4, max_tokens=300)
        before = engine(process)
        os.kill(before, signal.SIGKILL)
        assert set(streams.texts()) == {"ab" * 150}
        assert engine(process) != before
        assert metric(process, "canter:engine_restarts_total") == 1
        assert metric(process, "vllm:request_success_total") == 8
        assert stream(process, max_tokens=4)[0] == "abab"
        wait_until(lambda: live_requests(process.url) == 0, "the engine to be idle")


def test_who_kills_the_engine_fails_alone_whosever_it_is(pool: ThreadPoolExecutor) -> None:
    with fleet("--poison", "x", "--delay", "0.05") as process:
        first, second = frontends(process)
        with only(process, first):
            begun = threading.Barrier(2)
            good = [pool.submit(stream, process, begun, max_tokens=60)]
            begun.wait(30)
        with only(process, second):
            bad = pool.submit(httpx.post, process.url + "/v1/completions", json={"prompt": "xyz", "max_tokens": 50}, timeout=60)
            wait_until(lambda: len(children(process, "fake_engine")) != 1 or any("died" in line for line in process.log), "the death")
        answer = bad.result()
        assert answer.status_code == 500 and "died each time" in answer.json()["error"]["message"]
        assert good[0].result()[0] == "ab" * 30


def test_a_killed_frontend_is_replaced_and_leaves_nothing(pool: ThreadPoolExecutor) -> None:
    with fleet("--delay", "0.01") as process:
        streams = Streams(process, pool, 3, max_tokens=500)
        first, second = frontends(process)
        killed_at = metric(process, "vllm:prompt_tokens_total")
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: live_requests(process.url) == 3, "the requests of the dead to end")
        assert set(streams.texts(first)) == {"ab" * 250}
        for future in streams.by_frontend[first]:
            assert isinstance(future.exception(), (httpx.TransportError, AssertionError))
        wait_until(lambda: len(frontends(process)) == 2, "another")
        [new] = [pid for pid in frontends(process) if pid != second]
        process.wait_for_line("frontend 2: ready: m")
        with only(process, new):
            assert stream(process, max_tokens=4)[0] == "abab"
        assert metric(process, "vllm:prompt_tokens_total") >= killed_at == 12, "what the dead had told stays counted"


@pytest.mark.parametrize("stopped", [False, True])
def test_when_the_parent_is_killed_all_are_gone(pool: ThreadPoolExecutor, stopped: bool) -> None:
    with fleet("--delay", "0.05") as process:
        Streams(process, pool, 1, max_tokens=500)
        pids = [*frontends(process), engine(process)]
        if stopped:
            os.kill(pids[0], signal.SIGSTOP)
        process.signal(signal.SIGKILL)
        started = time.monotonic()
        for pid in pids:
            wait_gone(pid)
        assert time.monotonic() - started < 5


def test_sigterm_lets_the_streams_of_all_end(pool: ThreadPoolExecutor) -> None:
    with fleet("--delay", "0.01", shutdown_timeout=60) as process:
        streams = Streams(process, pool, 4, max_tokens=300)
        pids = [*frontends(process), engine(process)]
        process.signal(signal.SIGTERM)
        assert set(streams.texts()) == {"ab" * 150}
        assert process.wait() == 0
        for pid in pids:
            wait_gone(pid)


def test_sigterm_without_patience_ends_requests_with_an_error(pool: ThreadPoolExecutor) -> None:
    with fleet("--delay", "0.02") as process:
        streams = Streams(process, pool, 2, max_tokens=500)
        process.signal(signal.SIGTERM)
        for futures in streams.by_frontend.values():
            assert all("shutting down" in str(future.exception()) for future in futures)
        assert process.wait() == 0


def test_a_pause_is_for_all_and_for_those_that_come_later(pool: ThreadPoolExecutor) -> None:
    with fleet("--delay", "0.01", enable_dev_mode=True) as process:
        streams = Streams(process, pool, 2, max_tokens=500)
        first, second = frontends(process)
        assert httpx.post(process.url + "/pause?mode=abort", timeout=30).json() == {"status": "paused"}
        assert all(len(text) < 500 for text in streams.texts()), "aborted, whosever they were"
        os.kill(first, signal.SIGKILL)
        os.kill(engine(process), signal.SIGKILL)
        wait_until(lambda: first not in frontends(process) and len(frontends(process)) == 2, "another frontend")
        [new] = [pid for pid in frontends(process) if pid != second]
        process.wait_for_line("frontend 2: ready: m")
        for pid in (second, new):
            with only(process, pid):
                wait_until(lambda: httpx.get(process.url + "/is_paused").json() == {"is_paused": True}, "the pause", 5)
        with only(process, new):
            late = pool.submit(stream, process, max_tokens=4)
            time.sleep(0.2)
            assert not late.done()
        with only(process, second):
            held = pool.submit(httpx.post, process.url + "/resume", timeout=30)
        assert held.result().json() == {"status": "resumed"}
        assert late.result()[0] == "abab"


def test_an_abort_finds_its_request_at_any_frontend(pool: ThreadPoolExecutor) -> None:
    with fleet("--delay", "0.01", enable_dev_mode=True) as process:
        first, second = frontends(process)
        with only(process, first):
            begun = threading.Barrier(2)
            body = {"max_tokens": 500, "request_id": "mine"}
            asked = [pool.submit(stream, process, begun, **body)]
            begun.wait(30)
        with only(process, second):
            begun = threading.Barrier(2)
            asked.append(pool.submit(stream, process, begun, **body))
            begun.wait(30)
        assert httpx.post(process.url + "/abort_requests", json={"request_ids": ["cmpl-mine"]}).json() == {"aborted": 2}
        assert all(len(future.result()[0]) < 500 for future in asked)


def test_what_needs_the_store_is_refused() -> None:
    with fleet() as process:
        plain = httpx.post(process.url + "/v1/responses", json={"input": "hi", "max_output_tokens": 4})
        assert plain.status_code == 200 and plain.json()["store"] is False
        for field in ({"store": True}, {"background": True}, {"previous_response_id": plain.json()["id"]}):
            answer = httpx.post(process.url + "/v1/responses", json={"input": "hi", **field})
            assert answer.status_code == 400 and "api_server_count" in answer.json()["error"]["message"]
        answer = httpx.get(f"{process.url}/v1/responses/{plain.json()['id']}")
        assert answer.status_code == 404 and "api_server_count" in answer.json()["error"]["message"]


def test_the_queue_is_one_for_all(pool: ThreadPoolExecutor) -> None:
    """The fake engine takes 8 at once, 2 may wait: ten, at whichever frontends."""
    with fleet("--delay", "0.05", engine={"max_num_queued_reqs": 2}) as process:
        streams = Streams(process, pool, 5, max_tokens=100)
        response = httpx.post(process.url + "/v1/completions", json={"prompt": "a", "stream": True}, timeout=30)
        assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
        assert set(streams.texts()) == {"ab" * 50}
        assert stream(process, max_tokens=2)[0] == "ab"


def test_a_frontend_that_hangs_is_killed(pool: ThreadPoolExecutor) -> None:
    with fleet(constants={"canter.client.exchange": {"MOST_UNANSWERED": 3}}) as process:
        first = frontends(process)[0]
        os.kill(first, signal.SIGSTOP)
        wait_until(lambda: first not in frontends(process) and len(frontends(process)) == 2, "it to be replaced")
        assert stream(process, max_tokens=4)[0] == "abab"


def test_a_stuck_engine_is_stuck_for_those_without_requests(pool: ThreadPoolExecutor) -> None:
    with fleet("--delay", "0.01", engine_stall_timeout=0.5) as process:
        first, second = frontends(process)
        with only(process, first):
            begun = threading.Barrier(2)
            asked = pool.submit(stream, process, begun, max_tokens=300)
            begun.wait(30)
        pid = engine(process)
        os.kill(pid, signal.SIGSTOP)
        with only(process, second):
            assert process.wait_for_status(503).json()["status"] == "stuck"
        os.kill(pid, signal.SIGCONT)
        assert asked.result()[0] == "ab" * 150


def test_an_engine_that_can_not_start_ends_the_server_with_its_sentence() -> None:
    with server("--fail", "no such thing", ready=False, api_server_count=2) as process:
        assert process.wait() == 1
        assert process.log[-1] == "canter: error: no such thing\n"


def test_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with server(ready=False, uds=path, api_server_count=2) as process:
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://x") as http:

            def is_up() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return http.get("/health").status_code == 200
                return False

            wait_until(is_up, "the socket")
            assert http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 4}).json()["choices"][0]["text"] == "abab"
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert not Path(path).exists()


def test_connections_that_wait_go_to_whoever_lives() -> None:
    """The socket is the parent's: a frontend that dies takes no connection with it that it has not accepted."""
    with fleet() as process:
        first, second = frontends(process)
        for pid in (first, second):
            os.kill(pid, signal.SIGSTOP)
        connection = socket.create_connection(("127.0.0.1", process.port))
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        os.kill(first, signal.SIGKILL)
        os.kill(second, signal.SIGCONT)
        connection.settimeout(20)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        connection.close()


def test_how_figures_add_up() -> None:
    one, two = Metrics("m", has_engine=False), Metrics("m", has_engine=False)
    for metrics, seconds in ((one, 1.0), (two, 3.0)):
        metrics.on_refused()
        metrics.loop_lag.observe(seconds)
        metrics.http.fine_seconds.observe(seconds)
    total = Sum()
    total.add(figures(one.registry))
    total.add(figures(two.registry))
    assert total.value("vllm:admission_rejections_total") == 2
    assert total.value("canter:event_loop_lag_seconds_sum") == 4 and total.value("canter:event_loop_lag_max_seconds") == 3
    assert total.value("http_request_duration_highr_seconds_count") == 2
    past = Sum()
    past.keep(figures(one.registry))
    assert past.value("vllm:admission_rejections_total") == 1 and past.value("canter:event_loop_lag_max_seconds") == 0
    text, _ = total.expose()
    assert b"canter:event_loop_lag_max_seconds" in text and text.count(b"# TYPE python_info") == 1
    assert past.copy().value("vllm:admission_rejections_total") == 1


@pytest.mark.parametrize("count", [0, 65, True, "2"])
def test_how_many_there_may_be(count: object) -> None:
    with pytest.raises(ConfigError, match="api_server_count"):
        ServerArgs.parse(api_server_count=count)
