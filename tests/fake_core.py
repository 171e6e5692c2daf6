"""An engine core without a model, light enough for a process of its own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

from canter.core.errors import EngineError
from canter.core.messages import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP, AddRequest, EngineInfo, EngineStats, RequestDelta, RequestTimes
from canter.core.plan import TokenLogprobs
from canter.core.timeline import Timeline

EOS_ID = 256
VOCAB_SIZE = 260
CONTEXT = 512

INFO = EngineInfo(
    model="fake",
    architecture="FakeForCausalLM",
    vocab_size=VOCAB_SIZE,
    max_model_len=CONTEXT,
    dtype="float32",
    device="cpu",
    block_size=16,
    num_blocks=100,
    cache_tokens=1600,
    max_num_seqs=8,
    max_num_batched_tokens=2048,
    prefix_caching=True,
)


def echo(request: AddRequest) -> Iterable[int]:
    """The prompt, again and again."""
    while True:
        yield from request.prompt_token_ids


def say(text: str, then_eos: bool = True) -> Callable[[AddRequest], Iterable[int]]:
    """An answer that is always the same."""
    return lambda _: [*text.encode(), *([EOS_ID] if then_eos else [])]


def fake_logprobs(token_id: int, count: int) -> TokenLogprobs:
    """The chosen token is the likeliest; the next ids follow, each 1 less."""
    count = VOCAB_SIZE if count == -1 else count
    ids = [(token_id + i) % VOCAB_SIZE for i in range(count)]
    return TokenLogprobs([token_id, *ids], [-0.5, *(-0.5 - i for i in range(count))], 1)


def named_logprobs(token_id: int, ids: list[int]) -> TokenLogprobs:
    """Of the ids that a request names, each as far below as its place."""
    return TokenLogprobs([token_id, *ids], [-0.5, *(-2.0 - i for i in range(len(ids)))], 1)


class FakeCore:
    """An engine core without a model: every step gives each request its next `per_step` tokens."""

    def __init__(self, answer: Callable[[AddRequest], Iterable[int]] = echo, per_step: int = 1) -> None:
        self.info = INFO
        self.requests: dict[str, AddRequest] = {}
        self.seen: list[AddRequest] = []
        self.aborted: list[str] = []
        self.refuse: Exception | None = None
        self._answer = answer
        self._per_step = per_step
        self._tokens: dict[str, Any] = {}
        self._times: dict[str, RequestTimes] = {}
        self._counts: dict[str, int] = {}
        self._deltas: list[RequestDelta] = []
        self._num_steps = 0
        self.is_paused = False
        self.timeline = Timeline()

    def add_request(self, request: AddRequest) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.requests[request.request_id] = request
        self.seen.append(request)
        told = len(request.output_token_ids or ())
        self._tokens[request.request_id] = itertools.islice(self._answer(request), told, None)
        self._times[request.request_id] = RequestTimes(queued=time.time())
        self._counts[request.request_id] = told

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.aborted.append(request_id)
            if self.requests.pop(request_id, None) is not None:
                self._deltas.append(RequestDelta(request_id, [], FINISH_ABORT))

    def step(self) -> list[RequestDelta]:
        self._num_steps += 1
        deltas, self._deltas = self._deltas, []
        if self.is_paused:
            return deltas
        self.timeline.next_step()
        return deltas + self.timeline.around("step", lambda: [self._advance(request) for request in list(self.requests.values())])()

    def has_work(self) -> bool:
        return bool((self.requests and not self.is_paused) or self._deltas)

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.requests), num_steps=self._num_steps, num_blocks=100, num_free_blocks=100, step_num_tokens=1
        )

    def utility(self, method: str, args: list[Any]) -> Any:
        if method in ("pause", "resume"):
            self.is_paused = method == "pause"
            return None
        if method == "reset_prefix_cache":
            return not self.requests
        if method == "num_run":
            return sum(self._counts[name] > len(request.output_token_ids or ()) for name, request in self.requests.items())
        if method == "start_profile":
            return self.timeline.start(*args)
        if method == "stop_profile":
            return self.timeline.stop()
        if method != "echo":
            raise EngineError(f"no method {method}")
        return args

    def shutdown(self) -> None:
        self.requests.clear()

    def _advance(self, request: AddRequest) -> RequestDelta:
        delta = RequestDelta(request.request_id, [], num_cached_tokens=len(request.prompt_token_ids) // 16 * 16)
        params, now, times = request.sampling, time.time(), self._times[request.request_id]
        if self._counts[request.request_id] == 0 and params.prompt_logprobs is not None:
            delta.prompt_logprobs = [fake_logprobs(t, params.prompt_logprobs) for t in request.prompt_token_ids[1:]]
        for _ in range(self._per_step):
            token = next(self._tokens[request.request_id], EOS_ID)
            delta.new_token_ids.append(token)
            self._counts[request.request_id] += 1
            if token in params.all_stop_token_ids and self._counts[request.request_id] >= params.min_tokens:
                delta.finish_reason, delta.stop_reason = FINISH_STOP, None if token in params.eos_token_ids else token
            elif self._counts[request.request_id] == params.max_tokens:
                delta.finish_reason = FINISH_LENGTH
            if delta.finish_reason:
                del self.requests[request.request_id]
                break
        if params.logprobs is not None:
            named = params.logprob_token_ids
            delta.logprobs = [named_logprobs(t, named) if named else fake_logprobs(t, params.logprobs) for t in delta.new_token_ids]
        self._times[request.request_id] = RequestTimes(times.queued, times.scheduled or now, times.first_token or now, now)
        delta.times = self._times[request.request_id]
        return delta
