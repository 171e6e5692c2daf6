"""What the frontend takes for each streamed token and each request: `python benchmarks/frontend.py [--json FILE] [--quick]
[--frontends N]`.

The whole server (sockets, HTTP, JSON, tokenizer, templates, the messages of the engine) before an engine that computes
nothing, and in the same run a bare uvicorn application that sends the same pieces: what no server built on it can beat.
Requests are chats with streamed answers. The processor's time is the server process's own, so that neither the engine nor
the client, each in a process of its own, counts: tokens/s a core is tokens over those seconds.

paced: every stream gets a token at each step of so many milliseconds, as from an engine that decodes a batch
flat: the engine doesn't wait; what comes faster than it can be sent goes out in larger chunks
requests: answers of one token

With `--frontends N` also the server of so many processes; its time is that of the parent and all frontends.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
import uvicorn
import zmq

from canter.cli.bench.load import Outcome, Plan, Target, run_plan
from canter.cli.bench.report import Report, number
from canter.cli.private_server import HOST, free_port
from canter.cli.table import table
from canter.core import messages
from canter.core.config import EngineArgs
from canter.core.messages import AbortRequests, AddRequest, EngineInfo, EngineStats, Outputs, Ready, RequestDelta, RequestTimes, Shutdown
from canter.server.args import ServerArgs
from canter.server.http_protocol import BoundedHttpProtocol
from canter.server.model_text import load_model_text
from canter.server.serve import run_server

TEXT = Path(__file__).resolve().parent.parent / "canter" / "cli" / "bench" / "perplexity.txt"
MODEL = "m"
START_SECONDS = 60.0
STOP_SECONDS = 20.0
PIECE_MS = 5.0
"""So slow that each token goes out by itself: the pieces of the bare application are of one token."""
HEAD = [(b"content-type", b"text/event-stream; charset=utf-8")]


@dataclass(frozen=True)
class Case:
    """One kind of load: streams at once, requests, tokens of an answer, milliseconds of a step (0: no wait)."""

    name: str
    streams: int
    requests: int
    tokens: int
    step_ms: float


CASES = (Case("paced", 64, 64, 400, 10.0), Case("flat", 64, 64, 400, 0.0), Case("requests", 32, 1500, 1, 0.0))
QUICK = (Case("paced", 8, 8, 20, 5.0), Case("flat", 8, 8, 20, 0.0), Case("requests", 4, 20, 1, 0.0))


@dataclass
class Measured:
    """A server under one load."""

    outcome: Outcome
    cpu_seconds: float

    @property
    def tokens(self) -> int:
        return sum(result.output_tokens for result in self.outcome.results)

    @property
    def chunks(self) -> int:
        return sum(result.num_chunks for result in self.outcome.results)


def run_engine(step_ms: float) -> int:
    """The engine's side of the protocol: at each step the next token of a text for every request."""
    start = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_exit_with_frontend, daemon=True).start()
    text = load_model_text(EngineArgs(**start["args"]))
    tokens = text.tokenizer.encode(TEXT.read_text(encoding="utf-8"), False)
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(start["address"])
    info = EngineInfo("fake", "Fake", text.tokenizer.vocab_size, 8192, "float32", "cpu", 16, 10**6, 10**7, 1024, 8192, True)
    socket.send(messages.encode(Ready(info)))
    live: dict[str, tuple[Iterator[int], AddRequest, list[float]]] = {}
    due = time.perf_counter()
    while True:
        while not live or socket.poll(0):
            message = messages.decode_frontend(socket.recv())
            if isinstance(message, Shutdown):
                return 0
            if isinstance(message, AddRequest):
                live[message.request_id] = (itertools.cycle(tokens), message, [time.time(), 0.0, 0.0])
            elif isinstance(message, AbortRequests):
                for request_id in message.request_ids:
                    live.pop(request_id, None)
        due = max(due + step_ms / 1000, time.perf_counter())
        time.sleep(max(0.0, due - time.perf_counter()))
        deltas = [_next(live, request_id) for request_id in list(live)]
        socket.send(messages.encode(Outputs(deltas, EngineStats(num_running=len(live), step_num_tokens=len(deltas)))))


def _next(live: dict[str, tuple[Iterator[int], AddRequest, list[float]]], request_id: str) -> RequestDelta:
    tokens, request, times = live[request_id]
    now = time.time()
    times[1] += 1
    times[2] = times[2] or now
    done = times[1] == request.sampling.max_tokens
    if done:
        del live[request_id]
    told = RequestTimes(times[0], times[0], times[2], now)
    return RequestDelta(request_id, [next(tokens)], "length" if done else None, times=told)


def _exit_with_frontend() -> None:
    while os.read(0, 1 << 16):
        continue
    os._exit(0)


def run_frontend(port: int, step_ms: float, profile: str | None, count: int) -> int:
    """The server as `canter serve` runs it, before the engine above."""
    command = (sys.executable, __file__, "--role", "engine", "--step-ms", str(step_ms))
    server = ServerArgs(host=HOST, port=port, served_model_name=[MODEL], disable_uvicorn_access_log=True, api_server_count=count)

    gc.freeze()  # as `canter serve` does

    def work() -> int:
        return run_server(EngineArgs(disable_log_stats=True), server, engine_command=command)

    if profile is None:
        return work()
    with cProfile.Profile() as profiler:
        status = work()
    profiler.dump_stats(profile)
    return status


def run_echo(port: int, step_ms: float, pieces_file: str, case: str) -> int:
    """A bare application: the same pieces at the same steps."""
    pieces = [piece.encode() for piece in json.loads(Path(pieces_file).read_text())[case]]
    steps: deque[asyncio.Future[None]] = deque()
    ticking: list[asyncio.Task[None]] = []

    async def tick() -> None:
        while True:
            await asyncio.sleep(step_ms / 1000)
            waiting = list(steps)
            steps.clear()
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    async def app(scope: dict[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        while (await receive()).get("more_body"):
            continue
        if not ticking:
            ticking.append(asyncio.create_task(tick()))
        await send({"type": "http.response.start", "status": 200, "headers": HEAD})
        for piece in pieces:
            future = asyncio.get_running_loop().create_future()
            steps.append(future)
            await future
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(
        app,
        host=HOST,
        port=port,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        http=BoundedHttpProtocol,
        server_header=False,
    )
    uvicorn.Server(config).run()
    return 0


@contextmanager
def server_process(*words: str) -> Iterator[tuple[str, int]]:
    """(address, process id) of a server of this file."""
    port = free_port()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, __file__, *words, "--port", str(port)], stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://{HOST}:{port}"
            deadline = time.monotonic() + START_SECONDS
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(f"The server did not start:\n{log.read().decode(errors='replace')[-3000:]}")
                time.sleep(0.05)
            yield url, process.pid
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def cpu_seconds(process_id: int) -> float:
    """Processor time of a server: its process, and its frontends where it has several, all threads; the engine's not."""
    return sum(map(_cpu_seconds_of, [process_id, *frontends_of(process_id)]))


def frontends_of(process_id: int) -> list[int]:
    """Frontend processes of a parent."""
    children = map(int, Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split())
    return [child for child in children if "canter.server.frontend" in Path(f"/proc/{child}/cmdline").read_text()]


def _cpu_seconds_of(process_id: int) -> float:
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wait_for_all(url: str, process_id: int, frontends: int) -> None:
    """Until as many answers in a row as make it likely that each frontend has given one."""
    good = 0
    deadline = time.monotonic() + START_SECONDS
    while good < 8 * frontends or len(frontends_of(process_id)) < frontends:
        good = good + 1 if _answers(url) else 0
        if time.monotonic() > deadline:
            raise SystemExit("The frontends did not start.")


def body_of(case: Case) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "Tell me of the mill and its two clocks."}],
        "max_tokens": case.tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def measure(url: str, process_id: int, case: Case) -> Measured:
    """Put the load on, and read the processor's time before and after."""
    body = json.dumps(body_of(case)).encode()
    target = Target(f"{url}/v1/chat/completions", {})
    run_plan(Plan(target, [body] * case.streams, [0.0] * case.streams))
    before = cpu_seconds(process_id)
    outcome = run_plan(Plan(target, [body] * case.requests, [0.0] * case.requests, case.streams))
    used = cpu_seconds(process_id) - before
    errors = {result.error for result in outcome.results if result.error}
    if errors:
        raise SystemExit(f"Requests failed: {errors}")
    return Measured(outcome, max(used, 1e-9))


def pieces_of(url: str, tokens: int) -> list[str]:
    """What the server sends for an answer of so many tokens, write by write: the first has the role too."""
    body = body_of(Case("", 1, 1, tokens, 0.0))
    text = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60.0, trust_env=False).text
    role, first, *others = [event + "\n\n" for event in text.split("\n\n") if event and "[DONE]" not in event]
    return [role + first, *others]


def compare(cases: tuple[Case, ...], profile: str | None, frontends: int) -> Report:
    """Every load on both servers."""
    report = Report("frontend", {"cases": {}})
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        pieces = Path(folder) / "pieces.json"
        with server_process("--role", "frontend", "--step-ms", str(PIECE_MS)) as (url, _):
            pieces.write_text(json.dumps({case.name: pieces_of(url, case.tokens) for case in cases}))
        for case in cases:
            extra = ["--profile", f"{profile}.{case.name}"] if profile else []
            found: dict[str, Measured] = {}
            with server_process("--role", "frontend", "--step-ms", str(case.step_ms), *extra) as (url, process_id):
                found["canter"] = measure(url, process_id, case)
            if frontends > 1:
                words = ["--role", "frontend", "--step-ms", str(case.step_ms), "--frontends", str(frontends)]
                with server_process(*words) as (url, process_id):
                    _wait_for_all(url, process_id, frontends)
                    found[f"canter ×{frontends}"] = measure(url, process_id, case)
            with server_process("--role", "echo", "--step-ms", str(case.step_ms), "--pieces", str(pieces), "--case", case.name) as (
                url,
                process_id,
            ):
                found["echo"] = measure(url, process_id, case)
            for name, measured in found.items():
                rows.append(_row(report, case, name, measured))
    header = ["load", "server", "tokens/s", "requests/s", "µs/token", "µs/request", "tokens/s a core", "tokens/chunk", "client µs/chunk"]
    print(table(header, rows))
    return report


def _row(report: Report, case: Case, name: str, measured: Measured) -> list[str]:
    outcome, tokens, requests = measured.outcome, measured.tokens, len(measured.outcome.results)
    figures = {
        "tokens_s": tokens / outcome.seconds,
        "requests_s": requests / outcome.seconds,
        "us_per_token": measured.cpu_seconds / tokens * 1e6,
        "us_per_request": measured.cpu_seconds / requests * 1e6,
        "tokens_s_per_core": tokens / measured.cpu_seconds,
        "tokens_per_chunk": tokens / max(measured.chunks, 1),
        "client_us_per_chunk": outcome.cpu_seconds / max(measured.chunks, 1) * 1e6,
    }
    report.data["cases"].setdefault(case.name, {})[name] = figures
    return [case.name, name, *map(number, figures.values())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="Also write the figures to this file.")
    parser.add_argument("--quick", action="store_true", help="A few tokens only: to see that it works.")
    parser.add_argument("--case", choices=[case.name for case in CASES], help="Only this load.")
    parser.add_argument("--frontends", type=int, default=1, metavar="N", help="Also a server of N frontend processes.")
    parser.add_argument("--profile", metavar="FILE", help="Write the server's cProfile to FILE.<load>; figures then mean little.")
    parser.add_argument("--role", choices=("frontend", "engine", "echo"), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--step-ms", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--pieces", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "engine":
        return run_engine(options.step_ms)
    if options.role == "frontend":
        return run_frontend(options.port, options.step_ms, options.profile, options.frontends)
    if options.role == "echo":
        return run_echo(options.port, options.step_ms, options.pieces, options.case)
    cases = tuple(case for case in (QUICK if options.quick else CASES) if options.case in (None, case.name))
    report = compare(cases, options.profile, options.frontends)
    if options.json:
        report.write(Path(options.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
