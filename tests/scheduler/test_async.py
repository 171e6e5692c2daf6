"""Steps planned ahead of their outputs, drafts, and requests that end while in flight."""

from __future__ import annotations

import pytest

from canter.core.plan import DRAFT_ON_DEVICE, NewRow, ScheduledRow, SchedulePlan
from canter.scheduler.request import Request
from canter.scheduler.scheduler import Scheduler
from tests.scheduler.device import FakeDevice, expected_output, layout_of, request
from tests.scheduler.test_scheduler import answer, make, shares


def counters(scheduler: Scheduler) -> tuple[int, int, int, list[int]]:
    r: Request = scheduler._requests["A"]
    return r.num_tokens, r.num_computed_tokens, r.num_output_placeholders, list(r.draft_token_ids)


def test_placeholders_with_two_drafts() -> None:
    unknown = [DRAFT_ON_DEVICE] * 2
    scheduler = make(num_draft_tokens=2, max_num_batched_tokens=16)
    scheduler.add(request("A", 5, max_tokens=30), 0.0)
    assert counters(scheduler) == (5, 0, 0, [])
    first = scheduler.schedule(0.0)
    assert counters(scheduler) == (5, 5, 1, unknown) and shares(first) == {"A": 5}
    second = scheduler.schedule(0.0)
    assert counters(scheduler) == (5, 8, 4, unknown)
    assert second.rows[0].num_tokens == 3 and second.rows[0].draft_token_ids == tuple(unknown)
    scheduler.update(first, answer(first, A=[50]), 0.0)
    assert counters(scheduler) == (6, 8, 3, unknown)
    third = scheduler.schedule(0.0)
    assert counters(scheduler) == (6, 11, 6, unknown) and shares(third) == {"A": 3}
    (delta,) = scheduler.update(second, answer(second, A=[51, 52]), 0.0)
    assert delta.new_token_ids == [51, 52]
    assert counters(scheduler) == (8, 10, 3, unknown)
    scheduler.check_invariants()


def test_one_step_ahead_without_drafts() -> None:
    scheduler = make()
    scheduler.add(request("A", 5, max_tokens=3), 0.0)
    plans = [scheduler.schedule(0.0), scheduler.schedule(0.0)]
    assert plans[1] == SchedulePlan(1, [ScheduledRow("A", 1, 5)])
    scheduler.update(plans[0], answer(plans[0], A=[1]), 0.0)
    plans.append(scheduler.schedule(0.0))
    assert plans[2].rows == [ScheduledRow("A", 1, 6)]
    scheduler.update(plans[1], answer(plans[1], A=[2]), 0.0)
    # The last token is in flight: nothing to do.
    assert not scheduler.has_work() and scheduler.schedule(0.0) == SchedulePlan(3)
    (delta,) = scheduler.update(plans[2], answer(plans[2], A=[3]), 0.0)
    assert delta.finish_reason == "length"


@pytest.mark.parametrize(("prompt", "max_tokens", "num_steps"), [(3, 1, 1), (3, 4, 4), (7, None, 3), (9, 5, 1)])
def test_no_step_is_planned_beyond_the_last_token(prompt: int, max_tokens: int | None, num_steps: int) -> None:
    """`max_model_len` 10. However deep the pipeline, as many steps sample as tokens can come."""
    scheduler = make(max_model_len=10)
    scheduler.add(request("A", prompt, max_tokens=max_tokens), 0.0)
    plans = [scheduler.schedule(0.0) for _ in range(8)]
    assert [len(p.rows) for p in plans] == [1] * num_steps + [0] * (8 - num_steps)


def test_drafts_never_reach_beyond_the_last_token() -> None:
    scheduler = make(num_draft_tokens=3, max_num_batched_tokens=32)
    scheduler.add(request("A", 4, max_tokens=4), 0.0)
    first = scheduler.schedule(0.0)
    second = scheduler.schedule(0.0)
    # Tokens 4..7 may come; 7 is never computed: one token and two drafts, positions 4..6.
    assert second.rows == [ScheduledRow("A", 3, 4, ([3],), (DRAFT_ON_DEVICE,) * 2)]
    assert not scheduler.schedule(0.0).rows
    scheduler.update(first, answer(first, A=[1]), 0.0)
    scheduler.update(second, answer(second, A=[2]), 0.0)
    third = scheduler.schedule(0.0)
    assert third.rows == [ScheduledRow("A", 2, 5, (), (DRAFT_ON_DEVICE,))]
    (delta,) = scheduler.update(third, answer(third, A=[3, 4]), 0.0)
    assert delta.finish_reason == "length" and delta.new_token_ids == [3, 4]


def test_drafts_from_the_host() -> None:
    scheduler = make(num_draft_tokens=2)
    scheduler.add(request("A", 4, max_tokens=20), 0.0)
    first = scheduler.schedule(0.0)
    output = answer(first, A=[1])
    output.draft_token_ids = [[7, 8, 9]]
    scheduler.update(first, output, 0.0)
    second = scheduler.schedule(0.0)
    assert second.rows[0].draft_token_ids == (7, 8, 9) and second.rows[0].num_tokens == 4
    output = answer(second, A=[7])
    output.draft_token_ids = [[]]
    scheduler.update(second, output, 0.0)
    assert scheduler.schedule(0.0).rows[0].num_tokens == 1


def test_drafts_from_the_host_begin_behind_what_is_in_flight() -> None:
    scheduler = make()
    scheduler.add(request("A", 4, max_tokens=20), 0.0)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    output = answer(first, A=[1])
    output.draft_token_ids = [[7, 8, 9]]  # 7 is what the second step is about to bring
    scheduler.update(first, output, 0.0)
    third = scheduler.schedule(0.0)
    assert (third.rows[0].draft_token_ids, third.rows[0].num_tokens) == ((8, 9), 3)
    output = answer(second, A=[7])
    output.draft_token_ids = [[8, 9]]
    scheduler.update(second, output, 0.0)
    fourth = scheduler.schedule(0.0)
    assert (fourth.rows[0].draft_token_ids, fourth.rows[0].num_tokens) == ((), 1)
    output = answer(third, A=[8])
    output.draft_token_ids = [None]
    (delta,) = scheduler.update(third, output, 0.0)
    assert delta.new_token_ids == [8] and scheduler.stats().num_accepted_drafts == 0
    (delta,) = scheduler.update(fourth, answer(fourth, A=[5]), 0.0)
    assert scheduler.schedule(0.0).rows[0].num_tokens == 1
    scheduler.check_invariants()


def test_drafts_from_the_host_that_come_too_late_are_ignored() -> None:
    scheduler = make(num_draft_tokens=2)
    scheduler.add(request("A", 4, max_tokens=20), 0.0)
    first, _ = scheduler.schedule(0.0), scheduler.schedule(0.0)
    output = answer(first, A=[1])
    output.draft_token_ids = [[7, 8]]
    scheduler.update(first, output, 0.0)
    assert counters(scheduler)[3] == [DRAFT_ON_DEVICE] * 2


def test_tokens_behind_a_stop_are_dropped() -> None:
    scheduler = make(num_draft_tokens=3)
    scheduler.add(request("A", 4, max_tokens=20, stop_token_ids=[9]), 0.0)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    scheduler.update(first, answer(first, A=[1]), 0.0)
    (delta,) = scheduler.update(second, answer(second, A=[2, 9, 3]), 0.0)
    assert (delta.new_token_ids, delta.finish_reason, delta.stop_reason) == ([2, 9], "stop", 9)


def test_drafts_are_never_published() -> None:
    scheduler = make(num_draft_tokens=3)
    scheduler.add(request("A", 3, max_tokens=20), 0.0)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert second.rows[0].num_tokens == 4
    assert len(scheduler.cache.pools[0].index) == 0
    scheduler.update(first, answer(first, A=[1]), 0.0)
    assert len(scheduler.cache.pools[0].index) == 1
    scheduler.update(second, answer(second, A=[2]), 0.0)
    assert len(scheduler.cache.pools[0].index) == 1


def test_windows_wait_for_drafts_in_flight() -> None:
    """All drafts may yet be rejected: the window moves by what is sure only."""
    layout = layout_of(4)
    scheduler = make(layout, 30, num_draft_tokens=3, max_num_batched_tokens=8)
    scheduler.add(request("A", 8, max_tokens=40), 0.0)
    plans = [scheduler.schedule(0.0) for _ in range(4)]
    # Computed may be 20, or 11 if every draft failed; known for sure are 8 tokens, whose window starts at 5.
    assert counters(scheduler)[:3] == (8, 20, 13)
    assert scheduler._requests["A"].cache.tables[0].num_trimmed <= 1
    for plan in plans:
        scheduler.update(plan, answer(plan, A=[1]), 0.0)
        scheduler.check_invariants()
    assert counters(scheduler)[:3] == (12, 11, 0)


def test_a_request_aborted_in_flight_leaves_its_outputs_and_frees_its_blocks() -> None:
    scheduler = make()
    scheduler.add(request("A", 5), 0.0)
    scheduler.add(request("B", 5), 0.0)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    scheduler.abort(["A"], 0.0)
    assert [d.request_id for d in scheduler.update(first, answer(first, A=[1], B=[1]), 0.0)] == ["B"]
    third = scheduler.schedule(0.0)
    assert third.finished_ids == ["A"] and shares(third) == {"B": 1}
    assert [d.request_id for d in scheduler.update(second, answer(second, A=[1], B=[1]), 0.0)] == ["B"]
    scheduler.check_invariants()


def test_an_id_may_come_back_while_its_old_row_is_in_flight() -> None:
    scheduler = make()
    scheduler.add(request("A", [1, 2, 3]), 0.0)
    first = scheduler.schedule(0.0)
    scheduler.abort(["A"], 0.0)
    scheduler.add(request("A", [4, 5]), 0.0)
    second = scheduler.schedule(0.0)
    assert second.finished_ids == ["A"]
    assert [NewRow("A", [4, 5], 2, 0, n.block_ids, n.sampling) for n in second.new_rows] == second.new_rows
    assert scheduler.update(first, answer(first, A=[1]), 0.0) == []
    (delta,) = scheduler.update(second, answer(second, A=[8]), 0.0)
    assert delta.new_token_ids == [8]
    scheduler.check_invariants()


def test_a_request_that_stopped_ignores_what_is_still_in_flight() -> None:
    scheduler = make()
    scheduler.add(request("A", 5, eos_token_ids=[9]), 0.0)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert scheduler.update(first, answer(first, A=[9]), 0.0)[0].finish_reason == "stop"
    assert scheduler.update(second, answer(second, A=[1]), 0.0) == []
    assert scheduler.schedule(0.0).finished_ids == ["A"]


def test_a_lost_step_ends_its_requests_and_those_that_may_have_read_from_it() -> None:
    scheduler = make(max_num_batched_tokens=64, max_num_seqs=8)
    shared = list(range(9))
    scheduler.add(request("A", shared), 0.0)
    lost = scheduler.schedule(0.0)
    scheduler.add(request("B", [*shared, 1]), 0.0)
    scheduler.add(request("C", 6), 0.0)
    later = scheduler.schedule(0.0)
    assert [n.num_computed_tokens for n in later.new_rows] == [8, 0]
    scheduler.add(request("D", 6), 0.0)
    deltas = scheduler.fail(lost, "broken", 0.0)
    assert [(d.request_id, d.finish_reason, d.error) for d in deltas] == [("A", "error", "broken"), ("B", "error", "broken")]
    scheduler.check_invariants()
    assert [d.request_id for d in scheduler.update(later, answer(later, A=[1], B=[1], C=[1]), 0.0)] == ["C"]
    scheduler.add(request("E", shared), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan.finished_ids == ["A", "B"] and shares(plan) == {"C": 1, "D": 6, "E": 9}
    scheduler.check_invariants()


@pytest.mark.parametrize("lag", [0, 1, 2, 4])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_outputs_do_not_depend_on_lag_or_drafts(lag: int, num_drafts: int) -> None:
    layout = layout_of(None, 6)
    scheduler = make(layout, 44, max_num_batched_tokens=12, num_draft_tokens=num_drafts)
    device = FakeDevice(layout, vocab_size=50, num_draft_tokens=num_drafts, accuracy=0.7)
    messages = {f"r{i}": request(f"r{i}", 3 + i, max_tokens=20, stop_token_ids=[5]) for i in range(6)}
    outputs: dict[str, list[int]] = {name: [] for name in messages}
    for message in messages.values():
        scheduler.add(message, 0.0)
    in_flight = []
    while scheduler.has_unfinished():
        plan = scheduler.schedule(0.0)
        if plan.rows:
            in_flight.append((plan, device.execute(plan)))
        elif plan.has_work:
            device.execute(plan)
        while in_flight and (len(in_flight) > lag or not plan.rows):
            for delta in scheduler.update(*in_flight.pop(0), 0.0):
                outputs[delta.request_id] += delta.new_token_ids
        scheduler.check_invariants()
    assert outputs == {name: expected_output(m, 64, 50)[0] for name, m in messages.items()}
