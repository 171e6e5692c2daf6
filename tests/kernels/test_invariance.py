"""A row has the same bits whatever runs beside it: other rows, their number, the threads, the chunks of a prompt, the block size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from canter.kernels import native
from canter.kernels.attention_plan import plan_attention
from canter.kernels.inputs import CACHE_DTYPES, attention_case, empty_cache, one_cache, packed_floats
from canter.kernels.native import attention, dense

DTYPES = (torch.float32, torch.bfloat16)
FORMATS = dict(zip(DTYPES, ("f32", "bf16"), strict=True))
WIDTHS = (1, 7, 64, 577, 1550)

pytestmark = pytest.mark.usefixtures("isa")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same_bits(a: Tensor, b: Tensor) -> bool:
    integers = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return a.shape == b.shape and bool((a.contiguous().view(integers) == b.contiguous().view(integers)).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_linear_rows_do_not_depend_on_their_number(width: int, dtype: torch.dtype) -> None:
    generator = rng(width)
    x = torch.randn(70, width, generator=generator).to(dtype)
    weight = packed_floats(FORMATS[dtype], torch.randn(53, width, generator=generator))
    bias = torch.randn(53, generator=generator).to(dtype)
    alone = torch.cat([dense.linear(x[i : i + 1], weight, bias) for i in range(70)])
    for rows in range(71):
        assert same_bits(dense.linear(x[:rows], weight, bias), alone[:rows]), rows


@pytest.mark.parametrize("format", FORMATS.values())
def test_linear_rows_do_not_depend_on_their_place(format: str) -> None:
    x, weight = torch.randn(150, 900, generator=rng()), packed_floats(format, torch.randn(100, 900, generator=rng(1)))
    whole = dense.linear(x, weight, None)
    order = torch.randperm(150, generator=rng(2))
    assert same_bits(dense.linear(x[order], weight, None), whole[order])
    assert same_bits(dense.linear(x[99:], weight, None), whole[99:])


@pytest.mark.parametrize("rows", (1, 3, 33, 140))
def test_linear_columns_do_not_depend_on_each_other(rows: int) -> None:
    """A fused matrix gives the bits of its parts."""
    x, weight = torch.randn(rows, 333, generator=rng()), torch.randn(221, 333, generator=rng(1))
    parts = torch.cat([dense.linear(x, packed_floats("f32", part), None) for part in weight.split((3, 100, 7, 111))], 1)
    assert same_bits(dense.linear(x, packed_floats("f32", weight), None), parts)


@pytest.mark.parametrize("threads", (2, 3, 8))
@pytest.mark.usefixtures("restored_threads")
def test_results_do_not_depend_on_threads(threads: int) -> None:
    x, weight = torch.randn(37, 640, generator=rng()), packed_floats("f32", torch.randn(411, 640, generator=rng(1)))
    case = attention_case(rng(2), torch.float32, requests=((1, 700), (40, 90), (1, 5)))
    gate_up = torch.randn(200, 1024, generator=rng(3))

    def run() -> list[Tensor]:
        norms = dense.add_rms_norm(gate_up, gate_up.flip(0), gate_up[0], 1e-5)
        heavy = [dense.linear(x, weight, None), dense.linear(x[:1], weight, None), attention.paged_attention(*case)]
        return [*heavy, dense.silu_and_mul(gate_up), dense.softcap(gate_up, 3.0), *norms]

    native.set_num_threads(1)
    expected = run()
    native.set_num_threads(threads)
    for want, got in zip(expected, run(), strict=True):
        assert same_bits(want, got)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_ops_do_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    x = torch.randn(70, 2 * 517, generator=rng()).to(dtype)
    for fn in (dense.silu_and_mul, dense.gelu_tanh_and_mul, lambda rows: dense.rms_norm(rows, x[0], 1e-6)):
        whole = fn(x)
        assert same_bits(torch.cat([fn(x[i : i + 1]) for i in range(70)]), whole)
        assert same_bits(fn(x[13:]), whole[13:])


def history(
    generator: torch.Generator, dtype: torch.dtype, length: int, heads: tuple[int, int], head_dim: int, value_dim: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of every position of one request."""
    q_heads, k_heads = heads
    q = torch.randn(length, q_heads, head_dim, generator=generator).to(dtype)
    k, v = (torch.randn(length, k_heads, width, generator=generator).to(dtype) for width in (head_dim, value_dim or head_dim))
    return q, k, v


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunks: list[int],
    block_size: int,
    window: int = 0,
    softcap: float = 0.0,
    beside: int = 0,
    cache_dtype: torch.dtype | None = None,
    sinks: Tensor | None = None,
    local: int = 0,
    prompt: int | None = None,
    slopes: Tensor | None = None,
    shared: bool = False,
) -> Tensor:
    """Attention of a request computed in chunks, its blocks scattered, `beside` other requests in the batch. `local`: the op's `chunk`;
    `prompt`: how much of the request stays in sight beside the window. `shared`: one cache, whose keys begin with the values.

    Keys and values are written before all of them are used, as chunks of a later step would find them, and what the chunk may
    not see is NaN where the type has one.
    """
    length, k_heads, head_dim = k.shape
    num_blocks = -(-length // block_size)
    caches = empty_cache(cache_dtype or k.dtype, num_blocks + 4, k_heads, block_size, head_dim, float("nan"), v.shape[2])
    if shared:
        rows = one_cache(cache_dtype or k.dtype, num_blocks + 4, k_heads, block_size, head_dim, v.shape[2], float("nan"))
        caches = *rows, None, None
    blocks = (torch.randperm(num_blocks + 3, generator=rng(block_size))[:num_blocks] + 1).int()
    slots = blocks.long().repeat_interleave(block_size)[:length] * block_size + torch.arange(length) % block_size
    done, outputs = 0, []
    for chunk in chunks:
        now = slice(done, done + chunk)
        if shared:
            attention.write_kv(k[now], v[now][..., :0], caches[0], caches[1][..., :0], slots[now])
        else:
            attention.write_kv(k[now], v[now], *caches[:2], slots[now], *caches[2:])
        others = [min(3 + 5 * i, done + chunk) for i in range(beside)]
        queries = torch.cat([q[:1].expand(beside, -1, -1), q[now]])
        starts = torch.tensor([*range(beside), beside, beside + chunk], dtype=torch.int32)
        lengths = torch.tensor([*others, done + chunk], dtype=torch.int32)
        table = blocks.expand(beside + 1, -1).contiguous()
        requests = table, starts, lengths
        plan = plan_attention(*requests)
        prompts = None if prompt is None else torch.tensor([*range(beside), prompt], dtype=torch.int32)
        limits = head_dim**-0.5, window, softcap, sinks
        for _ in range(2):  # as the next layer of the group
            out = attention.paged_attention(queries, *caches[:2], *requests, *limits, *caches[2:], plan, local, prompts, slopes)
        outputs.append(out[beside:])
        done += chunk
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window,softcap", ((0, 0.0), (13, 0.0), (40, 30.0)))
@pytest.mark.parametrize("heads,head_dim", (((6, 2), 20), ((4, 1), 64)))
def test_attention_in_chunks_has_the_bits_of_token_by_token(
    heads: tuple[int, int], head_dim: int, window: int, softcap: float, dtype: torch.dtype
) -> None:
    length = 83
    qkv = history(rng(), dtype, length, heads, head_dim)
    alone = attend(*qkv, [1] * length, 16, window, softcap)
    for chunks in ([length], [5, 1, 7, 30, 40], [16, 16, 16, 16, 16, 3], [82, 1]):
        assert same_bits(attend(*qkv, chunks, 16, window, softcap), alone), chunks
    for block_size in (1, 3, 8, 32, 128):
        assert same_bits(attend(*qkv, [length], block_size, window, softcap), alone), block_size
    assert same_bits(attend(*qkv, [40, 43], 16, window, softcap, beside=9), alone)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("heads,head_dim,window", (((14, 2), 64, 0), ((3, 1), 36, 300), ((8, 8), 32, 100)))
@pytest.mark.usefixtures("restored_threads")
def test_attention_over_several_spans(heads: tuple[int, int], head_dim: int, window: int, cache_dtype: torch.dtype) -> None:
    """Contexts longer than a span: cut into chunks, token by token at the end, beside others, on any number of threads."""
    length = 600
    qkv = history(rng(), torch.float32, length, heads, head_dim)
    sinks = torch.randn(heads[0], generator=rng(5))
    native.set_num_threads(1)
    whole = attend(*qkv, [length], 16, window, cache_dtype=cache_dtype, sinks=sinks)
    assert bool(whole.isfinite().all())
    for threads, chunks, block_size, beside in (
        (2, [length], 16, 0),
        (1, [250, 17, 300, 30, 1, 1, 1], 16, 0),
        (5, [250, 17, 300, 30, 1, 1, 1], 16, 0),
        (1, [300, 1, 299], 24, 3),
        (2, [300, 1, 299], 24, 3),
        (5, [511, 1, 88], 5, 0),
    ):
        native.set_num_threads(threads)
        found = attend(*qkv, chunks, block_size, window, beside=beside, cache_dtype=cache_dtype, sinks=sinks)
        assert same_bits(found, whole), (threads, chunks)


CUTS = (
    (1, [250, 17, 300, 30, 1, 1, 1], 16, 3),
    (3, [250, 17, 300, 30, 1, 1, 1], 16, 3),
    (1, [99, 1, 1, 199, 300], 24, 0),
    (3, [512, 88], 5, 1),
)
"""Threads, chunks of 600 tokens, tokens of a block, requests beside."""
MASKS: dict[str, dict[str, Any]] = {
    "chunk": {"local": 100},
    "chunk of spans": {"local": 256},
    "prompt": {"window": 30, "prompt": 300},
    "prompt alone": {"window": 30, "prompt": 600},
    "short prompt": {"window": 290, "prompt": 7},
    "no prompt": {"window": 30, "prompt": 0},
    "slopes": {"slopes": torch.tensor([2.0**-i for i in range(1, 7)])},
}


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.usefixtures("restored_threads")
def test_masks_over_several_spans(mask: dict[str, Any], cache_dtype: torch.dtype) -> None:
    """The same for what a query sees otherwise, with values narrower than keys."""
    length = 600
    qkv = history(rng(), torch.bfloat16, length, (6, 2), 36, 20)
    native.set_num_threads(1)
    whole = attend(*qkv, [length], 16, cache_dtype=cache_dtype, **mask)
    assert whole.shape == (length, 6, 20) and bool(whole.isfinite().all())
    for threads, chunks, block_size, beside in CUTS:
        native.set_num_threads(threads)
        found = attend(*qkv, chunks, block_size, beside=beside, cache_dtype=cache_dtype, **mask)
        assert same_bits(found, whole), (threads, chunks)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES[:-1], ids=str)
@pytest.mark.parametrize("heads", ((5, 1), (32, 1), (6, 2)))
@pytest.mark.usefixtures("restored_threads")
def test_one_cache_over_several_spans(heads: tuple[int, int], cache_dtype: torch.dtype) -> None:
    """The same for keys that lie as values do; and it gives the bits of two caches that hold the same."""
    length = 600
    q, k, _ = history(rng(), torch.bfloat16, length, heads, 36, 20)
    qkv = q, k, k[..., :20]
    native.set_num_threads(1)
    whole = attend(*qkv, [length], 16, cache_dtype=cache_dtype, shared=True)
    assert bool(whole.isfinite().all())
    assert same_bits(attend(*qkv, [length], 16, cache_dtype=cache_dtype), whole)
    for threads, chunks, block_size, beside in CUTS:
        native.set_num_threads(threads)
        found = attend(*qkv, chunks, block_size, beside=beside, cache_dtype=cache_dtype, shared=True)
        assert same_bits(found, whole), (threads, chunks)


@pytest.mark.usefixtures("restored_threads")
def test_a_long_context_alone_on_many_threads() -> None:
    """One token's spans are spread over the threads, and merged in order."""
    case = attention_case(rng(2), torch.float32, heads=(14, 2), requests=((1, 5000),))
    native.set_num_threads(1)
    expected = attention.paged_attention(*case)
    for threads in (2, 3, 8):
        native.set_num_threads(threads)
        plan = plan_attention(*case[3:6])
        for _ in range(3):
            assert same_bits(attention.paged_attention(*case[:12], plan), expected)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_attention_random_chunks(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 70))
    group, k_heads, head_dim = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 2)), data.draw(st.sampled_from((4, 8, 33, 40)))
    mask: dict[str, Any] = {"window": data.draw(st.sampled_from((0, 1, 9, 16, 30)))}
    if data.draw(st.booleans()):
        mask |= data.draw(st.sampled_from(({"local": 1}, {"local": 7}, {"local": 32}, {"prompt": 1}, {"prompt": 17}, {"prompt": 90})))
    if data.draw(st.booleans()):
        mask["slopes"] = torch.rand(group * k_heads, generator=rng(7))
    qkv = history(rng(length), torch.float32, length, (group * k_heads, k_heads), head_dim)
    chunks, left = [], length
    while left:
        chunks.append(data.draw(st.integers(1, left)))
        left -= chunks[-1]
    block_size = data.draw(st.integers(1, 40))
    cache_dtype = data.draw(st.sampled_from(CACHE_DTYPES if head_dim % 4 == 0 else (torch.float32,)))
    found = attend(*qkv, chunks, block_size, beside=data.draw(st.integers(0, 3)), cache_dtype=cache_dtype, **mask)
    assert same_bits(found, attend(*qkv, [length], 16, cache_dtype=cache_dtype, **mask))
