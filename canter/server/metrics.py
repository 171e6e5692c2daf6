"""Prometheus metrics under vLLM's names, labels and buckets, in a registry of their own.

Request figures are observed here, in the frontend, from the times that the engine sends; the engine's gauges and
counters are read from its last `EngineStats` when somebody asks.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, GCCollector, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from canter.client.outputs import RequestGroup, RequestState
from canter.core.logging import get_logger
from canter.core.messages import EngineInfo, EngineStats
from canter.server.access_log import AccessLog
from canter.server.auth import OPEN_PATHS

logger = get_logger(__name__)

LABELS = ("model_name", "engine")
ENGINE = "0"
COMPUTED, CACHED = PROMPT_SOURCES = ("local_compute", "local_cache_hit")
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")

LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
STEP_BUCKETS = (1, *(2**i for i in range(3, 15)))
CHOICE_BUCKETS = (1, 2, 5, 10, 20)
PARSE_MODES, PARSE_OUTCOMES = ("streaming", "non_streaming"), ("tool_call", "no_tool_call")
REQUEST_TYPES = ("chat_completions", "responses", "other")
PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)
NOT_LOAD = OPEN_PATHS | {"/load"}
HTTP_BUCKETS = (0.1, 0.5, 1)
HTTP_FINE_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)


def count_buckets(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 and so on, up to `largest`."""
    series = (digit * 10**power for power in range(20) for digit in (1, 2, 5))
    return tuple(takewhile(lambda value: value <= largest, series))


class Metrics:
    """A `RequestObserver` that keeps the figures. Those of requests exist from `engine_ready` on.

    `has_engine` False: the engine's own figures are another process's to show.
    """

    def __init__(self, model_name: str, has_engine: bool = True) -> None:
        self.registry = CollectorRegistry()
        self.engine = EngineFigures(model_name)
        self.http = HttpMetrics(self.registry)
        self._totals = Totals()
        self._model_name = model_name
        self.inter_token = Tally(TOKEN_BUCKETS)
        self.loop_lag = LoopLag()
        self._requests: RequestMetricSet | None = None
        refused = Counter("vllm:admission_rejections", "Requests refused.", ("model_name", "reason"), registry=self.registry)
        self._queue_full = refused.labels(model_name, "queue_full")
        parsed = Counter(
            "vllm:tool_call_parser_invocations",
            "Choices of whole answers, and pieces of streamed ones, that were read for tool calls.",
            ("model_name", "mode", "outcome", "request_type"),
            registry=self.registry,
        )
        kinds = itertools.product(PARSE_MODES, PARSE_OUTCOMES, REQUEST_TYPES)
        self._parsed = {kind: parsed.labels(model_name, *kind) for kind in kinds}
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.registry.register(_LiveCollector(self))
        if has_engine:
            self.registry.register(self.engine)

    @property
    def labels(self) -> tuple[str, str]:
        return self._model_name, ENGINE

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats

    @property
    def totals(self) -> Totals:
        return self._totals

    def engine_ready(self, info: EngineInfo) -> None:
        """The engine's limits are known: they shape buckets. Idempotent."""
        if self._requests is None:
            self.engine.info = info
            self._requests = RequestMetricSet(self.registry, self.labels, info.max_model_len)

    def expose(self) -> tuple[bytes, str]:
        """(text, content type) for a scrape."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def on_refused(self) -> None:
        """The queue had no room for a request."""
        self._queue_full.inc()

    def on_calls_read(self, request_type: str, is_streamed: bool, found: bool) -> None:
        """A choice, or a piece of a streamed one, was read for tool calls. `found`: it holds one, or a part of one."""
        self._parsed[PARSE_MODES[not is_streamed], PARSE_OUTCOMES[not found], request_type].inc()

    def on_step(self, stats: EngineStats) -> None:
        self.engine.on_step(stats)

    def on_engine_restart(self) -> None:
        self.engine.on_engine_restart()

    def on_tokens(self, state: RequestState, num_tokens: int, seconds: float | None, is_first: bool) -> None:
        self._totals.generation_tokens += num_tokens
        if is_first:
            self._totals.prompt_tokens += len(state.prompt_token_ids)
            if self._requests is not None:
                self._requests.observe_first_token(state, seconds)
        elif seconds is not None:
            self.inter_token.observe(seconds)

    def on_state_end(self, state: RequestState, now: float) -> None:
        if self._requests is not None:
            self._requests.observe_end(state, now)

    def on_group_end(self, group: RequestGroup) -> None:
        if self._requests is not None:
            self._requests.observe_group(group)


@dataclass(slots=True)
class Totals:
    """Tokens since the server started, for the log line."""

    prompt_tokens: int = 0
    generation_tokens: int = 0


class Tally:
    """Counts by bucket of what happens with every token: lighter than a `Histogram`, and written by the event loop alone."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, doc: str, labels: tuple[str, str]) -> Metric:
        """What a scrape shows of it."""
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        family = HistogramMetricFamily(name, doc, labels=LABELS)
        family.add_metric(labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        return family


class LoopLag:
    """How late the event loop came to what was due: nothing else can run while it is held up."""

    def __init__(self) -> None:
        self.tally = Tally(LAG_BUCKETS)
        self.longest = 0.0

    def observe(self, seconds: float) -> None:
        self.tally.observe(seconds)
        self.longest = max(self.longest, seconds)


class RequestMetricSet:
    """Counters and histograms of requests."""

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, str], max_model_len: int) -> None:
        self._registry = registry
        self._labels = labels
        lengths = count_buckets(max_model_len)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self.prompt_tokens_cached = self._counter("prompt_tokens_cached", "Prompt tokens taken from the prefix cache.")
        by_source = Counter(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.", (*LABELS, "source"), registry=registry
        )
        self.prompt_tokens_by_source = {source: by_source.labels(*labels, source) for source in PROMPT_SOURCES}
        success = Counter("vllm:request_success", "Requests ended.", (*LABELS, "finished_reason"), registry=registry)
        self.request_success = {reason: success.labels(*labels, reason) for reason in FINISH_REASONS}
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self.request_generation_tokens = self._histogram("request_generation_tokens", "Tokens generated for a request.", lengths)
        self.max_generation_tokens = self._histogram(
            "request_max_num_generation_tokens", "Most tokens generated for a choice of a request.", lengths
        )
        self.computed_prompt_tokens = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that no cache had.", lengths
        )
        self.params_n = self._histogram("request_params_n", "Choices asked for.", CHOICE_BUCKETS)
        self.params_max_tokens = self._histogram("request_params_max_tokens", "max_tokens asked for.", lengths)
        self.num_preemptions = self._histogram("request_num_preemptions", "Preemptions of a request.", PREEMPTION_BUCKETS)
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_BUCKETS)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "A request's mean time per token after the first.", TOKEN_BUCKETS
        )
        self.whole = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", LATENCY_BUCKETS)
        self.queue = self._histogram("request_queue_time_seconds", "Time in the waiting queue.", LATENCY_BUCKETS)
        self.inference = self._histogram("request_inference_time_seconds", "From first scheduled to the last token.", LATENCY_BUCKETS)
        self.prefill = self._histogram("request_prefill_time_seconds", "From first scheduled to the first token.", LATENCY_BUCKETS)
        self.decode = self._histogram("request_decode_time_seconds", "From the first token to the last.", LATENCY_BUCKETS)

    def observe_first_token(self, state: RequestState, seconds: float | None) -> None:
        self.prompt_tokens.inc(len(state.prompt_token_ids))
        self.prompt_tokens_cached.inc(state.num_cached_tokens)
        self.prompt_tokens_by_source[CACHED].inc(state.num_cached_tokens)
        self.prompt_tokens_by_source[COMPUTED].inc(max(0, len(state.prompt_token_ids) - state.num_cached_tokens))
        if seconds is not None:
            self.first_token.observe(seconds)

    def observe_end(self, state: RequestState, now: float) -> None:
        times = state.metrics
        self.request_success[state.finish_reason if state.finish_reason in FINISH_REASONS else "error"].inc()
        self.whole.observe(max(0.0, now - times.arrival_time))
        self.request_prompt_tokens.observe(len(state.prompt_token_ids))
        self.request_generation_tokens.observe(times.num_generation_tokens)
        self.computed_prompt_tokens.observe(max(0, len(state.prompt_token_ids) - state.num_cached_tokens))
        self.num_preemptions.observe(state.num_preemptions)
        if state.params.max_tokens is not None:
            self.params_max_tokens.observe(state.params.max_tokens)
        if times.scheduled_ts:
            self.queue.observe(max(0.0, times.scheduled_ts - times.queued_ts))
        if times.first_token_ts:
            decode = max(0.0, times.last_token_ts - times.first_token_ts)
            self.prefill.observe(max(0.0, times.first_token_ts - times.scheduled_ts))
            self.inference.observe(max(0.0, times.last_token_ts - times.scheduled_ts))
            self.decode.observe(decode)
            if times.num_generation_tokens > 1:
                self.per_token.observe(decode / (times.num_generation_tokens - 1))

    def observe_group(self, group: RequestGroup) -> None:
        self.params_n.observe(group.params.n)
        self.max_generation_tokens.observe(max(state.metrics.num_generation_tokens for state in group.states.values()))

    def _counter(self, name: str, doc: str) -> Counter:
        return Counter(f"vllm:{name}", doc, LABELS, registry=self._registry).labels(*self._labels)

    def _histogram(self, name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"vllm:{name}", doc, LABELS, buckets=buckets, registry=self._registry).labels(*self._labels)


class EngineFigures(Collector):
    """The engine's own figures, as it last told them."""

    def __init__(self, model_name: str) -> None:
        self.stats = EngineStats()
        self.info: EngineInfo | None = None
        self._labels = (model_name, ENGINE)
        self._step_tokens = Tally(STEP_BUCKETS)
        self._num_restarts = 0

    def on_step(self, stats: EngineStats) -> None:
        """The engine has finished a step."""
        self.stats = stats
        if stats.step_num_tokens:
            self._step_tokens.observe(stats.step_num_tokens)

    def on_engine_restart(self) -> None:
        """The engine has died and is started again."""
        self._num_restarts += 1

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats, info, labels = self.stats, self.info, self._labels
        untouched = info.num_blocks if info is not None and not stats.num_blocks else 0  # before the first step tells
        yield _gauge("vllm:num_requests_running", "Requests that run.", labels, stats.num_running)
        yield _gauge("vllm:num_requests_waiting", "Requests that wait.", labels, stats.num_waiting)
        yield self._waiting_by_reason(stats.num_waiting)
        yield _gauge("vllm:kv_cache_usage_perc", "Share of the cache's blocks in use, 0 to 1.", labels, stats.cache_usage)
        yield _gauge("canter:num_free_blocks", "Cache blocks that are free.", labels, stats.num_free_blocks or untouched)
        yield _gauge("canter:num_blocks", "Cache blocks.", labels, stats.num_blocks or untouched)
        yield _counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", labels, stats.prefix_queries)
        yield _counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", labels, stats.prefix_hits)
        yield _counter("vllm:num_preemptions", "Preemptions.", labels, stats.num_preemptions)
        yield self._step_tokens.family("vllm:iteration_tokens_total", "Tokens of a step.", labels)
        yield _counter(
            "canter:jump_ahead_tokens", "Tokens that a grammar forced, and no step was spent on.", labels, stats.num_accepted_drafts
        )
        yield _counter("canter:engine_restarts", "Restarts of the engine after it had died.", labels, self._num_restarts)
        if info is not None:
            yield self._cache_info(info)

    def _waiting_by_reason(self, num_waiting: int) -> Metric:
        """All wait for room; nothing of Canter's puts a request off for another reason."""
        family = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", "Requests that wait.", labels=(*LABELS, "reason"))
        family.add_metric((*self._labels, "capacity"), num_waiting)
        family.add_metric((*self._labels, "deferred"), 0)
        return family

    def _cache_info(self, info: EngineInfo) -> Metric:
        values = {
            "block_size": str(info.block_size),
            "cache_dtype": info.dtype,
            "num_gpu_blocks": str(info.num_blocks),
            "enable_prefix_caching": str(info.prefix_caching),
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "How the cache is laid out.", labels=("engine", *values))
        family.add_metric((ENGINE, *values.values()), 1)
        return family


class _LiveCollector(Collector):
    """What every token adds to, and the event loop's own figures."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        metrics, labels = self._metrics, self._metrics.labels
        yield _counter("vllm:generation_tokens", "Tokens generated.", labels, metrics.totals.generation_tokens)
        yield metrics.inter_token.family("vllm:inter_token_latency_seconds", "From token to token.", labels)
        yield metrics.loop_lag.tally.family("canter:event_loop_lag_seconds", "How late the event loop was.", labels)
        yield _gauge("canter:event_loop_lag_max_seconds", "The latest that the event loop ever was.", labels, metrics.loop_lag.longest)
        yield _gauge("canter:event_loop_tasks", "Tasks on the event loop.", labels, _num_tasks())


def _gauge(name: str, doc: str, labels: tuple[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, doc, labels=LABELS)
    family.add_metric(labels, value)
    return family


def _counter(name: str, doc: str, labels: tuple[str, str], value: float) -> Metric:
    family = CounterMetricFamily(name, doc, labels=LABELS)
    family.add_metric(labels, value)
    return family


class HttpMetrics:
    """Figures of HTTP itself, as prometheus-fastapi-instrumentator names them. `num_under_way` leaves monitoring out."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.num_under_way = 0
        self.requests = Counter("http_requests", "Requests.", ("handler", "method", "status"), registry=registry)
        self.seconds = Histogram(
            "http_request_duration_seconds",
            "Time to the end of the answer.",
            ("handler", "method"),
            buckets=HTTP_BUCKETS,
            registry=registry,
        )
        self.fine_seconds = Histogram(
            "http_request_duration_highr_seconds", "Time to the end of the answer.", buckets=HTTP_FINE_BUCKETS, registry=registry
        )
        self.request_bytes = Counter("http_request_size_bytes", "Bytes of request bodies, as declared.", ("handler",), registry=registry)
        self.response_bytes = Counter("http_response_size_bytes", "Bytes of answers.", ("handler",), registry=registry)


class HttpMetricsMiddleware:
    """Counts requests by route, and logs them; paths that are no route share one label, so that nobody can make new ones."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, handlers: dict[object, str], log: AccessLog | None = None) -> None:
        self._app = app
        self._metrics = metrics
        self._handlers = handlers
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        counts = scope["path"].removeprefix(scope.get("root_path", "")) not in NOT_LOAD
        self._metrics.num_under_way += counts
        status, num_bytes = 499, 0  # a client that left before the answer, as nginx writes it

        async def watch(message: Message) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            seconds = time.perf_counter() - started
            self._metrics.num_under_way -= counts
            self._record(scope, status, num_bytes, seconds)
            if self._log is not None:
                self._log.write(scope, status, num_bytes, seconds)

    def _record(self, scope: Scope, status: int, num_bytes: int, seconds: float) -> None:
        handler = self._handlers.get(scope.get("endpoint"), "none")
        method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH") else "other"
        self._metrics.requests.labels(handler, method, f"{status // 100}xx").inc()
        self._metrics.seconds.labels(handler, method).observe(seconds)
        self._metrics.fine_seconds.observe(seconds)
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        self._metrics.request_bytes.labels(handler).inc(int(declared) if declared.isdigit() else 0)
        self._metrics.response_bytes.labels(handler).inc(num_bytes)


class Loggable(Protocol):
    """Figures for the log."""

    @property
    def stats(self) -> EngineStats: ...

    @property
    def totals(self) -> Totals: ...


class StatsLog:
    """The line that says, every few seconds while there is work, how fast the server is."""

    def __init__(self, metrics: Loggable) -> None:
        self._metrics = metrics
        self._totals = Totals()
        self._stats = EngineStats()
        self._time = time.monotonic()
        self._was_idle = True

    def write(self) -> None:
        """Log the figures since the last call; once more after the work has ended, then not again until there is some."""
        now, stats, totals = time.monotonic(), self._metrics.stats, self._metrics.totals
        seconds = max(now - self._time, 1e-9)
        prompt = (totals.prompt_tokens - self._totals.prompt_tokens) / seconds
        generated = (totals.generation_tokens - self._totals.generation_tokens) / seconds
        idle = not (prompt or generated or stats.num_running or stats.num_waiting)
        if not (idle and self._was_idle):
            queries = stats.prefix_queries - self._stats.prefix_queries
            hits = stats.prefix_hits - self._stats.prefix_hits
            logger.info(
                "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, cache in use %.1f %%, prefix hits %.1f %%",
                prompt,
                generated,
                stats.num_running,
                stats.num_waiting,
                100 * stats.cache_usage,
                100 * hits / queries if queries else 0.0,
            )
        self._was_idle, self._time, self._stats = idle, now, stats
        self._totals = Totals(totals.prompt_tokens, totals.generation_tokens)


def _num_tasks() -> int:
    """Tasks of the loop that serves; 0 where the figures are read outside of one."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0
