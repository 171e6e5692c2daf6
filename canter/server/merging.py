"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")

QUEUE_SIZE = 16


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
        except Exception as error:
            await queue.put((None, error))
        else:
            await queue.put((None, None))

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
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
