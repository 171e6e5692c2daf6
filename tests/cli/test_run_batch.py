"""Files of requests: every line answered once, whatever is in it, and nothing held that grows with the file."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from canter.cli import run_batch
from canter.cli.batch import lines
from canter.cli.batch.lines import Line, encode_result, split_lines
from canter.cli.batch.output import Output
from canter.cli.batch.progress import Progress
from canter.cli.batch.remote import ServerCaller
from canter.cli.batch.runner import Runner
from canter.cli.batch.source import Source, read_ahead
from canter.core.errors import CanterError, ConfigError, EngineDeadError
from canter.core.messages import RequestDelta
from canter.server.args import ServerArgs
from canter.server.batch import Answer, AppCaller, batch_paths
from tests.fake_core import FakeCore
from tests.fakes import FAKE_ENGINE, model_folder
from tests.server.helpers import MODEL, Harness

ROOT = Path(__file__).resolve().parent.parent.parent
CHAT = "/v1/chat/completions"


def chat(custom_id: str, content: str = "hi", url: str = CHAT, **fields: Any) -> str:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 3, **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def answer(source: Source, output: Output, caller: Any, concurrency: int = 4) -> Progress:
    progress = Progress(None, len(output.done), io.StringIO())
    runner = Runner(caller, output.write, progress, concurrency, batch_paths())
    async with read_ahead(source) as portions:
        await runner.run(portions, output.done)
    return progress


def run(source: Path, target: Path, core: FakeCore | None = None, **server: Any) -> list[dict[str, Any]]:
    """Answer a file with the server's routes over a fake engine."""

    async def main() -> None:
        harness = Harness(core, **server)
        args = harness.app.state.server.server_args
        with Output(str(target)) as output:
            given = Source(str(source), args.max_body_bytes)
            given.check(output.done)
            await answer(given, output, AppCaller(harness.app, harness.engine, args))
            output.put_in_order()

    asyncio.run(asyncio.wait_for(main(), 60))
    return results(target)


def test_lines_are_answered_by_the_servers_routes(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    completion = {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "ab", "max_tokens": 2, "model": MODEL}}
    tokens = {"custom_id": "c", "url": "/tokenize", "body": {"prompt": "xy"}}
    source.write_text("\n".join([chat("a"), json.dumps(completion), "", "  ", json.dumps(tokens)]))
    first, second, third = run(source, tmp_path / "out.jsonl")
    assert [result["custom_id"] for result in (first, second, third)] == ["a", "b", "c"]
    assert [result["id"] for result in (first, second, third)] == ["batch_req_1", "batch_req_2", "batch_req_5"]
    assert all(result["error"] is None and result["response"]["status_code"] == 200 for result in (first, second, third))
    assert first["response"]["body"]["object"] == "chat.completion" and first["response"]["body"]["usage"]["completion_tokens"] == 3
    assert first["response"]["request_id"] in first["response"]["body"]["id"]
    assert second["response"]["body"]["choices"][0]["text"] == "ab" and third["response"]["body"]["tokens"] == [120, 121]


WRONG: list[tuple[str, str | None, int, str]] = [
    ("{", None, 400, "The line is not valid JSON"),
    ("[1]", None, 400, "The line must be a JSON object"),
    ("\x00\x01", None, 400, "not valid JSON"),
    ("[" * 60_000, None, 400, "The line must be a JSON object, got list"),
    ('{"custom_id": "x"', None, 400, "not valid JSON"),
    ('{"url": "/v1/completions", "body": {}}', None, 400, "custom_id is required"),
    ('{"custom_id": 7, "url": "/v1/completions", "body": {}}', None, 400, "custom_id: expected str"),
    ('{"custom_id": "\\ud800", "url": "/v1/completions", "body": {}}', None, 400, "not valid JSON"),
    ('{"custom_id": "x", "body": {}}', "x", 400, "url is required"),
    ('{"custom_id": "x", "url": "/v1/completions"}', "x", 400, "body is required"),
    ('{"custom_id": "x", "url": "/v1/completions", "body": [1]}', "x", 400, "must be a JSON object"),
    ('{"custom_id": "x", "url": "/v1/completions", "body": "b"}', "x", 400, "must be a JSON object"),
    ('{"custom_id": "x", "url": "/v1/completions", "body": {}}', "x", 400, "prompt is required"),
    ('{"custom_id": "x", "url": "/v1/nonsense", "body": {}}', "x", 400, "url must be one of /v1/chat/completions"),
    ('{"custom_id": "x", "url": "/health", "body": {}}', "x", 400, "url must be one of"),
    ('{"custom_id": "x", "url": "http://h/v1/completions", "body": {}}', "x", 400, "url must be a path"),
    ('{"custom_id": "x", "url": 1, "body": {}}', "x", 400, "url: expected str"),
    ('{"custom_id": "x", "method": "GET", "url": "/v1/completions", "body": {}}', "x", 400, "method must be POST"),
    (chat("x", stream=True), "x", 400, "stream is not possible in a batch"),
    (chat("x", background=True), "x", 400, "background is not possible in a batch"),
    (chat("x", temperature=-1), "x", 400, "temperature"),
    (chat("x", model="other"), "x", 404, "does not exist"),
    (chat("x", "y" * 3000), "x", 413, "at most 2000"),
    ("z" * 200_000, None, 413, "longer than a request may be"),
]


def test_a_wrong_line_is_an_error_line_and_no_more(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join([chat("first"), *(line for line, *_ in WRONG), chat("last")]) + "\n")
    found = run(source, tmp_path / "out.jsonl", max_body_bytes=2000)
    assert len(found) == len(WRONG) + 2
    assert found[0]["error"] is None and found[-1]["error"] is None and found[-1]["custom_id"] == "last"
    for (line, custom_id, status, message), result in zip(WRONG, found[1:-1], strict=True):
        assert result["custom_id"] == custom_id, line[:100]
        assert result["response"]["status_code"] == status, (line[:100], result)
        assert message in result["response"]["body"]["error"]["message"], (line[:100], result)
        assert message in result["error"]["message"] and result["error"]["code"]


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + chat("bom").encode() + b"\r\n\xff\xfe\n" + b'{"custom_id": "\xff"}\n' + chat("end").encode())
    first, second, third, last = run(source, tmp_path / "out.jsonl")
    assert (first["custom_id"], last["custom_id"]) == ("bom", "end") and first["error"] is None and last["error"] is None
    assert second["response"]["status_code"] == third["response"]["status_code"] == 400


def test_ids_that_are_the_same_are_answered_each(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(chat("same", content) for content in "abcde"))
    found = run(source, tmp_path / "out.jsonl")
    assert [result["id"] for result in found] == [f"batch_req_{i}" for i in range(1, 6)]
    assert {result["custom_id"] for result in found} == {"same"}


def test_a_second_run_goes_on(tmp_path: Path) -> None:
    """Whatever was done in whatever order, a torn end included; duplicates and lines without an id too."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([*(chat(f"{i % 3}") for i in range(8)), "{", "}"]))
    whole = run(source, target)
    kept = [whole[i] for i in (4, 1, 8)]
    torn = json.dumps(whole[5], separators=(",", ":"))
    for end in ("", torn[:9], torn[:60], torn[:-1], torn):
        target.write_text("".join(json.dumps(result, separators=(",", ":")) + "\n" for result in kept) + end)
        core = FakeCore()
        again = run(source, target, core)
        assert len(core.seen) == 6, end
        assert [result["id"] for result in again] == [result["id"] for result in whole]
        assert [result["custom_id"] for result in again] == [result["custom_id"] for result in whole]
        assert again[4] == whole[4] and again[1] == whole[1] and again[8] == whole[8]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id":"batch_req_1","custom_id":"other"}\n', "line 1 had another custom_id"),
        ('{"id":"batch_req_1","custom_id":null}\n', "line 1 had another custom_id"),
        ('{"id":"batch_req_9","custom_id":"a"}\n', "lines that the input does not have"),
        ('{"id":"vllm-123","custom_id":"a"}\n', "no result of canter run-batch"),
        ('{"id":"batch_req_x","custom_id":"a"}\n', "no result of canter run-batch"),
        ("notes of mine\n", "no result of canter run-batch"),
        ("notes of mine, unfinished", "no result of canter run-batch"),
        ('{"id":"batch_req_1","custom_id":"a"}\n\n', "no result of canter run-batch"),
    ],
)
def test_a_file_that_is_not_of_this_batch_is_left_alone(tmp_path: Path, text: str, message: str) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(chat("a"))
    target.write_text(text)
    with pytest.raises(ConfigError, match=message):
        run(source, target)
    assert target.read_text() == text


def test_two_runs_never_write_to_one_file(tmp_path: Path) -> None:
    with Output(str(tmp_path / "out.jsonl")), pytest.raises(ConfigError, match="Another run"):
        Output(str(tmp_path / "out.jsonl"))


def test_results_come_into_the_order_of_the_requests(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    wanted = [3, 1, 20, 2]
    path.write_bytes(b"".join(encode_result(n, f"id{n}", "r", Answer(200, b"{}")) for n in wanted))
    path.chmod(0o640)
    with Output(str(path)) as output:
        assert sorted(output.done) == sorted(wanted)
        output.put_in_order()
    assert [result["custom_id"] for result in results(path)] == ["id1", "id2", "id3", "id20"]
    assert path.stat().st_mode & 0o777 == 0o640 and list(tmp_path.iterdir()) == [path]


def test_lines_are_split_as_they_come() -> None:
    data = b"one\n\n  \ntwo\r\nthree"
    for step in (1, 2, 5, 100):
        file = io.BytesIO(data)
        found = [line for portion in split_lines(lambda size, file=file, step=step: file.read(min(size, step)), 100) for line in portion]
        assert found == [Line(1, b"one"), Line(4, b"two"), Line(5, b"three")]


def test_an_endless_line_is_never_held() -> None:
    left = 200

    def read(size: int) -> bytes:
        nonlocal left
        left -= 1
        return b"x" * size if left > 0 else b"\nnext" if left == 0 else b""

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = [line for portion in split_lines(read, 1000) for line in portion]
    assert found == [Line(1, None), Line(2, b"next")]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096  # KiB; the line has 13 MB


class Counting:
    """A caller that counts what is under way, and what it has been asked."""

    def __init__(self, answers: Callable[[int], Answer] = lambda _: Answer(200, b'{"ok":true}')) -> None:
        self.running = self.most = self.asked = 0
        self._answers = answers

    async def ask(self, path: str, body: bytes, request_id: str) -> Answer:
        self.running += 1
        self.asked += 1
        self.most = max(self.most, self.running)
        number = self.asked
        try:
            for _ in range(number % 5):
                await asyncio.sleep(0)
            return self._answers(number)
        finally:
            self.running -= 1


def drive(text: str, caller: Any, tmp_path: Path, concurrency: int = 4) -> list[dict[str, Any]]:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(text)

    async def main() -> None:
        with Output(str(target)) as output:
            await answer(Source(str(source), 10_000), output, caller, concurrency)

    asyncio.run(asyncio.wait_for(main(), 60))
    return results(target)


def test_concurrency_is_bounded(tmp_path: Path) -> None:
    caller = Counting()
    found = drive("\n".join(chat(str(i)) for i in range(50)), caller, tmp_path, concurrency=3)
    assert sorted(int(result["custom_id"]) for result in found) == list(range(50)) and caller.most == 3


def test_what_was_not_taken_in_is_asked_again(tmp_path: Path) -> None:
    full = Answer(503, b'{"error":{"message":"full","type":"ServiceUnavailableError"}}', retry_after=0.0)
    caller = Counting(lambda number: full if number % 3 == 1 else Answer(200, b"{}"))
    found = drive("\n".join(chat(str(i)) for i in range(10)), caller, tmp_path)
    assert len(found) == 10 and all(result["error"] is None for result in found) and caller.asked > 10


def test_a_full_engine_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's own refusal, with its Retry-After, through the app."""
    monkeypatch.setattr("canter.cli.batch.runner.LONGEST_RETRY_SECONDS", 0.01)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(chat(str(i)) for i in range(12)))

    async def main() -> None:
        harness = Harness()
        harness.engine.hub.max_live = 2
        with Output(str(target)) as output:
            await answer(Source(str(source), 10_000), output, AppCaller(harness.app, harness.engine, ServerArgs()), 6)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert [result["error"] for result in results(target)] == [None] * 12


def test_a_dead_engine_stops_the_batch_and_keeps_what_is_done(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(chat(str(i)) for i in range(20)))

    async def main() -> None:
        harness = Harness()
        caller = AppCaller(harness.app, harness.engine, ServerArgs())
        ask = caller.ask

        async def dying(path: str, body: bytes, request_id: str) -> Answer:
            if len(harness.engine.core.seen) >= 8:
                harness.engine.health = EngineDeadError("The engine has died.")
                harness.engine.core.refuse = EngineDeadError("The engine has died.")
            return await ask(path, body, request_id)

        caller.ask = dying  # type: ignore[method-assign]
        with Output(str(target)) as output:
            await answer(Source(str(source), 10_000), output, caller, 2)

    with pytest.raises(EngineDeadError):
        asyncio.run(asyncio.wait_for(main(), 60))
    found = results(target)
    assert 6 <= len(found) <= 8 and all(result["error"] is None for result in found)
    assert len(run(source, target)) == 20


def test_keys_of_the_environment_are_brought_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANTER_API_KEY", "secret")
    source = tmp_path / "in.jsonl"
    source.write_text(chat("a"))
    assert run(source, tmp_path / "out.jsonl")[0]["error"] is None


def test_a_disk_that_is_full_stops_the_batch(tmp_path: Path) -> None:
    caller = Counting()
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(chat(str(i)) for i in range(5)))

    async def main() -> None:
        with Output("/dev/full") as output:
            await answer(Source(str(source), 10_000), output, caller)

    with pytest.raises(CanterError, match="No space left"):
        asyncio.run(asyncio.wait_for(main(), 60))


def test_an_answer_of_a_foreign_server_stays_on_one_line(tmp_path: Path) -> None:
    answers = [Answer(200, b'{\n "a": 1\n}\n'), Answer(502, b"<html>\nBad gateway\n</html>"), Answer(200, b""), Answer(200, b"\xff")]
    found = drive("\n".join(chat(str(i)) for i in range(4)), Counting(lambda number: answers[number - 1]), tmp_path, concurrency=1)
    assert [result["response"]["body"] for result in found] == [{"a": 1}, "<html>\nBad gateway\n</html>", "", "\ufffd"]
    assert [result["error"] and result["error"]["code"] for result in found] == [None, "http_502", None, None]


def test_a_running_server_can_be_asked(tmp_path: Path) -> None:
    seen: list[httpx.Request] = []

    def serve(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if len(seen) == 2:
            return httpx.Response(429, headers={"Retry-After": "0"}, json={"error": {"message": "slow down"}})
        return httpx.Response(200, json={"path": request.url.path})

    async def main() -> None:
        async with ServerCaller("http://localhost:1/v1", "key", 4, httpx.MockTransport(serve)) as caller:
            with Output(str(tmp_path / "out.jsonl")) as output:
                await answer(Source(str(tmp_path / "in.jsonl"), 10_000), output, caller, 1)

    (tmp_path / "in.jsonl").write_text("\n".join([chat("a"), chat("b"), "{"]))
    asyncio.run(asyncio.wait_for(main(), 60))
    found = results(tmp_path / "out.jsonl")
    assert [result["response"]["status_code"] for result in found] == [200, 200, 400] and len(seen) == 3
    assert found[0]["response"]["body"] == {"path": CHAT} and seen[0].headers["authorization"] == "Bearer key"


def test_a_server_that_is_not_there_stops_the_batch(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(chat("a"))
    words = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--url", "http://127.0.0.1:9/v1"]
    with pytest.raises(CanterError, match="Run again to go on"):
        run_batch.run(run_batch.build_parser().parse(words))


class Silent(io.StringIO):
    def isatty(self) -> bool:
        return False


def test_progress_without_a_terminal_is_a_line_now_and_then() -> None:
    out, now = Silent(), 0.0
    progress = Progress(100, 10, out, lambda: now)
    for i in range(60):
        now = i * 0.5
        progress.add(failed=i % 20 == 0)
    progress.close("results in out.jsonl")
    shown = out.getvalue().splitlines()
    assert shown[0] == "31 of 100 lines, 2 failed, 2.1 lines/s" and len(shown) == 3
    assert shown[-1] == "70 of 100 lines, 3 failed, 2.0 lines/s; results in out.jsonl"
    assert "\r" not in out.getvalue()


def test_progress_on_a_terminal_is_a_bar() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    progress = Progress(2, 1, out)
    progress.add(failed=True)
    progress.close("done")
    assert "100%" in out.getvalue() and "2 of 2 lines, 1 failed" in out.getvalue()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-i", "nope.jsonl", "-o", "out.jsonl"], "Can't read 'nope.jsonl'"),
        (["-i", ".", "-o", "out.jsonl"], "Can't read '.': a directory"),
        (["-i", "in.jsonl", "-o", "."], "Can't write to '.'"),
        (["-i", "in.jsonl", "-o", "in.jsonl"], "the same file"),
        (["-i", "in.jsonl", "-o", "out.jsonl.gz"], "compress the file when it is done"),
        (["-i", "in.jsonl", "-o", "no/such/folder"], "Can't write to 'no/such/folder'"),
        (["-i", "in.jsonl", "-o", "out.jsonl", "--url", "http://h", "--max-num-seqs", "4"], "leave out --max-num-seqs"),
        (["-i", "bad.gz", "-o", "out.jsonl"], "Can't read 'bad.gz'"),
        (["-i", "http://127.0.0.1:9/a.jsonl", "-o", "out.jsonl"], "Can't fetch"),
    ],
)
def test_mistakes_are_told_before_anything_loads(words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_batch, "served_app", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(chat("a"))
    (tmp_path / "bad.gz").write_bytes(b"no gzip")
    with pytest.raises(CanterError, match=message):
        run_batch.run(run_batch.build_parser().parse(words))


SCRIPT = f"""
import functools, sys
from canter.cli import main, run_batch
from canter.server.batch import served_app
run_batch.served_app = functools.partial(served_app, engine_command=({FAKE_ENGINE[0]!r}, {FAKE_ENGINE[1]!r}, *sys.argv[1].split()))
sys.exit(main.main(["run-batch", *sys.argv[2:]]))
"""


def command(engine: str, *words: str) -> list[str]:
    return [sys.executable, "-c", SCRIPT, engine, "--model", str(model_folder()), *words]


def test_the_whole_command_between_pipes() -> None:
    text = "\n".join([chat("a"), "nonsense", chat("b")])
    done = subprocess.run(command("", "-i", "-", "-o", "-"), cwd=ROOT, input=text, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda result: str(result["id"]))
    assert [result["response"]["status_code"] for result in found] == [200, 400, 200]
    assert "3 lines, 1 failed" in done.stderr


def test_answers_come_while_the_input_is_still_open(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("", "-i", "-", "-o", "-"), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    for name in ("a", "b"):
        process.stdin.write(chat(name) + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["custom_id"] == name
    process.send_signal(signal.SIGTERM)  # while the reader waits for a line that does not come
    assert process.wait(30) == 128 + signal.SIGTERM
    process.stdin.close()
    process.stdout.close()


def test_an_interrupt_keeps_what_is_done_and_a_second_run_ends_it(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl"
    source.write_bytes(gzip.compress("\n".join(chat(str(i), max_tokens=1 + i % 7) for i in range(300)).encode()))
    words = ("-i", str(source), "-o", str(target), "--max-concurrency", "4")
    process = subprocess.Popen(command("--delay 0.01", *words), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while process.poll() is None and (not target.exists() or target.read_bytes().count(b"\n") < 20) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 130 and "run again to go on" in log and "Traceback" not in log
    kept = {line: json.loads(line)["id"] for line in target.read_text().splitlines()}
    assert 20 <= len(kept) < 300 and len(set(kept.values())) == len(kept)
    again = subprocess.run(command("", *words), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0 and f"{300:,} of 300 lines" in again.stderr
    whole = target.read_text().splitlines()
    assert [json.loads(line)["id"] for line in whole] == [f"batch_req_{i}" for i in range(1, 301)]
    assert set(kept) <= set(whole)
    third = subprocess.run(command("", *words), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert third.returncode == 0 and "all 300 lines already" in third.stderr


def test_an_engine_that_dies_is_one_sentence(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(chat(str(i)) for i in range(50)))
    words = ("-i", str(source), "-o", str(target), "--max-concurrency", "2")
    done = subprocess.run(command("--die-after 20", *words), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "canter run-batch: The engine process ended" in done.stderr and "Traceback" not in done.stderr
    found = results(target)
    assert 0 < len(found) < 50 and all(result["error"] is None for result in found)
    failed = subprocess.run(command("--fail sorry", *words), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert failed.returncode == 1 and "canter run-batch: sorry" in failed.stderr


@pytest.fixture
def web() -> Iterator[tuple[str, dict[str, bytes]]]:
    """A server of files: GET what is there, PUT what shall be."""
    files: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in files else 404)
            self.end_headers()
            self.wfile.write(files.get(self.path, b""))

        def do_PUT(self) -> None:
            if self.path == "/no":
                self.send_response(403)
            else:
                files[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", files
    server.shutdown()
    thread.join()
    server.server_close()


def test_files_of_the_web(web: tuple[str, dict[str, bytes]], tmp_path: Path) -> None:
    root, files = web
    files["/in.jsonl"] = chat("a").encode()
    words = ("-i", f"{root}/in.jsonl", "--output-tmp-dir", str(tmp_path))
    done = subprocess.run(command("", *words, "-o", f"{root}/out.jsonl"), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(files["/out.jsonl"])["custom_id"] == "a" and not list(tmp_path.iterdir())
    refused = subprocess.run(command("", *words, "-o", f"{root}/no"), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 1 and "Can't send the results" in refused.stderr
    (kept,) = tmp_path.iterdir()
    assert str(kept) in refused.stderr and results(kept)[0]["custom_id"] == "a"


class Forgetful(FakeCore):
    """A fake engine that remembers nothing of a request that has ended."""

    def step(self) -> list[RequestDelta]:
        deltas = super().step()
        self.seen.clear()
        for delta in deltas:
            if delta.finish_reason is not None:
                for table in (self._tokens, self._times, self._counts):
                    table.pop(delta.request_id, None)
        return deltas


@pytest.mark.slow
def test_memory_is_flat_on_a_hundred_thousand_lines(tmp_path: Path) -> None:
    """Through the routes and a fake engine: what the first lines have taken is all."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with open(source, "w") as file:
        for i in range(100_000):
            file.write(chat(f"request-{i}", f"{i} " + "x" * 100, max_tokens=2) + "\n")

    resident: list[int] = []

    def kilobytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024

    async def main() -> None:
        harness = Harness(Forgetful())
        caller = AppCaller(harness.app, harness.engine, ServerArgs())
        ask = caller.ask

        async def watched(path: str, body: bytes, request_id: str) -> Answer:
            if int(request_id[-2:], 16) == 0:
                resident.append(kilobytes())
            return await ask(path, body, request_id)

        caller.ask = watched  # type: ignore[method-assign]
        with Output(str(target)) as output:
            await answer(Source(str(source), 10_000), output, caller, 16)
            output.put_in_order()

    asyncio.run(main())
    assert len(resident) > 100
    early, late = max(resident[: len(resident) // 10]), max(resident)
    assert late - early < 8 * 1024, (early, late)
    with open(target) as file:
        for i, line in enumerate(file, 1):
            assert line.startswith(f'{{"id":"{lines.ID_PREFIX}{i}","custom_id":"request-{i - 1}"')
    assert i == 100_000
