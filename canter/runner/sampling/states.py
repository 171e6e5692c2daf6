"""What each row of the request table asks of the sampler. The host's arrays are the truth; the device gets copies.

Which rows use which feature is always known on the host, so a step decides what to run without asking the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from canter.core.sampling_params import SamplingParams
from canter.kernels.dispatch import bind
from canter.kernels.ops import Kernel
from canter.runner.sampling.random import seed_key
from canter.runner.sampling.rows import IntArray, upload

T = TypeVar("T")

NO_LOGPROBS = -2
"""In `num_logprobs`: the request wants none. -1 asks for the whole vocabulary."""


class Feature:
    """Bits of what a row uses. A stage of the pipeline is skipped when no row of the batch has its bit.

    Plain integers: tests of `enum` flags would cost a greedy step as much as its tensor work.
    """

    ALLOWED_IDS = 1
    LOGIT_BIAS = 2
    MIN_TOKENS = 4
    PENALTIES = 8
    BAD_WORDS = 16
    RANDOM = 32
    TRUNCATION = 64
    LOGPROBS = 128
    THINKING = 256
    PLUGINS = 512
    GRAMMAR = 1024


@dataclass(frozen=True, slots=True)
class IdList:
    """Token ids of one row, with a value each where the feature has one."""

    ids: IntArray
    values: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BadWords:
    """Forbidden sequences of one row: `prefixes [W, M]` right-aligned and filled with -1, `lengths [W]`, `last [W]`."""

    prefixes: IntArray
    lengths: IntArray
    last: IntArray


@dataclass(slots=True)
class Column:
    """A value for each row: numpy on the host, and a device copy that is renewed after a change."""

    host: npt.NDArray[Any]
    stale: bool = True
    copy: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        if self.copy is None or (self.stale and device.type != "cpu"):
            self.copy = upload(self.host, device)
        self.stale = False
        return self.copy


class SamplingOps:
    """The ops of `kernels/reference/sampling.py`, as they are served on a device."""

    def __init__(self, device: torch.device) -> None:
        def op(name: str) -> Kernel:
            return bind(name, device.type, torch.float32)

        self.greedy_tokens, self.draw_tokens, self.keep_tokens = op("greedy_tokens"), op("draw_tokens"), op("keep_tokens")
        self.allow_tokens, self.add_to_tokens, self.penalize = op("allow_tokens"), op("add_to_tokens"), op("penalize")
        self.mask_tokens = op("mask_tokens")
        self.forbid_words, self.token_logprobs = op("forbid_words"), op("token_logprobs")


@dataclass(slots=True)
class RowStates:
    """The sampling state of `num_rows` rows over a vocabulary of `vocab_size`. `set_row` rewrites all of a row.

    Columns: temperature (0 where nothing is drawn), top_k (vocab_size is off), top_p (inf is off), log_min_p (-inf is
    off), presence_penalty, frequency_penalty, repetition_penalty, seed_key, num_prompt_tokens, min_tokens.
    """

    num_rows: int
    vocab_size: int
    device: torch.device
    version: int = 0
    """Counts changes: a cache of things made from these states holds as long as this stands still."""
    ops: SamplingOps = field(init=False)
    features: IntArray = field(init=False)
    num_logprobs: IntArray = field(init=False)
    allowed: list[IdList | None] = field(init=False)
    bias: list[IdList | None] = field(init=False)
    stops: list[IdList | None] = field(init=False)
    bad_words: list[BadWords | None] = field(init=False)
    logprob_ids: list[IntArray | None] = field(init=False)
    columns: dict[str, Column] = field(init=False)

    def __post_init__(self) -> None:
        def zeros(dtype: npt.DTypeLike) -> npt.NDArray[Any]:
            return np.zeros(self.num_rows, dtype)

        self.ops = SamplingOps(self.device)
        self.features = np.zeros(self.num_rows, np.int64)
        self.num_logprobs = np.full(self.num_rows, NO_LOGPROBS, np.int64)
        self.allowed = [None] * self.num_rows
        self.bias = [None] * self.num_rows
        self.stops = [None] * self.num_rows
        self.bad_words = [None] * self.num_rows
        self.logprob_ids = [None] * self.num_rows
        floats = ("temperature", "log_min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        self.columns = {name: Column(zeros(np.float32)) for name in floats}
        self.columns["top_p"] = Column(zeros(np.float64))
        for name in ("top_k", "seed_key", "num_prompt_tokens", "min_tokens"):
            self.columns[name] = Column(zeros(np.int64))

    def set_row(self, row: int, params: SamplingParams, seed: int, num_prompt_tokens: int) -> None:
        """Take over a request's parameters; `seed` is the request's own or the one made for it."""
        off_k = params.top_k == 0 or params.top_k >= self.vocab_size
        self._write(
            row,
            temperature=0.0 if params.is_greedy else params.temperature,
            top_k=self.vocab_size if off_k or params.is_greedy else params.top_k,
            top_p=math.inf if params.top_p >= 1.0 or params.is_greedy else params.top_p,
            log_min_p=-math.inf if params.min_p == 0.0 or params.is_greedy else math.log(params.min_p),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            seed_key=seed_key(seed),
            num_prompt_tokens=num_prompt_tokens,
            min_tokens=params.min_tokens,
        )
        self.num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        wanted = self._ids(params.logprob_token_ids or None) if params.logprobs is not None else None
        self.logprob_ids[row] = None if wanted is None else wanted.ids
        self.allowed[row] = self._ids(params.allowed_token_ids)
        bias = params.logit_bias or {}
        self.bias[row] = self._ids(list(bias), list(bias.values()))
        # Beside a grammar min_tokens hold as far as it leaves anything else to write: its masks see to that.
        is_free = params.structured_outputs is None
        self.stops[row] = self._ids(sorted(params.all_stop_token_ids)) if params.min_tokens and is_free else None
        self.bad_words[row] = self._bad_words(params.bad_words_token_ids)
        self.features[row] = self._features(row, params)

    def clear_row(self, row: int) -> None:
        """Forget what the row used, so that its lists can be freed."""
        self.features[row] = 0
        self.num_logprobs[row] = NO_LOGPROBS
        self.allowed[row] = self.bias[row] = self.stops[row] = None
        self.bad_words[row] = self.logprob_ids[row] = None
        self.version += 1

    def column(self, name: str) -> Tensor:
        """Device copy of a column, [num_rows]."""
        return self.columns[name].on(self.device)

    def _write(self, row: int, **values: float) -> None:
        for name, value in values.items():
            column = self.columns[name]
            column.host[row] = value
            column.stale = True
        self.version += 1

    def _ids(self, ids: list[int] | None, values: list[float] | None = None) -> IdList | None:
        """Ids of the vocabulary; None when there is nothing to do. An empty list of allowed ids stays a list."""
        if ids is None:
            return None
        array = np.asarray(ids, np.int64).reshape(-1)
        known = (array >= 0) & (array < self.vocab_size)
        numbers = np.zeros(len(array), np.float32) if values is None else np.asarray(values, np.float32)
        return IdList(array[known], numbers[known])

    def _bad_words(self, words: Sequence[Sequence[int]]) -> BadWords | None:
        known = [word for word in words if word and 0 <= word[-1] < self.vocab_size]
        if not known:
            return None
        lengths = np.array([len(word) - 1 for word in known], np.int64)
        prefixes = np.full((len(known), max(1, int(lengths.max()))), -1, np.int64)
        for line, word in zip(prefixes, known, strict=True):
            if len(word) > 1:
                line[-(len(word) - 1) :] = word[:-1]
        return BadWords(prefixes, lengths, np.array([word[-1] for word in known], np.int64))

    def _features(self, row: int, params: SamplingParams) -> int:
        penalised = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0
        bias, stops = self.bias[row], self.stops[row]
        used = {
            Feature.ALLOWED_IDS: self.allowed[row] is not None,
            Feature.LOGIT_BIAS: bias is not None and len(bias.ids) > 0,
            Feature.MIN_TOKENS: stops is not None and len(stops.ids) > 0,
            Feature.PENALTIES: penalised,
            Feature.BAD_WORDS: self.bad_words[row] is not None,
            Feature.RANDOM: not params.is_greedy,
            Feature.TRUNCATION: not params.is_greedy and self._truncates(row),
            Feature.LOGPROBS: params.logprobs is not None,
            Feature.GRAMMAR: params.structured_outputs is not None,
            Feature.THINKING: params.thinking_token_budget is not None and bool(params.thinking_start_ids and params.thinking_end_ids),
        }
        return sum(feature for feature, is_used in used.items() if is_used)

    def _truncates(self, row: int) -> bool:
        host = {name: self.columns[name].host[row] for name in ("top_k", "top_p", "log_min_p")}
        return bool(host["top_k"] < self.vocab_size or host["top_p"] < 1.0 or host["log_min_p"] > -math.inf)


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """The logits of one step, L of them, and what sampling needs to know of each. Built by the runner.

    A request that verifies d drafts has d + 1 neighbouring logits: the first continues its last known token, the i-th
    after it continues the i-th draft.

    rows_np [L]: row of the request table, on the host; rows [L] int64: the same on the device.
    positions [L] int64: position of the token whose logits these are; the drawn token stands at the next.
    all_token_ids [R, max_len], total_len [R]: tokens known of each row, prompt and output, drafts not counted.
    local_pos_np [L]: number of drafts before the logit, 0 for the first; None when there are no drafts.
    input_ids [L]: the token whose logits these are, hence at local position i > 0 the i-th draft; needed with drafts.
    """

    rows_np: IntArray
    rows: Tensor
    positions: Tensor
    all_token_ids: Tensor
    total_len: Tensor
    local_pos_np: IntArray | None = None
    input_ids: Tensor | None = None

    @property
    def max_drafts(self) -> int:
        """Most drafts that stand before a logit of this batch."""
        if self.local_pos_np is None or self.input_ids is None:
            return 0
        return int(self.local_pos_np.max(initial=0))

    @property
    def key(self) -> tuple[bytes, bytes]:
        """Equal for batches with the same rows and drafts before each logit."""
        return self.rows_np.tobytes(), b"" if self.local_pos_np is None else self.local_pos_np.tobytes()

    def drafts_before(self) -> Tensor:
        """Drafts before each logit, on the device: [L] int64."""
        if self.local_pos_np is None:
            return torch.zeros_like(self.positions)
        return upload(self.local_pos_np.astype(np.int64), self.positions.device)


class Cached(Generic[T]):
    """The last value of a function of (states, batch rows); made anew when either has changed."""

    def __init__(self) -> None:
        self._key: object = None
        self._value: T | None = None

    def get(self, states: RowStates, batch: SampleBatch, make: Callable[[], T]) -> T:
        key = (states.version, batch.key)
        if self._value is None or key != self._key:
            self._value, self._key = make(), key
        return self._value
