"""Recurrent states: where steps end, what is kept, who may go on from it."""

from __future__ import annotations

import pytest

from canter.core.errors import UnsupportedModelError
from canter.core.plan import SchedulePlan
from canter.core.state_specs import SnapshotMode, StateLayout
from canter.scheduler.scheduler import Scheduler
from tests.scheduler.device import FakeDevice, expected_output, layout_with_states, request
from tests.scheduler.test_scheduler import make, shares

ALIGNED_16 = layout_with_states(SnapshotMode.ALIGN, 16, None)


class Run:
    """A scheduler and a device that checks what is read."""

    def __init__(self, layout: StateLayout, **options: object) -> None:
        self.layout = layout
        self.scheduler: Scheduler = make(layout, *[100] * len(layout.pools), **{"max_num_batched_tokens": 100, **options})
        self.device = FakeDevice(layout)

    def step(self) -> SchedulePlan:
        plan = self.scheduler.schedule(0.0)
        self.scheduler.update(plan, self.device.execute(plan), 0.0)
        self.scheduler.check_invariants()
        return plan

    def finish(self) -> None:
        while self.scheduler.has_work():
            self.step()

    def states(self, request_id: str) -> list[int]:
        """The request's table of states."""
        return self.device.rows[request_id].tables[-1]


def test_steps_end_on_the_last_boundary_and_a_hit_goes_on_in_another_block() -> None:
    """A prompt of 40, boundaries at multiples of 16: 32, then 8; the state after 32 is never written again."""
    run = Run(ALIGNED_16)
    prompt = list(range(40))
    run.scheduler.add(request("A", prompt, max_tokens=4), 0.0)
    run.scheduler.add(request("B", prompt, max_tokens=4), 0.0)
    assert shares(run.step()) == {"A": 32}, "what a step writes no other row of it may read: B waits"
    assert run.states("A") == [0, 1]
    plan = run.step()
    assert shares(plan) == {"A": 8, "B": 8}
    assert [row.num_computed_tokens for row in plan.rows] == [32, 32]
    assert run.states("A") == [0, 1, 2] and run.states("B") == [0, 1, 3]
    run.finish()


def test_a_prompt_that_ends_on_a_boundary_can_be_gone_on_from_and_asked_again() -> None:
    run = Run(ALIGNED_16)
    prompt = list(range(32))
    run.scheduler.add(request("A", prompt, max_tokens=1), 0.0)
    assert [shares(run.step()), shares(run.step())] == [{"A": 16}, {"A": 16}]
    run.scheduler.add(request("again", prompt, max_tokens=1), 0.0)
    run.scheduler.add(request("longer", [*prompt, 99], max_tokens=1), 0.0)
    assert {row.request_id: row.num_computed_tokens for row in run.step().rows} == {"again": 16, "longer": 32}


def test_a_budget_short_of_a_boundary_still_makes_progress() -> None:
    run = Run(layout_with_states(SnapshotMode.ALIGN, 8, None), max_num_batched_tokens=3)
    run.scheduler.add(request("A", list(range(20)), max_tokens=1), 0.0)
    ends = []
    while not ends or ends[-1] < 20:
        (row,) = run.step().rows
        ends.append(row.num_computed_tokens + row.num_tokens)
    assert ends == [3, 6, 8, 11, 14, 16, 19, 20]


def test_the_state_where_a_shared_prefix_ends_is_kept_when_it_is_seen_again() -> None:
    """Two prompts share 18 tokens, of which 16 lie in whole blocks and 16 is a boundary: the third one begins there."""
    run = Run(layout_with_states(SnapshotMode.ALIGN, 8, None))
    for name in "ABC":
        run.scheduler.add(request(name, [*range(18), *(1000 + ord(name) * 20 + i for i in range(14))], max_tokens=1), 0.0)
        starts = []
        while run.scheduler.has_work():
            starts += [(row.num_computed_tokens, row.num_tokens) for row in run.step().rows]
        assert starts == {"A": [(0, 24), (24, 8)], "B": [(0, 16), (16, 8), (24, 8)], "C": [(16, 8), (24, 8)]}[name]


@pytest.mark.parametrize("mode,bound", [(SnapshotMode.NONE, 1), (SnapshotMode.ALIGN, 2), (SnapshotMode.ALL, 3)])
def test_live_states_are_bounded(mode: SnapshotMode, bound: int) -> None:
    run = Run(layout_with_states(mode, 64 if mode is SnapshotMode.NONE else 8, None), max_num_batched_tokens=20)
    message = request("A", list(range(20)), max_tokens=40)
    run.scheduler.add(message, 0.0)
    pool = run.scheduler.cache.pools[-1]
    most = 0
    while run.scheduler.has_unfinished():
        run.step()
        most = max(most, pool.num_used)
    assert most == bound
    num_kept = sum(pool.key_of(block) is not None for block in range(1, 100))
    assert num_kept == {SnapshotMode.NONE: 0, SnapshotMode.ALIGN: 2, SnapshotMode.ALL: 3}[mode], "of the output only the latest"


def test_every_boundary_is_kept_where_the_kernel_writes_it() -> None:
    run = Run(layout_with_states(SnapshotMode.ALL, 8, None))
    run.scheduler.add(request("A", list(range(30)), max_tokens=1), 0.0)
    assert shares(run.step()) == {"A": 30}
    run.finish()
    run.scheduler.add(request("B", [*range(18), 500], max_tokens=1), 0.0)
    assert [row.num_computed_tokens for row in run.step().rows] == [16]


def test_after_eviction_a_request_begins_anew() -> None:
    run = Run(ALIGNED_16)
    prompt = list(range(40))
    run.scheduler.add(request("A", prompt, max_tokens=2), 0.0)
    run.finish()
    pool = run.scheduler.cache.pools[-1]
    pool.free(reversed(pool.allocate(pool.num_free)))
    message = request("B", prompt, max_tokens=2)
    run.scheduler.add(message, 0.0)
    assert [row.num_computed_tokens for row in run.step().rows] == [0]
    run.finish()
    assert expected_output(message, 64, 7)[1] == "length"


def test_drafts_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="speculative decoding"):
        make(ALIGNED_16, 100, 100, num_draft_tokens=1)
