"""Sends requests at their times, from one process or several, and notes what came of each."""

from __future__ import annotations

import asyncio
import heapq
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

from canter.cli.api import ServerError
from canter.cli.bench.http_stream import Result, StreamClient

START_DELAY_SECONDS = 0.5
"""Time for all client processes to be there before the first request."""


@dataclass(frozen=True)
class Target:
    """Where requests go: the whole address, headers, and whether its certificate is checked."""

    url: str
    headers: dict[str, str]
    verify: bool = True


@dataclass(frozen=True)
class Plan:
    """Bodies and the seconds at which they are sent; at most `max_concurrency` are under way."""

    target: Target
    bodies: list[bytes]
    times: list[float]
    max_concurrency: int | None = None

    def part(self, number: int, count: int) -> Plan:
        """Every `count`-th request, for the process of this number."""
        most = self.max_concurrency
        share = None if most is None else most // count + (number < most % count)
        return replace(self, bodies=self.bodies[number::count], times=self.times[number::count], max_concurrency=share)


@dataclass
class Outcome:
    """What came of a plan: `seconds` from the first request to the last answer, `cpu_seconds` of the client."""

    results: list[Result] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    num_clients: int = 1

    @property
    def busy(self) -> float:
        """The part of its time that the busiest process may have worked: near 1, the client is what is measured."""
        return self.cpu_seconds / self.num_clients / self.seconds if self.seconds else 0.0

    @property
    def peak_concurrency(self) -> int:
        """Most requests that were under way at once."""
        now, peak, ends = 0, 0, list[float]()
        for result in sorted(self.results, key=lambda result: result.sent):
            while ends and ends[0] <= result.sent:
                heapq.heappop(ends)
                now -= 1
            heapq.heappush(ends, result.sent + result.latency)
            now += 1
            peak = max(peak, now)
        return peak


def arrivals(count: int, rate: float | Callable[[float], float], burstiness: float, seed: int) -> list[float]:
    """Seconds at which requests start. `rate`: a second, or what it is at each part (0 to 1) of them; infinite: all at once.

    The times between are of a gamma distribution: with a burstiness of 1 a Poisson process, below it in bursts, above it more even.
    """
    rng, now, times = random.Random(seed), 0.0, []
    for i in range(count):
        times.append(now)
        current = rate(i / max(count - 1, 1)) if callable(rate) else rate
        now += 0.0 if current == float("inf") else rng.gammavariate(burstiness, 1 / (current * burstiness))
    return times


def warm_up(target: Target, bodies: Sequence[bytes]) -> None:
    """Send requests one by one. Raises `ServerError` at the first that fails."""

    async def ask_each() -> None:
        client = StreamClient(target.url, target.headers, target.verify)
        try:
            for body in bodies:
                result = await client.ask(body)
                if result.error is not None:
                    raise ServerError(result.error)
        finally:
            await client.close()

    asyncio.run(ask_each())


def run_plan(plan: Plan, num_clients: int = 1, on_result: Callable[[Result], None] = lambda result: None) -> Outcome:
    """Carry a plan out. `on_result` hears of each result where one process does it, of none where several do."""
    if num_clients == 1:
        return asyncio.run(drive(plan, time.time(), on_result))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_clients, mp_context=context) as pool:
        list(pool.map(_ready, range(num_clients)))
        start = time.time() + START_DELAY_SECONDS
        outcomes = list(pool.map(_run_part, [(plan.part(i, num_clients), start) for i in range(num_clients)]))
    merged = Outcome(num_clients=num_clients)
    for outcome in outcomes:
        merged.results += outcome.results
        merged.cpu_seconds += outcome.cpu_seconds
        merged.seconds = max(merged.seconds, outcome.seconds)
    return merged


def _ready(number: int) -> int:
    """Makes a process import what it needs before the start."""
    return number


def _run_part(work: tuple[Plan, float]) -> Outcome:
    return asyncio.run(drive(*work))


async def drive(plan: Plan, start: float, on_result: Callable[[Result], None] = lambda result: None) -> Outcome:
    """Send every request at its time after `start` (`time.time()`). `sent` is counted from `start` in the results."""
    outcome = Outcome()
    origin = time.perf_counter() + start - time.time()
    client = StreamClient(plan.target.url, plan.target.headers, plan.target.verify, lambda: time.perf_counter() - origin)
    gate = asyncio.Semaphore(plan.max_concurrency or max(len(plan.bodies), 1))

    async def one(body: bytes) -> None:
        async with gate:
            result = await client.ask(body)
        outcome.results.append(result)
        on_result(result)

    try:
        await asyncio.sleep(max(0.0, origin - time.perf_counter()))
        cpu = time.process_time()
        async with asyncio.TaskGroup() as tasks:
            for at, body in zip(plan.times, plan.bodies, strict=True):
                wait = origin + at - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                tasks.create_task(one(body))
        outcome.seconds = time.perf_counter() - origin
        outcome.cpu_seconds = time.process_time() - cpu
    finally:
        await client.close()
    return outcome
