"""Watches that the event loop is never held up: everything that takes long belongs into a thread."""

from __future__ import annotations

import asyncio
import time

from canter.core.logging import get_logger
from canter.server.metrics import LoopLag

logger = get_logger(__name__)

INTERVAL_SECONDS = 0.05
NOTABLE_SECONDS = 0.1


async def watch_loop(lag: LoopLag, interval: float = INTERVAL_SECONDS) -> None:
    """Sleep over and over, and note how much later than due the loop comes back. Runs until it is cancelled."""
    while True:
        due = time.monotonic() + interval
        await asyncio.sleep(interval)
        late = max(0.0, time.monotonic() - due)
        lag.observe(late)
        if late > NOTABLE_SECONDS:
            logger.debug("the event loop was held up for %.0f ms", 1000 * late)
