from __future__ import annotations

import math
from typing import Any

import pytest

from canter.core import messages
from canter.core.errors import InvalidRequestError
from canter.core.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 129), ("n", True), ("n", 1.5),
        ("presence_penalty", 2.1), ("presence_penalty", math.nan), ("frequency_penalty", -2.1), ("frequency_penalty", "1"),
        ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", math.inf),
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", math.nan), ("temperature", "hot"), ("temperature", True),
        ("top_p", 0), ("top_p", 1.01), ("top_k", -2), ("top_k", 1.0), ("min_p", -0.1), ("min_p", 1.1),
        ("seed", 2**63), ("seed", 1.5), ("max_tokens", 0), ("max_tokens", 1.0), ("min_tokens", -1), ("min_tokens", 17),
        ("logprobs", -2), ("prompt_logprobs", -2), ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2),
        ("stop", ""), ("stop", ["a", ""]), ("stop", ["x" * 5000]), ("stop", ["a"] * 65), ("stop", [1]),
        ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("stop_token_ids", list(range(129))),
        ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("allowed_token_ids", list(range(1025))),
        ("bad_words", [""]), ("bad_words", ["a"] * 129), ("bad_words", [3]),
        ("logit_bias", {"x": 1.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", {1: math.nan}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ],
)  # fmt: skip
def test_a_bad_value_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field) as error:
        SamplingParams(**{field: value})
    assert error.value.param == field


def test_equal_meanings_have_one_spelling() -> None:
    params = SamplingParams(seed=-1, top_k=-1, temperature=0.001, stop="x", logit_bias={"5": 200, 6: -300})
    assert (params.seed, params.top_k, params.temperature, params.stop) == (None, 0, 0.01, ["x"])
    assert params.logit_bias == {5: 100.0, 6: -100.0}
    assert SamplingParams(temperature=1e-6).is_greedy


def test_n_needs_sampling() -> None:
    assert SamplingParams(n=3).n == 3
    with pytest.raises(InvalidRequestError, match="greedy"):
        SamplingParams(n=3, temperature=0)


def test_stop_ids() -> None:
    assert SamplingParams(stop_token_ids=[4], eos_token_ids=[2, 3]).all_stop_token_ids == {2, 3, 4}
    assert SamplingParams(stop_token_ids=[4], eos_token_ids=[2, 3], ignore_eos=True).all_stop_token_ids == {4}


@pytest.mark.parametrize(("field", "value"), [("stop_token_ids", [131]), ("allowed_token_ids", [131]), ("logit_bias", {131: 1.0})])
def test_ids_outside_the_vocabulary(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=rf"{field}.*131\)"):
        SamplingParams(**{field: value}).verify_vocabulary(131, 20)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_logprobs_are_capped(field: str) -> None:
    SamplingParams(**{field: 20}).verify_vocabulary(131, 20)
    SamplingParams(**{field: -1}).verify_vocabulary(131, -1)
    for value in (21, -1):
        with pytest.raises(InvalidRequestError, match=rf"{field} must be at most 20"):
            SamplingParams(**{field: value}).verify_vocabulary(131, 20)


def test_clone_verifies_again() -> None:
    assert SamplingParams(seed=3).clone(seed=4).seed == 4
    with pytest.raises(InvalidRequestError, match="top_p"):
        SamplingParams().clone(top_p=3.0)


def test_it_travels() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"], logit_bias={3: 1.0}, eos_token_ids=[2], bad_words_token_ids=[[1, 2]])
    request = messages.AddRequest("r", [1, 2, 3], params, 1.5, 2, "salt")
    assert messages.decode_frontend(messages.encode(request)) == request


@pytest.mark.parametrize(
    ("field", "value"),
    [("stop", ["x" * 4096] * 5), ("repetition_penalty", 1e308), ("repetition_penalty", 1e7), ("repetition_penalty", 1e-40)],
)
def test_values_that_would_cost_too_much_or_overflow(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field) as error:
        SamplingParams(**{field: value})
    assert error.value.param == field
