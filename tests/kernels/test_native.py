"""The compiled module's edges: what it refuses, the instruction sets, the thread pool."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from canter.kernels import native
from canter.kernels.inputs import attention_case, empty_cache, packed_floats
from canter.kernels.native import attention, dense
from canter.kernels.reference import attention as reference


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_mismatched_shapes_are_refused() -> None:
    x = torch.zeros(3, 8)
    with pytest.raises(ValueError, match=r"linear: expected packed weights, got a tensor \[4, 8\]"):
        dense.linear(x, torch.zeros(4, 8), None)
    with pytest.raises(ValueError, match=r"embedding: expected a packed table .* got a tensor \[4, 8\]"):
        dense.embedding(torch.tensor([0]), torch.zeros(4, 8))
    with pytest.raises(ValueError, match="rms_norm"):
        dense.rms_norm(x, torch.zeros(7), 1e-5)
    with pytest.raises(ValueError, match="silu_and_mul"):
        dense.silu_and_mul(torch.zeros(2, 7))


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        dense.softcap(torch.zeros(3, dtype=torch.float16), 1.0)


def test_positions_out_of_range() -> None:
    for bad in (-1, 5):
        with pytest.raises(IndexError, match=r"\[0, 5\)"):
            attention.rotary(torch.zeros(2, 1, 4), torch.zeros(2, 1, 4), torch.tensor([0, bad]), torch.zeros(5, 4), 4)


def test_in_place_ops_refuse_scattered_heads() -> None:
    scattered = torch.zeros(2, 4, 3).transpose(1, 2)
    with pytest.raises(ValueError, match="in one run"):
        attention.rotary(scattered, torch.zeros(2, 1, 4), torch.tensor([0, 1]), torch.zeros(5, 4), 4)
    caches = torch.zeros(3, 8, 2, 4, 1).transpose(1, 2), torch.zeros(3, 2, 4, 8)
    with pytest.raises(ValueError, match="in one run"):
        attention.write_kv(torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), *caches, torch.tensor([0]))


@pytest.mark.parametrize("slot", (-2, 12))
def test_slots_out_of_range(slot: int) -> None:
    caches = torch.zeros(3, 2, 8, 4, 1), torch.zeros(3, 2, 4, 8)
    with pytest.raises(IndexError, match=r"-1 or in \[0, 12\)"):
        attention.write_kv(torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), *caches, torch.tensor([slot]))


def test_blocks_apart_in_memory() -> None:
    """Caches of several layers may interleave their blocks: only a block must lie in one run."""
    case = attention_case(rng(), torch.float32)
    expected = reference.paged_attention(*case)
    apart = [torch.stack((cache, cache * 0), 1)[:, 0] for cache in case[1:3]]
    torch.testing.assert_close(attention.paged_attention(case[0], *apart, *case[3:]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", (-1, 10**6))
def test_blocks_out_of_range(block: int) -> None:
    case = attention_case(rng(), torch.float32)
    case[3][1, 0] = block
    with pytest.raises(IndexError, match="request 1: block"):
        attention.paged_attention(*case)


def test_positions_beyond_the_table() -> None:
    case = attention_case(rng(), torch.float32)
    case[5][2] = 10_000
    with pytest.raises(IndexError, match="request 2: 10000 positions"):
        attention.paged_attention(*case)
    case[5][2] = 19  # fewer positions than queries
    with pytest.raises(IndexError, match="request 2: 19 positions"):
        attention.paged_attention(*case)


@pytest.mark.usefixtures("isa")
def test_sharp_scores_choose_one_key() -> None:
    """Scores far beyond the range of exp: the softmax is a choice, and nothing overflows."""
    q, *others = attention_case(rng(), torch.float32, requests=((40, 40),))
    out = attention.paged_attention(q * 1e6, *others)
    expected = reference.paged_attention(q * 1e6, *others)
    assert bool(out.isfinite().all())
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("isa")
def test_bfloat16_rounds_to_nearest_even() -> None:
    patterns = torch.arange(0, 1 << 32, 65521, dtype=torch.int64).to(torch.int32)
    halfway = (torch.arange(-(1 << 15), 1 << 15, 7, dtype=torch.int32) << 16) + (1 << 15)
    values = torch.cat((patterns, halfway, halfway - 1, halfway + 1)).view(torch.float32)
    values = values[: len(values) // 4 * 4]
    keys, stored, *_ = empty_cache(torch.bfloat16, len(values) // 4, 1, 1, 4)
    rows = values.view(-1, 1, 4)
    attention.write_kv(rows, rows, keys, stored, torch.arange(len(rows)))
    assert torch.equal(stored.view(-1).view(torch.int16)[~values.isnan()], values.bfloat16().view(torch.int16)[~values.isnan()])
    assert bool(stored.view(-1)[values.isnan()].isnan().all())


@pytest.mark.usefixtures("isa")
def test_exp_over_its_whole_range() -> None:
    """silu(x) * 1 against float64: the exponential inside is good to a few units in the last place everywhere."""
    x = torch.cat((torch.linspace(-110, 110, 100_001), torch.logspace(-30, 30, 2000), -torch.logspace(-30, 30, 2000)))
    found = dense.silu_and_mul(torch.cat((x, torch.ones_like(x)))[None])[0]
    expected = torch.nn.functional.silu(x.double())
    torch.testing.assert_close(found.double(), expected, rtol=5e-7, atol=1e-34)


@pytest.mark.parametrize("name,expected", (("scalar", "scalar"), ("avx512", native.isas()[-1]), ("", native.isas()[-1])))
def test_environment_lowers_the_instruction_set(name: str, expected: str) -> None:
    code = "from canter import _native; print(_native.isa())"
    run = subprocess.run([sys.executable, "-c", code], env=os.environ | {"CANTER_ISA": name}, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == expected


def test_unknown_instruction_set() -> None:
    with pytest.raises(ValueError, match="scalar, avx2, avx512"):
        native.set_isa("mmx")


@pytest.mark.usefixtures("restored_threads")
def test_number_of_threads() -> None:
    assert 1 <= native.default_num_threads() <= len(os.sched_getaffinity(0))
    native.set_num_threads(3)
    assert native.num_threads() == 3
    with pytest.raises(ValueError, match="at least 1"):
        native.set_num_threads(0)


@pytest.mark.usefixtures("restored_threads")
def test_python_threads_may_call_at_once() -> None:
    """The interpreter lock is released inside: calls overlap, and one of them gets the pool."""
    native.set_num_threads(2)
    x, weight = torch.randn(64, 256, generator=rng()), packed_floats("f32", torch.randn(300, 256, generator=rng()))
    expected = dense.linear(x, weight, None)
    wrong: list[int] = []

    def work(worker: int) -> None:
        for _ in range(60):
            if not torch.equal(dense.linear(x, weight, None), expected):
                wrong.append(worker)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for _ in range(20):  # the pool may change size under them
        native.set_num_threads(3)
        native.set_num_threads(2)
    for worker in workers:
        worker.join()
    assert wrong == []


@pytest.mark.usefixtures("restored_threads")
def test_forked_child_computes() -> None:
    native.set_num_threads(2)
    x, weight = torch.randn(64, 256, generator=rng()), packed_floats("f32", torch.randn(300, 256, generator=rng()))
    expected = dense.linear(x, weight, None)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(dense.linear(x, weight, None), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
