"""The seams of this package: what a frontend may ask of an engine, and what a watcher of requests is told."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any, Protocol

from canter.client.outputs import RequestGroup, RequestOutput, RequestState
from canter.core.messages import AddRequest, EngineInfo, EngineStats, RequestDelta
from canter.core.sampling_params import SamplingParams


class EngineClient(Protocol):
    """An engine as the server sees it."""

    @property
    def info(self) -> EngineInfo | None:
        """What the engine serves; None until it is ready."""
        ...

    @property
    def is_restarting(self) -> bool:
        """Whether the engine has died and another is on its way. Requests are taken nevertheless, and wait."""
        ...

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase of start-up that has ended."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The engine's gauges and counters as last heard."""
        ...

    def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request. Closing the iterator, or cancelling the task that waits in it, aborts the request.

        Raises what the engine refused it with (`InvalidRequestError`, `QueueFullError`), `EngineError` when it
        failed on the way, `EngineNotReadyError` or `EngineDeadError`.
        """
        ...

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests by the ids given to `generate`; their iterators end with the reason "abort"."""
        ...

    async def utility(self, method: str, *args: Any) -> Any:
        """Call an engine method by name. Raises `EngineError` with the engine's message."""
        ...

    def check_health(self) -> None:
        """Raises `EngineNotReadyError` while loading, `EngineRestartingError` while loading anew, `EngineDeadError` when gone,
        `EngineError` when stuck."""
        ...

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Let live requests end for so many seconds, end the rest with an error, and stop the engine."""
        ...


class RequestObserver(Protocol):
    """Told of every request's life, for metrics. Calls must be quick and must not raise."""

    def on_step(self, stats: EngineStats) -> None:
        """The engine has finished a step."""
        ...

    def on_engine_restart(self) -> None:
        """The engine has died and is started again."""
        ...

    def on_tokens(self, state: RequestState, num_tokens: int, seconds: float | None, is_first: bool) -> None:
        """New tokens, `seconds` after the tokens before them, or after arrival for the first; None when unknown."""
        ...

    def on_state_end(self, state: RequestState, now: float) -> None:
        """An engine request has ended; its state says how."""
        ...

    def on_group_end(self, group: RequestGroup) -> None:
        """A user's request with all its choices has ended or is given up."""
        ...


class EngineCoreLike(Protocol):
    """The methods of `engine.core.EngineCore` that the in-process client calls."""

    @property
    def info(self) -> EngineInfo: ...

    def add_request(self, request: AddRequest) -> None: ...

    def abort(self, request_ids: Iterable[str]) -> None: ...

    def step(self) -> list[RequestDelta]: ...

    def stats(self) -> EngineStats: ...

    def utility(self, method: str, args: list[Any]) -> Any: ...

    def shutdown(self) -> None: ...
