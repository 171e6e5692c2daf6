"""Repetition detection against its definition, and as an end of requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canter.core.errors import InvalidRequestError
from canter.core.messages import AddRequest
from canter.core.sampling_params import RepetitionDetection, SamplingParams
from canter.scheduler.cache.coordinator import RequestCache
from canter.scheduler.repetition import RepetitionDetector, make_detector
from canter.scheduler.request import Request


def repeats(tokens: list[int], wanted: RepetitionDetection) -> bool:
    for size in range(max(1, wanted.min_pattern_size), wanted.max_pattern_size + 1):
        pattern = tokens[-size:]
        if len(tokens) >= size * wanted.min_count and tokens[-size * wanted.min_count :] == pattern * wanted.min_count:
            return True
    return False


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 6), st.integers(0, 6), st.integers(2, 5))
def test_it_equals_the_definition(tokens: list[int], largest: int, smallest: int, count: int) -> None:
    wanted = RepetitionDetection(max_pattern_size=largest, min_pattern_size=min(smallest, largest), min_count=count)
    detector = RepetitionDetector(wanted)
    for i, token_id in enumerate(tokens):
        assert detector.append(token_id) == repeats(tokens[: i + 1], wanted)


def test_nothing_to_detect_costs_nothing() -> None:
    assert make_detector(None) is None and make_detector(RepetitionDetection()) is None


def request(**sampling: object) -> Request:
    wanted = RepetitionDetection(max_pattern_size=3, min_count=3)
    params = SamplingParams(max_tokens=20, repetition_detection=wanted, **sampling)  # type: ignore[arg-type]
    return Request(AddRequest("r", [5, 5, 5, 5], params), 0.0, 0, 100, RequestCache.__new__(RequestCache))


def test_a_request_ends_at_the_token_that_completes_the_repetition() -> None:
    r = request()
    assert r.append([5, 1, 2, 1, 2, 1, 2, 9]) == [5, 1, 2, 1, 2, 1, 2], "the prompt does not count, nor what follows"
    assert (r.finish_reason, r.stop_reason) == ("repetition", "repetition_detected")


def test_min_tokens_come_first() -> None:
    r = request(min_tokens=5)
    assert len(r.append([7] * 10)) == 5 and r.finish_reason == "repetition"


@pytest.mark.parametrize(
    "fields",
    [
        {"max_pattern_size": -1},
        {"max_pattern_size": 1025, "min_count": 2},
        {"max_pattern_size": 2**63, "min_count": 2},
        {"max_pattern_size": True, "min_count": 2},
        {"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 2},
        {"max_pattern_size": 4, "min_pattern_size": -1, "min_count": 2},
        {"max_pattern_size": 4},
        {"max_pattern_size": 4, "min_count": 1},
        {"max_pattern_size": 4, "min_count": 1025},
        {"max_pattern_size": float("nan"), "min_count": 2},
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict) -> None:
    with pytest.raises(InvalidRequestError, match="repetition_detection"):
        SamplingParams(repetition_detection=RepetitionDetection(**fields))
