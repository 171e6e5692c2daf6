"""Steps that compute prompts beside running requests stay within a multiple of those that don't."""

from __future__ import annotations

from canter.core.config import EngineArgs
from canter.scheduler.pace import FIRST_TOKENS, NO_LIMIT, PrefillPace
from canter.scheduler.scheduler import Scheduler
from tests.scheduler.device import FakeDevice, expected_output, layout_of, request
from tests.scheduler.test_scheduler import make

QUIET, TOKEN = 0.010, 0.001


STEP = 256


def test_it_learns_what_fits() -> None:
    pace = PrefillPace(4.0, STEP)
    assert pace.limit == FIRST_TOKENS
    for seconds in (QUIET, 3.0, QUIET):
        pace.note(0, 0, seconds)
    for _ in range(10):
        pace.note(pace.limit, pace.limit, QUIET + TOKEN * pace.limit)
    assert 29 <= pace.limit <= 30
    for _ in range(10):
        pace.note(2000, 20, QUIET + TOKEN / 100 * 2000)
    assert 29 <= pace.limit <= 30, "tokens of short prompts cost less, and teach nothing"
    for _ in range(30):
        pace.note(pace.limit, pace.limit, QUIET + 100 * TOKEN * pace.limit)
    assert pace.limit == 1, "prompts always get on"
    for _ in range(60):
        pace.note(pace.limit, pace.limit, QUIET)
    assert pace.limit > 1000


def test_where_no_step_was_quiet_it_learns_from_the_shortest() -> None:
    pace = PrefillPace(4.0, STEP)
    shortest = QUIET + TOKEN * FIRST_TOKENS
    for _ in range(40):
        pace.note(pace.limit, pace.limit, QUIET + TOKEN * pace.limit)
    assert 3 * shortest / TOKEN * 0.8 <= pace.limit <= 4 * shortest / TOKEN


def test_only_long_prompts_are_held_back_and_only_while_others_generate() -> None:
    pace = PrefillPace(4.0, STEP)
    pace.begin(any_generate=True)
    assert pace.share(STEP) == pace.first_share(STEP) == NO_LIMIT
    assert pace.share(STEP + 1) == pace.first_share(STEP + 1) == FIRST_TOKENS
    pace.take(STEP, STEP)
    pace.take(STEP + 1, 10)
    assert pace.share(STEP + 1) == FIRST_TOKENS - 10
    pace.take(STEP + 1, FIRST_TOKENS - 10)
    assert pace.share(STEP + 1) == 0 and pace.first_share(STEP + 1) == 1 and pace.share(STEP) == NO_LIMIT
    pace.begin(any_generate=False)
    assert pace.share(STEP + 1) == NO_LIMIT
    off = PrefillPace(0.0, STEP)
    off.begin(any_generate=True)
    assert off.share(STEP + 1) == NO_LIMIT


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
    made = make(layout, 600, max_num_batched_tokens=STEP, max_model_len=2000, max_prefill_slowdown=4.0)
    _, steps = play(made, FakeDevice(layout, vocab_size=50), late_at=20)
    beside = [prompt for prompt, others in steps if prompt and others]
    assert sum(beside) == 599 or sum(beside) == 600
    assert beside[0] == FIRST_TOKENS and max(beside) <= 31 and len(beside) > 15
    assert all(QUIET + TOKEN * prompt <= 4.1 * QUIET for prompt in beside)


def test_alone_a_prompt_takes_whole_steps() -> None:
    layout = layout_of(None)
    made = make(layout, 600, max_num_batched_tokens=STEP, max_model_len=2000, max_prefill_slowdown=4.0)
    made.add(request("long", 600, max_tokens=2), 0.0)
    device, sizes = FakeDevice(layout, vocab_size=50), []
    while made.has_work():
        plan = made.schedule(0.0)
        sizes.append(plan.num_tokens)
        made.update(plan, device.execute(plan), 0.0)
    assert sizes[:3] == [256, 256, 88]


def test_a_crowd_of_short_prompts_takes_whole_steps_beside_streams_and_a_long_prompt() -> None:
    """What holds by default. Each step that the crowd needs is full; two long prompts share what the streams can bear."""
    layout = layout_of(None)
    slowdown = EngineArgs().max_prefill_slowdown
    made = make(layout, 2000, max_num_batched_tokens=STEP, max_model_len=2000, max_num_seqs=64, max_prefill_slowdown=slowdown)
    device = FakeDevice(layout, vocab_size=50)
    for i in range(8):
        made.add(request(f"stream {i}", 5, max_tokens=400), 0.0)
    arrivals = {3: ["long 0", "long 1"], 5: [f"short {i}" for i in range(32)]}
    steps = []
    for number in range(40):
        for name in arrivals.get(number, []):
            made.add(request(name, 128 if name.startswith("short") else 900, max_tokens=100), 0.0)
        plan = made.schedule(0.0)
        steps.append({row.request_id: row.num_tokens for row in plan.rows})
        made.update(plan, device.execute(plan), 0.0)
        made.check_invariants()
    long_tokens = [sum(tokens for name, tokens in rows.items() if name.startswith("long")) for rows in steps]
    crowd = [sum(tokens for name, tokens in rows.items() if name.startswith("short") and tokens > 1) for rows in steps]
    assert long_tokens[3] == FIRST_TOKENS + 1 and "long 1" in steps[3], "the second is let in, or the crowd would wait for the first"
    last = max(number for number, tokens in enumerate(crowd) if tokens)
    assert sum(crowd) >= 32 * 127 and last < 39
    assert all(sum(rows.values()) == STEP for rows in steps[5:last])
    assert all(0 < tokens <= STEP // 8 for tokens in long_tokens[3:])
