"""How to choose tokens: one validated value, the same offline, over HTTP and inside the engine."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import msgspec

from canter.core.errors import InvalidRequestError

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
GREEDY_EPSILON = 1e-5
MIN_TEMPERATURE = 1e-2
MIN_REPETITION_PENALTY = 1e-6
"""And at most its inverse: beyond, logits leave the range of float32."""


class OutputKind(IntEnum):
    """What each item of an output stream holds: everything so far, what is new, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request; names and defaults follow vLLM.

    Raises `InvalidRequestError` naming the field for a value outside its range.
    `eos_token_ids` and `bad_words_token_ids` are filled in by `text` from the tokenizer; the engine reads only those.
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
    truncate_prompt_tokens: int | None = None
    output_kind: OutputKind = OutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    eos_token_ids: list[int] = msgspec.field(default_factory=list)
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
        """Bring equal meanings to one spelling: seed -1 and top_k -1 mean unset; tiny temperatures mean greedy."""
        if self.seed == -1:
            self.seed = None
        if self.top_k == -1:
            self.top_k = 0
        if _is_number(self.temperature) and GREEDY_EPSILON <= self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE
        if isinstance(self.stop, str):
            self.stop = [self.stop]
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
        _length(self.bad_words or [], "bad_words", MAX_BAD_WORDS)
        for word in self.bad_words or []:
            if not isinstance(word, str) or not word:
                raise InvalidRequestError(f"bad_words must hold non-empty strings, got {word!r:.80}.", "bad_words")

    def verify_vocabulary(self, vocab_size: int, max_logprobs: int) -> None:
        """Check ids against the model's vocabulary and logprob counts against the server's cap."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
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
