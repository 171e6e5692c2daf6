"""The order of requests: who is admitted next, and who makes room when memory runs out."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from canter.core.errors import ConfigError
from canter.scheduler.request import Request


class RequestQueue(Protocol):
    """Waiting requests under one policy. Nothing here takes longer than O(log n)."""

    def push(self, request: Request) -> None:
        """Queue a new request."""

    def push_preempted(self, request: Request) -> None:
        """Queue a request that lost its place: before all that arrived after it."""

    def peek(self) -> Request | None:
        """The next to admit, or None."""

    def pop(self) -> Request:
        """Take the next to admit. Raises `IndexError` when none waits."""

    def remove(self, request: Request) -> None:
        """Drop a request that ended while it waited. Raises `KeyError` when it does not wait."""

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Who of the running requests makes room; they stand in the order of their admission."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, in no particular order."""


class FCFSQueue:
    """First come, first served; the last admitted makes room first."""

    def __init__(self) -> None:
        self._requests: OrderedDict[Request, None] = OrderedDict()

    def push(self, request: Request) -> None:
        self._requests[request] = None

    def push_preempted(self, request: Request) -> None:
        self._requests[request] = None
        self._requests.move_to_end(request, last=False)

    def peek(self) -> Request | None:
        return next(iter(self._requests), None)

    def pop(self) -> Request:
        if not self._requests:
            raise IndexError("no request waits")
        return self._requests.popitem(last=False)[0]

    def remove(self, request: Request) -> None:
        del self._requests[request]

    def choose_victim(self, running: Sequence[Request]) -> Request:
        return running[-1]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


PriorityKey = tuple[int, float, int]


def priority_key(request: Request) -> PriorityKey:
    """Lower goes first: priority, then time of arrival at the frontend, then order of arrival here."""
    return (request.priority, request.arrival_time, request.arrival_order)


class PriorityQueue:
    """Lowest priority number first, then the earliest; the opposite end makes room first.

    A heap; a removed request stays in it as a dead entry until it comes up.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[PriorityKey, Request]] = []
        self._alive: set[Request] = set()

    def push(self, request: Request) -> None:
        self._alive.add(request)
        heapq.heappush(self._heap, (priority_key(request), request))

    def push_preempted(self, request: Request) -> None:
        self.push(request)

    def peek(self) -> Request | None:
        while self._heap and self._heap[0][1] not in self._alive:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        request = self.peek()
        if request is None:
            raise IndexError("no request waits")
        heapq.heappop(self._heap)
        self._alive.remove(request)
        return request

    def remove(self, request: Request) -> None:
        self._alive.remove(request)

    def choose_victim(self, running: Sequence[Request]) -> Request:
        return max(running, key=priority_key)

    def __len__(self) -> int:
        return len(self._alive)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._alive)


POLICIES: Mapping[str, Callable[[], RequestQueue]] = {"fcfs": FCFSQueue, "priority": PriorityQueue}


def make_queue(policy: str) -> RequestQueue:
    """Raises `ConfigError` for an unknown policy."""
    if policy not in POLICIES:
        raise ConfigError(f"scheduling_policy must be one of {', '.join(POLICIES)}, got {policy!r}.")
    return POLICIES[policy]()
