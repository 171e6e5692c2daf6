"""The engine loop with a runner that invents tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from canter.core.errors import InvalidRequestError
from canter.core.messages import AddRequest, EngineInfo
from canter.core.plan import RowError, SchedulePlan, StepOutput
from canter.core.sampling_params import SamplingParams
from canter.core.state_specs import attention_spec, plan_layout
from canter.engine.core import EngineCore
from canter.scheduler.scheduler import Scheduler


class InventingRunner:
    """Answers every row that samples with token 7; `fail_in` names steps that raise when awaited,
    `errors` requests whose tokens mean nothing."""

    def __init__(self) -> None:
        self.executed: list[SchedulePlan] = []
        self.awaited: list[int] = []
        self.fail_in: set[int] = set()
        self.errors: dict[str, RowError] = {}
        self._prefill: dict[str, int] = {}
        self.is_shut_down = False

    def execute(self, plan: SchedulePlan) -> SchedulePlan:
        self.executed.append(plan)
        self._prefill.update({row.request_id: len(row.token_ids) for row in plan.new_rows})
        return plan

    def sample(self, pending: SchedulePlan) -> Any:
        return _Invented(self, pending)

    def shutdown(self) -> None:
        self.is_shut_down = True


class _Invented:
    def __init__(self, runner: InventingRunner, plan: SchedulePlan) -> None:
        self._runner, self._plan = runner, plan

    def result(self) -> StepOutput:
        self._runner.awaited.append(self._plan.step_id)
        if len(self._runner.awaited) in self._runner.fail_in:
            raise RuntimeError("a kernel broke")
        tokens = [[7] if r.num_computed_tokens + r.num_tokens >= self._runner._prefill[r.request_id] else [] for r in self._plan.rows]
        ids = {r.request_id for r in self._plan.rows}
        errors = {k: v for k, v in self._runner.errors.items() if k in ids}
        return StepOutput(self._plan.step_id, tokens, [None] * len(tokens), errors=errors)


def new_core(depth: int = 2) -> tuple[EngineCore, InventingRunner]:
    layout = plan_layout({0: attention_spec(1, 4, "float32", 4)})
    scheduler = Scheduler(layout, [64], max_model_len=64, max_num_seqs=8, max_num_batched_tokens=16)
    info = EngineInfo("m", "M", 100, 64, "float32", "cpu", 4, 64, 252, 8, 16, True)
    runner = InventingRunner()
    return EngineCore(scheduler, runner, info, depth, clock=lambda: 1.0), runner


def request(name: str, length: int = 5, **params: Any) -> AddRequest:
    return AddRequest(name, list(range(1, length + 1)), SamplingParams(**{"max_tokens": 4, **params}))


def drain(core: EngineCore) -> dict[str, tuple[list[int], str | None]]:
    result: dict[str, tuple[list[int], str | None]] = {}
    while core.has_work():
        for delta in core.step():
            tokens, finish = result.get(delta.request_id, ([], None))
            assert finish is None
            result[delta.request_id] = (tokens + delta.new_token_ids, delta.finish_reason)
    return result


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_run_to_their_ends(depth: int) -> None:
    core, runner = new_core(depth)
    for name in ("a", "b"):
        core.add_request(request(name))
    assert drain(core) == {"a": ([7] * 4, "length"), "b": ([7] * 4, "length")}
    assert not core.has_unfinished()
    core.shutdown()
    assert runner.is_shut_down


def test_the_next_step_is_planned_before_this_one_is_known() -> None:
    core, runner = new_core()
    core.add_request(request("a"))
    core.step()
    assert len(runner.executed) == 2 and len(runner.awaited) == 1
    core.step()
    assert len(runner.executed) == 3 and len(runner.awaited) == 2


def test_without_async_each_step_is_awaited_first() -> None:
    core, runner = new_core(depth=1)
    core.add_request(request("a"))
    for i in range(1, 4):
        core.step()
        assert len(runner.executed) == len(runner.awaited) == i


def test_abort_ends_a_request_once_and_drops_its_row() -> None:
    core, runner = new_core()
    core.add_request(request("a", max_tokens=50))
    core.add_request(request("b", max_tokens=6))
    core.step()
    core.abort(["a", "nobody"])
    result = drain(core)
    assert result["a"][1] == "abort" and result["b"][1] == "length"
    assert "a" in [i for plan in runner.executed for i in plan.finished_ids]
    assert core.stats().num_free_blocks == core.stats().num_blocks


def test_a_failed_step_fails_its_requests_and_no_others() -> None:
    core, runner = new_core()
    core.add_request(request("a"))
    runner.fail_in = {2}
    result = drain(core)
    assert result["a"][1] == "error"
    core.add_request(request("b"))
    assert drain(core)["b"] == ([7] * 4, "length")
    assert core.stats().num_free_blocks == core.stats().num_blocks


def test_a_request_whose_tokens_mean_nothing_ends_alone() -> None:
    core, runner = new_core()
    runner.errors = {"a": RowError("no token may follow", "InvalidRequestError")}
    core.add_request(request("a"))
    core.add_request(request("b"))
    deltas = []
    while core.has_work():
        deltas += core.step()
    (of_a,) = [d for d in deltas if d.request_id == "a"]
    assert (of_a.finish_reason, of_a.error, of_a.new_token_ids) == ("error", "no token may follow", [])
    assert of_a.error_type == "InvalidRequestError"
    assert sum(len(d.new_token_ids) for d in deltas if d.request_id == "b") == 4
    assert core.stats().num_free_blocks == core.stats().num_blocks


@pytest.mark.parametrize(("prompt", "match"), [([], "empty"), ([1, 100], r"\[0, 100\), got 100"), ([-1], "got -1")])
def test_bad_prompts_are_refused(prompt: list[int], match: str) -> None:
    core, _ = new_core()
    with pytest.raises(InvalidRequestError, match=match):
        core.add_request(AddRequest("a", prompt, SamplingParams()))
    assert not core.has_work()


def test_utilities() -> None:
    core, _ = new_core()
    assert core.utility("reset_prefix_cache", []) is True
    with pytest.raises(InvalidRequestError, match="no method 'explode'"):
        core.utility("explode", [])


def test_shutdown_waits_for_steps_in_flight() -> None:
    core, runner = new_core()
    core.add_request(request("a", max_tokens=50))
    core.step()
    core.shutdown()
    assert len(runner.executed) == len(runner.awaited)


def test_a_paused_engine_plans_nothing_but_aborts() -> None:
    core, runner = new_core()
    core.add_request(request("a", max_tokens=50))
    core.step()
    core.utility("pause", [])
    while core.has_work():
        core.step()
    planned = len(runner.executed)
    core.add_request(request("b", max_tokens=2))
    assert not core.has_work() and len(runner.executed) == planned
    core.abort(["a"])
    assert core.has_work()
    assert [(delta.request_id, delta.finish_reason) for delta in core.step()] == [("a", "abort")]
    core.utility("resume", [])
    deltas = []
    while core.has_work():
        deltas += core.step()
    assert deltas[-1].request_id == "b" and deltas[-1].finish_reason == "length"


def test_a_profile_shows_the_steps(tmp_path) -> None:
    core, _ = new_core()
    path = tmp_path / "t.json"
    assert core.utility("start_profile", [str(path), 0, 0])
    core.add_request(request("a", max_tokens=4))
    while core.has_work():
        core.step()
    assert core.utility("stop_profile", []) == str(path)
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
    assert names.count("launch") >= 4 and {"schedule", "finish", "requests", "cache"} <= set(names)


def test_requests_that_wait_too_long_are_refused() -> None:
    layout = plan_layout({0: attention_spec(1, 4, "float32", 4)})
    scheduler = Scheduler(layout, [64], max_model_len=64, max_num_seqs=1, max_num_batched_tokens=16, queue_timeout=5.0)
    info = EngineInfo("m", "M", 100, 64, "float32", "cpu", 4, 64, 252, 1, 16, True)
    now = 0.0
    core = EngineCore(scheduler, InventingRunner(), info, clock=lambda: now)
    core.add_request(request("runs", max_tokens=40))
    core.step()
    core.add_request(request("waits", max_tokens=2))
    deltas = core.step()
    now = 5.0
    deltas = core.step()
    refused = [delta for delta in deltas if delta.request_id == "waits"]
    assert [(delta.finish_reason, delta.error_type) for delta in refused] == [("error", "QueueFullError")]
    assert "5 seconds" in (refused[0].error or "")
    scheduler.check_invariants()
    while core.has_work():
        deltas += core.step()
    assert [delta.finish_reason for delta in deltas if delta.request_id == "runs"][-1] == "length"
