from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from canter.core.sampling_params import SamplingParams
from canter.runner.sampling.rows import sort_candidates
from canter.runner.sampling.states import RowStates
from canter.runner.sampling.truncation import Limits, _keep_by_sort, keep_sets, top_candidates
from tests.runner.sampling import naive


def limits_of(params: list[SamplingParams], vocab_size: int) -> Limits:
    states = RowStates(len(params), vocab_size, torch.device("cpu"))
    for row, p in enumerate(params):
        states.set_row(row, p, 0, 1)
    return Limits.of(states, np.arange(len(params)))


def kept_ids(x: torch.Tensor, params: list[SamplingParams]) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for kept in keep_sets(x, limits_of(params, x.shape[1])):
        for line, index in enumerate(kept.index.tolist()):
            assert index not in found
            found[index] = kept.ids[line][kept.keep[line]].tolist()
    assert sorted(found) == list(range(len(params)))
    return [found[i] for i in range(len(params))]


def params(**keywords: object) -> SamplingParams:
    return SamplingParams(temperature=1.0, **keywords)  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([-np.inf, -3.0, -1.0, -0.0, 0.0, 0.25, 1.0, 2.0, 5.0]), min_size=2, max_size=30).filter(
        lambda values: max(values) > -np.inf
    ),
    st.integers(0, 40),
    st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999999, 1.0]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
def test_small_vocabularies_equal_the_naive_rule(values: list[float], top_k: int, top_p: float, min_p: float) -> None:
    p = params(top_k=top_k, top_p=top_p, min_p=min_p)
    x = np.array(values, np.float32)
    assert kept_ids(torch.from_numpy(x)[None].clone(), [p]) == [naive.kept_tokens(x, p)]


@pytest.mark.parametrize("vocab_size", [1024, 4096, 5003])
@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0])
def test_candidates_decide_as_a_full_sort_does(vocab_size: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    several = [
        params(top_k=1),
        params(top_k=5, top_p=0.5),
        params(top_k=63),
        params(top_k=64),
        params(top_k=100, min_p=0.001),
        params(top_k=vocab_size - 1),
        params(top_k=3 * vocab_size),
        params(top_p=0.3),
        params(top_p=0.9),
        params(top_p=0.99),
        params(top_p=0.9999999),
        params(min_p=0.05),
        params(min_p=1e-6, top_p=0.95),
        params(top_p=1e-9),
    ]
    x = torch.randn(len(several), vocab_size, generator=generator).mul_(scale).mul_(8).round_().div_(8)  # plenty of ties
    limits = limits_of(several, vocab_size)
    whole = _keep_by_sort(x, limits, np.arange(len(several)))
    expected = [whole.ids[line][whole.keep[line]].tolist() for line in range(len(several))]
    assert kept_ids(x, several) == expected
    for line in (1, 8, 11, 12, 13):
        assert expected[line] == naive.kept_tokens(x[line].numpy(), several[line])


def test_wide_rows_of_equal_logits() -> None:
    x = torch.zeros(4, 1024)
    found = kept_ids(x, [params(top_k=3), params(top_p=0.25), params(min_p=1.0), params(top_p=1e-9)])
    assert found == [list(range(1024)), list(range(256)), list(range(1024)), [0]]


def test_ties_at_the_kth_are_kept_and_top_p_takes_the_lowest_ids() -> None:
    x = torch.tensor([[0.0, 3.0, 1.0, 3.0, 1.0, 1.0, -1.0, 0.0]])
    assert kept_ids(x, [params(top_k=3)]) == [[1, 3, 2, 4, 5]]
    assert kept_ids(x, [params(top_k=3, top_p=0.85)]) == [[1, 3, 2]]


def test_top_p_of_one_keeps_tokens_too_unlikely_to_weigh_anything() -> None:
    x = torch.zeros(1, 1024)
    x[0, 5] = 300.0
    assert len(kept_ids(x, [params(top_k=1000)])[0]) == 1024
    assert kept_ids(x, [params(top_p=0.999999)]) == [[5]]


@pytest.mark.parametrize("vocab_size", [64 * 300, 64 * 300 + 7])
def test_top_candidates_are_the_largest_in_order(vocab_size: int) -> None:
    x = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(3))
    x[2, 100:164] += 10.0  # all the best in one block
    values, ids = sort_candidates(*top_candidates(x, 64))
    expected = torch.sort(x, dim=-1, descending=True, stable=True)
    assert torch.equal(values, expected.values[:, :64]) and torch.equal(ids, expected.indices[:, :64])


def test_nan_rows_don_t_disturb_their_neighbours() -> None:
    x = torch.randn(3, 4096, generator=torch.Generator().manual_seed(1))
    x[1, 77] = float("nan")
    several = [params(top_p=0.9), params(top_p=0.9), params(top_k=4)]
    found = kept_ids(x, several)
    assert found[0] == naive.kept_tokens(x[0].numpy(), several[0])
    assert found[2] == naive.kept_tokens(x[2].numpy(), several[2])
