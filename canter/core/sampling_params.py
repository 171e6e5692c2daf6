"""How to choose tokens: one validated value, the same offline, over HTTP and inside the engine."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import msgspec

from canter.core.errors import InvalidRequestError
from canter.core.structured_outputs import StructuredOutputsParams

MAX_N = 128
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 4096
MAX_STOP_CHARS = 16384
"""All stop strings of a request together: what watches for them takes memory and time for each character."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_PATTERN_SIZE = 1024
MAX_PATTERN_COUNT = 1024
MAX_THINKING_TOKENS = 2**31 - 1
MAX_MARKER_TOKENS = 32
"""Tokens of a marker that begins or ends a thought."""
MAX_STREAM_INTERVAL = 1024
MAX_EXTRA_ARGS = 64
MAX_EXTRA_ARG_CHARS = 4096
MAX_EXTRA_ARG_ITEMS = 1024
GREEDY_EPSILON = 1e-5
MIN_TEMPERATURE = 1e-2
MIN_REPETITION_PENALTY = 1e-6
"""And at most its inverse: beyond, logits leave the range of float32."""


class OutputKind(IntEnum):
    """What each item of an output stream holds: everything so far, what is new, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class RepetitionDetection(msgspec.Struct, kw_only=True, omit_defaults=True):
    """End an output that repeats itself: the same `min_pattern_size` to `max_pattern_size` tokens, `min_count` times in a row.

    A `max_pattern_size` of 0 detects nothing; a `min_pattern_size` of 0 counts as 1.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def verify(self) -> None:
        _integer(self.max_pattern_size, "repetition_detection.max_pattern_size", 0, MAX_PATTERN_SIZE)
        _integer(self.min_pattern_size, "repetition_detection.min_pattern_size", 0, MAX_PATTERN_SIZE)
        _integer(self.min_count, "repetition_detection.min_count", 2 if self.max_pattern_size else 0, MAX_PATTERN_COUNT)
        if self.min_pattern_size > self.max_pattern_size:
            raise InvalidRequestError(
                f"repetition_detection.min_pattern_size must be at most max_pattern_size ({self.max_pattern_size}), "
                f"got {self.min_pattern_size}.",
                "repetition_detection",
            )


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request; names and defaults follow vLLM.

    Raises `InvalidRequestError` naming the field for a value outside its range.
    `eos_token_ids`, `bad_words_token_ids` and the ids of the thought's markers are filled in by `text` from the tokenizer; the
    engine reads only those. `extra_args` are the arguments of logits processors, vLLM's `vllm_xargs` over HTTP.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stop_in_thoughts: bool = True
    truncate_prompt_tokens: int | None = None
    output_kind: OutputKind = OutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logprob_token_ids: list[int] | None = None
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    extra_args: dict[str, Any] | None = None
    stream_interval: int = 1
    eos_token_ids: list[int] = msgspec.field(default_factory=list)
    thinking_start_ids: list[int] = msgspec.field(default_factory=list)
    thinking_end_ids: list[int] = msgspec.field(default_factory=list)
    bad_words_token_ids: list[list[int]] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        self.normalize()
        self.verify()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def all_stop_token_ids(self) -> set[int]:
        """Token ids that end the output: the user's, and EOS unless it is ignored."""
        ids = set(self.stop_token_ids or ())
        return ids if self.ignore_eos else ids | set(self.eos_token_ids)

    def normalize(self) -> None:
        """Bring equal meanings to one spelling: -1 for seed, top_k or a thinking budget means unset; tiny temperatures are raised."""
        if self.seed == -1:
            self.seed = None
        if self.top_k == -1:
            self.top_k = 0
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        if _is_number(self.temperature) and GREEDY_EPSILON <= self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.logprob_token_ids and self.logprobs is None:
            self.logprobs = 0
        if self.logit_bias is not None:
            self.logit_bias = _checked_bias(self.logit_bias)

    def verify(self) -> None:
        _integer(self.n, "n", 1, MAX_N)
        _number(self.presence_penalty, "presence_penalty", -2.0, 2.0)
        _number(self.frequency_penalty, "frequency_penalty", -2.0, 2.0)
        _number(self.repetition_penalty, "repetition_penalty", MIN_REPETITION_PENALTY, 1 / MIN_REPETITION_PENALTY)
        _number(self.temperature, "temperature", 0.0, 2.0)
        _number(self.top_p, "top_p", 0.0, 1.0, above=True)
        _integer(self.top_k, "top_k", 0, None, hint=" (0 or -1 turns it off)")
        _number(self.min_p, "min_p", 0.0, 1.0)
        if self.seed is not None:
            _integer(self.seed, "seed", -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _integer(self.max_tokens, "max_tokens", 1, None)
        _integer(self.min_tokens, "min_tokens", 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}.", "min_tokens")
        if self.logprobs is not None:
            _integer(self.logprobs, "logprobs", -1, None, hint=" (-1 asks for the whole vocabulary)")
        if self.prompt_logprobs is not None:
            _integer(self.prompt_logprobs, "prompt_logprobs", -1, None, hint=" (-1 asks for the whole vocabulary)")
        if self.truncate_prompt_tokens is not None:
            _integer(self.truncate_prompt_tokens, "truncate_prompt_tokens", -1, None)
            if self.truncate_prompt_tokens == 0:
                raise InvalidRequestError("truncate_prompt_tokens must be -1 or at least 1, got 0.", "truncate_prompt_tokens")
        if self.thinking_token_budget is not None:
            _integer(self.thinking_token_budget, "thinking_token_budget", 0, MAX_THINKING_TOKENS, hint=" (-1 sets no limit)")
        if self.repetition_detection is not None:
            self.repetition_detection.verify()
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise InvalidRequestError(
                f"structured_outputs must be StructuredOutputsParams, got {type(self.structured_outputs).__name__}.", "structured_outputs"
            )
        _integer(self.stream_interval, "stream_interval", 1, MAX_STREAM_INTERVAL)
        if self.n > 1 and self.is_greedy:
            raise InvalidRequestError(
                f"n must be 1 with greedy sampling (temperature 0), got {self.n}: every choice would be the same. Raise temperature.", "n"
            )
        self._verify_lists()

    def _verify_lists(self) -> None:
        stops = self.stop_strings
        _length(stops, "stop", MAX_STOP_STRINGS)
        for text in stops:
            if not isinstance(text, str) or not text or len(text) > MAX_STOP_STRING_CHARS:
                raise InvalidRequestError(
                    f"stop must hold non-empty strings of at most {MAX_STOP_STRING_CHARS} characters, got {text!r:.80}.", "stop"
                )
        if sum(map(len, stops)) > MAX_STOP_CHARS:
            raise InvalidRequestError(f"stop may hold at most {MAX_STOP_CHARS} characters together, got {sum(map(len, stops))}.", "stop")
        if stops and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize=True.", "stop")
        _ids(self.stop_token_ids, "stop_token_ids", MAX_STOP_TOKEN_IDS)
        _ids(self.allowed_token_ids, "allowed_token_ids", MAX_ALLOWED_TOKEN_IDS)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids must not be empty: no token could be chosen.", "allowed_token_ids")
        _ids(self.logprob_token_ids, "logprob_token_ids", MAX_LOGPROB_TOKEN_IDS)
        if self.logprob_token_ids and self.logprobs:
            raise InvalidRequestError(
                f"logprob_token_ids take the place of the most likely tokens: logprobs must be 0 beside them, got {self.logprobs}.",
                "logprob_token_ids",
            )
        _ids(self.thinking_start_ids, "thinking_start_ids", MAX_MARKER_TOKENS)
        _ids(self.thinking_end_ids, "thinking_end_ids", MAX_MARKER_TOKENS)
        _verify_extra_args(self.extra_args or {})
        _length(self.bad_words or [], "bad_words", MAX_BAD_WORDS)
        for word in self.bad_words or []:
            if not isinstance(word, str) or not word:
                raise InvalidRequestError(f"bad_words must hold non-empty strings, got {word!r:.80}.", "bad_words")

    def verify_vocabulary(self, vocab_size: int, max_logprobs: int) -> None:
        """Check ids against the model's vocabulary and logprob counts against the server's cap."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids", "thinking_end_ids"):
            for token_id in getattr(self, name) or ():
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequestError(f"{name} must hold token ids in [0, {vocab_size}), got {token_id}.", name)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is None:
                continue
            wanted = vocab_size if count == -1 else count
            cap = vocab_size if max_logprobs == -1 else max_logprobs
            if wanted > cap:
                raise InvalidRequestError(f"{name} must be at most {cap} on this server (--max-logprobs), got {count}.", name)

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, verified again."""
        return msgspec.structs.replace(self, **changes)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: object, name: str, low: float, high: float, above: bool = False) -> None:
    """Require a finite number in [low, high], or (low, high] when `above`."""
    bounds = f"{'above' if above else 'at least'} {low:g}" + (f" and at most {high:g}" if high != math.inf else "")
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise InvalidRequestError(f"{name} must be a finite number {bounds}, got {value!r}.", name)
    if value < low or value > high or (above and value == low):
        raise InvalidRequestError(f"{name} must be {bounds}, got {value!r}.", name)


def _integer(value: object, name: str, low: int, high: int | None, hint: str = "") -> None:
    bounds = f"an integer of at least {low}" + (f" and at most {high}" if high is not None else "") + hint
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise InvalidRequestError(f"{name} must be {bounds}, got {value!r}.", name)


def _length(values: list[Any], name: str, limit: int) -> None:
    if len(values) > limit:
        raise InvalidRequestError(f"{name} may hold at most {limit} entries, got {len(values)}.", name)


def _ids(values: list[int] | None, name: str, limit: int) -> None:
    _length(values or [], name, limit)
    for token_id in values or ():
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise InvalidRequestError(f"{name} must hold token ids (integers of at least 0), got {token_id!r}.", name)


def _verify_extra_args(args: dict[str, Any]) -> None:
    """What a logits processor may be told: numbers and texts, and lists of them, all bounded."""
    _length(list(args), "vllm_xargs", MAX_EXTRA_ARGS)
    for name, value in args.items():
        if not isinstance(name, str) or not 1 <= len(name) <= 128:
            raise InvalidRequestError(f"vllm_xargs must have names of 1 to 128 characters, got {name!r:.80}.", "vllm_xargs")
        items = value if isinstance(value, list) else [value]
        _length(items, f"vllm_xargs.{name:.80}", MAX_EXTRA_ARG_ITEMS)
        for item in items:
            if not _is_plain(item):
                raise InvalidRequestError(
                    f"vllm_xargs.{name:.80} must be a text of at most {MAX_EXTRA_ARG_CHARS} characters, a finite number, an integer of "
                    f"64 bits, true or false, or a list of such, got {item!r:.80}.",
                    "vllm_xargs",
                )


def _is_plain(item: object) -> bool:
    if isinstance(item, str):
        return len(item) <= MAX_EXTRA_ARG_CHARS
    if isinstance(item, int):
        return -(2**63) <= item < 2**63
    return isinstance(item, float) and math.isfinite(item)


def _checked_bias(bias: dict[int, float]) -> dict[int, float]:
    """Integer keys, finite values, clamped to [-100, 100] as the OpenAI API defines."""
    _length(list(bias), "logit_bias", MAX_LOGIT_BIAS)
    checked = {}
    for key, value in bias.items():
        try:
            token_id = int(key)
        except (TypeError, ValueError):
            raise InvalidRequestError(f"logit_bias keys must be token ids, got {key!r:.80}.", "logit_bias") from None
        if token_id < 0:
            raise InvalidRequestError(f"logit_bias keys must be token ids of at least 0, got {key!r}.", "logit_bias")
        _number(value, "logit_bias", -math.inf, math.inf)
        checked[token_id] = min(100.0, max(-100.0, float(value)))
    return checked
