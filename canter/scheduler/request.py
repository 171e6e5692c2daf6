"""A request as the scheduler knows it: its tokens, how far they are computed, and what is still in flight."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from canter.core.messages import FINISH_LENGTH, FINISH_REPETITION, FINISH_STOP, AddRequest, RequestDelta, RequestTimes
from canter.core.plan import TokenLogprobs
from canter.scheduler.cache.coordinator import RequestCache
from canter.scheduler.repetition import make_detector

REPETITION_DETECTED = "repetition_detected"
"""Stop reason of an output that was ended because it repeated itself."""


class RequestStatus(Enum):
    """WAITING -> RUNNING -> FINISHED; RUNNING -> PREEMPTED -> RUNNING. Only a RUNNING request has a row in the runner. HELD -> WAITING
    is the way of one that lacks something when it comes."""

    HELD = "held"
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Request:
    """Mutable state of one request; equal only to itself.

    `num_computed_tokens` counts tokens whose computation has been scheduled, drafts included until they are rejected.
    `num_output_placeholders` counts the tokens that steps in flight may yet bring: for each row that samples, one and
    its drafts. While it decodes, `num_computed_tokens + 1 == num_tokens + num_output_placeholders`.
    `max_total_tokens`: the length at which it ends, by `max_tokens` or the model's length.
    `publish_at`: number of tokens at which the next block for the prefix index is full.
    """

    __slots__ = (
        "arrival_order",
        "arrival_time",
        "block_hashes",
        "cache",
        "cache_salt",
        "draft_token_ids",
        "eos_token_ids",
        "finish_reason",
        "first_token_time",
        "last_token_time",
        "max_total_tokens",
        "min_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "prompt_logprobs",
        "publish_at",
        "queued_time",
        "repetition",
        "request_id",
        "sampling",
        "scheduled_time",
        "status",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(self, message: AddRequest, now: float, arrival_order: int, max_model_len: int, cache: RequestCache) -> None:
        sampling = message.sampling
        output = message.output_token_ids
        if output and sampling.prompt_logprobs is not None:
            sampling = sampling.clone(prompt_logprobs=None)  # they were told with the first token
        self.request_id = message.request_id
        self.sampling = sampling
        self.token_ids = [*message.prompt_token_ids, *(output or ())]
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.max_total_tokens = max_model_len
        if sampling.max_tokens is not None:
            self.max_total_tokens = min(max_model_len, self.num_prompt_tokens + sampling.max_tokens)
        # Where a grammar leaves nothing but the end, that comes before `min_tokens`; elsewhere the sampler sees to them.
        self.min_tokens = sampling.min_tokens if sampling.structured_outputs is None else 0
        self.stop_token_ids = frozenset(sampling.all_stop_token_ids)
        self.eos_token_ids = frozenset(() if sampling.ignore_eos else sampling.eos_token_ids)
        self.priority = message.priority
        self.arrival_time = message.arrival_time
        self.arrival_order = arrival_order
        self.cache_salt = message.cache_salt
        self.cache = cache
        self.block_hashes: list[bytes] = []
        self.publish_at = 0
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.draft_token_ids: Sequence[int] = ()
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if sampling.prompt_logprobs is not None else None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.repetition = make_detector(sampling.repetition_detection, output or ())
        self.queued_time = now
        self.scheduled_time = self.first_token_time = self.last_token_time = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def num_wanted_tokens(self) -> int:
        """Tokens to compute before it has caught up: known ones, ones in flight, and drafts to verify.

        The token at `max_total_tokens - 1` ends the request and is never computed. As tokens in flight count here, a
        request whose last token is in flight wants nothing.
        """
        known = len(self.token_ids) + self.num_output_placeholders + len(self.draft_token_ids)
        last = self.max_total_tokens - 1
        return (known if known < last else last) - self.num_computed_tokens

    @property
    def num_uncached_tokens(self) -> int:
        """Tokens known, less those that came from the prefix cache when it was first admitted."""
        return self.num_tokens - self.num_cached_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether more tokens remain to be scheduled than the one that a decoding request always has."""
        return self.num_computed_tokens < len(self.token_ids) + self.num_output_placeholders - 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether predictions of prompt positions are still missing: then no position may come from the prefix cache."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def append(self, sampled: list[int]) -> list[int]:
        """Append sampled tokens up to the one that ends the request; returns those appended."""
        for i, token_id in enumerate(sampled):
            self.token_ids.append(token_id)
            if self._check_stop(token_id):
                return sampled[: i + 1]
        return sampled

    def _check_stop(self, token_id: int) -> bool:
        """EOS, then the user's stop ids; then the length; then repetition. None but the length may come before `min_tokens`."""
        num_tokens = len(self.token_ids)
        if token_id in self.stop_token_ids and num_tokens - self.num_prompt_tokens >= self.min_tokens:
            self.finish_reason = FINISH_STOP
            self.stop_reason = None if token_id in self.eos_token_ids else token_id
            return True
        if num_tokens >= self.max_total_tokens:
            self.finish_reason = FINISH_LENGTH
            return True
        if self.repetition is not None and self.repetition.append(token_id) and num_tokens - self.num_prompt_tokens >= self.min_tokens:
            self.finish_reason, self.stop_reason = FINISH_REPETITION, REPETITION_DETECTED
            return True
        return False

    def take_prompt_logprobs(self, num_computed_tokens: int, entries: list[TokenLogprobs]) -> None:
        """Take the predictions that a step brought which computed tokens up to `num_computed_tokens`.

        They are those of the last tokens before that; a request that is computed again after a preemption may bring
        all of them or only new ones. What is known already is dropped.
        """
        if self.prompt_logprobs is not None:
            num_missing = min(num_computed_tokens, self.num_prompt_tokens - 1) - len(self.prompt_logprobs)
            if num_missing > 0:
                self.prompt_logprobs += entries[-num_missing:]

    def times(self) -> RequestTimes:
        return RequestTimes(self.queued_time, self.scheduled_time, self.first_token_time, self.last_token_time)

    def make_delta(self, new_token_ids: list[int], logprobs: list[TokenLogprobs] | None, is_first: bool) -> RequestDelta:
        """What to tell of the request now. Times stand in its first and last delta, prompt logprobs in the first with tokens."""
        finish_reason = self.finish_reason
        return RequestDelta(
            self.request_id,
            new_token_ids,
            finish_reason,
            self.stop_reason,
            logprobs,
            self.prompt_logprobs if is_first else None,
            self.num_cached_tokens,
            self.num_preemptions,
            self.times() if is_first or finish_reason is not None else None,
        )
