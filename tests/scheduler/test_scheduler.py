"""Exact plans, stop rules and refusals."""

from __future__ import annotations

import pytest

from canter.core.errors import ConfigError, InvalidRequestError, QueueFullError, UnsupportedModelError
from canter.core.messages import RequestDelta, RequestTimes
from canter.core.plan import NewRow, ScheduledRow, SchedulePlan, StepOutput, TokenLogprobs
from canter.core.state_specs import StateField, StateKind, StateLayout, StateSpec, plan_layout
from canter.scheduler.scheduler import Scheduler
from tests.scheduler.device import FakeDevice, layout_of, request


def make(layout: StateLayout | None = None, *num_blocks: int, **options: object) -> Scheduler:
    defaults: dict[str, object] = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    return Scheduler(layout or layout_of(None), num_blocks or (100,), **{**defaults, **options})  # type: ignore[arg-type]


def shares(plan: SchedulePlan) -> dict[str, int]:
    return {row.request_id: row.num_tokens for row in plan.rows}


def answer(plan: SchedulePlan, **tokens: list[int]) -> StepOutput:
    """An output that brings the given tokens, and none for other rows."""
    sampled = [tokens.get(row.request_id, []) for row in plan.rows]
    return StepOutput(plan.step_id, sampled, [None] * len(sampled))


def run_step(scheduler: Scheduler, **tokens: list[int]) -> tuple[SchedulePlan, list[RequestDelta]]:
    plan = scheduler.schedule(1.0)
    deltas = scheduler.update(plan, answer(plan, **tokens), 2.0)
    scheduler.check_invariants()
    return plan, deltas


def test_token_budget_and_chunked_prefill() -> None:
    scheduler = make(max_num_batched_tokens=16)
    scheduler.add(request("A", 20), 0.0)
    scheduler.add(request("B", 6), 0.0)
    assert shares(run_step(scheduler)[0]) == {"A": 16}
    plan, deltas = run_step(scheduler, A=[1], B=[2])
    assert shares(plan) == {"A": 4, "B": 6}
    assert [(d.request_id, d.new_token_ids) for d in deltas] == [("A", [1]), ("B", [2])]
    assert shares(run_step(scheduler, A=[1], B=[2])[0]) == {"A": 1, "B": 1}


def test_plans_name_all_tokens_and_blocks_once() -> None:
    scheduler = make(max_num_batched_tokens=6)
    message = request("A", [5, 6, 7, 8, 9, 10, 11], max_tokens=3)
    scheduler.add(message, 0.0)
    first = scheduler.schedule(0.0)
    assert first == SchedulePlan(0, [ScheduledRow("A", 6, 0)], [NewRow("A", [5, 6, 7, 8, 9, 10, 11], 7, 0, ([1, 2],), message.sampling)])
    scheduler.update(first, answer(first), 0.0)
    second = scheduler.schedule(0.0)
    assert second == SchedulePlan(1, [ScheduledRow("A", 1, 6)])
    scheduler.update(second, answer(second, A=[1]), 0.0)
    third = scheduler.schedule(0.0)
    assert third == SchedulePlan(2, [ScheduledRow("A", 1, 7)])
    scheduler.update(third, answer(third, A=[2]), 0.0)
    fourth = scheduler.schedule(0.0)
    assert fourth == SchedulePlan(3, [ScheduledRow("A", 1, 8, ([3],))])
    (delta,) = scheduler.update(fourth, answer(fourth, A=[3]), 0.0)
    assert delta.finish_reason == "length" and not scheduler.has_unfinished() and scheduler.has_work()
    assert scheduler.schedule(0.0) == SchedulePlan(4, finished_ids=["A"])
    assert not scheduler.has_work()


def test_long_prefill_threshold_leaves_room_for_others() -> None:
    scheduler = make(max_num_batched_tokens=16, long_prefill_token_threshold=5)
    for name, size in (("A", 12), ("B", 7), ("C", 3)):
        scheduler.add(request(name, size), 0.0)
    assert shares(run_step(scheduler, C=[1])[0]) == {"A": 5, "B": 5, "C": 3}
    assert shares(run_step(scheduler, B=[1], C=[1])[0]) == {"A": 5, "B": 2, "C": 1}
    assert shares(run_step(scheduler, A=[1], B=[1], C=[1])[0]) == {"A": 2, "B": 1, "C": 1}


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_whole() -> None:
    scheduler = make(max_num_batched_tokens=64, enable_chunked_prefill=False, long_prefill_token_threshold=3)
    for name, size in (("A", 40), ("B", 30), ("C", 5)):
        scheduler.add(request(name, size), 0.0)
    assert shares(run_step(scheduler, A=[1])[0]) == {"A": 40}
    assert shares(run_step(scheduler, A=[1], B=[1], C=[1])[0]) == {"A": 1, "B": 30, "C": 5}


def test_rows_bound_how_many_run() -> None:
    scheduler = make(max_num_seqs=2)
    for name in "ABC":
        scheduler.add(request(name, 2, max_tokens=2), 0.0)
    assert shares(run_step(scheduler, A=[1], B=[1])[0]) == {"A": 2, "B": 2}
    assert scheduler.stats().num_running == 2 and scheduler.stats().num_waiting == 1
    run_step(scheduler, A=[1], B=[1])
    plan, _ = run_step(scheduler, C=[1])
    assert plan.finished_ids == ["A", "B"] and shares(plan) == {"C": 2}


@pytest.mark.parametrize(
    ("sampling", "tokens", "kept", "reason", "stop_reason"),
    [
        ({"eos_token_ids": [9]}, [1, 9], [1, 9], "stop", None),
        ({"eos_token_ids": [9], "ignore_eos": True}, [1, 9, 1], [1, 9, 1], None, None),
        ({"eos_token_ids": [9], "stop_token_ids": [7]}, [1, 7], [1, 7], "stop", 7),
        ({"eos_token_ids": [9], "ignore_eos": True, "stop_token_ids": [9]}, [9], [9], "stop", 9),
        ({"eos_token_ids": [9], "stop_token_ids": [9]}, [9], [9], "stop", None),
        ({"eos_token_ids": [9], "min_tokens": 2}, [9, 1, 9], [9, 1, 9], "stop", None),
        ({"eos_token_ids": [9], "min_tokens": 2}, [9, 9], [9, 9], "stop", None),
        ({"eos_token_ids": [9], "max_tokens": 2}, [1, 9], [1, 9], "stop", None),
        ({"max_tokens": 2}, [1, 2], [1, 2], "length", None),
        ({"max_tokens": None}, [1] * 4, [1] * 4, "length", None),
        ({"max_tokens": 10, "min_tokens": 10, "eos_token_ids": [1]}, [1] * 4, [1] * 4, "length", None),
    ],
)
def test_stop_rules(sampling: dict[str, object], tokens: list[int], kept: list[int], reason: str | None, stop_reason: int | None) -> None:
    scheduler = make(max_model_len=10)
    scheduler.add(request("A", 6, **{"max_tokens": 4, **sampling}), 0.0)
    seen: list[int] = []
    for token in tokens:
        (delta,) = run_step(scheduler, A=[token])[1]
        seen += delta.new_token_ids
    assert (seen, delta.finish_reason, delta.stop_reason) == (kept, reason, stop_reason)
    assert scheduler.has_unfinished() == (reason is None)


def test_deltas_tell_times_and_counts() -> None:
    scheduler = make()
    scheduler.add(request("A", 3, max_tokens=3), 10.0)
    seen = []
    for i in range(3):
        plan = scheduler.schedule(11.0 + i)
        seen += scheduler.update(plan, answer(plan, A=[i]), 11.5 + i)
    assert [d.times for d in seen] == [RequestTimes(10.0, 11.0, 11.5, 11.5), None, RequestTimes(10.0, 11.0, 11.5, 13.5)]
    assert [d.finish_reason for d in seen] == [None, None, "length"]


@pytest.mark.parametrize(
    ("message", "param", "text"),
    [
        (request("A", []), "prompt", "empty"),
        (request("A", 64), "prompt", "64 tokens"),
        (request("A", [1, -1]), "prompt", "-1 to 1"),
        (request("A", [1, 2**40]), "prompt", "Token ids"),
        (request("A", 3, n=2, temperature=1.0), "n", "n = 2"),
        (request("live", 3), "request_id", "unique"),
        (request("A", 30, max_tokens=20), "max_tokens", "Lower max_tokens"),
        (request("A", 50, max_tokens=2), "prompt", "Shorten the prompt"),
        (request("A", 3, max_tokens=None), "max_tokens", "at most 41 tokens"),
    ],
)
def test_requests_that_can_never_be_served_are_refused(message: object, param: str, text: str) -> None:
    scheduler = make(layout_of(None), 11)
    scheduler.add(request("live", 3), 0.0)
    with pytest.raises(InvalidRequestError, match=text) as caught:
        scheduler.add(message, 0.0)  # type: ignore[arg-type]
    assert caught.value.param == param
    assert scheduler.stats().num_waiting == 1


def test_the_longest_request_that_is_accepted_finishes_alone() -> None:
    for layout, num_blocks, drafts in ((layout_of(None), 6, 0), (layout_of(None, 8), 12, 0), (layout_of(None), 7, 2), (layout_of(9), 7, 3)):
        scheduler = make(layout, num_blocks, max_num_batched_tokens=5, num_draft_tokens=drafts)
        device = FakeDevice(layout, num_draft_tokens=drafts)
        size = scheduler.max_request_tokens
        scheduler.add(request("A", size - 3, max_tokens=None if size == 64 else 3), 0.0)
        for _ in range(100):
            plan = scheduler.schedule(0.0)
            assert not plan.preempted_ids
            scheduler.update(plan, device.execute(plan), 0.0)
        assert not scheduler.has_unfinished()


def test_the_queue_is_bounded() -> None:
    scheduler = make(max_num_queued_reqs=2, max_num_seqs=1)
    scheduler.add(request("A", 3), 0.0)
    scheduler.add(request("B", 3), 0.0)
    with pytest.raises(QueueFullError, match="2 requests wait"):
        scheduler.add(request("C", 3), 0.0)
    scheduler.schedule(0.0)
    scheduler.add(request("C", 3), 0.0)


def test_prompt_tokens_that_wait_are_bounded_but_one_may_always_wait() -> None:
    scheduler = make(max_num_queued_tokens=10)
    scheduler.add(request("long", 15), 1.0)
    with pytest.raises(QueueFullError, match="15 prompt tokens wait"):
        scheduler.add(request("next", 1), 1.0)
    scheduler.abort(["long"], 1.0)
    scheduler.add(request("a", 6), 1.0)
    scheduler.add(request("b", 4), 1.0)
    with pytest.raises(QueueFullError):
        scheduler.add(request("c", 1), 1.0)
    scheduler.check_invariants()


def test_configurations_that_can_not_work_are_refused() -> None:
    for options, text in (
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"policy": "lifo"}, "lifo"),
        ({"enable_chunked_prefill": False}, "Without chunked prefill"),
    ):
        with pytest.raises(ConfigError, match=text):
            make(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 2 blocks"):
        make(layout_of(None), 1)
    with pytest.raises(ConfigError, match="1 pools"):
        make(layout_of(None), 9, 9)
    with pytest.raises(UnsupportedModelError, match="cross_attention"):
        make(plan_layout({0: StateSpec(StateKind.CROSS_ATTENTION, 4, (StateField("k", (2,), "float32"),))}))


def test_abort_ends_each_live_request_once() -> None:
    scheduler = make(max_num_seqs=1)
    scheduler.add(request("A", 3), 1.0)
    scheduler.add(request("B", 3), 2.0)
    run_step(scheduler, A=[4])
    deltas = scheduler.abort(["A", "B", "A", "nobody"], 3.0)
    assert [(d.request_id, d.new_token_ids, d.finish_reason) for d in deltas] == [("A", [], "abort"), ("B", [], "abort")]
    assert deltas[1].times == RequestTimes(2.0, 0.0, 0.0, 0.0)
    assert scheduler.abort(["A", "B"], 4.0) == []
    assert scheduler.schedule(5.0) == SchedulePlan(1, finished_ids=["A"])
    assert scheduler.stats().num_free_blocks == scheduler.stats().num_blocks


# prefix cache


def test_a_hit_never_covers_the_whole_prompt() -> None:
    scheduler = make()
    prompt = list(range(8))
    for name, cached in (("A", 0), ("B", 4)):
        scheduler.add(request(name, prompt, max_tokens=1), 0.0)
        plan, (delta,) = run_step(scheduler, A=[1], B=[1])
        assert plan.new_rows[0].num_computed_tokens == delta.num_cached_tokens == cached
    stats = scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (16, 4)


def test_equal_prompts_submitted_at_once_share_from_the_first_step() -> None:
    scheduler = make(max_num_batched_tokens=256, max_num_seqs=32)
    device = FakeDevice(layout_of(None))
    for i in range(32):
        scheduler.add(request(f"r{i}", list(range(41)), max_tokens=4), 0.0)
    plan = scheduler.schedule(0.0)
    assert list(shares(plan).values()) == [41] + [1] * 31
    assert scheduler.cache.pools[0].num_used == 11 + 31
    scheduler.update(plan, device.execute(plan), 0.0)
    while scheduler.has_unfinished():
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, device.execute(plan), 0.0)
        scheduler.check_invariants()


def test_salts_keep_prompts_apart() -> None:
    scheduler = make(max_num_batched_tokens=64)
    for name, salt in (("A", None), ("B", "x"), ("C", "y"), ("D", "x")):
        scheduler.add(request(name, list(range(9)), salt=salt), 0.0)
    assert shares(scheduler.schedule(0.0)) == {"A": 9, "B": 9, "C": 9, "D": 1}


def test_without_prefix_caching_nothing_is_shared_or_counted() -> None:
    scheduler = make(max_num_batched_tokens=64, enable_prefix_caching=False)
    for name in "AB":
        scheduler.add(request(name, list(range(9))), 0.0)
    assert shares(run_step(scheduler, A=[1], B=[1])[0]) == {"A": 9, "B": 9}
    assert scheduler.stats().prefix_queries == 0 and len(scheduler.cache.pools[0].index) == 0


def test_outputs_are_published_for_the_next_turn() -> None:
    scheduler = make()
    scheduler.add(request("A", [1, 2, 3], max_tokens=6), 0.0)
    for token in range(6):
        run_step(scheduler, A=[token])
    scheduler.add(request("B", [1, 2, 3, 0, 1, 2, 3, 4, 5, 9]), 0.0)
    assert scheduler.schedule(0.0).new_rows[0].num_computed_tokens == 8


def test_a_block_is_published_only_when_it_is_full() -> None:
    """A's second block is half written: B may share the first only."""
    scheduler = make(max_num_batched_tokens=64, long_prefill_token_threshold=6)
    for name in "AB":
        scheduler.add(request(name, list(range(20))), 0.0)
    plan = scheduler.schedule(0.0)
    assert [(r.request_id, r.num_computed_tokens, r.num_tokens) for r in plan.rows] == [("A", 0, 6), ("B", 4, 6)]


def test_reset_prefix_cache_needs_an_idle_engine() -> None:
    scheduler = make()
    scheduler.add(request("A", list(range(9)), max_tokens=1), 0.0)
    plan = scheduler.schedule(0.0)
    assert not scheduler.reset_prefix_cache()
    scheduler.update(plan, answer(plan, A=[1]), 0.0)
    assert scheduler.reset_prefix_cache()
    scheduler.add(request("B", list(range(9))), 0.0)
    assert scheduler.schedule(0.0).new_rows[0].num_computed_tokens == 0


def entries(*positions: int) -> list[TokenLogprobs]:
    return [TokenLogprobs([p], [0.0], 1) for p in positions]


def test_prompt_logprobs_bypass_hits_and_come_whole_with_the_first_token() -> None:
    scheduler = make(max_num_batched_tokens=6)
    scheduler.add(request("A", list(range(9)), max_tokens=1), 0.0)
    run_step(scheduler)
    run_step(scheduler, A=[1])
    scheduler.add(request("B", list(range(9)), prompt_logprobs=1), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan.rows == [ScheduledRow("B", 6, 0)]
    output = answer(plan)
    output.prompt_logprobs["B"] = entries(1, 2, 3, 4, 5, 6)
    assert scheduler.update(plan, output, 0.0) == []
    plan = scheduler.schedule(0.0)
    output = answer(plan, B=[3])
    output.prompt_logprobs["B"] = entries(7, 8)
    (delta,) = scheduler.update(plan, output, 0.0)
    assert delta.prompt_logprobs == entries(*range(1, 9))
    assert run_step(scheduler, B=[4])[1][0].prompt_logprobs is None


def test_a_kept_prompt_of_one_token_has_no_logprobs_but_says_so() -> None:
    scheduler = make()
    scheduler.add(request("A", [3], prompt_logprobs=0), 0.0)
    assert run_step(scheduler, A=[1])[1][0].prompt_logprobs == []


# memory


def test_windows_free_their_blocks_as_they_move() -> None:
    scheduler = make(layout_of(8), 8, max_num_batched_tokens=10)
    scheduler.add(request("A", 21, max_tokens=8), 0.0)
    run_step(scheduler)
    assert scheduler.cache.pools[0].num_used == 3
    run_step(scheduler)
    assert scheduler._running[0].cache.block_ids() == ([1, 2, 3, 4, 5],)
    run_step(scheduler, A=[1])
    assert scheduler._running[0].cache.block_ids() == ([0, 0, 0, 4, 5, 6],)


def test_a_prompt_is_not_begun_that_could_not_be_ended() -> None:
    """B's first chunk would fit, its whole prompt not beside what A still needs."""
    scheduler = make(layout_of(None), 11, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    scheduler.add(request("A", 23, max_tokens=1), 0.0)
    scheduler.add(request("B", 20, max_tokens=1), 0.0)
    for _ in range(5):
        assert shares(run_step(scheduler)[0]) == {"A": 4}
    run_step(scheduler, A=[1])
    assert shares(run_step(scheduler)[0]) == {"B": 4}
    assert scheduler.stats().num_preemptions == 0


def test_admission_is_strictly_in_order() -> None:
    scheduler = make(layout_of(None), 11, max_num_batched_tokens=64)
    for name, size in (("A", 30), ("B", 12), ("C", 1)):
        scheduler.add(request(name, size, max_tokens=1), 0.0)
    assert shares(run_step(scheduler, A=[1])[0]) == {"A": 30}
    assert shares(run_step(scheduler, B=[1], C=[1])[0]) == {"B": 12, "C": 1}


def test_outputs_out_of_order_or_shape_are_refused() -> None:
    scheduler = make()
    scheduler.add(request("A", 3), 0.0)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    with pytest.raises(ValueError, match="oldest step in flight is 0"):
        scheduler.update(second, answer(second, A=[1]), 0.0)
    with pytest.raises(ValueError, match="output of step 1"):
        scheduler.update(first, answer(second, A=[1]), 0.0)
    with pytest.raises(ValueError, match="1 to 1 tokens, got 2"):
        scheduler.update(first, answer(first, A=[1, 2]), 0.0)


def test_two_pools_are_counted_apart() -> None:
    layout = layout_of(None, 4, head_dims=[8, 16])
    scheduler = make(layout, 20, 6, max_num_batched_tokens=8)
    device = FakeDevice(layout)
    for name in "ABC":
        scheduler.add(request(name, 15, max_tokens=4), 0.0)
    while scheduler.has_unfinished():
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, device.execute(plan), 0.0)
        scheduler.check_invariants()
    assert scheduler.stats().num_free_blocks == 24
