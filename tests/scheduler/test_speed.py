"""The cost of a decode step in Python; the bounds leave room for slow and busy machines."""

from __future__ import annotations

import time

import pytest

from canter.core.plan import SchedulePlan, StepOutput
from canter.scheduler.scheduler import Scheduler
from tests.scheduler.device import layout_of, request


def median_step_seconds(num_requests: int, *windows: int | None) -> float:
    scheduler = Scheduler(layout_of(*windows, block_size=16), [20000], max_model_len=4096, max_num_seqs=256, max_num_batched_tokens=8192)
    for i in range(num_requests):
        scheduler.add(request(f"r{i}", [i] * (20 + i % 16), max_tokens=None, stop_token_ids=[9]), 0.0)
    last: SchedulePlan | None = None
    seconds = []
    for _ in range(80):
        start = time.perf_counter()
        plan = scheduler.schedule(0.0)
        if last is not None:
            count = len(last.rows)
            scheduler.update(last, StepOutput(last.step_id, [[5]] * count, [None] * count), 0.0)
        seconds.append(time.perf_counter() - start)
        last = plan
    return sorted(seconds)[len(seconds) // 2]


@pytest.mark.slow
@pytest.mark.parametrize(("num_requests", "bound"), [(1, 60e-6), (128, 1.5e-3)])
@pytest.mark.parametrize("windows", [(None,), (None, 512, 512, 512, 512, 512)])
def test_a_decode_step_is_cheap(num_requests: int, bound: float, windows: tuple[int | None, ...]) -> None:
    assert min(median_step_seconds(num_requests, *windows) for _ in range(5)) < bound
