"""Steps that compute prompts beside running requests stay within a multiple of those that don't."""

from __future__ import annotations

from canter.scheduler.pace import FIRST_TOKENS, PrefillPace
from canter.scheduler.scheduler import Scheduler
from tests.scheduler.device import FakeDevice, expected_output, layout_of, request
from tests.scheduler.test_scheduler import make

QUIET, TOKEN = 0.010, 0.001


def test_it_learns_what_fits() -> None:
    pace = PrefillPace(4.0)
    assert pace.limit == FIRST_TOKENS
    pace.note(FIRST_TOKENS, 5.0)
    assert pace.limit == FIRST_TOKENS, "without a step to compare with nothing is learnt"
    for seconds in (QUIET, 3.0, QUIET):
        pace.note(0, seconds)
    for _ in range(10):
        pace.note(pace.limit, QUIET + TOKEN * pace.limit)
    assert 29 <= pace.limit <= 30
    for _ in range(30):
        pace.note(pace.limit, QUIET + 100 * TOKEN * pace.limit)
    assert pace.limit == 1, "prompts always get on"
    for _ in range(60):
        pace.note(pace.limit, QUIET)
    assert pace.limit > 1000


def play(scheduler: Scheduler, device: FakeDevice, late_at: int) -> tuple[dict[str, list[int]], list[tuple[int, int]]]:
    """Two short requests, and a long prompt that comes at a step; (outputs, prompt and other tokens of each step)."""
    messages = {name: request(name, length, max_tokens=400) for name, length in (("a", 5), ("b", 9), ("long", 600))}
    for name in ("a", "b"):
        scheduler.add(messages[name], 0.0)
    outputs: dict[str, list[int]] = {name: [] for name in messages}
    steps, now, number = [], 0.0, 0
    while scheduler.has_work():
        if number == late_at:
            scheduler.add(messages["long"], now)
        plan = scheduler.schedule(now)
        prompt = sum(row.num_tokens for row in plan.rows if row.request_id == "long" and row.num_computed_tokens < 599)
        now += QUIET + TOKEN * prompt
        for delta in scheduler.update(plan, device.execute(plan), now):
            outputs[delta.request_id] += delta.new_token_ids
        scheduler.check_invariants()
        steps.append((prompt, plan.num_tokens - prompt))
        number += 1
    for name, message in messages.items():
        assert outputs[name] == expected_output(message, 2000, 50)[0]
    return outputs, steps


def test_a_long_prompt_takes_many_small_steps() -> None:
    layout = layout_of(None)
    made = make(layout, 600, max_num_batched_tokens=256, max_model_len=2000, max_prefill_slowdown=4.0)
    _, steps = play(made, FakeDevice(layout, vocab_size=50), late_at=20)
    beside = [prompt for prompt, others in steps if prompt and others]
    assert sum(beside) == 599 or sum(beside) == 600
    assert beside[0] == FIRST_TOKENS and max(beside) <= 31 and len(beside) > 15
    assert all(QUIET + TOKEN * prompt <= 4.1 * QUIET for prompt in beside)


def test_alone_a_prompt_takes_whole_steps() -> None:
    layout = layout_of(None)
    made = make(layout, 600, max_num_batched_tokens=256, max_model_len=2000, max_prefill_slowdown=4.0)
    made.add(request("long", 600, max_tokens=2), 0.0)
    device, sizes = FakeDevice(layout, vocab_size=50), []
    while made.has_work():
        plan = made.schedule(0.0)
        sizes.append(plan.num_tokens)
        made.update(plan, device.execute(plan), 0.0)
    assert sizes[:3] == [256, 256, 88]
