"""Answers the lines of a batch: so many at once, each result written as it comes, nothing kept."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Protocol

from canter.cli.batch.lines import Line, custom_id_of, encode_result, failed, read_request
from canter.cli.batch.progress import Progress
from canter.cli.batch.source import check_done
from canter.core.errors import InvalidRequestError, PayloadTooLargeError
from canter.server.batch import Answer

LONGEST_RETRY_SECONDS = 10.0


class Caller(Protocol):
    """Who answers requests."""

    async def ask(self, path: str, body: bytes, request_id: str) -> Answer:
        """Run one request. Raises `CanterError` when it makes no sense to go on with the batch."""
        ...


class Writer:
    """Writes what tasks hand to it, in a thread, and lets them go on when it is written. Close it to end it."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._work = asyncio.Event()
        self._closed = False
        self._task = asyncio.create_task(self._run())

    async def put(self, data: bytes) -> None:
        """Write whole lines. What is handed in is written, also when the caller is cancelled."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((data, future))
        self._work.set()
        await future

    async def close(self) -> None:
        """Write what is left, and end."""
        self._closed = True
        self._work.set()
        await self._task

    async def _run(self) -> None:
        while not self._closed or self._waiting:
            await self._work.wait()
            self._work.clear()
            taken, self._waiting = self._waiting, []
            if not taken:
                continue
            try:
                await asyncio.to_thread(self._write, b"".join(data for data, _ in taken))
            except Exception as error:
                for _, future in taken:
                    if not future.done():
                        future.set_exception(error)
            else:
                for _, future in taken:
                    if not future.done():
                        future.set_result(None)


class Runner:
    """One run over a batch. `paths` None: any path may be asked."""

    def __init__(
        self, caller: Caller, write: Callable[[bytes], None], progress: Progress, concurrency: int, paths: Collection[str] | None
    ) -> None:
        self._caller = caller
        self._writer = Writer(write)
        self._progress = progress
        self._slots = asyncio.Semaphore(concurrency)
        self._paths = paths

    async def run(self, portions: AsyncIterator[list[Line]], done: Mapping[int, int]) -> None:
        """Answer every line that is not done. Cancelling it aborts what runs and keeps what is answered."""
        try:
            async with asyncio.TaskGroup() as tasks:
                async for portion in portions:
                    for line in portion:
                        if line.number in done:
                            check_done(line, done)
                            continue
                        await self._slots.acquire()
                        tasks.create_task(self._one(line))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the others are of the same cause
        finally:
            await self._writer.close()

    async def _one(self, line: Line) -> None:
        try:
            request_id = f"batch-{uuid.uuid4().hex}"
            custom_id = None if line.data is None else custom_id_of(line.data)
            answer = await self._answer(line, request_id)
            await self._writer.put(encode_result(line.number, custom_id, request_id, answer))
            self._progress.add(answer.status != 200)
        finally:
            self._slots.release()

    async def _answer(self, line: Line, request_id: str) -> Answer:
        """What a route says, or what is wrong with the line. What was not taken in is asked again."""
        try:
            if line.data is None:
                raise PayloadTooLargeError("The line is longer than a request may be: see --max-body-bytes.")
            request = read_request(line.data)
            if self._paths is not None and request.url not in self._paths:
                raise InvalidRequestError(f"url must be one of {', '.join(self._paths)}, got {request.url!r:.200}.", "url")
        except (InvalidRequestError, PayloadTooLargeError) as error:
            return failed(error)
        body = bytes(request.body)
        while True:
            answer = await self._caller.ask(request.url, body, request_id)
            if answer.retry_after is None:
                return answer
            await asyncio.sleep(min(answer.retry_after, LONGEST_RETRY_SECONDS))
