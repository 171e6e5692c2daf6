"""Sampling parameters made ready for the engine."""

from __future__ import annotations

from typing import Any

import pytest

from canter.core.errors import ConfigError, InvalidRequestError
from canter.core.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams
from canter.text.prepare import default_sampling, finish_params
from tests.text.vocabularies import small_byte_level, small_spm

VOCAB = 1500


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [0, 2]),
        ({"eos_token_id": 5}, [0, 2, 5]),
        ({"eos_token_id": [7, 2, 6]}, [0, 2, 6, 7]),
        ({"eos_token_id": [None, 99999, -1, "x"]}, [0, 2]),
    ],
)
def test_eos_is_the_union(config: dict[str, Any], expected: list[int]) -> None:
    assert finish_params(SamplingParams(), small_byte_level(), config, VOCAB).eos_token_ids == expected


def test_the_given_parameters_are_not_changed() -> None:
    params = SamplingParams(bad_words=["the"], temperature=0.5, stop=["x"])
    finished = finish_params(params, small_byte_level(), {}, VOCAB)
    assert (params.eos_token_ids, params.bad_words_token_ids) == ([], [])
    assert (finished.temperature, finished.stop, finished.bad_words) == (0.5, ["x"], ["the"])


@pytest.mark.parametrize("word", ["fox", "quick brown", "  fox", "日本", " "])
def test_bad_words_are_spelled_with_and_without_a_space(word: str) -> None:
    for tokenizer in (small_byte_level(), small_spm()):
        sequences = finish_params(SamplingParams(bad_words=[word]), tokenizer, {}, tokenizer.vocab_size).bad_words_token_ids
        bare = word.lstrip() or word
        expected = [tokenizer.encode(spelling, add_special_tokens=False) for spelling in (bare, f" {bare}")]
        assert sequences == [ids for i, ids in enumerate(expected) if ids not in expected[:i]]


def test_bad_words_that_the_model_cannot_say() -> None:
    tokenizer = small_byte_level()
    high = next(token for i in range(VOCAB - 1, 0, -1) if (token := tokenizer.decode([i])).isalpha() and tokenizer.encode(token) == [i])
    with pytest.raises(InvalidRequestError, match="vocabulary ends at") as error:
        finish_params(SamplingParams(bad_words=[high]), tokenizer, {}, tokenizer.encode(high)[0])
    assert error.value.param == "bad_words"


@pytest.mark.parametrize("words", [["x" + "z9" * MAX_BAD_WORD_TOKENS], ["word" * 40000]])
def test_bad_words_are_bounded(words: list[str]) -> None:
    with pytest.raises(InvalidRequestError, match="bad_words may"):
        finish_params(SamplingParams(bad_words=words), small_byte_level(), {}, VOCAB)


def test_default_sampling() -> None:
    config = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": None,
        "repetition_penalty": 1.1,
        "max_new_tokens": 300,
        "do_sample": True,
    }
    expected = {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1, "max_tokens": 300}
    assert default_sampling(config) == expected
    assert default_sampling(config, "vllm") == {}
    assert default_sampling(config, "vllm", {"top_k": 3}) == {"top_k": 3}
    assert default_sampling(config, "auto", {"temperature": 0.1, "top_k": None}) == {
        **{k: v for k, v in expected.items() if k != "top_k"},
        "temperature": 0.1,
    }
    assert default_sampling({}) == {}
    SamplingParams(**default_sampling(config))


def test_a_generation_config_that_no_request_could_have() -> None:
    with pytest.raises(ConfigError, match=r"temperature.*--generation-config vllm"):
        default_sampling({"temperature": 9})
