from __future__ import annotations

import pytest

from canter.core.errors import ConfigError
from canter.scheduler.cache.coordinator import RequestCache
from canter.scheduler.queues import FCFSQueue, PriorityQueue, RequestQueue, make_queue
from canter.scheduler.request import Request
from tests.scheduler.device import request


def make(order: int, priority: int = 0, arrival: float = 0.0) -> Request:
    message = request(f"r{order}", 3, priority=priority)
    message.arrival_time = arrival
    return Request(message, 0.0, order, 100, RequestCache(()))


def drain(queue: RequestQueue) -> list[str]:
    return [queue.pop().request_id for _ in range(len(queue))]


def test_fcfs_serves_in_order_and_preempted_ones_first() -> None:
    queue, requests = FCFSQueue(), [make(i) for i in range(4)]
    for r in requests[2:]:
        queue.push(r)
    queue.push_preempted(requests[1])
    queue.push_preempted(requests[0])
    assert queue.peek() is requests[0] and len(queue) == 4 and set(queue) == set(requests)
    queue.remove(requests[2])
    assert drain(queue) == ["r0", "r1", "r3"]
    assert queue.choose_victim(requests) is requests[3]


def test_priority_serves_the_lowest_number_then_the_earliest() -> None:
    requests = [make(0, 1, 5.0), make(1, 0, 9.0), make(2, 1, 2.0), make(3, 0, 9.0)]
    queue = PriorityQueue()
    for r in requests:
        queue.push(r)
    assert drain(queue) == ["r1", "r3", "r2", "r0"]
    assert queue.choose_victim(requests) is requests[0]


def test_priority_removal_is_seen_at_once() -> None:
    requests = [make(i) for i in range(3)]
    queue = PriorityQueue()
    for r in requests:
        queue.push(r)
    queue.remove(requests[0])
    assert len(queue) == 2 and queue.peek() is requests[1]
    assert drain(queue) == ["r1", "r2"] and queue.peek() is None
    queue.push_preempted(requests[1])
    assert drain(queue) == ["r1"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_empty_queues(policy: str) -> None:
    queue = make_queue(policy)
    assert queue.peek() is None and len(queue) == 0 and list(queue) == []
    with pytest.raises(IndexError):
        queue.pop()
    with pytest.raises(KeyError):
        queue.remove(make(0))


def test_unknown_policy() -> None:
    with pytest.raises(ConfigError, match="fcfs, priority"):
        make_queue("lifo")
