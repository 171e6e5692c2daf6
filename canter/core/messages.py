"""The messages between a frontend and an engine process. msgspec structs, tagged, encoded as msgpack arrays."""

from __future__ import annotations

from typing import Any

import msgspec

from canter.core.plan import TokenLogprobs
from canter.core.sampling_params import SamplingParams

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_ABORT = "abort"
FINISH_ERROR = "error"
FINISH_REPETITION = "repetition"


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Base of all messages; the tag is the class name."""


# frontend -> engine


class AddRequest(Message):
    """Start a request. `sampling.n` is 1: the client fans out. `arrival_time` is `time.time()` of the frontend.

    `output_token_ids`: not None for a request that an engine before this one had accepted, with the tokens that it has
    told. It goes on behind them as after a preemption, tells none of them again, and has its place however long the queue is.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    output_token_ids: list[int] | None = None


class AbortRequests(Message):
    """Drop requests; unknown and finished ids are ignored. Each live one ends with a delta of reason "abort".

    A request that a stop string ended is dropped the same way: the frontend has already told its finish.
    """

    request_ids: list[str]


class Utility(Message):
    """Call a named engine method (`reset_prefix_cache`, `pause`, ...); answered by a `UtilityResult` of the same id."""

    call_id: int
    method: str
    args: list[Any] = []


class Shutdown(Message):
    """Stop after the current step; requests still alive are aborted."""


FrontendMessage = AddRequest | AbortRequests | Utility | Shutdown


# engine -> frontend


class RequestTimes(msgspec.Struct, array_like=True, gc=False):
    """Wall-clock seconds (`time.time()`) of a request's life in the engine; 0 means not yet."""

    queued: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


class RequestDelta(msgspec.Struct, array_like=True, gc=False):
    """What is new about a request. `finish_reason` is set in exactly one delta of each request, its last."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    times: RequestTimes | None = None
    error: str | None = None
    error_type: str | None = None
    """Name of the `core.errors` class, when the engine refused the request."""


class EngineStats(msgspec.Struct, array_like=True, gc=False):
    """Gauges as they are now; counters since the engine started."""

    num_running: int = 0
    num_waiting: int = 0
    cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    step_num_tokens: int = 0
    num_accepted_drafts: int = 0
    """Tokens of output that came without a step of their own."""

    def after(self, past: EngineStats) -> EngineStats:
        """These figures with the counters of the engines before, so that none runs backwards."""
        return msgspec.structs.replace(
            self,
            num_preemptions=self.num_preemptions + past.num_preemptions,
            prefix_queries=self.prefix_queries + past.prefix_queries,
            prefix_hits=self.prefix_hits + past.prefix_hits,
            num_steps=self.num_steps + past.num_steps,
            num_scheduled_tokens=self.num_scheduled_tokens + past.num_scheduled_tokens,
            num_blocks=self.num_blocks or past.num_blocks,
            num_accepted_drafts=self.num_accepted_drafts + past.num_accepted_drafts,
        )


class Outputs(Message):
    """The deltas of one step, and the engine's state after it."""

    deltas: list[RequestDelta]
    stats: EngineStats | None = None


class UtilityResult(Message):
    """`error` is None on success."""

    call_id: int
    result: Any = None
    error: str | None = None


class LoadPhase(Message):
    """A phase of start-up has ended: its name and seconds."""

    name: str
    seconds: float


class EngineInfo(msgspec.Struct, frozen=True):
    """What a ready engine serves. `eager_reason`: why kernels are called one by one; None where a step is one program."""

    model: str
    architecture: str
    vocab_size: int
    max_model_len: int
    dtype: str
    device: str
    block_size: int
    num_blocks: int
    cache_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool
    phases: dict[str, float] = {}
    eager_reason: str | None = None


class Ready(Message):
    """The engine has loaded and serves."""

    info: EngineInfo


class Failed(Message):
    """The engine can't start, or stops for good. `user_error`: the message is a mistake the user can mend."""

    error: str
    user_error: bool = False


EngineMessage = Outputs | UtilityResult | LoadPhase | Ready | Failed

_encoder = msgspec.msgpack.Encoder()
_frontend_decoder = msgspec.msgpack.Decoder(FrontendMessage)
_engine_decoder = msgspec.msgpack.Decoder(EngineMessage)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_frontend(data: bytes | memoryview) -> FrontendMessage:
    return _frontend_decoder.decode(data)


def decode_engine(data: bytes | memoryview) -> EngineMessage:
    return _engine_decoder.decode(data)
