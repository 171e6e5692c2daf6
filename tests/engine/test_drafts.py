"""Drafts change how fast tokens come, never which: right, wrong and random ones through scheduler and runner."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import canter.engine.build
from canter.core.messages import AddRequest
from canter.core.plan import StepOutput
from canter.core.sampling_params import SamplingParams
from canter.engine.core import EngineCore
from canter.runner.model_runner import ModelRunner, PendingForward
from canter.scheduler.scheduler import Scheduler
from tests.engines import VOCAB_SIZE, LateDevice, Result, engine, mixed_requests, results, tiny_checkpoint

NUM_DRAFTS = 3


class DraftingRunner(ModelRunner):
    """Proposes drafts after each sample: the tokens that come next, others, or now these and now those.

    They lie in the request table, as a drafter on the device leaves them; with `brings_drafts` the output tells them too,
    and then the table holds nonsense.
    """

    accuracy = 1.0
    brings_drafts = False
    expected: dict[str, Result]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._random = random.Random(1)
        self._told: dict[int, list[list[int]]] = {}

    def _sample(self, pending: PendingForward) -> Any:
        sampled = super()._sample(pending)
        if sampled is not None:
            drafts = [self._propose(row.request_id) for row in pending.plan.rows]
            self._told[pending.plan.step_id] = drafts
            for row, tokens in zip(pending.plan.rows, drafts, strict=True):
                self._table.draft_tokens[self._table.row_of[row.request_id]] = torch.tensor(
                    [0] * NUM_DRAFTS if self.brings_drafts else tokens
                )
        return sampled

    def _propose(self, request_id: str) -> list[int]:
        row = self._table.row_of[request_id]
        known = int(self._table.total_len[row]) - int(self._table.prompt_len_np[row])
        truth = self.expected[request_id].token_ids if request_id in self.expected else []
        right = [*truth[known : known + NUM_DRAFTS], 0, 0, 0][:NUM_DRAFTS]
        return [t if self._random.random() < self.accuracy else self._random.randrange(VOCAB_SIZE) for t in right]

    def sample(self, pending: PendingForward) -> Any:
        return Told(self, super().sample(pending))


class Told:
    def __init__(self, runner: DraftingRunner, pending: Any) -> None:
        self._runner, self._pending = runner, pending

    def result(self) -> StepOutput:
        output: StepOutput = self._pending.result()
        if self._runner.brings_drafts and output.sampled_token_ids:
            output.draft_token_ids = self._runner._told[output.step_id]
        return output


def drafting_engine(
    monkeypatch: pytest.MonkeyPatch, model: Path, expected: dict[str, Result], accuracy: float, brings_drafts: bool, **changes: Any
) -> EngineCore:
    settings = dict(accuracy=accuracy, brings_drafts=brings_drafts, expected=expected)
    runner = type("Runner", (DraftingRunner,), settings)
    monkeypatch.setattr(canter.engine.build, "ModelRunner", functools.partial(runner, num_draft_tokens=NUM_DRAFTS))
    monkeypatch.setattr(canter.engine.build, "Scheduler", functools.partial(Scheduler, num_draft_tokens=NUM_DRAFTS))
    return engine(model, **changes)


def all_requests() -> list[AddRequest]:
    """Every sampling option, and several at once; all with logprobs."""
    requests = mixed_requests(40, longest=60)
    both = dict(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.4, bad_words_token_ids=[[i, i] for i in range(3, 131)])
    for i, temperature in enumerate((0.0, 1.0, 0.0, 0.7)):
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=30, min_tokens=10, stop_token_ids=[*range(3, 40)], **both)
        requests.append(AddRequest(f"both{i}", [9 + i] * (5 + 20 * i), params))
    for request in requests:
        request.sampling = request.sampling.clone(logprobs=2)
    requests[0].sampling = requests[0].sampling.clone(prompt_logprobs=1)
    return requests


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), request.param, seed=2)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Result]:
    core = engine(model, async_scheduling=False)
    found = results(core, all_requests())
    core.shutdown()
    return found


def assert_equal(found: dict[str, Result], expected: dict[str, Result]) -> None:
    for name, result in found.items():
        want = expected[name]
        assert result.token_ids == want.token_ids, name
        assert (result.finish_reason, result.stop_reason, result.error) == (want.finish_reason, want.stop_reason, None), name
        assert [(e.token_ids, e.rank) for e in result.logprobs] == [(e.token_ids, e.rank) for e in want.logprobs], name
        assert [e.logprobs for e in result.logprobs] == [pytest.approx(e.logprobs, abs=1e-5) for e in want.logprobs], name
        assert (result.prompt_logprobs is None) == (want.prompt_logprobs is None)
        assert len(result.prompt_logprobs or []) == len(want.prompt_logprobs or [])


@pytest.mark.parametrize("accuracy", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("brings_drafts", [True, False], ids=["told", "on-device"])
@pytest.mark.parametrize("changes", [dict(async_scheduling=True), dict(async_scheduling=False)], ids=["async", "sync"])
def test_drafts_change_no_token(
    monkeypatch: pytest.MonkeyPatch, model: Path, expected: dict[str, Result], accuracy: float, brings_drafts: bool, changes: dict[str, Any]
) -> None:
    core = drafting_engine(monkeypatch, model, expected, accuracy, brings_drafts, max_num_batched_tokens=128, **changes)
    assert_equal(results(core, all_requests()), expected)
    stats = core.stats()
    assert stats.num_free_blocks == stats.num_blocks
    core.shutdown()


@pytest.mark.parametrize("accuracy", [1.0, 0.6])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_drafts_with_preemption(
    monkeypatch: pytest.MonkeyPatch, model: Path, expected: dict[str, Result], accuracy: float, asynchronous: bool
) -> None:
    blocks = 14 if "llama" in model.name else 36
    changes = dict(num_gpu_blocks_override=blocks, max_model_len=130, max_num_batched_tokens=64, async_scheduling=asynchronous)
    core = drafting_engine(monkeypatch, model, expected, accuracy, not asynchronous, **changes)
    assert_equal(results(core, all_requests()), expected)
    stats = core.stats()
    assert stats.num_preemptions > 0 and stats.num_free_blocks == stats.num_blocks
    core.shutdown()


def test_drafts_with_small_blocks_and_a_late_device(monkeypatch: pytest.MonkeyPatch, model: Path, expected: dict[str, Result]) -> None:
    changes = dict(
        num_gpu_blocks_override=1600, block_size=2, device=LateDevice(), max_num_batched_tokens=67, long_prefill_token_threshold=9
    )
    core = drafting_engine(monkeypatch, model, expected, 0.7, False, **changes)
    assert_equal(results(core, all_requests()), expected)
    core.shutdown()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_right_drafts_take_fewer_steps(monkeypatch: pytest.MonkeyPatch, model: Path, asynchronous: bool) -> None:
    request = AddRequest("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=41))
    plain = engine(model, async_scheduling=False)
    expected = results(plain, [request])
    plain.shutdown()
    core = drafting_engine(monkeypatch, model, expected, 1.0, not asynchronous, async_scheduling=asynchronous)
    assert_equal(results(core, [request]), expected)
    # One token from the prompt, then four in each step; and a plan that drops the row.
    assert (plain.stats().num_steps, core.stats().num_steps) == (42, 12)
    core.shutdown()
