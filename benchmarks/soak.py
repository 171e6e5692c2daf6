"""A server under every kind of request for a long time: `python benchmarks/soak.py [--seconds N] [--concurrency N] [--json FILE]`.

So many workers send what `soak_requests.py` lists, one after another and mixed at random. A tenth is malformed and must get its
status, a tenth hangs up at a random moment; every other answer is checked. Meanwhile memory that no file backs, descriptors and
threads of frontend and engine are sampled. The run fails, with exit status 1, when

- an answer is wrong, an id comes twice, a request has no end, or a status is above 499;
- the log has an error, or the engine was restarted;
- at the end requests still run or wait, blocks of the cache are not free, or descriptors or tasks are left;
- memory grows. After the first quarter, in which caches fill, its slope is the median of those between all pairs of samples. It
  fails above `--max-slope` MB an hour, if that came to more than `--noise` MB within the run: less tells nothing in a short one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx

from benchmarks.soak_requests import KINDS, Kind, Session, WrongAnswer, malformed
from canter.cli.private_server import Server, private_server
from canter.cli.table import table
from tests.engines import add_letters, tiny_checkpoint

MALFORMED_SHARE = 0.1
HUNG_UP_SHARE = 0.1
SAMPLE_SECONDS = 1.0
END_SECONDS = 180.0
"""For the requests under way when the time is over: then those that are left have no end."""
IDLE_SECONDS = 20.0
"""For the server to come to rest after the last answer."""
FIRST_SECONDS = 1.0
"""A kind's time until one of it has ended."""
SPARE_DESCRIPTORS = 4
SPARE_TASKS = 4
MAX_PROBLEMS = 20
MAX_POINTS = 400
MB = 1e6
FLAGS = ("--kv-cache-memory-bytes", "96M", "--max-model-len", "2048", "--responses-store-size", "64", "--enable-dev-mode",
         "--enable-server-load-tracking", "--served-model-name", "soak", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3",
         "--structured-outputs-config", '{"enable_in_reasoning": true}')  # fmt: skip
FIGURES = ("seconds", "concurrency", "ids", "tokens", "preemptions", "prefix_hits", "blocks", "free_blocks", "descriptors_start",
           "descriptors_end", "tasks_start", "tasks_end", "loop_lag_max_ms")  # fmt: skip
_ERRORS = re.compile(r"\b(ERROR|CRITICAL|Traceback)\b|was never retrieved|was never awaited|Task was destroyed")
_PLAIN_FIGURE = re.compile(r"^([a-zA-Z_:]+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass
class Process:
    """What a process holds: megabytes that no file backs, open descriptors, threads."""

    mb: float
    descriptors: int
    threads: int


@dataclass
class Sample:
    """The server at one moment. `seconds` count from the beginning of the load."""

    seconds: float
    frontend: Process
    engine: Process
    under_way: float


@dataclass
class Tally:
    """What came of the requests of a run."""

    sent: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    hung_up: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    problems: list[str] = field(default_factory=list)

    def add_problem(self, problem: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)
            print(f"problem: {problem}", file=sys.stderr, flush=True)


class Load:
    """The workers, until the time is over."""

    def __init__(self, session: Session, seconds: float, concurrency: int, seed: int) -> None:
        self.tally = Tally()
        self.started = time.monotonic()
        self._session = session
        self._end = self.started + seconds
        self._concurrency = concurrency
        self._seed = seed

    async def run(self) -> None:
        """Send requests until the time is over, and wait for those under way."""
        workers = [asyncio.create_task(self._work(random.Random(self._seed * 1000 + i))) for i in range(self._concurrency)]
        _, left = await asyncio.wait(workers, timeout=self._end - time.monotonic() + END_SECONDS)
        for worker in left:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        if left:
            self.tally.add_problem(f"{len(left)} requests have no end {END_SECONDS:.0f} s after the time was over")
        for worker in set(workers) - left:
            if worker.exception() is not None:
                self.tally.add_problem(f"a worker failed: {worker.exception()!r}")

    async def _work(self, rng: random.Random) -> None:
        while time.monotonic() < self._end:
            chosen = rng.random()
            if chosen < MALFORMED_SHARE:
                await self._one(malformed, rng, None)
            else:
                kind = rng.choice(KINDS)
                await self._one(kind, rng, self._patience(kind, rng) if chosen < MALFORMED_SHARE + HUNG_UP_SHARE else None)

    def _patience(self, kind: Kind, rng: random.Random) -> float:
        """After how many seconds to hang up: at any moment of what such a request takes."""
        known = self.tally.seconds[kind.__name__][-20:]
        return rng.uniform(0.0, statistics.median(known) if known else FIRST_SECONDS)

    async def _one(self, kind: Kind, rng: random.Random, patience: float | None) -> None:
        name, tally, began = kind.__name__, self.tally, time.monotonic()
        tally.sent[name] += 1
        try:
            async with asyncio.timeout(patience):
                await kind(self._session, rng)
        except TimeoutError:
            tally.hung_up[name] += 1
        except (WrongAnswer, httpx.HTTPError, KeyError, ValueError, TypeError, IndexError) as error:
            tally.wrong[name] += 1
            tally.add_problem(f"{name}: {type(error).__name__}: {error}")
        else:
            tally.answered[name] += 1
            times = tally.seconds[name]
            times.append(time.monotonic() - began)
            del times[:-1000]


class Watch:
    """Samples of the server's processes."""

    def __init__(self, server: Server, http: httpx.AsyncClient, started: float) -> None:
        self.samples: list[Sample] = []
        self._server = server
        self._http = http
        self._started = started

    async def run(self) -> None:
        while True:
            await self.sample()
            await asyncio.sleep(SAMPLE_SECONDS)

    async def sample(self) -> Sample:
        load = (await self._http.get("/load")).json()["server_load"]
        frontend = self._server.process.pid
        sample = Sample(time.monotonic() - self._started, read_process(frontend), read_process(engine_of(frontend)), load)
        self.samples.append(sample)
        return sample


def engine_of(frontend: int) -> int:
    """The engine: of the frontend's children the largest, as others only clear up."""
    children = [int(child) for task in Path(f"/proc/{frontend}/task").iterdir() for child in (task / "children").read_text().split()]
    return max(children, key=lambda child: read_process(child).mb)


def read_process(process_id: int) -> Process:
    folder = Path(f"/proc/{process_id}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    kilobytes = sum(int(status[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    return Process(kilobytes * 1024 / MB, len(list((folder / "fd").iterdir())), int(status["Threads"]))


def slope(points: list[tuple[float, float]]) -> float:
    """Median of the slopes between all pairs of points: what a few outliers don't move. Many points are thinned out."""
    points = points[:: max(1, len(points) // MAX_POINTS)]
    pairs = [(y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(points) for x2, y2 in points[i + 1 :]]
    return statistics.median(pairs) if pairs else 0.0


def judge_memory(samples: list[Sample], max_slope: float, noise: float) -> tuple[dict[str, dict[str, float]], list[str]]:
    """(figures of each process, what is wrong with them). Samples of the first quarter don't count."""
    figures: dict[str, dict[str, float]] = {}
    problems = []
    later = [sample for sample in samples if sample.seconds >= samples[-1].seconds / 4]
    span = later[-1].seconds - later[0].seconds
    for name in ("frontend", "engine"):
        points = [(sample.seconds, getattr(sample, name).mb) for sample in later]
        per_hour = slope(points) * 3600
        growth = per_hour * span / 3600
        quarter, end = getattr(later[0], name), getattr(later[-1], name)
        figures[name] = {
            "mb_start": getattr(samples[0], name).mb,
            "mb_quarter": quarter.mb,
            "mb_end": end.mb,
            "mb_most": max(getattr(sample, name).mb for sample in samples),
            "mb_an_hour": per_hour,
            "mb_grown": growth,
            "descriptors_most": max(getattr(sample, name).descriptors for sample in samples),
            "threads_quarter": quarter.threads,
            "threads_end": end.threads,
        }
        if per_hour > max_slope and growth > noise:
            problems.append(f"the {name}'s memory grows by {per_hour:.0f} MB an hour, {growth:.1f} MB in {span:.0f} s")
    return figures, problems


async def figures_of(http: httpx.AsyncClient) -> dict[str, float]:
    """The metrics, those of several labels summed up."""
    found: dict[str, float] = defaultdict(float)
    for name, value in _PLAIN_FIGURE.findall((await http.get("/metrics")).text):
        found[name] += float(value)
    return dict(found)


async def come_to_rest(http: httpx.AsyncClient) -> tuple[dict[str, float], list[str]]:
    """(the metrics when nothing runs any more, what is still alive after all)."""
    end = time.monotonic() + IDLE_SECONDS
    while True:
        metrics = await figures_of(http)
        load = (await http.get("/load")).json()["server_load"]
        alive = {name: metrics[name] for name in ("vllm:num_requests_running", "vllm:num_requests_waiting") if metrics[name]}
        alive |= {"under way": load} if load else {}
        kept = metrics["canter:num_blocks"] - metrics["canter:num_free_blocks"]
        alive |= {"blocks that are not free": kept} if kept else {}
        if not alive or time.monotonic() > end:
            return metrics, [f"at the end: {name} {value:.0f}" for name, value in alive.items()]
        await asyncio.sleep(0.5)


async def soak(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """The run: load, rest, judgement."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=options.concurrency)
    async with httpx.AsyncClient(base_url=server.root, timeout=60.0, trust_env=False) as control:
        info = (await control.get("/server_info")).json()["engine"]
        before = read_process(server.process.pid).descriptors
        tasks = (await figures_of(control))["canter:event_loop_tasks"]
        async with httpx.AsyncClient(base_url=server.root, timeout=None, trust_env=False, limits=limits) as http:
            session = Session(http, "soak", info["max_model_len"], info["vocab_size"])
            load = Load(session, options.seconds, options.concurrency, options.seed)
            watch = Watch(server, control, load.started)
            watching = asyncio.create_task(watch.run())
            await load.run()
            watching.cancel()
            results = await asyncio.gather(watching, return_exceptions=True)
        seconds = time.monotonic() - load.started
        tally = load.tally
        if not isinstance(results[0], asyncio.CancelledError):
            tally.add_problem(f"the server's processes can't be watched: {results[0]!r}")
        metrics, alive = await come_to_rest(control)
        last = await watch.sample()
    memory, grown = judge_memory(watch.samples[:-1] or [last], options.max_slope, options.noise)
    problems = [*tally.problems, *alive, *grown]
    if last.frontend.descriptors > before + SPARE_DESCRIPTORS:
        problems.append(f"the frontend has {last.frontend.descriptors} descriptors at the end, {before} at the beginning")
    if metrics["canter:event_loop_tasks"] > tasks + SPARE_TASKS:
        problems.append(
            f"the frontend's event loop has {metrics['canter:event_loop_tasks']:.0f} tasks at the end, {tasks:.0f} at the beginning"
        )
    if metrics["canter:engine_restarts_total"]:
        problems.append(f"the engine was restarted {metrics['canter:engine_restarts_total']:.0f} times")
    problems += [f"the log: {line:.300}" for line in server.log_text().splitlines() if _ERRORS.search(line)][:MAX_PROBLEMS]
    return {
        "seconds": seconds,
        "concurrency": options.concurrency,
        "seed": options.seed,
        "kinds": {name: _kind_figures(tally, name) for name in sorted(tally.sent)},
        "ids": len(session.ids),
        "tokens": metrics["vllm:generation_tokens_total"],
        "preemptions": metrics["vllm:num_preemptions_total"],
        "prefix_hits": metrics["vllm:prefix_cache_hits_total"],
        "free_blocks": metrics["canter:num_free_blocks"],
        "blocks": metrics["canter:num_blocks"],
        "loop_lag_max_ms": metrics["canter:event_loop_lag_max_seconds"] * 1e3,
        "tasks_start": tasks,
        "tasks_end": metrics["canter:event_loop_tasks"],
        "descriptors_start": before,
        "descriptors_end": last.frontend.descriptors,
        "memory": memory,
        "samples": [asdict(sample) for sample in watch.samples],
        "problems": problems,
    }


def _kind_figures(tally: Tally, name: str) -> dict[str, float]:
    times = sorted(tally.seconds[name]) or [0.0]
    figures = {title: getattr(tally, title)[name] for title in ("sent", "answered", "hung_up", "wrong")}
    return figures | {"median_s": statistics.median(times), "most_s": times[-1]}


def show(result: dict[str, Any]) -> None:
    """The tables, and the verdict."""
    columns = ("sent", "answered", "hung_up", "wrong")
    rows = [
        [name, *(str(row[c]) for c in columns), f"{row['median_s']:.2f}", f"{row['most_s']:.2f}"] for name, row in result["kinds"].items()
    ]
    rows.append(["all", *(str(sum(row[c] for row in result["kinds"].values())) for c in columns), "", ""])
    print(table(["request", "sent", "answered", "hung up", "wrong", "median s", "most s"], rows, numeric=True))
    print()
    names = list(result["memory"]["frontend"])
    rows = [[name.replace("_", " "), *(f"{result['memory'][process][name]:.1f}" for process in ("frontend", "engine"))] for name in names]
    print(table(["process", "frontend", "engine"], rows, numeric=True))
    figures = {name: f"{result[name]:.0f}" for name in FIGURES}
    print()
    print(table(["run", "value"], [[name.replace("_", " "), value] for name, value in figures.items()], numeric=True))
    print("ok" if not result["problems"] else f"FAILED: {len(result['problems'])} problems")
    for problem in result["problems"]:
        print(f"- {problem}")


@contextmanager
def model_words(options: argparse.Namespace) -> Iterator[list[str]]:
    """The flags that name the model: the bundled one, or another, or one of a few kilobytes with random weights."""
    if not options.tiny:
        yield [options.model] if options.model else []
        return
    with tempfile.TemporaryDirectory() as folder:
        yield [str(add_letters(tiny_checkpoint(Path(folder), "llama"))), "--max-model-len", "256"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="A model in place of the bundled one.")
    parser.add_argument("--tiny", action="store_true", help="A tiny model with random weights: to see that it works.")
    parser.add_argument("--max-slope", type=float, default=40.0, metavar="MB", help="Most that memory may grow in an hour.")
    parser.add_argument("--noise", type=float, default=16.0, metavar="MB", help="Growth within the run that tells nothing.")
    parser.add_argument("--json", metavar="FILE", help="Also write everything, all samples too, to this file.")
    options = parser.parse_args()
    with model_words(options) as words, private_server([*words[:1], *FLAGS, *words[1:]]) as server:
        result = asyncio.run(soak(server, options))
        if result["problems"]:
            print(server.log_text()[-4000:], file=sys.stderr)
    show(result)
    if options.json:
        Path(options.json).write_text(json.dumps(result))
    return int(bool(result["problems"]))


if __name__ == "__main__":
    sys.exit(main())
