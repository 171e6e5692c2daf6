from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from canter.runner.sampling.random import (
    Stream,
    derive_seed,
    gumbel,
    negative_gumbel,
    position_keys,
    random_bits,
    seed_key,
    token_salts,
    uniform,
)
from tests.runner.sampling import naive

CPU = torch.device("cpu")
LARGEST_NOISE = -math.log(-math.log1p(-(2.0**-32)))


def keys(seeds: list[int], positions: list[int], stream: Stream = Stream.SAMPLE) -> torch.Tensor:
    return position_keys(torch.tensor([seed_key(s) for s in seeds]), torch.tensor(positions), stream)


def chi_square_is_plausible(observed: np.ndarray, expected: np.ndarray) -> bool:
    """Within five standard deviations of what chance gives (the statistic's mean is df, its variance 2 df)."""
    statistic, freedom = float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1
    return abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


@settings(max_examples=60, deadline=None)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31), st.sampled_from(Stream), st.integers(1, 40))
def test_bits_equal_unbounded_integer_arithmetic(seed: int, position: int, stream: Stream, width: int) -> None:
    found = random_bits(keys([seed], [position], stream), token_salts(width, CPU))[0].tolist()
    assert found == [naive.bits(seed, position, token, int(stream)) for token in range(width)]


def test_salts_of_chosen_tokens_give_the_same_bits() -> None:
    salts = token_salts(5000, CPU)
    ids = torch.tensor([[4999, 3, 1234]])
    k = keys([11], [5])
    assert torch.equal(random_bits(k, salts[ids]), random_bits(k, salts)[:, ids[0]])
    assert torch.equal(negative_gumbel(k, salts[ids]), negative_gumbel(k, salts)[:, ids[0]])


def test_uniform_stays_inside_the_open_interval() -> None:
    extremes = torch.tensor([0, 1, 2**31 - 1], dtype=torch.int32).to(torch.float32).add_(0.5).mul_((1 - 2.0**-24) * 2.0**-31)
    assert extremes.min() > 0 and extremes.max() < 1
    u = uniform(keys(list(range(50)), [3] * 50), token_salts(2000, CPU))
    assert u.min() > 0 and u.max() < 1
    observed = torch.histc(u, 100, 0, 1).numpy()
    assert chi_square_is_plausible(observed, np.full(100, 1000.0))


def test_small_uniforms_are_resolved() -> None:
    u = uniform(keys(list(range(200)), [0] * 200), token_salts(20000, CPU)).flatten()
    small = u[u < 2.0**-18]
    assert 10 <= len(small) <= 22  # 4 million draws: 15 expected
    assert len(small.unique()) == len(small)


def test_gumbel_noise_follows_its_distribution_far_out() -> None:
    g = gumbel(keys(list(range(200)), [9] * 200), token_salts(20000, CPU)).flatten().double()
    assert torch.isfinite(g).all() and g.max() <= LARGEST_NOISE + 1e-3
    assert abs(float(g.mean()) - 0.5772157) < 0.004 and abs(float(g.var()) - math.pi**2 / 6) < 0.01
    count = len(g)
    for bound in (-2.0, -1.0, 0.0, 2.0, 5.0, 8.0, 11.0):
        share = -math.expm1(-math.exp(-bound))
        spread = math.sqrt(count * share * (1 - share))
        assert abs(int((g > bound).sum()) - count * share) < 5 * spread


@pytest.mark.parametrize("vary", ["positions", "seeds", "streams", "tokens"])
def test_neighbours_are_independent(vary: str) -> None:
    """Joint frequencies of 8 x 8 cells of neighbouring draws."""
    salts = token_salts(2001, CPU)
    count = 100
    if vary == "positions":
        first, second = keys([5] * count, list(range(count))), keys([5] * count, list(range(1, count + 1)))
    elif vary == "seeds":
        first, second = keys(list(range(count)), [5] * count), keys(list(range(1, count + 1)), [5] * count)
    elif vary == "streams":
        first, second = keys([5] * count, list(range(count))), keys([5] * count, list(range(count)), Stream.RESIDUAL)
    else:
        first = second = keys([5] * count, list(range(count)))
    shift = 1 if vary == "tokens" else 0
    a = (uniform(first, salts)[:, :2000] * 8).long()
    b = (uniform(second, salts)[:, shift : 2000 + shift] * 8).long()
    joint = torch.bincount((a * 8 + b).flatten(), minlength=64).numpy()
    assert chi_square_is_plausible(joint, np.full(64, 200_000 / 64))


def test_each_key_bit_flips_half_of_the_output() -> None:
    salts = token_salts(4000, CPU)
    base = torch.tensor([[123456789, -987654321]], dtype=torch.int32)
    plain = random_bits(base, salts)
    for half in (0, 1):
        for bit in (0, 7, 15, 16, 30, 31):
            flipped = base.clone()
            flipped[0, half] ^= np.int32(np.uint32(1 << bit).view(np.int32)).item()
            changed = (plain ^ random_bits(flipped, salts))[0]
            shares = torch.stack([((changed >> place) & 1).float().mean() for place in range(31)])
            assert abs(float(shares.mean()) - 0.5) < 0.02, (half, bit)
            assert float(shares.min()) > 0.3 and float(shares.max()) < 0.7, (half, bit)


def test_draws_follow_the_softmax_and_positions_are_independent() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, 0.0, -1.0, -3.0])
    count = 60_000
    scores = logits + gumbel(keys([42] * count, list(range(count))), token_salts(6, CPU))
    drawn = scores.argmax(-1)
    expected = torch.softmax(logits.double(), 0).numpy()
    assert chi_square_is_plausible(torch.bincount(drawn, minlength=6).numpy(), expected * count)
    pairs = torch.bincount(drawn[:-1] * 6 + drawn[1:], minlength=36).numpy()
    assert chi_square_is_plausible(pairs, np.outer(expected, expected).flatten() * (count - 1))


def test_draws_follow_the_softmax_over_seeds() -> None:
    logits = torch.tensor([0.5, 0.0, -0.5, 1.5])
    count = 40_000
    scores = logits + gumbel(keys(list(range(count)), [17] * count), token_salts(4, CPU))
    expected = torch.softmax(logits.double(), 0).numpy() * count
    assert chi_square_is_plausible(torch.bincount(scores.argmax(-1), minlength=4).numpy(), expected)


def test_made_seeds_differ_and_repeat() -> None:
    made = {derive_seed(engine, counter) for engine in (0, 1, 2) for counter in range(200)}
    assert len(made) == 600
    assert derive_seed(1, 5) == derive_seed(1, 5)
