"""What every route needs, and the questions that several ask of it."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request

from canter.client.exchange import CLOSE_GATE, OPEN_GATE
from canter.client.outputs import RequestMetrics, merge_metrics
from canter.client.protocol import EngineClient
from canter.client.shared import SharedClient
from canter.core.config import EngineArgs
from canter.core.errors import EngineNotReadyError, EngineRestartingError, ModelNotFoundError
from canter.server.args import ServerArgs
from canter.server.figures import figures
from canter.server.generation import Generation
from canter.server.metrics import Metrics
from canter.server.model_text import ModelText
from canter.server.request_ids import SAFE_ID, made_request_id
from canter.server.responses_store import ResponseStore
from canter.server.schemas.openai import CompletionTokensDetails, PromptTokensDetails, RequestTiming, Usage
from canter.server.tracing import Tracing
from canter.server.traffic import ID_MARK, Traffic


@dataclass(eq=False)
class ServerState:
    """Mutable in two points: `text` comes when the tokenizer is read, `draining` when the server stops."""

    client: EngineClient
    engine_args: EngineArgs
    server_args: ServerArgs
    metrics: Metrics
    text: ModelText | None = None
    draining: bool = False
    tracing: Tracing | None = None
    fellows: SharedClient | None = None
    """The client, where it has other frontend processes beside it."""
    created: int = field(default_factory=lambda: int(time.time()))
    _serial: itertools.count[int] = field(default_factory=itertools.count)
    _generation: Generation | None = None
    responses: ResponseStore = field(init=False)
    traffic: Traffic = field(init=False)
    answers: dict[str, Callable[..., Any]] = field(init=False)
    """What one frontend process can ask of all."""

    def __post_init__(self) -> None:
        args = self.server_args
        self.responses = ResponseStore(args.responses_store_size, args.responses_store_bytes, args.responses_store_seconds)
        self.traffic = Traffic(self.client, args.request_timeout)
        self.answers = {
            CLOSE_GATE: self.traffic.hold,
            OPEN_GATE: self.traffic.release,
            "abort": self.traffic.abort,
            "wait_idle": self.traffic.wait_idle,
            "load": lambda: self.metrics.http.num_under_way,
            "figures": lambda: figures(self.metrics.registry),
        }
        if self.fellows is not None:
            self.fellows.answers.update(self.answers)

    @property
    def model_names(self) -> list[str]:
        return self.server_args.served_model_name or [self.engine_args.model]

    def generation(self) -> Generation:
        """The pipeline. Raises `EngineNotReadyError` while loading, restarting or stopping, `EngineDeadError` when the engine is gone."""
        if self.draining:
            raise EngineNotReadyError("The server is stopping. Send the request to another one.")
        if self.client.is_restarting:
            raise EngineRestartingError("The engine has died and is being restarted. Try again in a moment.")
        if self._generation is None:
            self.client.check_health()
            if self.text is None or self.client.info is None:
                raise EngineNotReadyError("The model is still loading. Try again in a moment.")
            self._generation = Generation(self.client, self.text, self.engine_args, self.traffic, self.metrics.on_calls_read)
        return self._generation

    async def everywhere(self, method: str, *args: Any) -> list[Any]:
        """One of `answers` from each frontend process, this one too."""
        if self.fellows is not None:
            return await self.fellows.everywhere(method, *args)
        result = self.answers[method](*args)
        return [await result if inspect.isawaitable(result) else result]

    def model_name(self, asked: str | None) -> str:
        """The name to answer with. Raises `ModelNotFoundError` for a name that isn't served."""
        names = self.model_names
        if not asked:
            return names[0]
        if asked not in names:
            served = ", ".join(f"`{name}`" for name in names)
            raise ModelNotFoundError(f"The model `{asked:.200}` does not exist. This server serves {served}.")
        return asked

    def new_ids(self, request: Request, prefix: str, asked: str | None) -> tuple[str, str]:
        """(id to show, id for the engine). The client's own id is kept where it can be; the engine's is unique in any case."""
        own = asked or request.headers.get("x-request-id") or ""
        shown = f"{prefix}-{own if SAFE_ID.fullmatch(own) else made_request_id(request.scope)}"
        own_mark = "" if self.fellows is None else f"{self.fellows.identity}."
        return shown, f"{shown}{ID_MARK}{own_mark}{next(self._serial)}"

    def timing(self, metrics: Sequence[RequestMetrics | None], num_sequences: int) -> RequestTiming | UnsetType:
        """`metrics` of an answer, if the server gives them."""
        if not self.server_args.enable_per_request_metrics:
            return UNSET
        return make_timing(merge_metrics([m for m in metrics if m is not None]), num_sequences)

    def usage(self, num_prompt_tokens: int, num_generated: int, num_cached: int, num_reasoning: int | None = None) -> Usage:
        cached = num_cached if self.server_args.enable_prompt_tokens_details else None
        return make_usage(num_prompt_tokens, num_generated, cached, num_reasoning)


def make_timing(metrics: RequestMetrics, num_sequences: int) -> RequestTiming:
    """Milliseconds between the moments of a request's life. The mean gap between tokens is told of a single sequence only."""
    num_tokens = metrics.num_generation_tokens
    generation = _milliseconds(metrics.first_token_ts, metrics.last_token_ts)
    total = _milliseconds(metrics.scheduled_ts, metrics.last_token_ts)
    return RequestTiming(
        time_to_first_token_ms=_milliseconds(metrics.scheduled_ts, metrics.first_token_ts),
        generation_time_ms=generation,
        queue_time_ms=_milliseconds(metrics.queued_ts, metrics.scheduled_ts),
        mean_itl_ms=generation / (num_tokens - 1) if generation is not None and num_sequences == 1 and num_tokens > 1 else None,
        tokens_per_second=1000 * num_tokens / total if total else None,
    )


def _milliseconds(start: float, end: float) -> float | None:
    return max(0.0, 1000 * (end - start)) if start and end else None


def make_usage(num_prompt_tokens: int, num_generated: int, num_cached: int | None, num_reasoning: int | None = None) -> Usage:
    details = None if num_cached is None else PromptTokensDetails(num_cached)
    thoughts = UNSET if num_reasoning is None else CompletionTokensDetails(num_reasoning)
    return Usage(num_prompt_tokens, num_prompt_tokens + num_generated, num_generated, details, thoughts)


def server_state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state
