from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from canter.core.sampling_params import SamplingParams
from canter.kernels.native import sampling as native
from canter.kernels.reference import sampling as reference
from canter.runner.sampling.states import RowStates
from tests.runner.sampling import naive


@pytest.fixture(params=[native, reference], ids=["native", "reference"])
def ops(request: pytest.FixtureRequest) -> Any:
    return request.param


def kept_ids(ops: Any, x: torch.Tensor, params: list[SamplingParams]) -> list[list[int]]:
    """Ids that each row keeps, likeliest first."""
    states = RowStates(len(params), x.shape[1], torch.device("cpu"))
    for row, p in enumerate(params):
        states.set_row(row, p, 0, 1)
    kept = x.clone()
    ops.keep_tokens(kept, *(states.column(name) for name in ("top_k", "top_p", "log_min_p")))
    assert torch.equal(kept[kept > -np.inf], x[kept > -np.inf]), "what is kept keeps its logit"
    return [sorted(torch.nonzero(row > -np.inf).flatten().tolist(), key=row.neg().tolist().__getitem__) for row in kept]


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
    for ops in (native, reference):
        assert kept_ids(ops, torch.from_numpy(x)[None], [p]) == [naive.kept_tokens(x, p)]


@pytest.mark.parametrize("vocab_size", [1024, 4096, 5003, 20000])
@pytest.mark.parametrize("scale", [0.05, 0.5, 2.0, 6.0])
@pytest.mark.parametrize("rounded", [True, False])
def test_every_way_to_a_threshold_gives_what_a_sort_gives(vocab_size: int, scale: float, rounded: bool) -> None:
    """Peaked and flat rows, with ties and without: lists of candidates, buckets and bits decide alike."""
    generator = torch.Generator().manual_seed(vocab_size)
    several = [
        params(top_k=1),
        params(top_k=5, top_p=0.5),
        params(top_k=63),
        params(top_k=64),
        params(top_k=100, min_p=0.001),
        params(top_k=vocab_size - 1),
        params(top_k=vocab_size // 2, top_p=0.7),
        params(top_k=3 * vocab_size),
        params(top_p=0.3),
        params(top_p=0.9),
        params(top_p=0.99),
        params(min_p=0.05),
        params(min_p=1e-6, top_p=0.95),
        params(top_p=1e-9),
    ]
    x = torch.randn(len(several), vocab_size, generator=generator).mul_(scale)
    if rounded:
        x.mul_(8).round_().div_(8)  # plenty of ties
    expected, found = kept_ids(reference, x, several), kept_ids(native, x, several)
    for row, want, got, p in zip(x, expected, found, several, strict=True):
        shorter = min(len(want), len(got))
        assert want[:shorter] == got[:shorter]
        if want != got:  # the share ties with top_p within rounding
            longer = max(want, got, key=len)
            assert p.top_p < 1.0 and len(longer) - shorter <= 2
            assert all(math.exp(float(row[t]) - float(row[longer[0]])) < 1e-2 for t in longer[shorter:])


def test_wide_rows_of_equal_logits(ops: Any) -> None:
    x = torch.zeros(4, 1024)
    found = kept_ids(ops, x, [params(top_k=3), params(top_p=0.25), params(min_p=1.0), params(top_p=1e-9)])
    assert found == [list(range(1024)), list(range(256)), list(range(1024)), [0]]


def test_ties_at_the_kth_are_kept_and_top_p_takes_the_lowest_ids(ops: Any) -> None:
    x = torch.tensor([[0.0, 3.0, 1.0, 3.0, 1.0, 1.0, -1.0, 0.0]])
    assert kept_ids(ops, x, [params(top_k=3)]) == [[1, 3, 2, 4, 5]]
    assert kept_ids(ops, x, [params(top_k=3, top_p=0.85)]) == [[1, 3, 2]]


def test_top_p_of_one_keeps_tokens_too_unlikely_to_weigh_anything(ops: Any) -> None:
    x = torch.zeros(1, 1024)
    x[0, 5] = 300.0
    assert len(kept_ids(ops, x, [params(top_k=1000)])[0]) == 1024
    assert kept_ids(ops, x, [params(top_p=0.999999)]) == [[5]]


def test_nan_rows_don_t_disturb_their_neighbours(ops: Any) -> None:
    x = torch.randn(3, 4096, generator=torch.Generator().manual_seed(1))
    x[1, 77] = float("nan")
    several = [params(top_p=0.9), params(top_p=0.9), params(top_k=4)]
    found = kept_ids(ops, x, several)
    assert found[0] == naive.kept_tokens(x[0].numpy(), several[0])
    assert found[2] == naive.kept_tokens(x[2].numpy(), several[2])
