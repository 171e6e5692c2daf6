"""The native choice of tokens: rows that can't be sampled, independence of company, threads and instruction sets, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from canter.kernels import native
from canter.kernels.native import sampling, step
from canter.kernels.reference import sampling as reference
from canter.kernels.reference.random import token_salts

VOCAB = 20011
NEG_INF = -math.inf


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cases(vocab: int = VOCAB) -> tuple[Tensor, ...]:
    """Rows of every kind: greedy, free, listed, flat, bounded by thousands; arguments of `draw_tokens` up to the salts."""
    limits = [
        (0.0, vocab, 1.0, NEG_INF),
        (1.0, vocab, 1.0, NEG_INF),
        (0.7, 40, 0.95, NEG_INF),
        (1.3, vocab, 0.9, NEG_INF),
        (1.0, vocab, 0.3, -3.0),
        (0.9, vocab, 1.0, -2.0),
        (1.0, 6000, 0.8, NEG_INF),
        (2.0, 1, 1e-9, 0.0),
        (1.0, 5 * vocab, 1.0, NEG_INF),
    ]
    count = len(limits)
    temperature, top_k, top_p, log_min_p = zip(*limits, strict=True)
    logits = torch.randn(count, vocab, generator=rng()) * torch.linspace(0.1, 6.0, count).unsqueeze(1)
    seeds = torch.randint(-(2**62), 2**62, (count,), generator=rng(1))
    columns = torch.tensor(temperature), torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64), torch.tensor(log_min_p)
    return logits, *columns, seeds, torch.arange(count) * 977, token_salts(vocab, torch.device("cpu"))


def draw(arguments: tuple[Tensor, ...], index: list[int]) -> tuple[Tensor, Tensor]:
    *rows, salts = arguments
    return sampling.draw_tokens(*(t[index].contiguous() for t in rows), salts, True)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("vocab", (1, 63, 4099, VOCAB))
def test_draws_equal_the_reference_and_don_t_depend_on_company(vocab: int) -> None:
    arguments = cases(vocab)
    everything = list(range(len(arguments[0])))
    scores, tokens = draw(arguments, everything)
    assert tokens.tolist() == reference.draw_tokens(*arguments, True)[1].tolist()
    for i in everything:
        assert [t.tolist() for t in draw(arguments, [i])] == [[scores[i]], [tokens[i]]]
    assert torch.equal(draw(arguments, everything[::-1])[1], tokens.flip(0))


@pytest.mark.usefixtures("isa")
def test_many_positions_equal_the_reference() -> None:
    """The bound that spares most tokens their noise never costs the winner."""
    logits = (torch.randn(1, 997, generator=rng(2)) * 2).expand(400, -1).contiguous()
    off = torch.full((400,), 997), torch.ones(400, dtype=torch.float64), torch.full((400,), NEG_INF)
    arguments = logits, torch.full((400,), 0.8), *off, torch.full((400,), 12345), torch.arange(400), token_salts(997, torch.device("cpu"))
    assert torch.equal(sampling.draw_tokens(*arguments, False)[1], reference.draw_tokens(*arguments, False)[1])


@pytest.mark.usefixtures("restored_threads")
def test_results_don_t_depend_on_threads() -> None:
    arguments = cases()

    def run() -> list[Tensor]:
        tops = sampling.token_logprobs(arguments[0], torch.arange(9), 30)
        return [*draw(arguments, list(range(9))), *sampling.greedy_tokens(arguments[0]), *tops]

    native.set_num_threads(1)
    expected = run()
    native.set_num_threads(3)
    assert all(torch.equal(a, b) for a, b in zip(expected, run(), strict=True))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("place", (0, 64, VOCAB - 1))
def test_rows_that_can_t_be_sampled_say_so_and_disturb_nobody(place: int) -> None:
    arguments = cases()
    healthy = draw(arguments, list(range(9)))[1]
    for value in (math.nan, math.inf):
        for i in range(9):
            logits = arguments[0].clone()
            logits[i, place] = value
            scores, tokens = draw((logits, *arguments[1:]), list(range(9)))
            assert not math.isfinite(scores[i]) and 0 <= tokens[i] < VOCAB
            others = torch.arange(9) != i
            assert torch.equal(tokens[others], healthy[others])
            best, column = sampling.greedy_tokens(logits)
            assert int(column[i]) == place and not math.isfinite(best[i])
    empty = torch.full((9, VOCAB), NEG_INF)
    scores, tokens = draw((empty, *arguments[1:]), list(range(9)))
    assert scores.tolist() == [NEG_INF] * 9 and tokens.tolist() == [0] * 9


@pytest.mark.usefixtures("isa")
def test_only_the_kept_are_drawn_among_equals() -> None:
    """All logits equal: top-p keeps the lowest ids, top-k everything."""
    count, vocab = 300, 1024
    zeros = torch.zeros(count, vocab)
    half = torch.full((count,), 0.25, dtype=torch.float64)
    shared = torch.full((count,), NEG_INF), torch.full((count,), 5), torch.arange(count), token_salts(vocab, torch.device("cpu"))
    ones = torch.ones(count)
    nucleus = sampling.draw_tokens(zeros, ones, torch.full((count,), vocab), half, *shared, True)[1]
    assert int(nucleus.max()) < 256 and len(nucleus.unique()) > 150
    ties = sampling.draw_tokens(zeros, ones, torch.full((count,), 3), ones.double(), *shared, True)[1]
    assert int(ties.max()) > 512


@pytest.mark.usefixtures("isa")
def test_logprobs_of_rows_with_nan_are_nan() -> None:
    logits = torch.randn(2, 300, generator=rng())
    logits[0, 7] = math.nan
    _, found, _ = sampling.token_logprobs(logits, torch.tensor([3, 3]), 4)
    assert found[0].isnan().all() and found[1].isfinite().all()


def test_what_would_lie_outside_is_refused() -> None:
    logits = torch.zeros(2, 8)
    with pytest.raises(IndexError, match="got 8"):
        sampling.token_logprobs(logits, torch.tensor([0, 8]), 1)
    with pytest.raises(ValueError, match="at most 8 tokens"):
        sampling.token_logprobs(logits, torch.tensor([0, 1]), 9)
    for wrong in (logits.double(), logits[:, ::2], logits[0]):
        with pytest.raises(ValueError, match="contiguous float32 logits"):
            sampling.greedy_tokens(wrong)
    table = torch.zeros(3, 10, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    drafts, blocks = torch.zeros(3, 1, dtype=torch.int64), [torch.zeros(3, 4, dtype=torch.int32)]
    for row, tokens in ((3, 1), (-1, 1), (0, 11)):
        host = torch.tensor([[row], [tokens], [1], [0]])
        with pytest.raises(IndexError, match="gather_step"):
            step.gather_step(host, drafts[0, :0], tokens, 1, *table, drafts, blocks, [4], [1], [True])
