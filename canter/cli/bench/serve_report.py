"""What a load test shows: the figures, percentile tables, and files under vLLM's names."""

from __future__ import annotations

import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from canter.cli.bench.http_stream import Result
from canter.cli.bench.limits import limit_of
from canter.cli.bench.load import Outcome
from canter.cli.bench.report import Report, number
from canter.cli.table import table

METRICS = ("ttft", "tpot", "itl", "e2el")
BUSY = 0.7
"""The part of a core from which on the client's own work shows in the figures."""
NUM_ERRORS = 5


def report(namespace: Namespace, model: str, outcome: Outcome) -> None:
    """Print and write what the run showed."""
    good = [result for result in outcome.results if result.error is None]
    seconds, failed = outcome.seconds, len(outcome.results) - len(good)
    made = Report("serve", {"model": model, "backend": namespace.backend, "dataset": namespace.dataset_name, **facts(namespace)})
    made.add("successful requests", len(good), "", "completed")
    made.add("failed requests", failed, "", "failed")
    made.add("duration", seconds, "s", "duration")
    prompt_tokens, output_tokens = sum(r.num_prompt or 0 for r in good), sum(r.output_tokens for r in good)
    made.add("prompt", prompt_tokens, "tokens", "total_input_tokens")
    made.add("output", output_tokens, "tokens", "total_output_tokens")
    made.add("requests", len(good) / seconds, "requests/s", "request_throughput")
    metrics = metrics_of(good)
    if namespace.goodput:
        made.add("requests within the goals", num_good(good, namespace.goodput) / seconds, "requests/s", "request_goodput")
    made.add("output", output_tokens / seconds, "tokens/s", "output_throughput")
    made.add("prompt and output", (prompt_tokens + output_tokens) / seconds, "tokens/s", "total_token_throughput")
    made.add("requests at once, at most", outcome.peak_concurrency, "", "max_concurrent_requests")
    add_decoding(made, namespace, metrics["tpot"])
    add_counting(made, good)
    add_client(made, outcome)
    rows = [row for name in METRICS if (row := statistics(made, name, metrics[name], namespace))]
    errors = Counter(result.error for result in outcome.results if result.error is not None)
    made.data["errors"] = dict(errors.most_common())
    if namespace.save_detailed:
        made.data |= details(outcome.results)
    made.finish(namespace.json)
    save(made, namespace, model)
    header = ["ms", "mean", "median", "std", *(f"p{p:g}" for p in namespace.metric_percentiles if p != 50)]
    print("\n" + table(header, rows, numeric=True))
    for error, times in errors.most_common(NUM_ERRORS):
        print(f"! {times:,} times: {error}")
    if len(errors) > NUM_ERRORS:
        print(f"! and {len(errors) - NUM_ERRORS:,} other errors")
    if outcome.busy > BUSY:
        print(f"! The client was busy for {outcome.busy:.0%} of its time: the server may be faster than shown. Use more --num-clients.")


def facts(namespace: Namespace) -> dict[str, Any]:
    """What else is known of the run."""
    rate = namespace.request_rate
    known = {
        "label": namespace.label,
        "num_prompts": namespace.num_prompts,
        "request_rate": "inf" if rate == float("inf") else rate,  # JSON has no infinity
        "burstiness": namespace.burstiness,
        "max_concurrency": namespace.max_concurrency,
        "seed": namespace.seed,
        "goodput": {name: value * 1000 for name, value in namespace.goodput},
    }
    return known | dict(namespace.metadata)


def metrics_of(good: Sequence[Result]) -> dict[str, list[float]]:
    """Seconds of each metric: one a request, and one a gap between chunks for ITL."""
    return {
        "ttft": [r.ttft for r in good],
        "tpot": [r.tpot for r in good if r.output_tokens > 1],
        "itl": [gap for r in good for gap in r.gaps],
        "e2el": [r.latency for r in good],
    }


def num_good(good: Sequence[Result], goals: Sequence[tuple[str, float]]) -> int:
    """Requests that meet all goals. One token has no time per token, and meets that."""

    def meets(result: Result) -> bool:
        seen = {"ttft": result.ttft, "tpot": result.tpot if result.output_tokens > 1 else 0.0, "e2el": result.latency}
        return all(seen[name] <= value for name, value in goals)

    return sum(map(meets, good))


def statistics(made: Report, name: str, values: Sequence[float], namespace: Namespace) -> list[str] | None:
    """Note a metric's figures under vLLM's names; the row to show, if it is to be shown."""
    milliseconds = np.array(values or [0.0]) * 1000
    found = {"mean": float(milliseconds.mean()), "median": float(np.median(milliseconds)), "std": float(milliseconds.std())}
    found |= {f"p{p:g}": float(np.percentile(milliseconds, p)) for p in namespace.metric_percentiles if p != 50}
    made.data |= {f"{statistic}_{name}_ms": value for statistic, value in found.items()}
    return [name.upper(), *map(number, found.values())] if name in namespace.percentile_metrics else None


def add_decoding(made: Report, namespace: Namespace, tpots: list[float]) -> None:
    """Decoding of one request, beside the limit when the weights are known."""
    limit = None
    if namespace.weights:
        limit = limit_of(namespace.weights, namespace.weights_dtype, quantization=namespace.weights_quantization)
    tpot = float(np.median(tpots)) if tpots else 0.0
    if tpot > 0:
        made.add("decode, each request", 1 / tpot, "tokens/s", "decode_tokens_s_each", limit.fraction(1 / tpot) if limit else None)
    made.add_limit(limit, "name the model's files with --weights to see it")


def add_counting(made: Report, good: Sequence[Result]) -> None:
    """How tokens were counted, and how many a chunk had: ITL is the time between chunks."""
    counted = sum(r.num_output is not None for r in good)
    made.data["tokens_counted_by"] = how = "usage" if counted == len(good) else "chunks" if not counted else "usage and chunks"
    notes = {"chunks": "the server tells of no usage: tokens are chunks", "usage and chunks": "some answers told of no usage"}
    chunks = sum(r.num_chunks for r in good)
    if chunks:
        made.add("tokens a chunk", sum(r.output_tokens for r in good) / chunks, "", "tokens_per_chunk")
        made.rows[-1][-1] = notes.get(how, "as the server counts them")


def add_client(made: Report, outcome: Outcome) -> None:
    """What the measurement itself took."""
    chunks = sum(r.num_chunks for r in outcome.results)
    made.add("client", outcome.busy * 100, "% of a core", "client_busy_percent")
    if chunks:
        each = outcome.cpu_seconds / chunks * 1e6
        made.data["client_us_per_chunk"] = each
        made.rows[-1][-1] = f"{number(each)} µs a chunk" + (f", {outcome.num_clients} processes" if outcome.num_clients > 1 else "")


def details(results: Sequence[Result]) -> dict[str, list[Any]]:
    """Each request's own figures, in the order in which they were sent."""
    ordered = sorted(results, key=lambda result: result.sent)
    return {
        "start_times": [r.sent for r in ordered],
        "input_lens": [r.num_prompt for r in ordered],
        "output_lens": [r.output_tokens for r in ordered],
        "ttfts": [r.ttft for r in ordered],
        "itls": [r.gaps for r in ordered],
        "e2els": [r.latency for r in ordered],
        "error_of_each": [r.error for r in ordered],
    }


def save(made: Report, namespace: Namespace, model: str) -> None:
    """The files that --save-result and --append-result ask for."""
    if not (namespace.save_result or namespace.append_result):
        return
    rate = "inf" if namespace.request_rate == float("inf") else f"{namespace.request_rate:g}"
    at_once = f"-concurrency{namespace.max_concurrency}" if namespace.max_concurrency else ""
    made_name = f"{namespace.label or namespace.backend}-{rate}qps{at_once}-{Path(model).name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path = Path(namespace.result_dir) / (namespace.result_filename or made_name.replace("/", "-"))
    made.write(path, append=namespace.append_result)
    print(f"Written to {path}")
