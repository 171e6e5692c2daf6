"""Random lives of the scheduler on a device that checks every read."""

from __future__ import annotations

import math
from collections import deque

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from canter.core.errors import InvalidRequestError
from canter.core.messages import AddRequest, RequestDelta
from canter.core.plan import SchedulePlan, StepOutput
from canter.core.sampling_params import SamplingParams
from canter.core.state_specs import (
    SnapshotMode,
    StateKind,
    attention_spec,
    compressed_spec,
    mla_spec,
    open_window_spec,
    plan_layout,
)
from canter.scheduler.cache.coordinator import CacheCoordinator
from canter.scheduler.cache.managers import CacheLimits
from canter.scheduler.scheduler import Scheduler
from tests.scheduler.device import FakeDevice, expected_output, layout_of, layout_with_states

MAX_MODEL_LEN = 40
LAYOUTS = {
    "full": layout_of(None),
    "window": layout_of(6),
    "full+window": layout_of(None, 6),
    "full+2 windows": layout_of(None, 6, 6),
    "full+windows 1, 9": layout_of(None, 1, 9),
    "two pools": layout_of(None, 6, head_dims=[8, 16]),
    "chunked": plan_layout({0: attention_spec(1, 8, "float32", 4, 8, kind=StateKind.CHUNKED_LOCAL)}),
    "full+chunked": plan_layout(
        {0: attention_spec(1, 8, "float32", 4), 1: attention_spec(1, 8, "float32", 4, 12, kind=StateKind.CHUNKED_LOCAL)}
    ),
    "prompt window": plan_layout({0: attention_spec(1, 8, "float32", 4, 6, kind=StateKind.PROMPT_WINDOW)}),
    "full+prompt window": plan_layout(
        {0: attention_spec(1, 8, "float32", 4), 1: attention_spec(1, 8, "float32", 4, 5, kind=StateKind.PROMPT_WINDOW)}
    ),
    "latents": plan_layout({0: mla_spec(8, 4, "float32", 4, index_dim=4)}),
    "compressed": plan_layout({0: compressed_spec(2, 8, "float32", 4), 1: open_window_spec(2, 8, "float32", 4, overlaps=True)}),
    "states": layout_with_states(SnapshotMode.NONE, MAX_MODEL_LEN),
    "aligned states": layout_with_states(SnapshotMode.ALIGN, 8),
    "all states": layout_with_states(SnapshotMode.ALL, 4),
    "full+states": layout_with_states(SnapshotMode.NONE, MAX_MODEL_LEN, None),
    "full+aligned states": layout_with_states(SnapshotMode.ALIGN, 4, None),
    "full+window+aligned states": layout_with_states(SnapshotMode.ALIGN, 8, None, 6),
    "full+chunked+all states": layout_with_states(SnapshotMode.ALL, 8, None, 8, kind=StateKind.CHUNKED_LOCAL),
    "two block sizes": plan_layout({0: attention_spec(1, 8, "float32", 4), 1: attention_spec(2, 8, "float32", 2, 5)}),
}
STOP_TOKEN = 3


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts, plans up to three steps ahead and takes outputs in later; at the end everything is drained."""

    @initialize(
        layout=st.sampled_from(sorted(LAYOUTS)),
        memory=st.sampled_from([0.4, 1.0, 1.0, 1.2, 1.5, 2.5]),
        max_num_seqs=st.sampled_from([1, 2, 4, 8]),
        budget=st.integers(1, 24),
        threshold=st.sampled_from([0, 0, 3]),
        chunked=st.sampled_from([True, True, True, False]),
        caching=st.sampled_from([True, True, True, False]),
        policy=st.sampled_from(["fcfs", "priority"]),
        num_drafts=st.sampled_from([0, 0, 1, 3]),
        accuracy=st.sampled_from([0.0, 0.5, 0.9]),
        brings_drafts=st.booleans(),
    )
    def start(
        self,
        layout: str,
        memory: float,
        max_num_seqs: int,
        budget: int,
        threshold: int,
        chunked: bool,
        caching: bool,
        policy: str,
        num_drafts: int,
        accuracy: float,
        brings_drafts: bool,
    ) -> None:
        if any(group.spec.kind is StateKind.RECURRENT for group in LAYOUTS[layout].groups):
            chunked, num_drafts = True, 0  # what start-up refuses otherwise
        self.budget = budget if chunked else MAX_MODEL_LEN + budget
        self.max_num_seqs = max_num_seqs
        limits = CacheLimits(MAX_MODEL_LEN, self.budget, num_drafts)
        longest = CacheCoordinator(LAYOUTS[layout], [2] * len(LAYOUTS[layout].pools), limits).max_blocks(MAX_MODEL_LEN)
        self.scheduler = Scheduler(
            LAYOUTS[layout],
            [1 + math.ceil(memory * count) for count in longest],
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.budget,
            long_prefill_token_threshold=threshold,
            enable_chunked_prefill=chunked,
            enable_prefix_caching=caching,
            policy=policy,
            num_draft_tokens=num_drafts,
        )
        self.device = FakeDevice(
            LAYOUTS[layout], vocab_size=19, num_draft_tokens=num_drafts, accuracy=accuracy, brings_drafts=brings_drafts
        )
        self.in_flight: deque[tuple[SchedulePlan, StepOutput]] = deque()
        self.messages: dict[str, AddRequest] = {}
        self.outputs: dict[str, list[int]] = {}
        self.prompt_logprobs: dict[str, int] = {}
        self.alive: set[str] = set()
        self.num_added = 0
        self.now = 0.0

    @rule(
        prefix=st.integers(0, 2),
        num_prompt=st.integers(1, 24),
        tail=st.integers(0, 3),
        max_tokens=st.one_of(st.none(), st.integers(1, 24)),
        min_tokens=st.integers(0, 3),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "salt"]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        copies=st.sampled_from([1, 1, 4]),
    )
    def add(
        self,
        prefix: int,
        num_prompt: int,
        tail: int,
        max_tokens: int | None,
        min_tokens: int,
        priority: int,
        salt: str | None,
        prompt_logprobs: int | None,
        copies: int,
    ) -> None:
        prompt = [prefix] * num_prompt + [tail]
        least = min(min_tokens, max_tokens) if max_tokens else min_tokens
        sampling = SamplingParams(max_tokens=max_tokens, min_tokens=least, eos_token_ids=[STOP_TOKEN], prompt_logprobs=prompt_logprobs)
        for _ in range(copies):
            message = AddRequest(f"r{self.num_added}", prompt, sampling, self.now, priority, salt)
            self.num_added += 1
            length = min(len(prompt) + (max_tokens or MAX_MODEL_LEN), MAX_MODEL_LEN)
            if length > self.scheduler.max_request_tokens:
                with pytest.raises(InvalidRequestError, match="cache memory"):
                    self.scheduler.add(message, self.now)
            else:
                self.scheduler.add(message, self.now)
                self.messages[message.request_id] = message
                self.outputs[message.request_id] = []
                self.alive.add(message.request_id)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.alive)))
        deltas = self.scheduler.abort([request_id, "unknown", request_id], self.now)
        assert [(d.request_id, d.finish_reason) for d in deltas] == [(request_id, "abort")]
        self.alive.remove(request_id)

    @precondition(lambda self: len(self.in_flight) < 3)
    @rule()
    def schedule(self) -> None:
        self.plan_step()

    @precondition(lambda self: self.in_flight)
    @rule()
    def update(self) -> None:
        self.take_output()

    @rule(lag=st.integers(0, 2), num_steps=st.integers(1, 16))
    def step(self, lag: int, num_steps: int) -> None:
        for _ in range(num_steps):
            self.plan_step()
            while len(self.in_flight) > lag:
                self.take_output()

    @rule()
    def reset_prefix_cache(self) -> None:
        done = self.scheduler.reset_prefix_cache()
        assert done or self.scheduler.stats().num_running

    def plan_step(self) -> SchedulePlan:
        self.now += 1.0
        had_work = self.scheduler.has_work()
        plan = self.scheduler.schedule(self.now)
        assert had_work or not plan.has_work
        assert plan.has_work or not had_work or self.in_flight, "nothing in flight, work to do, yet an empty plan"
        assert plan.num_tokens <= self.budget
        assert plan.num_tokens == self.scheduler.stats().step_num_tokens
        assert len(plan.rows) <= self.max_num_seqs and len(self.device.rows) <= self.max_num_seqs
        assert not (plan.preempted_ids and plan.new_rows)
        output = self.device.execute(plan)
        if plan.rows:
            self.in_flight.append((plan, output))
        return plan

    def take_output(self) -> None:
        plan, output = self.in_flight.popleft()
        for delta in self.scheduler.update(plan, output, self.now):
            self.take_delta(delta)

    def take_delta(self, delta: RequestDelta) -> None:
        assert delta.request_id in self.alive
        message, tokens = self.messages[delta.request_id], self.outputs[delta.request_id]
        if not tokens and message.sampling.prompt_logprobs is not None:
            assert delta.prompt_logprobs is not None
            assert [e.token_ids[0] for e in delta.prompt_logprobs] == message.prompt_token_ids[1:]
        else:
            assert delta.prompt_logprobs is None
        assert delta.num_cached_tokens < len(message.prompt_token_ids)
        assert len(delta.logprobs or []) == len(delta.new_token_ids) > 0
        tokens += delta.new_token_ids
        expected, reason = expected_output(message, MAX_MODEL_LEN, self.device.vocab_size)
        if delta.finish_reason is None:
            assert tokens == expected[: len(tokens)] and len(tokens) < len(expected)
        else:
            assert (tokens, delta.finish_reason) == (expected, reason)
            self.alive.remove(delta.request_id)

    @invariant()
    def check(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()
            assert self.scheduler.has_unfinished() == bool(self.alive)

    def teardown(self) -> None:
        """Everything ends within a bounded number of steps, and nothing is left behind."""
        if not hasattr(self, "scheduler"):
            return
        # Whoever is first never gives way: at worst each request computes its tokens once more for each that ends before it.
        total = sum(len(self.messages[i].prompt_token_ids) + MAX_MODEL_LEN for i in self.alive)
        bound = 20 + 3 * total * (1 + len(self.alive))
        while self.scheduler.has_unfinished() or self.scheduler.has_work():
            plan = self.plan_step()
            # Like the engine: an empty plan means that an output must come first.
            while self.in_flight and (len(self.in_flight) > self.num_added % 3 or not plan.rows):
                self.take_output()
            self.scheduler.check_invariants()
            bound -= 1
            assert bound > 0, "requests starve"
        while self.in_flight:
            self.take_output()
        assert not self.alive and not self.device.rows
        stats = self.scheduler.stats()
        assert stats.num_free_blocks == stats.num_blocks and stats.cache_usage == 0
        assert self.scheduler.reset_prefix_cache()


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=CHECKS)


@pytest.mark.slow
class TestSchedulerMachineLong(SchedulerMachine.TestCase):
    settings = settings(max_examples=800, stateful_step_count=50, deadline=None, suppress_health_check=CHECKS)
