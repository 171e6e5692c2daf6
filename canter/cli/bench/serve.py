"""`canter bench serve`: load on a server that speaks the OpenAI API, and what its users would see."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from tqdm.auto import tqdm

from canter.checkpoint.resolve import resolve
from canter.cli.api import LOOPBACK, ApiClient, ServerError, api_root, error_text, event_of, piece_of
from canter.cli.args import Parser, add_number, number_from
from canter.cli.bench.limits import limit_of
from canter.cli.bench.prompts import random_prompts
from canter.cli.bench.report import Report, add_report_flags, percentile_table, summary
from canter.core.config import QUANTIZATIONS

EXAMPLES = """\
  canter bench serve --url http://localhost:8000/v1                           64 requests at once
  canter bench serve --request-rate 2 --num-prompts 100                       a new request every half second on average
  canter bench serve --max-concurrency 8 --random-input-len 512               eight users, each asking when answered
  canter bench serve --shared-prefix-len 1024 --random-input-len 16 --json serve.json
"""

WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
    "be",
    "this",
    "from",
    "have",
    "or",
)


def build_parser() -> Parser:
    text = "Send requests to a running server and measure TTFT, TPOT, ITL and E2EL. Works with any server that has the OpenAI API."
    parser = Parser("canter bench serve", text, EXAMPLES)
    group = parser.add_argument_group("server")
    group.add_argument("--url", "--base-url", default="http://localhost:8000/v1", help="API root. Default: http://localhost:8000/v1.")
    group.add_argument("--api-key", help="Default: the environment variable OPENAI_API_KEY.")
    group.add_argument("--model", metavar="NAME", help="Default: the server's first.")
    group.add_argument(
        "--backend",
        choices=("openai", "openai-chat"),
        default="openai",
        help="openai: /completions with token ids, so lengths are exact; openai-chat: /chat/completions with as many words.",
    )
    _add_load_flags(parser)
    group = parser.add_argument_group("limit")
    group.add_argument("--weights", metavar="MODEL", help="The served model's files on this machine: speeds then stand beside its limit.")
    group.add_argument(
        "--weights-dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16"),
        help="Type the server holds them in. Default: float32.",
    )
    group.add_argument(
        "--weights-quantization",
        default="auto",
        choices=QUANTIZATIONS,
        help="Form the server computes them in, as its --quantization. Default: auto, that of the files.",
    )
    add_report_flags(parser)
    return parser


def _add_load_flags(parser: Parser) -> None:
    group = parser.add_argument_group("load")
    add_number(group, "--num-prompts", default=64, doc="Requests.", least=1)
    add_number(group, "--request-rate", default=float("inf"), doc="New requests a second, at random; inf: all at once.", least=0.001)
    group.add_argument("--max-concurrency", type=number_from(int, 1), metavar="N", help="Most requests at once. Default: no limit.")
    add_number(group, "--num-warmups", default=1, doc="Requests before the clock starts.")
    add_number(group, "--random-input-len", default=128, doc="Tokens of a prompt that are its own.", least=1)
    add_number(group, "--random-output-len", default=128, doc="Tokens of an answer.", least=1)
    add_number(group, "--shared-prefix-len", "--random-prefix-len", default=0, doc="Tokens that all prompts begin with.")
    add_number(group, "--temperature", default=0.0, doc="Randomness of the answers.")
    group.add_argument("--no-ignore-eos", action="store_true", help="Let answers end early; needed for servers that don't know ignore_eos.")
    add_number(group, "--seed", default=0, doc="Prompts and arrival times follow from it.")
    group.add_argument("--metric-percentiles", type=percentile_list, default=[50.0, 90.0, 99.0], metavar="LIST", help="Default: 50,90,99.")


def percentile_list(text: str) -> list[float]:
    """The value of a flag such as 50,90,99."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 <= value <= 100 for value in values):
        raise ArgumentTypeError(f"expected numbers from 0 to 100 such as 50,90,99, got {text!r}")
    return values


@dataclass
class Result:
    """One request: times in seconds since it was sent. `gaps` are the times between chunks."""

    sent: float
    ttft: float = 0.0
    latency: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_output: int = 0
    error: str | None = None

    @property
    def tpot(self) -> float:
        """Seconds a token after the first."""
        return (self.latency - self.ttft) / (self.num_output - 1)


@dataclass(frozen=True)
class Target:
    """Where and what to ask."""

    url: str
    path: str
    headers: dict[str, str]
    bodies: list[dict[str, Any]]


def run(namespace: Namespace) -> int:
    if namespace.weights:
        resolve(namespace.weights)  # a wrong name should not be told of after the load
    model = namespace.model
    if model is None:
        with ApiClient(namespace.url, namespace.api_key) as client:
            model = client.first_model()
    target = make_target(namespace, model)
    results, seconds = asyncio.run(drive(namespace, target))
    report(namespace, model, results, seconds)
    return 0 if all(result.error is None for result in results) else 1


def make_target(namespace: Namespace, model: str) -> Target:
    """The requests of the run; the first `num_warmups` have prompts of their own."""
    key = namespace.api_key or os.environ.get("OPENAI_API_KEY")
    warm_up = random_prompts(namespace.num_warmups, namespace.random_input_len, namespace.seed + 1)
    prompts = random_prompts(namespace.num_prompts, namespace.random_input_len, namespace.seed, namespace.shared_prefix_len)
    common: dict[str, Any] = {
        "model": model,
        "max_tokens": namespace.random_output_len,
        "temperature": namespace.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if not namespace.no_ignore_eos:
        common["ignore_eos"] = True
    chat = namespace.backend == "openai-chat"
    bodies = [common | ({"messages": [{"role": "user", "content": words(ids)}]} if chat else {"prompt": ids}) for ids in warm_up + prompts]
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return Target(api_root(namespace.url), "/chat/completions" if chat else "/completions", headers, bodies)


def words(token_ids: list[int]) -> str:
    """Text of as many common words: the same ids give the same words."""
    return " ".join(WORDS[token_id % len(WORDS)] for token_id in token_ids)


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which requests start: a Poisson process, or all at once."""
    rng, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(now)
        now += 0.0 if rate == float("inf") else rng.expovariate(rate)
    return times


async def drive(namespace: Namespace, target: Target, transport: httpx.AsyncBaseTransport | None = None) -> tuple[list[Result], float]:
    """Send every request at its time. Returns what came of each, and the seconds from the first to the last answer."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(None, connect=30.0)
    warm_up, bodies = target.bodies[: namespace.num_warmups], target.bodies[namespace.num_warmups :]
    gate = asyncio.Semaphore(namespace.max_concurrency or max(len(bodies), 1))
    remote = httpx.URL(target.url).host not in LOOPBACK
    async with httpx.AsyncClient(headers=target.headers, limits=limits, timeout=timeout, transport=transport, trust_env=remote) as http:
        for body in warm_up:
            first = await ask(http, target, body)
            if first.error is not None:
                raise ServerError(first.error)
        start = time.perf_counter()
        with tqdm(total=len(bodies), desc="Requests", dynamic_ncols=True) as bar:

            async def one(at: float, body: dict[str, Any]) -> Result:
                await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
                async with gate:
                    result = await ask(http, target, body)
                bar.update(1)
                return result

            times = arrivals(len(bodies), namespace.request_rate, namespace.seed)
            results = await asyncio.gather(*(one(at, body) for at, body in zip(times, bodies, strict=True)))
        return list(results), time.perf_counter() - start


async def ask(http: httpx.AsyncClient, target: Target, body: dict[str, Any], clock: Callable[[], float] = time.perf_counter) -> Result:
    """Send one request and time its stream. An error becomes part of the result: a load test goes on."""
    result = Result(clock())
    last = 0.0
    try:
        async with http.stream("POST", target.url + target.path, json=body) as response:
            if response.is_error:
                await response.aread()
                result.error = error_text(response)
                return result
            async for line in response.aiter_lines():
                event = event_of(line)
                if event is None:
                    continue
                piece, now = piece_of(event), clock() - result.sent
                result.num_prompt = piece.num_prompt_tokens or result.num_prompt
                result.num_output = piece.num_output_tokens or result.num_output
                if event.get("choices"):
                    result.latency = now
                if piece.text or piece.thought:
                    if last:
                        result.gaps.append(now - last)
                    else:
                        result.ttft = now
                    last = now
    except (httpx.HTTPError, ServerError, json.JSONDecodeError) as error:
        result.error = str(error) or type(error).__name__
    if result.error is None and not result.num_output:
        result.error = "The answer told of no tokens."
    # Tokens without a text of their own, to the last one, are first seen at the end.
    result.ttft = result.ttft or result.latency
    return result


def report(namespace: Namespace, model: str, results: list[Result], seconds: float) -> None:
    """Print and write what the run showed."""
    good = [result for result in results if result.error is None]
    percentiles = namespace.metric_percentiles
    made = Report("serve", {"model": model, "num_prompts": namespace.num_prompts, "duration": seconds})
    made.add("successful requests", len(good), "", "completed")
    made.add("failed requests", len(results) - len(good), "", "failed")
    made.add("duration", seconds, "s", "duration")
    made.add("prompt", sum(r.num_prompt for r in good), "tokens", "total_input_tokens")
    made.add("output", sum(r.num_output for r in good), "tokens", "total_output_tokens")
    made.add("requests", len(good) / seconds, "requests/s", "request_throughput")
    made.add("output", sum(r.num_output for r in good) / seconds, "tokens/s", "output_throughput")
    made.add("prompt and output", sum(r.num_prompt + r.num_output for r in good) / seconds, "tokens/s", "total_token_throughput")
    metrics = {
        "TTFT": [r.ttft for r in good],
        "TPOT": [r.tpot for r in good if r.num_output > 1],
        "ITL": [gap for r in good for gap in r.gaps],
        "E2EL": [r.latency for r in good],
    }
    add_decoding(made, namespace, metrics["TPOT"])
    for name, values in metrics.items():
        for statistic, value in summary(values, percentiles).items():
            made.data[f"{_spelt(statistic)}_{name.lower()}_ms"] = value * 1000
    made.data["errors"] = sorted({r.error for r in results if r.error is not None})
    made.finish(namespace.json)
    print("\n" + percentile_table(metrics, percentiles))
    for error in made.data["errors"]:
        print(f"! {error}")


def add_decoding(made: Report, namespace: Namespace, tpots: list[float]) -> None:
    """Decoding of one request, beside the limit when the weights are known."""
    limit = None
    if namespace.weights:
        limit = limit_of(namespace.weights, namespace.weights_dtype, quantization=namespace.weights_quantization)
    tpot = summary(tpots)["p50"]
    if tpot > 0:
        made.add("decode, each request", 1 / tpot, "tokens/s", "decode_tokens_s_each", limit.fraction(1 / tpot) if limit else None)
    made.add_limit(limit, "name the model's files with --weights to see it")


def _spelt(statistic: str) -> str:
    """vLLM's name of a statistic in result files."""
    return {"p50": "median"}.get(statistic, statistic)
