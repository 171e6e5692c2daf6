"""The requests under way: the gate that `/pause` closes, their deadline, and who can be aborted by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from canter.client.protocol import EngineClient
from canter.core.errors import EngineError, QueueFullError, RequestTimeoutError

T = TypeVar("T")

ID_MARK = "#"
"""Stands in engine ids between the id that a client sees and what makes it unique; no client's id can hold it."""


class Traffic:
    """Every request of the generation pipeline passes through `watch`.

    `timeout`: seconds that a request may take in all, or None.
    """

    def __init__(self, client: EngineClient, timeout: float | None = None) -> None:
        self._client = client
        self._timeout = timeout
        self._live: dict[str, Callable[[], Awaitable[None]]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = asyncio.Event()
        self._open.set()
        self._num_held = 0
        self._closed_for: EngineError | None = None
        self._ending: set[asyncio.Future[None]] = set()

    @property
    def num_live(self) -> int:
        """Engine requests behind the gate."""
        return len(self._live)

    @property
    def is_paused(self) -> bool:
        return not self._open.is_set()

    def hold(self) -> None:
        """Let no request in until `release`; those that come meanwhile wait."""
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def turn_away(self, error: EngineError) -> None:
        """Fail the requests that wait at the gate, and let none in any more: the server stops."""
        self._closed_for = error
        self._open.set()

    async def wait_idle(self) -> None:
        """Wait until no request is under way behind the gate."""
        await self._idle.wait()

    async def abort(self, shown_ids: Iterable[str] | None = None) -> int:
        """End requests by the ids that clients see, or all. Returns how many engine requests that were."""
        wanted = None if shown_ids is None else set(shown_ids)
        chosen = [engine_id for engine_id in self._live if wanted is None or engine_id.partition(ID_MARK)[0] in wanted]
        for engine_id in chosen:
            if engine_id in self._live:  # it may end while others are ended
                await self._live[engine_id]()
        return len(chosen)

    async def watch(
        self,
        number: int,
        engine_id: str,
        source: AsyncGenerator[T, None],
        most_held: int,
        abort: Callable[[], Awaitable[None]] | None = None,
    ) -> AsyncGenerator[tuple[int, T], None]:
        """The outputs of one request, each with the number of its prompt. Too late for its deadline it is refused, or ends as
        aborted when some of it is sent already.

        `abort` ends a request that the engine does not know by this id. Raises `QueueFullError` when the gate is closed and
        `most_held` wait there already.
        """
        loop = asyncio.get_running_loop()
        deadline = None if self._timeout is None else loop.time() + self._timeout
        timer: asyncio.TimerHandle | None = None
        async with aclosing(source):
            try:
                async with asyncio.timeout_at(deadline) as limit:
                    if self.is_paused or self._closed_for is not None:
                        await self._pass_gate(most_held)
                    self._live[engine_id] = abort or partial(self._client.abort, [engine_id])
                    self._idle.clear()
                    first = await anext(source, None)
                if deadline is not None:
                    timer = loop.call_at(deadline, self._end, engine_id)
                if first is not None:
                    yield number, first
                    async for item in source:
                        yield number, item
            except TimeoutError:
                if not limit.expired():
                    raise
                raise RequestTimeoutError(f"The request was not answered within {self._timeout:g} seconds.") from None
            finally:
                if timer is not None:
                    timer.cancel()
                self._live.pop(engine_id, None)
                if not self._live:
                    self._idle.set()

    async def _pass_gate(self, most_held: int) -> None:
        if self._num_held >= most_held:
            raise QueueFullError(f"The server is paused, and {self._num_held} requests wait for it already.")
        self._num_held += 1
        try:
            await self._open.wait()
        finally:
            self._num_held -= 1
        if self._closed_for is not None:
            raise self._closed_for

    def _end(self, engine_id: str) -> None:
        task = asyncio.ensure_future(self._live[engine_id]())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
