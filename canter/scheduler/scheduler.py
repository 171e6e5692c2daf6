"""What runs in the next step. Events and the time go in; plans and deltas come out.

There is no prefill and no decode: each step hands out a budget of tokens, and a request gets as many as it still
wants (`Request.num_wanted_tokens`). Chunked prefill, prefix hits, drafts and preemption are cases of that one rule.

Asynchronous stepping is native: `schedule` of later steps may come before `update` of earlier ones. Scheduling a row
that samples adds placeholders for the tokens it may bring; `update` takes them back.

Why blocks are reused at once, without a fence. The device runs plans one after another, in the order in which they
were made, and within a step every layer writes the keys and values of all rows before any row reads. A block that is
freed while step N is in flight can only be given away by the plan of a step after N. So (1) whatever step N or an
earlier one still writes to it, for a request that has meanwhile ended, been aborted or preempted, is overwritten
before the new owner reads, as a row reads only positions written by itself or published; (2) a published block holds
known tokens only, and every step that writes them was planned before the first step that can hit them; rows in flight
of the former owner write behind those tokens, or the same values again. Hence also blocks may be published when
their step is planned, and requests that begin alike share from the first step on. What (2) needs is that each plan
which `schedule` returned is run: a row that loses its place within `schedule` has published nothing yet.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from canter.core.errors import ConfigError, InvalidRequestError, QueueFullError
from canter.core.messages import FINISH_ABORT, FINISH_ERROR, AddRequest, EngineStats, RequestDelta
from canter.core.plan import DRAFT_ON_DEVICE, NewRow, RowError, ScheduledRow, SchedulePlan, StepOutput, TokenLogprobs
from canter.core.state_specs import StateLayout
from canter.scheduler.cache.coordinator import CacheCoordinator, PrefixHit
from canter.scheduler.cache.hashing import PrefixHasher
from canter.scheduler.cache.managers import CacheLimits
from canter.scheduler.pace import PrefillPace
from canter.scheduler.queues import make_queue
from canter.scheduler.request import Request, RequestStatus

MAX_TOKEN_ID = 2**31 - 1
NEVER = sys.maxsize
EXPIRY_SECONDS = 0.1
WATERMARK = 0.01
"""Fraction of a pool that admission leaves free while others run, so that they need not preempt the newcomer at once."""


@dataclass(slots=True)
class _Grant:
    """A running request's share of the step being planned; its counters move only when the plan is settled."""

    request: Request
    num_tokens: int
    new_block_ids: tuple[list[int], ...]


@dataclass(slots=True)
class _Flight:
    """A planned step whose output is awaited. `rows[i]`: request, first position, placeholders that the row added.

    `num_prompt_tokens`: tokens of rows that had more to compute than one that generates; `num_long_tokens` are of long prompts.
    """

    step_id: int
    rows: list[tuple[Request, int, int]]
    planned_at: float = 0.0
    num_prompt_tokens: int = 0
    num_long_tokens: int = 0
    num_generating: int = 0


class Scheduler:
    """Queues requests, plans steps and takes in their outputs.

    `num_blocks[p]` counts the blocks of pool p of the layout, the null block included. `num_draft_tokens`: drafts
    that follow each sampled token, of values that the device knows (`DRAFT_ON_DEVICE`). Those that an output brings take their
    place, and there may be any number of them.
    Raises `ConfigError` for contradicting values, `UnsupportedModelError` for a kind of state without a manager.
    """

    def __init__(
        self,
        layout: StateLayout,
        num_blocks: Sequence[int],
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        long_prefill_token_threshold: int = 0,
        max_prefill_slowdown: float = 0.0,
        enable_chunked_prefill: bool = True,
        enable_prefix_caching: bool = True,
        policy: str = "fcfs",
        max_num_queued_reqs: int | None = 4096,
        max_num_queued_tokens: int | None = None,
        queue_timeout: float | None = None,
        num_draft_tokens: int = 0,
    ) -> None:
        _verify(layout, num_blocks, max_model_len, max_num_seqs, max_num_batched_tokens, enable_chunked_prefill)
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_queued_reqs = max_num_queued_reqs
        self.max_num_queued_tokens = max_num_queued_tokens
        self.queue_timeout = queue_timeout
        self._next_expiry = 0.0
        self.enable_chunked_prefill = enable_chunked_prefill
        self.enable_prefix_caching = enable_prefix_caching
        self.num_draft_tokens = num_draft_tokens
        self._max_row_tokens = max_num_batched_tokens
        if enable_chunked_prefill and long_prefill_token_threshold > 0:
            self._max_row_tokens = min(max_num_batched_tokens, long_prefill_token_threshold)
        self._pace = PrefillPace(max_prefill_slowdown if enable_chunked_prefill else 0.0, max_num_batched_tokens)
        self._last_update = 0.0
        self._device_drafts = (DRAFT_ON_DEVICE,) * num_draft_tokens
        self.max_told_drafts = max_num_batched_tokens - 1
        self.cache = CacheCoordinator(layout, num_blocks, CacheLimits(max_model_len, max_num_batched_tokens, num_draft_tokens))
        self.max_request_tokens = min(max_model_len, self.cache.max_tokens_alone() + 1)
        """The greatest length that a request can reach with the cache to itself; its last token is never computed."""
        self._watermarks = [int(WATERMARK * pool.num_usable) for pool in self.cache.pools]
        self._hasher = PrefixHasher(layout.hash_block_size)
        self._requests: dict[str, Request] = {}
        self._waiting = make_queue(policy)
        self._held: dict[str, Request] = {}
        self._running: list[Request] = []
        self._flights: deque[_Flight] = deque()
        self._finished_ids: list[str] = []
        self._next_step_id = 0
        self._num_arrivals = 0
        self._refused: tuple[Request, int] | None = None
        self._counters = EngineStats(num_blocks=self.cache.num_usable_blocks())

    # events

    def add(self, message: AddRequest, now: float, is_ready: bool = True) -> None:
        """Queue a request. Raises `InvalidRequestError` for one that can never be served, `QueueFullError` when too many wait.

        One that goes on from an engine before this one was in a queue already: the bound is not for it. One that is not ready lacks
        something that it can't run without, such as its grammar; it holds up nobody, and enters the queue with `release`.
        """
        self._verify_request(message)
        is_new = message.output_token_ids is None
        num_waiting = len(self._waiting) + len(self._held)
        if is_new and self.max_num_queued_reqs is not None and num_waiting >= self.max_num_queued_reqs:
            raise QueueFullError(f"{num_waiting} requests wait already, the most that this engine queues. Retry later.")
        self._verify_queued_tokens(message)
        request = Request(message, now, self._num_arrivals, self.max_model_len, self.cache.new_cache(len(message.prompt_token_ids)))
        if request.max_total_tokens > self.max_request_tokens:
            raise self._too_long(request)
        if request.num_tokens >= request.max_total_tokens:
            raise InvalidRequestError(f"The {request.num_output_tokens} tokens of output so far leave none to generate.", "max_tokens")
        request.publish_at = self._hasher.block_size if self.enable_prefix_caching else NEVER
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        if is_ready:
            self._waiting.push(request)
        else:
            request.status = RequestStatus.HELD
            self._held[request.request_id] = request

    def release(self, request_id: str) -> None:
        """What the request lacked is there. An id that is not held (any more) is ignored."""
        request = self._held.pop(request_id, None)
        if request is not None:
            request.status = RequestStatus.WAITING
            self._waiting.push(request)

    def refuse(self, request_id: str, error: RowError) -> list[RequestDelta]:
        """End a request with an error; unknown and ended ids are ignored."""
        return self._end_with_errors({request_id: error})

    def abort(self, request_ids: Iterable[str], now: float) -> list[RequestDelta]:
        """End requests at once; unknown and ended ids are ignored. Each live one gets its last delta, of reason "abort"."""
        deltas = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                request.finish_reason = FINISH_ABORT
                self._end(request)
                deltas.append(request.make_delta([], None, is_first=False))
        self._drop_ended()
        return deltas

    def expire(self, now: float) -> list[RequestDelta]:
        """End the requests that have waited for their first step longer than `queue_timeout`. Looks for them ten times a second."""
        timeout = self.queue_timeout
        if timeout is None or now < self._next_expiry:
            return []
        self._next_expiry = now + min(timeout, EXPIRY_SECONDS)
        error = RowError(
            f"The request has waited for {timeout:g} seconds, the longest that this server lets wait.", QueueFullError.__name__
        )
        late = [r for r in self._waiting if r.status is RequestStatus.WAITING and now - r.queued_time >= timeout]
        return self._end_with_errors({request.request_id: error for request in late})

    def schedule(self, now: float) -> SchedulePlan:
        """Plan the next step. The plan must be run, and its output given to `update`, in the order of the plans.

        A plan without rows needs no `update`. It is empty while all that runs waits for outputs in flight.
        """
        plan = SchedulePlan(self._next_step_id, finished_ids=self._finished_ids)
        self._finished_ids = []
        self._next_step_id += 1
        flight = _Flight(plan.step_id, [], now)
        self.cache.begin_step()
        grants, budget, has_memory = self._grant_running(plan)
        for grant in grants:
            self._settle(plan, flight, grant.request, grant.num_tokens, grant.new_block_ids)
        if has_memory:
            budget = self._admit_waiting(plan, flight, budget, now)
        if plan.rows:
            self._flights.append(flight)
        counters = self._counters
        counters.num_steps += 1
        counters.step_num_tokens = self.max_num_batched_tokens - budget
        counters.num_scheduled_tokens += counters.step_num_tokens
        return plan

    def update(self, plan: SchedulePlan, output: StepOutput, now: float) -> list[RequestDelta]:
        """Take in the output of the oldest step in flight; returns what is new of each request that it brought on.

        Rows of requests that have ended meanwhile are ignored, and requests in `output.errors` end. Raises `ValueError` for an
        output out of order or shape: the runner broke its contract.
        """
        if not plan.rows:
            return []
        flight = self._take_flight(plan, output)
        if flight.num_generating:
            # A step begins when the one before has ended, or when it is planned.
            seconds = max(0.0, now - max(self._last_update, flight.planned_at))
            self._pace.note(flight.num_prompt_tokens, flight.num_long_tokens, seconds)
        self._last_update = now
        deltas = self._end_with_errors(output.errors)
        any_ended = False
        for i, (request, first_position, num_pending) in enumerate(flight.rows):
            if request.status is RequestStatus.FINISHED:
                continue
            if request.prompt_logprobs is not None:
                end = first_position + plan.rows[i].num_tokens
                request.take_prompt_logprobs(end, output.prompt_logprobs.get(request.request_id, []))
            if num_pending:
                drafts = output.draft_token_ids[i] if output.draft_token_ids is not None else None
                deltas.append(self._take_tokens(request, num_pending, output.sampled_token_ids[i], output.logprobs[i], drafts, now))
                if request.finish_reason is not None:
                    self._end(request)
                    any_ended = True
        if any_ended:
            self._drop_ended()
        return deltas

    def fail(self, plan: SchedulePlan, reason: str, now: float) -> list[RequestDelta]:
        """The oldest step in flight was lost: end its requests with reason "error", and forget the prefix cache.

        Requests that began in a later step on top of cached blocks end too, for the lost step may have been the one to
        write these. The others go on.
        """
        if not plan.rows:
            return []
        lost = dict.fromkeys(request for request, _, _ in self._next_flight(plan).rows)
        begun_after: set[Request] = set()
        for request, first_position, _ in (row for flight in self._flights for row in flight.rows):
            if first_position == 0:
                begun_after.add(request)
            elif request not in begun_after:
                lost[request] = None
        deltas = self._end_with_errors({request.request_id: RowError(reason) for request in lost})
        self.cache.forget_prefixes()
        return deltas

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; does nothing and says False while any request holds blocks."""
        return self.cache.reset()

    # state

    def has_unfinished(self) -> bool:
        """Whether any request is alive."""
        return bool(self._requests)

    @property
    def has_held(self) -> bool:
        """Whether any request lacks something that it can't run without."""
        return bool(self._held)

    def has_work(self) -> bool:
        """Whether `schedule` has something to plan: tokens to compute or rows to drop.

        The plan may still come out empty while memory is short and steps are in flight; it never does with none in flight.
        """
        if self._finished_ids or any(request.num_wanted_tokens > 0 for request in self._running):
            return True
        head = self._waiting.peek()
        return head is not None and len(self._running) < self.max_num_seqs and head.num_output_placeholders == 0

    def running_ids(self) -> list[str]:
        """The requests that have a row in the runner."""
        return [request.request_id for request in self._running]

    @property
    def num_in_flight(self) -> int:
        """Planned steps whose outputs are awaited."""
        return len(self._flights)

    def stats(self) -> EngineStats:
        """Gauges of this moment, counters since the start."""
        counters = self._counters
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + len(self._held),
            cache_usage=self.cache.usage(),
            num_preemptions=counters.num_preemptions,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            num_steps=counters.num_steps,
            num_scheduled_tokens=counters.num_scheduled_tokens,
            num_free_blocks=self.cache.num_free_blocks(),
            num_blocks=counters.num_blocks,
            step_num_tokens=counters.step_num_tokens,
            num_accepted_drafts=counters.num_accepted_drafts,
        )

    def check_invariants(self) -> None:
        """Verify that queues, counters and block tables agree. Raises `AssertionError`; for tests and debugging."""
        self.cache.check(request.cache for request in self._requests.values())
        waiting = list(self._waiting)
        assert len(waiting) == len(self._waiting) == len(set(waiting))
        assert len(self._running) == len(set(self._running)) <= self.max_num_seqs
        held = list(self._held.values())
        assert all(request.status is RequestStatus.HELD for request in held)
        assert sorted(r.request_id for r in waiting + held + self._running) == sorted(self._requests)
        pending = dict.fromkeys(self._requests.values(), 0)
        for request, _, num_pending in (row for flight in self._flights for row in flight.rows):
            if request in pending:
                pending[request] += num_pending
        for request, num_pending in pending.items():
            assert request.num_output_placeholders == num_pending, (request.request_id, num_pending)
            self._check_request(request)

    def _check_request(self, request: Request) -> None:
        num_known = request.num_tokens + request.num_output_placeholders
        assert not request.is_finished and request.finish_reason is None
        assert request.num_tokens < request.max_total_tokens
        assert request.num_computed_tokens <= request.cache.capacity
        assert len(request.block_hashes) <= request.num_tokens // self._hasher.block_size
        if request.status is RequestStatus.RUNNING:
            assert request in self._running
            assert request.num_computed_tokens < num_known
            assert not request.num_output_placeholders or request.num_computed_tokens + 1 == num_known
        else:
            assert request in set(self._waiting) or request in self._held.values()
            assert request.num_computed_tokens == 0 and not request.draft_token_ids and not request.cache.capacity
            assert not request.num_output_placeholders or request.status is RequestStatus.PREEMPTED

    # adding

    def _verify_request(self, message: AddRequest) -> None:
        prompt = message.prompt_token_ids
        if message.request_id in self._requests:
            raise InvalidRequestError(f"A request with the id {message.request_id!r} is alive. Ids must be unique.", "request_id")
        if message.sampling.n != 1:
            raise InvalidRequestError(f"The engine runs one sequence for a request, got n = {message.sampling.n}.", "n")
        if not prompt:
            raise InvalidRequestError("The prompt is empty; it must hold at least 1 token.", "prompt")
        if min(prompt) < 0 or max(prompt) > MAX_TOKEN_ID:
            raise InvalidRequestError(f"Token ids must lie in [0, {MAX_TOKEN_ID}], got {min(prompt)} to {max(prompt)}.", "prompt")
        if len(prompt) >= self.max_model_len:
            raise InvalidRequestError(
                f"The prompt has {len(prompt)} tokens; with at least 1 token of output it must stay within the model's "
                f"length of {self.max_model_len} tokens. Shorten the prompt.",
                "prompt",
            )

    def _verify_queued_tokens(self, message: AddRequest) -> None:
        """Raise `QueueFullError` when too many prompt tokens would wait. One that finds nobody waiting is taken, whatever its length."""
        limit = self.max_num_queued_tokens
        if limit is None or not len(self._waiting):
            return
        queued = sum(request.num_prompt_tokens for request in self._waiting)
        if queued + len(message.prompt_token_ids) > limit:
            raise QueueFullError(f"{queued} prompt tokens wait already; this engine queues at most {limit}. Retry later.")

    def _too_long(self, request: Request) -> InvalidRequestError:
        num_output = request.max_total_tokens - request.num_prompt_tokens
        advice, param = "Lower max_tokens", "max_tokens"
        if request.num_prompt_tokens >= self.max_request_tokens:
            advice, param = "Shorten the prompt", "prompt"
        return InvalidRequestError(
            f"The cache holds requests of at most {self.max_request_tokens} tokens, but this one may reach "
            f"{request.max_total_tokens} ({request.num_prompt_tokens} of prompt, {num_output} of output). "
            f"{advice}, or give the engine more cache memory.",
            param,
        )

    # planning: requests that run

    def _grant_running(self, plan: SchedulePlan) -> tuple[list[_Grant], int, bool]:
        """Share out the budget among running requests, in order. Returns grants, budget left, and whether memory sufficed."""
        budget = self.max_num_batched_tokens
        self._pace.begin(any(not request.is_prefilling for request in self._running))
        grants: list[_Grant] = []
        has_memory = True
        i = 0
        while i < len(self._running) and budget > 0:
            request = self._running[i]
            i += 1
            num_tokens = min(request.num_wanted_tokens, budget, self._max_row_tokens)
            is_prefilling = request.is_prefilling
            if is_prefilling:
                num_tokens = min(num_tokens, self._pace.share(request.num_uncached_tokens))
            if num_tokens <= 0:
                continue
            num_tokens = self.cache.shape_step(request.cache, request.num_computed_tokens, num_tokens, request.num_tokens)
            new_block_ids: tuple[list[int], ...] | None = ()
            end = request.num_computed_tokens + num_tokens
            if min(end + self.num_draft_tokens, self.max_model_len) > request.cache.capacity:
                new_block_ids = self._grow(request, end)
                if new_block_ids is None:
                    has_memory = False
                    new_block_ids, num_returned = self._make_room(request, end, grants, plan)
                    budget += num_returned
                    i = self._running.index(request) + 1
            if new_block_ids is not None:
                grants.append(_Grant(request, num_tokens, new_block_ids))
                budget -= num_tokens
                if is_prefilling:
                    self._pace.take(request.num_uncached_tokens, num_tokens)
        return grants, budget, has_memory

    def _grow(self, request: Request, num_tokens: int) -> tuple[list[int], ...] | None:
        """Slots for the first `num_tokens` tokens, or None. Windows move by what drafts in flight can't take back."""
        return self.cache.grow(request.cache, num_tokens, request.num_computed_tokens, request.num_output_placeholders)

    def _make_room(
        self, request: Request, num_tokens: int, grants: list[_Grant], plan: SchedulePlan
    ) -> tuple[tuple[list[int], ...] | None, int]:
        """Preempt others until the request fits. Returns its new blocks and the tokens that preempted grants give back.

        When the request is the first that should make room, it keeps its blocks and waits, and the blocks are None:
        those before it go on, and preempt it if they must.
        """
        num_returned = 0
        while (victim := self._waiting.choose_victim(self._running)) is not request:
            num_returned += self._preempt(victim, grants)
            plan.preempted_ids.append(victim.request_id)
            new_block_ids = self._grow(request, num_tokens)
            if new_block_ids is not None:
                return new_block_ids, num_returned
        return None, num_returned

    def _preempt(self, victim: Request, grants: list[_Grant]) -> int:
        """Back to the queue, to be computed again; returns the tokens that this step had granted to it."""
        self._running.remove(victim)
        self.cache.free(victim.cache)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.draft_token_ids = ()
        victim.num_preemptions += 1
        self._counters.num_preemptions += 1
        self._waiting.push_preempted(victim)
        for i, grant in enumerate(grants):
            if grant.request is victim:
                del grants[i]
                return grant.num_tokens
        return 0

    # planning: requests that wait

    def _admit_waiting(self, plan: SchedulePlan, flight: _Flight, budget: int, now: float) -> int:
        """Admit in strict order while budget, rows and memory last; returns the budget left."""
        reserved: list[int] | None = None
        while budget > 0 and len(self._running) < self.max_num_seqs:
            request = self._waiting.peek()
            # A preempted request whose tokens are in flight would sample the same positions twice.
            if request is None or request.num_output_placeholders or self._still_refused(request):
                break
            if reserved is None:
                reserved = self._reserved_blocks()
            num_tokens = self._admit(request, budget, reserved)
            if num_tokens is None:
                break
            self._waiting.pop()
            self._pace.take(request.num_uncached_tokens, num_tokens)
            self._start(plan, flight, request, num_tokens, now)
            if request.is_prefilling:
                outstanding = self.cache.num_outstanding(request.cache, request.num_tokens)
                reserved = [kept + want for kept, want in zip(reserved, outstanding, strict=True)]
            budget -= num_tokens
        return budget

    def _still_refused(self, request: Request) -> bool:
        """Whether memory was refused to this request before and none has been freed since; spares a futile lookup."""
        if self._refused is None or not self._running:
            return False
        refused, num_free = self._refused
        return refused is request and self.cache.num_free_blocks() <= num_free

    def _reserved_blocks(self) -> list[int]:
        """Blocks that newcomers leave for those that run: the rest of prompts under way, and the watermark."""
        if not self._running:
            return [0] * len(self.cache.pools)
        reserved = self._watermarks
        for request in self._running:
            if request.is_prefilling:
                outstanding = self.cache.num_outstanding(request.cache, request.num_tokens)
                reserved = [kept + want for kept, want in zip(reserved, outstanding, strict=True)]
        return reserved

    def _admit(self, request: Request, budget: int, reserved: list[int]) -> int | None:
        """Give the request its prefix hit and its first blocks; returns the tokens it may compute, or None."""
        hit = self._find_hit(request)
        num_cached = hit.num_tokens if hit else 0
        num_tokens = request.num_tokens - num_cached
        if not self.enable_chunked_prefill and num_tokens > budget:
            return None
        num_tokens = min(num_tokens, budget, self._max_row_tokens, self._pace.first_share(num_tokens))
        if hit:
            if not hit.is_readable:
                return None
            request.cache.shared_tokens = num_cached + hit.num_uncached_common_tokens
        num_tokens = self.cache.shape_step(request.cache, num_cached, num_tokens, request.num_tokens)
        if not self.cache.admit(request.cache, hit, num_cached + num_tokens, request.num_tokens, reserved):
            self._refused = (request, self.cache.num_free_blocks())
            return None
        request.num_computed_tokens = num_cached
        if request.num_preemptions == 0 and request.num_output_tokens == 0:
            request.num_cached_tokens = num_cached
            if hit:
                self._counters.prefix_queries += request.num_tokens
                self._counters.prefix_hits += num_cached
        return num_tokens

    def _find_hit(self, request: Request) -> PrefixHit | None:
        """The cached prefix; its last token is always computed anew, as sampling needs its logits. None if not looked for."""
        if not self.enable_prefix_caching or request.wants_prompt_logprobs:
            return None
        self._hasher.extend(request.block_hashes, request.token_ids, request.cache_salt)
        return self.cache.find_hit(request.block_hashes, min(request.num_tokens - 1, request.cache.max_shared_tokens))

    def _start(self, plan: SchedulePlan, flight: _Flight, request: Request, num_tokens: int, now: float) -> None:
        """Give an admitted request its row, with all tokens known and its whole block tables."""
        request.status = RequestStatus.RUNNING
        request.scheduled_time = request.scheduled_time or now
        self._running.append(request)
        new_row = NewRow(
            request.request_id,
            request.token_ids.copy(),
            request.num_prompt_tokens,
            request.num_computed_tokens,
            request.cache.block_ids(),
            request.sampling,
        )
        plan.new_rows.append(new_row)
        if self.enable_prefix_caching:
            request.publish_at = self._next_publish_at(request.num_computed_tokens)
        self._settle(plan, flight, request, num_tokens, ())

    def _settle(self, plan: SchedulePlan, flight: _Flight, request: Request, num_tokens: int, new_block_ids: tuple[list[int], ...]) -> None:
        """Write a row into the plan and move the request's counters as if the step had run."""
        start = request.num_computed_tokens
        end = start + num_tokens
        if request.is_prefilling:
            flight.num_prompt_tokens += num_tokens
            flight.num_long_tokens += num_tokens if self._pace.is_long(request.num_uncached_tokens) else 0
        else:
            flight.num_generating += 1
        # A row samples once it reaches the last token there is; tokens beyond are drafts.
        num_drafts = end - len(request.token_ids) - request.num_output_placeholders
        num_pending = 0
        draft_token_ids: tuple[int, ...] = ()
        if num_drafts >= 0:
            num_pending = 1 + num_drafts
            if num_drafts:
                draft_token_ids = tuple(request.draft_token_ids[:num_drafts])
            request.draft_token_ids = self._device_drafts
            request.num_output_placeholders += num_pending
        if any(new_block_ids):
            plan.rows.append(ScheduledRow(request.request_id, num_tokens, start, new_block_ids, draft_token_ids))
        else:
            plan.rows.append(ScheduledRow(request.request_id, num_tokens, start, (), draft_token_ids))
        flight.rows.append((request, start, num_pending))
        request.num_computed_tokens = end
        if end >= request.publish_at:
            self._publish(request)

    # taking outputs in

    def _next_flight(self, plan: SchedulePlan) -> _Flight:
        if not self._flights or self._flights[0].step_id != plan.step_id:
            expected = self._flights[0].step_id if self._flights else None
            raise ValueError(f"step {plan.step_id} ended, but the oldest step in flight is {expected}")
        return self._flights.popleft()

    def _take_flight(self, plan: SchedulePlan, output: StepOutput) -> _Flight:
        if plan.step_id != output.step_id:
            raise ValueError(f"output of step {output.step_id} for the plan of step {plan.step_id}")
        flight = self._next_flight(plan)
        if not len(flight.rows) == len(output.sampled_token_ids) == len(output.logprobs):
            raise ValueError(f"step {plan.step_id} has {len(flight.rows)} rows, its output {len(output.sampled_token_ids)}")
        return flight

    def _take_tokens(
        self,
        request: Request,
        num_pending: int,
        sampled: list[int],
        logprobs: list[TokenLogprobs] | None,
        drafts: list[int] | None,
        now: float,
    ) -> RequestDelta:
        """Append what a row sampled, take back what it did not, and publish blocks that are now known to be full."""
        num_rejected = num_pending - len(sampled)
        if not 0 <= num_rejected < num_pending:
            raise ValueError(f"request {request.request_id} was to sample 1 to {num_pending} tokens, got {len(sampled)}")
        self._counters.num_accepted_drafts += len(sampled) - 1
        is_first = len(request.token_ids) == request.num_prompt_tokens
        request.num_output_placeholders -= num_pending
        kept = request.append(sampled)
        if request.status is RequestStatus.RUNNING:
            if num_rejected:
                request.num_computed_tokens -= num_rejected
                self.cache.rollback(request.cache, request.num_computed_tokens)
            if drafts is not None:
                # They follow what this output brought; for the first of them stand those that steps in flight bring.
                ahead = drafts[request.num_output_placeholders : self.max_told_drafts]
                if ahead or not request.num_output_placeholders:
                    request.draft_token_ids = ahead
            if len(request.token_ids) >= request.publish_at:
                self._publish(request)
        if is_first:
            request.first_token_time = now
        request.last_token_time = now
        if logprobs is not None and len(kept) < len(logprobs):
            logprobs = logprobs[: len(kept)]
        return request.make_delta(kept, logprobs, is_first)

    def _publish(self, request: Request) -> None:
        """Publish the full blocks of tokens that are known and whose computation is scheduled; drafts never are."""
        num_tokens = min(request.num_computed_tokens, len(request.token_ids))
        if num_tokens >= request.publish_at:
            self._hasher.extend(request.block_hashes, request.token_ids, request.cache_salt)
            self.cache.publish(request.cache, request.block_hashes, num_tokens)
            request.publish_at = self._next_publish_at(num_tokens)

    def _next_publish_at(self, num_tokens: int) -> int:
        size = self._hasher.block_size
        return (num_tokens // size + 1) * size

    # ending

    def _end(self, request: Request) -> None:
        """Free everything that the request holds. The next plan tells the runner, if it has ever heard of the request."""
        if request.status in (RequestStatus.RUNNING, RequestStatus.PREEMPTED):
            # Of a preempted one the runner has no row, but still what it needs to go on as if nothing had been.
            self._finished_ids.append(request.request_id)
        if request.status is RequestStatus.HELD:
            del self._held[request.request_id]
        elif request.status is not RequestStatus.RUNNING:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        self.cache.free(request.cache)
        del self._requests[request.request_id]

    def _end_with_errors(self, errors: Mapping[str, RowError]) -> list[RequestDelta]:
        """End the live ones of some requests with reason "error"."""
        deltas = []
        for request_id, error in errors.items():
            request = self._requests.get(request_id)
            if request is not None:
                request.finish_reason = FINISH_ERROR
                self._end(request)
                delta = request.make_delta([], None, is_first=False)
                delta.error, delta.error_type = error.message, error.error_type
                deltas.append(delta)
        if deltas:
            self._drop_ended()
        return deltas

    def _drop_ended(self) -> None:
        self._running = [request for request in self._running if request.status is not RequestStatus.FINISHED]


def _verify(
    layout: StateLayout, num_blocks: Sequence[int], max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int, chunked: bool
) -> None:
    """Raise `ConfigError` for numbers with which nothing could run."""
    for name, value in (
        ("max_model_len", max_model_len),
        ("max_num_seqs", max_num_seqs),
        ("max_num_batched_tokens", max_num_batched_tokens),
    ):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}.")
    if not layout.groups or len(num_blocks) != len(layout.pools):
        raise ConfigError(f"The model's state lies in {len(layout.pools)} pools, got block counts {list(num_blocks)}.")
    if min(num_blocks) < 2:
        raise ConfigError(f"Each cache pool needs at least 2 blocks, one of which stays empty; got {list(num_blocks)}.")
    if not chunked and max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"Without chunked prefill, max_num_batched_tokens ({max_num_batched_tokens}) must be at least "
            f"max_model_len ({max_model_len}), or long prompts could never be computed."
        )
