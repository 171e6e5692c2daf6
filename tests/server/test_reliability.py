"""Promises about the whole server, over a fake engine process that is killed, stopped and flooded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import httpx
import pytest

from canter.core.errors import InvalidRequestError
from canter.server import body as body_module
from canter.server.generation import MAX_TEXT_CHARS
from canter.server.loop_lag import watch_loop
from canter.server.metrics import LoopLag
from canter.server.schemas.openai import ChatRequest, CompletionRequest
from tests.server.helpers import Harness, error_of, with_harness
from tests.server.test_serve import Process, engine_pid, live_requests, server, wait_gone


def stream(process: Process, begun: threading.Barrier | None = None, **body) -> tuple[str, dict | None]:
    """(text, usage) of a stream that ends as it should; `begun` is passed after its first piece."""
    wishes = {"prompt": "ab", "stream": True, "stream_options": {"include_usage": True}, **body}
    text, usage = "", None
    with httpx.stream("POST", process.url + "/v1/completions", json=wishes, timeout=60) as response:
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line)
        for line in lines:
            if line == "data: [DONE]":
                break
            event = json.loads(line[6:])
            assert "error" not in event, event
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event.get("usage") or usage
            if begun is not None and text:
                begun.wait(30)
                begun = None
        else:
            raise AssertionError("the stream ended without [DONE]")
        assert list(lines) == []
    return text, usage


def metric(process: Process, name: str) -> float:
    text = httpx.get(process.url + "/metrics").text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def wait_until(condition, what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def test_32_streams_outlive_a_killed_engine() -> None:
    with server("--delay", "0.01") as process, ThreadPoolExecutor(32) as pool:
        begun = threading.Barrier(33)
        asked = [pool.submit(stream, process, begun, max_tokens=100 + i) for i in range(32)]
        begun.wait(30)
        before = engine_pid(process)
        os.kill(before, signal.SIGKILL)
        for i, answer in enumerate(asked):
            text, usage = answer.result()
            assert text == ("ab" * 100)[: 100 + i] and usage["completion_tokens"] == 100 + i
        assert engine_pid(process) != before
        assert metric(process, "canter:engine_restarts_total") == 1
        assert metric(process, "vllm:request_success_total") == 32
        process.wait_for_line("the engine is back after")
        process.wait_for_status(200)


def test_while_the_engine_restarts_new_requests_are_told_to_come_back(tmp_path: Path) -> None:
    marker = tmp_path / "loaded"
    with server("--loads-once", str(marker)) as process:
        os.kill(engine_pid(process), signal.SIGKILL)
        response = process.wait_for_status(503)
        assert response.json()["status"] == "restarting" and int(response.headers["retry-after"]) > 0
        response = httpx.post(process.url + "/v1/completions", json={"prompt": "a"})
        assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
        assert "restarted" in response.json()["error"]["message"]
        assert httpx.get(process.url + "/metrics").status_code == 200
        marker.unlink()
        process.wait_for_status(200)
        assert stream(process, max_tokens=4)[0] == "abab"


def test_an_engine_that_dies_too_often_takes_the_server_with_it() -> None:
    with server("--die-after", "20", "--delay", "0.01", max_engine_restarts=1) as process:
        with httpx.stream("POST", process.url + "/v1/completions", json={"prompt": "ab", "max_tokens": 500, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert "exit code 4" in json.loads(lines[-2][6:])["error"]["message"] and lines[-1] == "data: [DONE]"
        assert process.wait() == 1
        assert "engine has died" in process.log[-1]


def test_a_request_that_kills_the_engine_ends_alone() -> None:
    with server("--poison", "x", "--delay", "0.01") as process, ThreadPoolExecutor(4) as pool:
        begun = threading.Barrier(5)
        good = [pool.submit(stream, process, begun, max_tokens=400) for _ in range(4)]
        begun.wait(30)
        response = httpx.post(process.url + "/v1/completions", json={"prompt": "xy", "max_tokens": 100}, timeout=60)
        assert response.status_code == 500 and "died each time" in response.json()["error"]["message"]
        assert {answer.result()[0] for answer in good} == {"ab" * 200}
        process.wait_for_status(200)


def test_a_stopped_engine_is_unhealthy_until_it_goes_on() -> None:
    with server("--delay", "0.01", engine_stall_timeout=0.5) as process, ThreadPoolExecutor(1) as pool:
        begun = threading.Barrier(2)
        answer = pool.submit(stream, process, begun, max_tokens=200)
        begun.wait(30)
        engine = engine_pid(process)
        os.kill(engine, signal.SIGSTOP)
        assert process.wait_for_status(503).json()["status"] == "stuck"
        os.kill(engine, signal.SIGCONT)
        assert answer.result()[0] == "ab" * 100
        process.wait_for_status(200)
        assert engine_pid(process) == engine, "a stopped engine is not a dead one"
        os.kill(engine, signal.SIGSTOP)
        assert httpx.get(process.url + "/health").status_code == 200, "without work it owes no sign of life"
        os.kill(engine, signal.SIGCONT)


@pytest.mark.parametrize("stopped", [False, True])
def test_when_the_frontend_is_killed_its_engine_goes_too(stopped: bool) -> None:
    with server("--delay", "0.05") as process, ThreadPoolExecutor(1) as pool:
        begun = threading.Barrier(2)
        answer = pool.submit(stream, process, begun, max_tokens=500)
        begun.wait(30)
        engine = engine_pid(process)
        if stopped:
            os.kill(engine, signal.SIGSTOP)
        process.signal(signal.SIGKILL)
        try:
            if not stopped:  # the fake engine can't ask the kernel to be killed, as the real one does
                wait_gone(engine)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, signal.SIGCONT)
        wait_gone(engine)
        with pytest.raises(httpx.TransportError):
            answer.result()


def test_sigterm_lets_16_streams_end() -> None:
    with server("--delay", "0.01", shutdown_timeout=60) as process, ThreadPoolExecutor(16) as pool:
        begun = threading.Barrier(17)
        asked = [pool.submit(stream, process, begun, max_tokens=150 + i) for i in range(16)]
        begun.wait(30)
        process.signal(signal.SIGTERM)
        for i, answer in enumerate(asked):
            text, usage = answer.result()
            assert text == ("ab" * 100)[: 150 + i] and usage["completion_tokens"] == 150 + i
        assert process.wait() == 0


def request_bytes(**body) -> bytes:
    data = json.dumps({"prompt": "ab", "stream": True, "stream_options": {"include_usage": True}, **body}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(data) + data


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_slow_readers_cost_little_and_hold_nobody_up() -> None:
    """What they don't read is kept as one piece that grows to the end of the answer, and no further; nothing is lost."""
    num_slow, num_tokens = 60, 500
    with server() as process, contextlib.ExitStack() as stack:
        before = resident_bytes(process.process.pid)
        slow = []
        for _ in range(num_slow):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(60)
            connection.connect(("127.0.0.1", process.port))
            connection.sendall(request_bytes(max_tokens=num_tokens, logprobs=5))
            slow.append(connection)
        assert stream(process, max_tokens=50)[0] == "ab" * 25
        wait_until(lambda: live_requests(process.url) == 0, "the engine to finish what nobody reads")
        # Each holds 500 tokens with six logprobs as objects; what HTTP buffers besides is bounded by its own marks.
        assert resident_bytes(process.process.pid) - before < num_slow * 4 * 2**20
        for connection in slow:
            answer = b"".join(iter(lambda c=connection: c.recv(65536), b""))
            events = [json.loads(line[6:]) for line in re.findall(rb"^data: \{.*\}\r?$", answer, re.MULTILINE)]
            assert b"data: [DONE]" in answer
            assert "".join(choice["text"] for event in events for choice in event["choices"]) == "ab" * (num_tokens // 2)
            assert events[-1]["usage"]["completion_tokens"] == num_tokens
        process.wait_for_status(200)


@pytest.fixture
def crowded() -> Iterator[Process]:
    with server("--delay", "0.05", engine={"max_num_queued_reqs": 2}) as process:
        yield process


def test_a_full_server_says_so_and_stays_well(crowded: Process) -> None:
    """The fake engine takes 8 at once, 2 may wait."""
    with ThreadPoolExecutor(10) as pool:
        begun = threading.Barrier(11)
        asked = [pool.submit(stream, crowded, begun, max_tokens=100) for _ in range(10)]
        begun.wait(30)
        response = httpx.post(crowded.url + "/v1/completions", json={"prompt": "a", "stream": True})
        assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
        assert "full" in response.json()["error"]["message"]
        crowded.wait_for_status(200)
        assert httpx.get(crowded.url + "/metrics").status_code == 200
        assert {answer.result()[0] for answer in asked} == {"ab" * 50}
    assert stream(crowded, max_tokens=2)[0] == "ab"


def test_a_loop_that_is_held_up_is_noticed() -> None:
    async def main() -> LoopLag:
        lag = LoopLag()
        watcher = asyncio.create_task(watch_loop(lag, interval=0.01))
        await asyncio.sleep(0.02)
        time.sleep(0.2)
        await asyncio.sleep(0.02)
        watcher.cancel()
        return lag

    assert asyncio.run(main()).longest > 0.1


TINY_PARTS = {
    "lists": b'{"prompt": [' + b",".join([b"[]"] * 1_000_000) + b"]}",
    "objects": b'{"messages": [' + b",".join([b"{}"] * 200_000) + b"]}",
    "messages": b'{"messages": [' + b",".join([b'{"role":"user","content":"a"}'] * 100_000) + b"]}",
    "deep in a field": b'{"messages": [], "tools": [{"x": {"y": [' + b",".join([b"[]"] * 200_000) + b"]}}]}",
    "texts": b'{"prompt": [' + b",".join([b'"\\\\"'] * 300_000) + b"]}",
    "names": b'{"prompt": "a", "logit_bias": {' + b",".join([b'"%d":1' % i for i in range(200_000)]) + b"}}",
    "values": b'{"prompt": [' + b",".join([b"1"] * 1_200_000) + b"]}",
}


@pytest.mark.parametrize("name", TINY_PARTS)
def test_bodies_of_very_many_parts_are_refused_before_they_are_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would hold up the loop, and a thread would not help, for the decoder keeps the interpreter."""

    def refuse_to_decode(name: str, raw: object, decoder: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(body_module, "_field", refuse_to_decode)
    kind = ChatRequest if b"messages" in TINY_PARTS[name] else CompletionRequest
    with pytest.raises(InvalidRequestError, match=r"holds more than [0-9]+ (lists|texts|values)"):
        body_module.parse(TINY_PARTS[name], kind)


@pytest.mark.parametrize("fields", [b'"x":1', b'"x" : {"y":[]}', b'"n":null'])
def test_bodies_of_very_many_fields_are_refused_before_they_are_split(fields: bytes) -> None:
    """Unknown ones, too: the decoder compares every name with all that it knows."""
    body = b'{"messages": [], ' + b",".join([fields] * 401_000) + b"}"
    with pytest.raises(InvalidRequestError, match="more than 400000 fields"):
        body_module.parse(body, ChatRequest)
    in_text = body.replace(b'"', b"").decode()
    text = json.dumps({"messages": [{"role": "user", "content": in_text}]}).encode()
    assert body_module.parse(text, ChatRequest).messages[0].content == in_text


@pytest.mark.parametrize("escape", ["\\n", "\\u4e00", "\\ud83d\\ude00", "\\\\"])
def test_bodies_of_very_many_escapes_are_refused(escape: str) -> None:
    def body(number: int) -> bytes:
        return b'{"messages": [{"role": "user", "content": "' + (escape * number).encode() + b'"}]}'

    most = 1_000_000 // escape.count("\\")
    assert len(body_module.parse(body(most), ChatRequest).messages[0].content) == most
    with pytest.raises(InvalidRequestError, match="more than 1000000 backslashes"):
        body_module.parse(body(most + 1), ChatRequest)


@pytest.mark.parametrize("text", ["if (a[0]) { b: [1, 2], c: {} };", '"[{\\"', "\\", '"', '\\\\"[', ",,::"])
def test_marks_in_texts_are_no_parts(text: str) -> None:
    """Programs as prompts: longer than the part of a body that is looked at first."""
    long = text * 150_000
    body = json.dumps({"messages": [{"role": "user", "content": long}, {"role": "user", "content": text}], "user": "[" * 200_000})
    read = body_module.parse(body.encode(), ChatRequest)
    assert [message.content for message in read.messages] == [long, text]


def test_very_long_texts_are_refused_before_they_are_tokenised() -> None:
    """Also where their length in tokens doesn't matter, and whatever the tokenizer knows of its tokens' bytes."""

    async def body(h: Harness) -> None:
        tokenizer = h.app.state.server.text.tokenizer
        refused = mock.patch.object(type(tokenizer), "encode_batch", side_effect=AssertionError("tokenised"))
        with refused, mock.patch.object(tokenizer, "token_bytes", None):
            for path, fields in (
                ("/tokenize", {"prompt": "a" * (MAX_TEXT_CHARS + 1)}),
                ("/tokenize", {"messages": [{"role": "user", "content": "a" * (MAX_TEXT_CHARS + 1)}]}),
                ("/v1/completions", {"prompt": ["a" * (MAX_TEXT_CHARS // 2 + 1)] * 2, "truncate_prompt_tokens": 5}),
            ):
                response = await h.http.post(path, json=fields)
                assert str(MAX_TEXT_CHARS) in error_of(response, 400)["message"]

    with_harness(body, seconds=60, max_body_bytes=2 * MAX_TEXT_CHARS)


def test_long_tokens_to_text_and_back_in_a_thread() -> None:
    async def body(h: Harness) -> None:
        text, threads = "ab" * 10_000, []
        tokenizer = h.app.state.server.text.tokenizer
        plain = tokenizer.id_to_token

        def id_to_token(token_id: int) -> str | None:
            threads.append(threading.get_ident())
            return plain(token_id)

        with mock.patch.object(tokenizer, "id_to_token", id_to_token):
            answer = (await h.http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
        assert len(answer["token_strs"]) == answer["count"] == len(threads) and threading.get_ident() not in threads
        assert (await h.http.post("/detokenize", json={"tokens": answer["tokens"]})).json()["prompt"] == text

    with_harness(body, seconds=60)


def test_how_late_the_loop_was_is_a_metric() -> None:
    """Also under big bodies, which must not hold others up. The figure is printed; it is the machine's as well as ours."""
    with server() as process, ThreadPoolExecutor(4) as pool:
        text = "word and word " * 70_000
        bodies = [{"prompt": text}, {"prompt": [97] * 200_000}, {"prompt": ["a"] * 1000, "max_tokens": 1}, {"prompt": text, "echo": True}]
        answers = list(pool.map(lambda body: httpx.post(process.url + "/v1/completions", json=body, timeout=60), bodies))
        assert {answer.status_code for answer in answers} <= {200, 400, 503}
        wait_until(lambda: metric(process, "canter:event_loop_lag_seconds_count") > 10, "the watcher of the loop")
        print(f"the loop was at most {1000 * metric(process, 'canter:event_loop_lag_max_seconds'):.0f} ms late")
