"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")

QUEUE_SIZE = 16
START_AT_ONCE = 32
"""Sources that are begun before others get their turn on the event loop."""


async def merge_streams(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items of all sources as they come. The first error ends it; ending it closes all sources.

    The queue between is short: sources whose items are not taken wait, and their mailboxes merge what comes.
    """
    queue: asyncio.Queue[tuple[T | None, BaseException | None]] = asyncio.Queue(QUEUE_SIZE)

    async def pump(source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source):
                async for item in source:
                    await queue.put((item, None))
        except Exception as error:  # raised again by whoever takes it from the queue
            await queue.put((None, error))
        else:
            await queue.put((None, None))

    tasks = []
    try:
        for source in sources:
            tasks.append(asyncio.create_task(pump(source)))
            if len(tasks) % START_AT_ONCE == 0:
                await asyncio.sleep(0)
        remaining = len(tasks)
        while remaining:
            item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                remaining -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
