"""Responses kept in memory: to be read again, gone on from, watched while they run in the background, and cancelled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from weakref import WeakValueDictionary

from canter.core.errors import InvalidRequestError, NotFoundError, QueueFullError
from canter.core.logging import get_logger
from canter.server.responses_encoder import ResponsesEncoder, encode_json
from canter.server.responses_input import output_items

logger = get_logger(__name__)

RECORD_BYTES = 1024
"""Reckoned for a record itself, beside what it holds."""
ENTRY_BYTES = 64
"""Reckoned for each item and event beside its bytes."""
FULL_RETRY_SECONDS = 1.0


class StoredResponse:
    """One response, running in the background or finished.

    `conversation` is what the model was given, an encoded item each, earlier turns included. Everything is kept as bytes, so
    that the size reckoned is the size taken. `events` is None when the response was not to be streamed again.
    """

    def __init__(self, response_id: str, encoder: ResponsesEncoder, conversation: list[bytes], background: bool, keep_events: bool) -> None:
        self.id = response_id
        self.background = background
        self.conversation = conversation
        self.events: list[bytes] | None = [] if keep_events else None
        self.task: asyncio.Task[None] | None = None
        self.size = RECORD_BYTES + _size_of(conversation)
        self.finished_at: float | None = None
        self._encoder: ResponsesEncoder | None = encoder
        self._body = b""
        self._output: list[bytes] = []
        self._changed = asyncio.Event()

    @property
    def finished(self) -> bool:
        return self.finished_at is not None

    def body(self) -> bytes:
        """The response as it stands, as JSON."""
        return self._body if self._encoder is None else encode_json(self._encoder.answer())

    def whole_conversation(self) -> list[bytes]:
        """What the next turn begins with."""
        return self.conversation + self._output

    async def events_after(self, number: int) -> AsyncGenerator[bytes, None]:
        """The events with higher sequence numbers as they come, to the last. Begins with nothing, so that an answer begins at once."""
        yield b""
        position = number + 1
        while True:
            changed = self._changed
            if self.events is None:
                raise QueueFullError("The events of this response have outgrown the store. It goes on: ask for it without stream.")
            if position < len(self.events):
                new = self.events[position:]
                position += len(new)
                yield b"".join(new)
            elif self.finished:
                return
            else:
                await changed.wait()

    def add_events(self, events: list[bytes]) -> int:
        """Append events where they are kept; returns by how much the record has grown."""
        if self.events is None:
            return 0
        self.events += events
        growth = _size_of(events)
        self.size += growth
        self._wake()
        return growth

    def forget_events(self) -> int:
        """Give up streaming; returns by how much the record has shrunk."""
        freed = _size_of(self.events or [])
        self.events = None
        self.size -= freed
        self._wake()
        return freed

    def finish(self, now: float) -> None:
        """Keep the end result in place of what made it."""
        assert self._encoder is not None
        response = self._encoder.answer()
        self._body, self._encoder, self.task = encode_json(response), None, None
        self._output = [encode_json(item) for item in output_items(response)]
        self.size += len(self._body) + _size_of(self._output)
        self.finished_at = now
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class ResponseStore:
    """Bounded by number, bytes and age. The oldest finished responses make room; running ones are never thrown out.

    Age is looked at whenever the store is used. One event loop only.
    """

    def __init__(self, max_responses: int, max_bytes: int, max_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._clock = clock
        self._records: dict[str, StoredResponse] = {}
        self._under_way: WeakValueDictionary[str, ResponsesEncoder] = WeakValueDictionary()
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes reckoned for everything that is kept."""
        return self._size

    def __len__(self) -> int:
        return len(self._records)

    def get(self, response_id: str, param: str = "response_id") -> StoredResponse:
        """Raises `NotFoundError` for one that was never stored, or is no longer."""
        self._drop_old()
        record = self._records.get(response_id)
        if record is None:
            raise NotFoundError(f"There is no response {response_id!r:.100}: it was not stored, or is stored no longer.", param)
        return record

    def claim(self, response_id: str, encoder: ResponsesEncoder) -> bool:
        """Take an id for as long as `encoder` lives; False when another response has it."""
        if response_id in self._records or response_id in self._under_way:
            return False
        self._under_way[response_id] = encoder
        return True

    def check_fits(self, conversation: list[bytes]) -> None:
        """Raises `InvalidRequestError` for a conversation that the store could not hold by itself."""
        size = RECORD_BYTES + _size_of(conversation)
        if size > self._max_bytes:
            raise InvalidRequestError(
                f"The conversation takes {size} bytes, and the store of responses holds {self._max_bytes}. "
                "Send store: false, or start the server with a larger --responses-store-bytes.",
                "input",
            )

    def add_running(self, record: StoredResponse) -> None:
        """Keep a response that runs in the background. Raises `QueueFullError` when what runs already fills the store."""
        self._drop_old()
        self._records[record.id] = record
        self._size += record.size
        self._make_room()
        if self._over_full():
            self._remove(record)
            raise QueueFullError("The store of responses is full of running ones. Try again later.", FULL_RETRY_SECONDS)

    def add_events(self, record: StoredResponse, events: list[bytes]) -> None:
        """Append to a running response. When there is no room its events are given up, and it goes on without."""
        growth = record.add_events(events)
        if record.id not in self._records:
            return  # deleted while it ran
        self._size += growth
        self._make_room()
        if self._over_full():
            self._size -= record.forget_events()

    def finish(self, record: StoredResponse) -> None:
        """A running response has ended, or one that did not run in the background is to be kept."""
        known = self._records.pop(record.id, None) is not None
        before = record.size if known else 0
        record.finish(self._clock())
        if known or not record.background:  # else it was deleted while it ran
            self._records[record.id] = record  # the youngest from now on
            self._size += record.size - before
            self._drop_old()
            self._make_room()

    def delete(self, record: StoredResponse) -> None:
        """Forget it; one that runs is cancelled."""
        self._remove(record)
        if record.task is not None:
            record.task.cancel()

    def _over_full(self) -> bool:
        return len(self._records) > self._max_responses or self._size > self._max_bytes

    def _make_room(self) -> None:
        if self._over_full():
            for record in [record for record in self._records.values() if record.finished]:
                self._remove(record)
                if not self._over_full():
                    return

    def _drop_old(self) -> None:
        limit = self._clock() - self._max_seconds
        for record in list(self._records.values()):
            if record.finished_at is not None:
                if record.finished_at > limit:
                    return  # finished ones stand in the order in which they ended
                self._remove(record)

    def _remove(self, record: StoredResponse) -> None:
        if self._records.pop(record.id, None) is not None:
            self._size -= record.size
            logger.debug("response %s is stored no longer", record.id)


def _size_of(entries: list[bytes]) -> int:
    return sum(map(len, entries)) + ENTRY_BYTES * len(entries)
