from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from canter.core.plan import TokenLogprobs
from canter.core.sampling_params import SamplingParams
from canter.runner.sampling.output import SampleStatus
from canter.runner.sampling.pipeline import Sampler
from canter.runner.sampling.random import Stream, uniform
from tests.runner.sampling import naive
from tests.runner.sampling.naive import Req

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)  # what CpuDevice does


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def seeded(**keywords: object) -> SamplingParams:
    return SamplingParams(**({"seed": 1234} | keywords))  # type: ignore[arg-type]


MIXTURE = [
    Req(),
    Req(seeded()),
    Req(seeded(temperature=0.6, seed=5), output=[4, 5]),
    Req(seeded(top_k=3)),
    Req(seeded(top_p=0.8, temperature=1.5, seed=-9)),
    Req(seeded(min_p=0.1)),
    Req(seeded(top_k=20, top_p=0.5, min_p=0.01), output=[1, 2, 3, 3]),
    Req(seeded(repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.2), output=[7, 7, 8], drafts=[9, 7]),
    Req(seeded(bad_words_token_ids=[[3], [7, 2]], logit_bias={5: 3.0}), output=[7]),
    Req(seeded(allowed_token_ids=[1, 4, 6], top_p=0.9), drafts=[2]),
    Req(SamplingParams(temperature=0.0, repetition_penalty=1.2, logprobs=2), output=[2, 2]),
    Req(seeded(min_tokens=5, eos_token_ids=[0, 2], max_tokens=9, logprobs=0)),
]


@pytest.mark.parametrize("vocab_size", [40, 1500])
def test_tokens_equal_the_naive_sampler(vocab_size: int) -> None:
    for trial in range(3):
        sampler, batch = naive.build(MIXTURE, vocab_size)
        logits = random_logits(len(batch.rows_np), vocab_size, seed=trial)
        expected = [naive.draw(row.numpy(), req, place) for row, (req, place) in zip(logits, all_logits(MIXTURE), strict=True)]
        output = sampler.sample(logits, batch).to_host()
        assert output.token_ids == expected and set(output.status) == {SampleStatus.OK}


def all_logits(reqs: list[Req]) -> list[tuple[Req, int]]:
    return [(req, place) for req in reqs for place in range(req.num_logits)]


@pytest.mark.parametrize("vocab_size", [1024, 4099])
def test_company_order_and_rows_change_nothing(vocab_size: int) -> None:
    """Alone, in a batch, shuffled and in other rows: the same tokens and logprobs, bit for bit."""
    requests = [Req(req.params.clone(logprobs=3), req.prompt, req.output, req.drafts) for req in MIXTURE]
    logits = random_logits(sum(req.num_logits for req in requests), vocab_size)
    starts = np.cumsum([0] + [req.num_logits for req in requests])
    sampler, batch = naive.build(requests, vocab_size)
    together = sampler.sample(logits.clone(), batch).to_host()
    for i, req in enumerate(requests):
        sampler, batch = naive.build([req], vocab_size, rows=[13 - i])
        part = slice(starts[i], starts[i + 1])
        alone = sampler.sample(logits[part].clone(), batch).to_host()
        assert alone.token_ids == together.token_ids[part] and alone.logprobs == together.logprobs[part]
    order = np.random.default_rng(3).permutation(len(requests))
    sampler, batch = naive.build([requests[i] for i in order], vocab_size, rows=order[::-1].tolist())
    lines = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order])
    shuffled = sampler.sample(logits[lines].clone(), batch).to_host()
    assert shuffled.token_ids == [together.token_ids[line] for line in lines]
    assert shuffled.logprobs == [together.logprobs[line] for line in lines]


def test_processed_logits_don_t_depend_on_company() -> None:
    logits = random_logits(sum(req.num_logits for req in MIXTURE), 1024)
    sampler, batch = naive.build(MIXTURE, 1024)
    together = sampler.process(logits.clone(), batch)
    line = 0
    for req in MIXTURE:
        sampler, batch = naive.build([req], 1024)
        part = slice(line, line + req.num_logits)
        assert torch.equal(sampler.process(logits[part].clone(), batch), together[part])
        line += req.num_logits


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.5, 1.0, 2.0]), st.integers(0, 64), st.sampled_from([0.3, 0.9, 1.0]), st.integers(0, 10**6))
def test_truncated_draw_equals_the_masked_full_draw(seed: int, temperature: float, top_k: int, top_p: float, logits_seed: int) -> None:
    """Noise for the candidates only, or for the whole vocabulary: the same token."""
    req = Req(seeded(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed))
    sampler, batch = naive.build([req], 512)
    logits = random_logits(1, 512, seed=logits_seed)
    token = sampler.sample(logits.clone(), batch).token_ids
    masked = sampler.process(logits, batch)
    plain, plain_batch = naive.build([Req(seeded(seed=seed))], 512)
    assert torch.equal(plain.sample(masked, plain_batch).token_ids, token)


def test_draws_follow_the_distribution_through_the_pipeline() -> None:
    count, vocab_size = 8000, 8
    logits = torch.tensor([1.0, 0.5, 0.0, -0.5, -1.0, -1.0, -2.0, 0.2])
    zeros = np.zeros(count, np.int64)
    sampler, batch = naive.build([Req(seeded(temperature=0.8, top_k=6))], vocab_size)
    long = type(batch)(zeros, torch.from_numpy(zeros), torch.arange(count), batch.all_token_ids, batch.total_len)
    drawn = torch.bincount(sampler.sample(logits.expand(count, -1).contiguous(), long).token_ids, minlength=vocab_size).double()
    x = (logits / 0.8).double()
    x[naive_dropped := [6]] = -math.inf
    expected = torch.softmax(x, 0) * count
    assert drawn[naive_dropped].sum() == 0
    kept = expected > 0
    assert float(((drawn - expected)[kept] ** 2 / expected[kept]).sum()) < 6 + 5 * math.sqrt(12)


def test_resume_after_preemption_continues_the_same_stream() -> None:
    """Ten tokens in a row, with the row dropped and set up again in another place after the fifth."""

    def run(preempt: bool) -> list[int]:
        params = SamplingParams(temperature=1.0, frequency_penalty=1.0, bad_words_token_ids=[[3, 4], [5]], top_p=0.95, max_tokens=10)
        sampler = Sampler(4, 30, CPU, 11)
        all_ids, lengths = torch.zeros(4, 20, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        tokens, row = [1, 2], 1
        sampler.add_row(row, "x", params, tokens, 2)
        for step in range(10):
            if preempt and step == 5:
                sampler.remove_row(row)
                row = 3
                sampler.add_row(row, "x", params, tokens, 2)
            all_ids[row, : len(tokens)], lengths[row] = torch.tensor(tokens, dtype=torch.int32), len(tokens)
            batch = naive.SampleBatch(np.array([row]), torch.tensor([row]), torch.tensor([len(tokens) - 1]), all_ids, lengths)
            out = sampler.sample(random_logits(1, 30, seed=step), batch)
            sampler.record(batch.rows_np, batch.rows, out.token_ids[:, None], torch.ones(1, dtype=torch.int64), naive.nobody_asks)
            all_ids[row, int(lengths[row])] = out.token_ids[0]
            lengths[row] += 1
            tokens = all_ids[row, : int(lengths[row])].tolist()
        return tokens

    assert run(preempt=True) == run(preempt=False)
    assert len(set(run(preempt=False)[2:])) > 1


def test_requests_without_a_seed_are_repeatable_by_order_and_differ() -> None:
    def run(engine_seed: int) -> list[int]:
        sampler = Sampler(8, 500, CPU, engine_seed)
        reqs = [Req(SamplingParams(temperature=1.0))] * 8
        for row, req in enumerate(reqs):
            sampler.add_row(row, f"r{row}", req.params, req.tokens, 3)
        return sampler.sample(torch.zeros(8, 500), naive.batch_of(reqs, list(range(8)), 8)).token_ids.tolist()

    assert run(0) == run(0) != run(1)
    assert len(set(run(0))) >= 7


def test_finished_requests_leave_no_seed_behind() -> None:
    sampler = Sampler(2, 10, CPU, 0)
    sampler.add_row(0, "a", SamplingParams(), [1], 1)
    sampler.remove_row(0)
    sampler.forget("a")
    sampler.forget("a")
    assert not sampler._made_seeds and not sampler.states.features.any()


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), seeded(), seeded(top_p=0.5), seeded(top_k=3), seeded(min_p=0.2)])
@pytest.mark.parametrize("vocab_size", [20, 2048])
def test_rows_that_can_t_be_sampled_are_reported(params: SamplingParams, vocab_size: int) -> None:
    logits = random_logits(6, vocab_size)
    logits[1, 3] = math.nan
    logits[2] = -math.inf
    logits[3, 5] = math.inf
    logits[4] = -torch.tensor(math.nan)
    healthy = [naive.draw(logits[i].numpy(), Req(params.clone(seed=1))) for i in (0, 5)]
    sampler, batch = naive.build([Req(params.clone(seed=1))] * 6, vocab_size)
    output = sampler.sample(logits, batch).to_host()
    bad = SampleStatus.BAD_LOGITS
    ok = SampleStatus.OK
    # One infinite logit leaves a greedy choice, but no distribution; it is reported either way.
    assert output.status == [ok, bad, SampleStatus.NO_TOKEN, bad, bad, ok]
    assert [output.token_ids[0], output.token_ids[5]] == healthy
    assert all(0 <= token < vocab_size for token in output.token_ids)
    assert [s is not SampleStatus.OK for s in output.status] == [False, True, True, True, True, False]


def test_nan_behind_allowed_ids_is_still_reported() -> None:
    sampler, batch = naive.build([Req(SamplingParams(temperature=0.0, allowed_token_ids=[2])), Req()], 10)
    logits = torch.zeros(2, 10)
    logits[0, 7] = math.nan
    assert sampler.sample(logits, batch).to_host().status == [SampleStatus.BAD_LOGITS, SampleStatus.OK]


def test_constraints_that_leave_nothing_are_reported() -> None:
    params = SamplingParams(temperature=0.0, allowed_token_ids=[2], min_tokens=1, stop_token_ids=[2])
    sampler, batch = naive.build([Req(params)], 10)
    assert sampler.sample(torch.zeros(1, 10), batch).to_host().status == [SampleStatus.NO_TOKEN]


def test_logprobs_are_of_the_raw_logits() -> None:
    params = SamplingParams(temperature=0.5, seed=3, logprobs=4, logit_bias={2: 50.0}, top_k=2, repetition_penalty=1.7)
    sampler, batch = naive.build([Req(), Req(params), Req(SamplingParams(temperature=0.0, logprobs=-1))], 16)
    logits = random_logits(3, 16)
    raw = torch.log_softmax(logits.double(), -1)
    output = sampler.sample(logits, batch).to_host()
    assert output.logprobs[0] is None
    first, whole = output.logprobs[1], output.logprobs[2]
    assert isinstance(first, TokenLogprobs) and isinstance(whole, TokenLogprobs)
    assert output.token_ids[1] == 2 and first.token_ids[0] == 2 and len(first.token_ids) == 5
    assert first.token_ids[1:] == raw[1].argsort(descending=True)[:4].tolist()
    assert np.allclose(first.logprobs, raw[1, first.token_ids], atol=1e-6)
    assert first.rank == int((raw[1] >= raw[1, 2]).sum())
    assert len(whole.token_ids) == 17 and whole.rank == 1 and np.isclose(np.exp(whole.logprobs[1:]).sum(), 1)


def test_no_logits_at_all() -> None:
    sampler, _ = naive.build([Req(seeded())], 10)
    empty = np.zeros(0, np.int64)
    none = torch.zeros(0, dtype=torch.int64)
    batch = naive.SampleBatch(empty, none, none, torch.zeros(16, 4, dtype=torch.int32), torch.zeros(16, dtype=torch.int32))
    output = sampler.sample(torch.zeros(0, 10), batch).to_host()
    assert output.token_ids == [] and output.logprobs == []


def test_streams_of_one_position_differ() -> None:
    sampler, batch = naive.build([Req(seeded())] * 2, 100)
    draws = [uniform(sampler.keys(batch, stream), sampler.salts)[0] for stream in Stream]
    assert all(not torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])


class NoHostReads(TorchDispatchMode):
    """Fails on every operation that would make the host wait for a device."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in func.name() for name in self.WAITING), func.name()
        if "aten::index" in func.name():
            places = args[1] if isinstance(args[1], (list, tuple)) else ()
            assert not any(place is not None and place.dtype == torch.bool for place in places), "a mask as an index"
        return func(*args, **(kwargs or {}))


def test_without_looking_at_the_device_the_tokens_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a device that the host can't read: the references, and nothing that waits."""
    logits = random_logits(sum(req.num_logits for req in MIXTURE), 1024)
    sampler, batch = naive.build(MIXTURE, 1024)
    expected = sampler.sample(logits.clone(), batch).to_host()
    monkeypatch.setenv("CANTER_KERNELS", "reference")
    sampler, batch = naive.build(MIXTURE, 1024)
    with NoHostReads():
        output = sampler.sample(logits.clone(), batch)
        sampler.process(logits.clone(), batch)
        ones = torch.ones(1, dtype=torch.int64)
        sampler.record(ones.numpy(), ones, ones[:, None], ones, naive.nobody_asks)
    assert output.to_host().token_ids == expected.token_ids


def test_works_inside_inference_mode_as_devices_run_it() -> None:
    logits = random_logits(sum(req.num_logits for req in MIXTURE), 300)
    sampler, batch = naive.build(MIXTURE, 300)
    expected = sampler.sample(logits.clone(), batch).to_host()
    with torch.inference_mode():
        sampler, batch = naive.build(MIXTURE, 300)
        assert sampler.sample(logits.clone(), batch).to_host() == expected
        ones = torch.ones(1, dtype=torch.int64)
        sampler.record(ones.numpy(), ones, ones[:, None], ones, naive.nobody_asks)
        sampler.add_row(0, "again", MIXTURE[7].params, [1, 2], 1)
