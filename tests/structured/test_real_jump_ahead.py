"""Jump-ahead with a real vocabulary, where a text can be cut into tokens in many ways: answers and log-probabilities are the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from canter import LLM, SamplingParams, StructuredOutputsParams
from canter.client.outputs import PositionLogprobs
from tests.structured.test_real_outputs import SHORT, closed

ADDRESS = closed(street_name=SHORT, house_number={"type": "integer", "minimum": 1, "maximum": 99})
PERSON = closed(first_name=SHORT, street_address=ADDRESS, is_active={"type": "boolean"})
NAME = 'root ::= "<<<" [a-c]{2} ">>> is the name of it, \u201e" [a-c]{2} "\u201c is not"'
FORCED = [
    (StructuredOutputsParams(json=PERSON), {}),
    (StructuredOutputsParams(json=PERSON, disable_any_whitespace=True), {"n": 3, "logprobs": 2}),
    (StructuredOutputsParams(json=PERSON, disable_any_whitespace=True), {"stop": ["_address"], "logprobs": 0}),
    (StructuredOutputsParams(json=PERSON, disable_any_whitespace=True), {"stop": ['dress":'], "include_stop_str_in_output": True}),
    (StructuredOutputsParams(json=PERSON, disable_any_whitespace=True), {"repetition_penalty": 1.3, "min_tokens": 30}),
    (StructuredOutputsParams(regex="The answer to this question is (yes|no), of course, and it will stay so\\."), {"n": 2, "logprobs": 1}),
    (StructuredOutputsParams(choice=["Once upon a time there was a king.", "Once upon a time there was a queen."]), {"n": 2}),
    (StructuredOutputsParams(grammar=NAME), {"min_tokens": 5}),
]


@pytest.fixture(scope="module")
def jumping() -> Iterator[LLM]:
    with LLM(num_threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def stepping() -> Iterator[LLM]:
    with LLM(num_threads=1, structured_outputs_config={"disable_jump_forward": True}) as llm:
        yield llm


def answers(llm: LLM, greedy: bool) -> tuple[list[Any], int]:
    """Everything that the outputs say; and the tokens that took no step of their own."""
    before = _saved(llm)
    params = [
        SamplingParams(temperature=0.0 if greedy else 1.0, seed=i, max_tokens=80, structured_outputs=wanted, **({} if greedy else more))
        for i, (wanted, more) in enumerate(FORCED)
    ]
    found = llm.generate(["Write: "] * len(params), params, use_tqdm=False)
    said = [
        (o.text, o.token_ids, o.finish_reason, o.stop_reason, [_shown(at) for at in o.logprobs or ()])
        for request in found
        for o in request.outputs
    ]
    return said, _saved(llm) - before


def _saved(llm: LLM) -> int:
    [saved] = [int(metric.value) for metric in llm.get_metrics() if metric.name == "canter:jump_ahead_tokens"]
    return saved


def _shown(position: PositionLogprobs) -> dict[int, tuple[int | None, float]]:
    return {token: (entry.rank, round(entry.logprob, 4)) for token, entry in position.items()}


@pytest.mark.parametrize("greedy", [True, False])
def test_the_same_answers_with_fewer_steps(jumping: LLM, stepping: LLM, greedy: bool) -> None:
    expected, none = answers(stepping, greedy)
    found, saved = answers(jumping, greedy)
    assert found == expected
    assert none == 0 and saved > 20
    assert not greedy or json.loads(found[1][0])["street_address"]["house_number"] > 0


def test_each_of_n_obeys_by_itself(jumping: LLM) -> None:
    params = SamplingParams(n=6, temperature=1.5, seed=1, max_tokens=80, structured_outputs=StructuredOutputsParams(json=PERSON))
    [answer] = jumping.generate(["Write: "], params, use_tqdm=False)
    whole = [json.loads(output.text) for output in answer.outputs if output.finish_reason == "stop"]
    assert len({output.text for output in answer.outputs}) == 6 and len(whole) >= 3
    assert all(set(value) == set(PERSON["properties"]) for value in whole)
