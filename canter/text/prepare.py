"""What the text side adds to sampling parameters: ids for EOS and bad words, and a model's own defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from canter.core.errors import ConfigError, InvalidRequestError
from canter.core.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams
from canter.text.thinking import ThinkingMarkers
from canter.text.tokenizer import Tokenizer

_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_MAX_BAD_WORD_CHARS = 64 * MAX_BAD_WORD_TOKENS


def finish_params(
    params: SamplingParams,
    tokenizer: Tokenizer,
    generation_config: Mapping[str, Any],
    vocab_size: int,
    thinking: ThinkingMarkers | None = None,
) -> SamplingParams:
    """A copy with `eos_token_ids`, `bad_words_token_ids` and the ids of the thought's markers filled in.

    `vocab_size` is the model's: how many logits it has. Raises `InvalidRequestError` for bad words that the model can't say, and
    for a thinking budget where the model has no `thinking` markers, or several kinds of them.
    """
    start, end = _marker_ids(params, thinking, vocab_size)
    return params.clone(
        eos_token_ids=eos_token_ids(tokenizer, generation_config, vocab_size),
        bad_words_token_ids=bad_words_token_ids(params.bad_words or [], tokenizer, vocab_size),
        thinking_start_ids=start,
        thinking_end_ids=end,
    )


def _marker_ids(params: SamplingParams, thinking: ThinkingMarkers | None, vocab_size: int) -> tuple[list[int], list[int]]:
    if params.thinking_token_budget is None and (params.stop_in_thoughts or thinking is None):
        return [], []
    if thinking is None or max(thinking.start + thinking.end) >= vocab_size:
        raise InvalidRequestError(
            "thinking_token_budget needs a model with tokens that begin and end a thought, and this one is not known to have any. "
            "--reasoning-config names them.",
            "thinking_token_budget",
        )
    if params.thinking_token_budget is not None and thinking.others:
        raise InvalidRequestError(
            f"thinking_token_budget counts thoughts of one kind, and this model has {1 + len(thinking.others)}, with markers of their own. "
            "--reasoning-config names the markers of the kind to count.",
            "thinking_token_budget",
        )
    return thinking.start, thinking.end


def eos_token_ids(tokenizer: Tokenizer, generation_config: Mapping[str, Any], vocab_size: int) -> list[int]:
    """Every token that ends a turn: the tokenizer's and the generation config's, which may be one id or a list."""
    listed = generation_config.get("eos_token_id")
    ids = set(listed) if isinstance(listed, (list, tuple)) else {listed}
    return sorted(i for i in ids | tokenizer.eos_token_ids if isinstance(i, int) and 0 <= i < vocab_size)


def bad_words_token_ids(words: list[str], tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
    """The token sequences that spell each word, at the start of a word and within one (with a space before it, and without)."""
    if sum(map(len, words)) > _MAX_BAD_WORD_CHARS:
        raise InvalidRequestError(f"bad_words may hold at most {_MAX_BAD_WORD_CHARS} characters together.", "bad_words")
    sequences: list[list[int]] = []
    for word in words:
        bare = word.lstrip() or word
        for spelling in (bare, f" {bare}"):
            ids = tokenizer.encode(spelling, add_special_tokens=False)
            _check_bad_word(word, ids, vocab_size)
            if ids not in sequences:
                sequences.append(ids)
    num_tokens = sum(map(len, sequences))
    if num_tokens > MAX_BAD_WORD_TOKENS:
        raise InvalidRequestError(f"bad_words may come to at most {MAX_BAD_WORD_TOKENS} tokens together, got {num_tokens}.", "bad_words")
    return sequences


def _check_bad_word(word: str, ids: list[int], vocab_size: int) -> None:
    if not ids:
        raise InvalidRequestError(f"bad_words: {word!r:.80} is no token of this model.", "bad_words")
    if max(ids) >= vocab_size:
        raise InvalidRequestError(
            f"bad_words: {word!r:.80} needs token {max(ids)}, but the model's vocabulary ends at {vocab_size - 1}.", "bad_words"
        )


def default_sampling(generation_config: Mapping[str, Any], mode: str = "auto", override: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Sampling parameters for requests that give none, by `SamplingParams` name.

    `generation_config` is the model's (or that of the directory which `mode` names); mode "vllm" leaves it aside. `override` is
    laid over it. Raises `ConfigError` for a value that no request could have.
    """
    config = {**({} if mode == "vllm" else generation_config), **(override or {})}
    defaults = {name: config[key] for key, name in _DEFAULTS.items() if config.get(key) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise ConfigError(
            f"The model's generation config can't be used: {error} Start with --generation-config vllm, or set it right with "
            "--override-generation-config."
        ) from None
    return defaults
