"""Thinking budgets: what may follow is decided by a plain reading of the tokens, whatever drafts, resumption or company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from canter.core.sampling_params import SamplingParams
from canter.runner.sampling.output import SampleStatus
from canter.runner.sampling.pipeline import Sampler
from tests.runner.sampling import naive
from tests.runner.sampling.naive import Req

VOCAB = 9


def thinking(budget: int, start: list[int], end: list[int], **more: object) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, thinking_token_budget=budget, thinking_start_ids=start, thinking_end_ids=end, max_tokens=100, **more
    )  # type: ignore[arg-type]


def forced(req: Req, place: int = 0) -> int | None:
    """The only token that may follow, or None: token by token, from the definition."""
    p = req.params
    start, end = p.thinking_start_ids, p.thinking_end_ids
    length, limit, budget = -1, p.thinking_token_budget or 0, p.thinking_token_budget or 0
    seen: list[int] = []
    for token in req.prompt + req.output + req.drafts[:place]:
        if len(seen) == len(req.prompt):
            limit = max(budget, length)
        seen.append(token)
        if length < 0:
            length = 0 if seen[-len(start) :] == start else -1
        elif seen[-len(end) :] == end:
            length, limit = -1, budget
        else:
            length += 1
    if len(seen) == len(req.prompt):
        limit = max(budget, length)
    return end[min(length - limit, len(end) - 1)] if length >= limit and length >= 0 else None


def check(reqs: list[Req]) -> list[list[int]]:
    """The tokens that each logit allows, checked against `forced`."""
    sampler, batch = naive.build(reqs, VOCAB)
    logits = torch.randn(sum(req.num_logits for req in reqs), VOCAB, generator=torch.Generator().manual_seed(1))
    before, after = logits.clone(), sampler.process(logits, batch)
    line = 0
    for req in reqs:
        for place in range(req.num_logits):
            token = forced(req, place) if req.params.thinking_token_budget is not None else None
            if token is None:
                assert torch.equal(after[line], before[line])
            else:
                assert torch.isfinite(after[line]).nonzero().flatten().tolist() == [token]
            line += 1
    return [torch.isfinite(row).nonzero().flatten().tolist() for row in after]


def test_a_thought_ends_when_its_budget_is_used_up() -> None:
    p = thinking(3, [7], [8])
    allowed = check([Req(p, prompt=[1, 7], output=[2] * n) for n in range(5)] + [Req(), Req(p, prompt=[1, 7], output=[2, 8, 3, 3, 3, 3])])
    assert [len(ids) for ids in allowed] == [VOCAB, VOCAB, VOCAB, 1, 1, VOCAB, VOCAB]


def test_an_end_of_several_tokens_is_written_out_and_each_thought_has_the_budget() -> None:
    p = thinking(2, [7], [5, 6, 8])
    assert [check([Req(p, prompt=[7], output=out)])[0] for out in ([1, 1], [1, 1, 5], [1, 1, 5, 6])] == [[5], [6], [8]]
    assert len(check([Req(p, prompt=[7], output=[1, 1, 5, 6, 8, 1, 1, 1])])[0]) == VOCAB
    assert check([Req(p, prompt=[7], output=[1, 1, 5, 6, 8, 7, 1, 1])])[0] == [5]


def test_a_prompt_that_has_used_the_budget_up_is_ended_at_once() -> None:
    p = thinking(2, [7], [5, 8])
    assert check([Req(p, prompt=[7, 1, 1, 1, 1])])[0] == [5]
    assert check([Req(p, prompt=[7, 1, 1, 1, 1], output=[5])])[0] == [8]
    assert check([Req(thinking(0, [7], [8]), prompt=[7])])[0] == [8]


tokens = st.lists(st.sampled_from([1, 2, 5, 6, 7, 8]), max_size=9)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 4), st.sampled_from([([7], [8]), ([7, 5], [8]), ([7], [5, 8]), ([7], [5, 5, 8])]), tokens, tokens, st.booleans()
        ),
        min_size=1,
        max_size=4,
    ),
    st.data(),
)
def test_any_tokens_read_at_once_or_one_after_the_other(cases: list, data: st.DataObject) -> None:
    """Rows set up from all tokens, and rows that were fed their output by `record`, know the same; drafts are read the same way."""
    reqs = [
        Req(thinking(budget, *markers) if wanted else SamplingParams(temperature=0.0), prompt=[1, *prompt], output=output)
        for budget, markers, prompt, output, wanted in cases
    ]
    check(reqs)
    for req in reqs:
        cut = data.draw(st.integers(0, len(req.output)))
        check([Req(req.params, req.prompt, req.output[:cut], drafts=req.output[cut : cut + 3])])
    fed = Sampler(16, VOCAB, torch.device("cpu"), 0)
    rows = np.arange(len(reqs))
    for row, req in zip(rows, reqs, strict=True):
        fed.add_row(int(row), f"r{row}", req.params, req.prompt, len(req.prompt))
    width = max(max(len(req.output) for req in reqs), 1)
    block = torch.full((len(reqs), width), 3)
    for row, req in zip(rows, reqs, strict=True):
        block[row, : len(req.output)] = torch.tensor(req.output, dtype=torch.int64)
    fed.record(rows, torch.from_numpy(rows), block, torch.tensor([len(req.output) for req in reqs]), naive.nobody_asks)
    whole, batch = naive.build(reqs, VOCAB)
    logits = torch.randn(len(reqs), VOCAB)
    assert torch.equal(fed.process(logits.clone(), batch), whole.process(logits.clone(), batch))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_forced_token_is_drawn_whatever_else_the_request_forbids(temperature: float) -> None:
    p = SamplingParams(
        temperature=temperature, seed=3, thinking_token_budget=1, thinking_start_ids=[7], thinking_end_ids=[8], allowed_token_ids=[1, 2]
    )
    sampler, batch = naive.build([Req(p, prompt=[7], output=[1]), Req(p, prompt=[1])], VOCAB)
    output = sampler.sample(torch.randn(2, VOCAB), batch).to_host()
    assert output.token_ids[0] == 8 and output.token_ids[1] in (1, 2)
    assert output.status == [SampleStatus.OK] * 2


def test_bad_logits_are_not_hidden_by_a_forced_token() -> None:
    sampler, batch = naive.build([Req(thinking(0, [7], [8]), prompt=[7])], VOCAB)
    output = sampler.sample(torch.full((1, VOCAB), float("nan")), batch).to_host()
    assert output.status == [SampleStatus.BAD_LOGITS]
