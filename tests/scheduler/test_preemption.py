"""Who gives way when memory runs out, exactly, and what becomes of tokens in flight."""

from __future__ import annotations

from canter.core.plan import ScheduledRow, SchedulePlan
from canter.scheduler.scheduler import Scheduler
from tests.scheduler.device import FakeDevice, expected_output, layout_of, request
from tests.scheduler.test_scheduler import answer, entries, make, run_step, shares


def crowded(policy: str = "fcfs", **options: object) -> Scheduler:
    """Blocks of 4 tokens, 6 of them; A, B and C take two each, and the next token of any needs a third."""
    scheduler = make(layout_of(None), 7, max_num_batched_tokens=32, policy=policy, enable_prefix_caching=False, **options)
    for name, priority in (("A", 2), ("B", 0), ("C", 1)):
        scheduler.add(request(name, 8, priority=priority, max_tokens=8), 0.0)
    return scheduler


def test_fcfs_preempts_the_last_admitted() -> None:
    scheduler = crowded()
    run_step(scheduler, A=[1], B=[1], C=[1])
    plan, _ = run_step(scheduler, A=[2], B=[2])
    assert plan == SchedulePlan(1, [ScheduledRow("A", 1, 8, ([6],)), ScheduledRow("B", 1, 8, ([5],))], preempted_ids=["C"])
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (2, 1, 1)


def test_a_preempted_request_comes_back_first_with_all_its_tokens() -> None:
    scheduler = crowded()
    scheduler.add(request("D", 8, max_tokens=8), 0.0)
    run_step(scheduler, A=[1], B=[1], C=[1])
    run_step(scheduler, A=[2], B=[2])
    scheduler.abort(["A"], 0.0)
    plan, deltas = run_step(scheduler, B=[3], C=[4])
    assert plan.finished_ids == ["A"] and [n.request_id for n in plan.new_rows] == ["C"]
    new = plan.new_rows[0]
    assert new.token_ids == [*request("C", 8).prompt_token_ids, 1] and new.num_prompt_tokens == 8 and new.num_computed_tokens == 0
    assert shares(plan) == {"B": 1, "C": 9}
    assert deltas[1].num_preemptions == 1 and deltas[1].new_token_ids == [4]


def test_priority_preempts_the_least_important_and_takes_its_grant_back() -> None:
    scheduler = make(layout_of(None), 6, max_num_batched_tokens=4, policy="priority", enable_prefix_caching=False, max_model_len=20)
    scheduler.add(request("low", 11, priority=9, max_tokens=4), 0.0)
    run_step(scheduler)
    scheduler.add(request("high", 4, priority=0, max_tokens=12), 0.0)
    run_step(scheduler)
    run_step(scheduler, low=[1])
    assert [(r.request_id, r.num_computed_tokens) for r in scheduler._running] == [("low", 11), ("high", 1)]
    assert run_step(scheduler, low=[2], high=[1])[0].rows == [ScheduledRow("low", 1, 11), ScheduledRow("high", 3, 1)]
    # low is granted a token and the last free block; then high needs a block: low gives both back.
    plan, _ = run_step(scheduler, high=[2])
    assert plan == SchedulePlan(4, [ScheduledRow("high", 1, 4, ([5],))], preempted_ids=["low"])
    assert scheduler.stats().step_num_tokens == 1
    low = scheduler._waiting.peek()
    assert low is not None and (low.request_id, low.num_tokens, low.num_computed_tokens) == ("low", 13, 0)


def test_everyone_behind_a_preempted_request_still_gets_a_turn() -> None:
    scheduler = make(layout_of(None), 6, max_num_batched_tokens=32, policy="priority", enable_prefix_caching=False, max_model_len=20)
    scheduler.add(request("low", 7, priority=9, max_tokens=8), 0.0)
    run_step(scheduler, low=[1])
    scheduler.add(request("high", 4, priority=0, max_tokens=8), 0.0)
    scheduler.add(request("mid", 1, priority=1, max_tokens=8), 0.0)
    run_step(scheduler, low=[2], high=[1], mid=[1])
    assert [r.request_id for r in scheduler._running] == ["low", "high", "mid"]
    scheduler.add(request("late", 4, priority=2, max_tokens=1), 0.0)
    plan, _ = run_step(scheduler, high=[2], mid=[2])
    assert plan.rows == [ScheduledRow("high", 1, 4, ([5],)), ScheduledRow("mid", 1, 1)]
    assert plan.preempted_ids == ["low"] and plan.new_rows == []
    # late could have had memory in that very step; it is let in with the next.
    assert [n.request_id for n in run_step(scheduler, high=[3], mid=[3], late=[1])[0].new_rows] == ["late"]


def test_the_first_to_give_way_waits_with_its_blocks_instead() -> None:
    """C alone is short of a block: it keeps what it has, D is not let in before it, and C goes on once A has ended."""
    scheduler = make(layout_of(None), 7, max_num_batched_tokens=32, enable_prefix_caching=False)
    for name, size, max_tokens in (("A", 11, 2), ("B", 5, 4), ("C", 4, 4)):
        scheduler.add(request(name, size, max_tokens=max_tokens), 0.0)
    run_step(scheduler, A=[1], B=[1], C=[1])
    scheduler.add(request("D", 4), 0.0)
    plan, _ = run_step(scheduler, A=[2], B=[2])
    assert plan == SchedulePlan(1, [ScheduledRow("A", 1, 11), ScheduledRow("B", 1, 5)])
    plan, _ = run_step(scheduler, B=[3], C=[2], D=[1])
    assert plan.finished_ids == ["A"] and plan.preempted_ids == []
    assert plan.rows == [ScheduledRow("B", 1, 6), ScheduledRow("C", 1, 4, ([3],)), ScheduledRow("D", 4, 0)]


def test_tokens_in_flight_of_a_preempted_request_are_kept_and_nothing_is_sampled_twice() -> None:
    scheduler = crowded()
    first = scheduler.schedule(0.0)
    second = scheduler.schedule(0.0)
    assert second.preempted_ids == ["C"] and shares(second) == {"A": 1, "B": 1}
    scheduler.abort(["A", "B"], 0.0)
    # Memory is free, but C's first token is still in flight.
    third = scheduler.schedule(0.0)
    assert third == SchedulePlan(2, finished_ids=["A", "B"]) and not scheduler.has_work()
    (delta,) = scheduler.update(first, answer(first, A=[1], B=[1], C=[7]), 0.0)
    assert (delta.request_id, delta.new_token_ids) == ("C", [7])
    scheduler.check_invariants()
    fourth = scheduler.schedule(0.0)
    assert fourth.new_rows[0].token_ids[-1] == 7 and shares(fourth) == {"C": 9}


def test_a_token_in_flight_may_end_a_preempted_request() -> None:
    scheduler = crowded()
    first = scheduler.schedule(0.0)
    scheduler._requests["C"].stop_token_ids = frozenset([7])
    second = scheduler.schedule(0.0)
    assert second.preempted_ids == ["C"]
    deltas = scheduler.update(first, answer(first, A=[1], B=[1], C=[7]), 0.0)
    assert [(d.request_id, d.finish_reason) for d in deltas] == [("A", None), ("B", None), ("C", "stop")]
    assert scheduler.stats().num_waiting == 0
    scheduler.check_invariants()
    # The runner has no row of C any more, but may remember things about it until it has finished.
    assert scheduler.schedule(0.0).finished_ids == ["C"]


def test_a_grant_taken_back_has_published_nothing() -> None:
    """low's third block would fill in the very step in which low gives way: nobody may find it."""
    scheduler = make(layout_of(None), 6, max_num_batched_tokens=8, policy="priority", max_model_len=20, num_draft_tokens=1)
    prompt = list(range(11))
    scheduler.add(request("low", prompt, priority=9, max_tokens=9), 0.0)
    run_step(scheduler)
    scheduler.add(request("high", 3, priority=0, max_tokens=9), 0.0)
    assert shares(run_step(scheduler, low=[11], high=[1])[0]) == {"low": 3, "high": 3}
    plan, _ = run_step(scheduler, high=[2])
    assert plan.preempted_ids == ["low"] and shares(plan) == {"high": 2}
    hashes: list[bytes] = []
    scheduler._hasher.extend(hashes, [*prompt, 11], None)
    assert scheduler.cache.find_hit(hashes, 12).num_tokens == 8


def test_outputs_do_not_depend_on_preemption() -> None:
    for policy in ("fcfs", "priority"):
        layout = layout_of(None, 6)
        scheduler = make(layout, 22, max_num_batched_tokens=12, policy=policy)
        device = FakeDevice(layout, vocab_size=50)
        messages = {f"r{i}": request(f"r{i}", 3 + i, priority=i % 3, max_tokens=20) for i in range(8)}
        outputs: dict[str, list[int]] = {name: [] for name in messages}
        for message in messages.values():
            scheduler.add(message, 0.0)
        while scheduler.has_unfinished():
            plan = scheduler.schedule(0.0)
            for delta in scheduler.update(plan, device.execute(plan), 0.0):
                outputs[delta.request_id] += delta.new_token_ids
        assert scheduler.stats().num_preemptions > 0
        assert outputs == {name: expected_output(m, 64, 50)[0] for name, m in messages.items()}


def test_prompt_logprobs_computed_again_after_a_preemption_are_not_told_twice() -> None:
    scheduler = make(layout_of(None), 6, max_num_batched_tokens=4, policy="priority", max_model_len=20)
    scheduler.add(request("low", 7, priority=9, prompt_logprobs=0, max_tokens=2), 0.0)
    low = scheduler._requests["low"]
    low.take_prompt_logprobs(4, entries(1, 2, 3, 4))
    low.take_prompt_logprobs(3, entries(1, 2, 3))  # told again
    low.take_prompt_logprobs(3, [])  # or not
    low.take_prompt_logprobs(5, entries(5))
    low.take_prompt_logprobs(7, entries(4, 5, 6))
    assert low.prompt_logprobs == entries(1, 2, 3, 4, 5, 6) and not low.wants_prompt_logprobs
