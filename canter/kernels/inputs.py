"""Inputs that every implementation of an op is tried on: odd sizes, no rows, extreme values, every option."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from canter.kernels.packed import BlockRows, PackedMatrix, PackedPart, packer
from canter.kernels.reference import attention

Case = tuple[Any, ...]
"""Positional arguments of one call."""


def normal(rng: Generator, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=rng) * scale).to(dtype)


_BLOCKS = {
    "q4_0": (32, 18, (0,)),
    "q4_1": (32, 20, (0, 2)),
    "q5_0": (32, 22, (0,)),
    "q5_1": (32, 24, (0, 2)),
    "q8_0": (32, 34, (0,)),
    "q4_k": (256, 144, (0, 2)),
    "q5_k": (256, 176, (0, 2)),
    "q6_k": (256, 210, (208,)),
}
"""GGUF types with kernels: elements and bytes of a block, and where its half floats lie."""

FORMATS = ("f32", "bf16", "i8", "w4", *_BLOCKS)
"""Formats of packed weights."""


def random_blocks(rng: Generator, format: str, rows: int, width: int, halves: Sequence[float] = ()) -> np.ndarray:
    """Rows of GGUF blocks with any codes: uint8 `[rows, bytes of a row]`. Their half floats are moderate scales, or any of `halves`."""
    elements, size, places = _BLOCKS[format]
    blocks = torch.randint(256, (rows * width // elements, size), generator=rng, dtype=torch.uint8).numpy()
    for place in places:
        scales = (torch.rand(len(blocks), generator=rng) + 0.5) * 2.0 ** (-13 if elements == 256 else -8)
        if halves:
            scales = torch.tensor(halves)[torch.randint(len(halves), (len(blocks),), generator=rng)]
        blocks[:, place : place + 2] = scales.to(torch.float16).numpy().view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, width // elements * size)


def packed_part(rng: Generator, format: str, outputs: int, width: int) -> PackedPart:
    """A part of random weights."""
    group = (128 if width % 128 == 0 else 32) if format == "w4" else 0
    part = packer().allocate_part(format, outputs, width, group)
    if format in _BLOCKS:
        packer().pack_blocks(part, random_blocks(rng, format, outputs, width))
    elif format == "w4":
        codes, zeros = (torch.randint(16, (outputs, count), generator=rng, dtype=torch.uint8) for count in (width, width // group))
        packer().pack_w4(part, codes, torch.rand((outputs, width // group), generator=rng) * 0.01, zeros)
    elif format == "i8":
        whole = torch.randint(-127, 128, (outputs, width), generator=rng, dtype=torch.int8)
        packer().pack_i8(part, whole, (torch.rand(outputs, generator=rng) + 0.5) * width**-0.5 / 64)
    else:
        packer().pack_floats(part, normal(rng, torch.float32, outputs, width, scale=width**-0.5))
    return part


def packed_floats(format: str, weight: Tensor) -> PackedMatrix:
    """A dense weight `[N, K]` as a matrix of one f32, bf16 or q8_0 part."""
    part = packer().allocate_part(format, *weight.shape)
    packer().pack_floats(part, weight)
    return PackedMatrix((part,))


def packed_linear_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    """Every format of packed weights: alone, and several side by side; rows that lie apart in memory."""
    cases: list[Case] = []
    for format in FORMATS:
        elements = 256 if format.endswith("_k") else 32 if format == "w4" or format in _BLOCKS else 1
        for i, (rows, outputs, blocks) in enumerate(((0, 16, 1), (1, 1, 1), (2, 33, 5), (5, 130, 2), (33, 47, 3), (130, 70, 9))):
            width = elements * blocks if elements > 1 else (1, 1, 127, 64, 577, 1030)[i]
            bias = normal(rng, dtype, outputs) if i % 2 else None
            x = normal(rng, dtype, rows, width, scale=0.1 if format in _BLOCKS else 1.0)
            cases.append((x, PackedMatrix((packed_part(rng, format, outputs, width),)), bias))
    for rows in (1, 9, 140):
        parts = tuple(
            packed_part(rng, format, outputs, 512) for format, outputs in (("q4_k", 33), ("i8", 1), ("bf16", 64), ("q6_k", 20), ("f32", 5))
        )
        cases.append((normal(rng, dtype, rows, 700, scale=0.1)[:, 100:612], PackedMatrix(parts), normal(rng, torch.float32, 123)))
    return cases


def linear_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    """T from none to past every row tile, N and K off every vector width and past the chunks that kernels walk in."""
    sizes = [(0, 5, 8), (1, 1, 1), (1, 67, 576), (2, 33, 127), (3, 48, 64), (4, 130, 1), (5, 31, 1029), (13, 95, 2051), (70, 70, 96)]
    cases: list[Case] = []
    for i, (rows, outputs, width) in enumerate(sizes):
        bias = normal(rng, torch.float32 if i % 3 else torch.bfloat16, outputs) if i % 2 else None
        format = "f32" if dtype == torch.float32 and i % 3 else "bf16"
        weight = packed_floats(format, normal(rng, dtype, outputs, width, scale=width**-0.5))
        cases.append((normal(rng, dtype, rows, width), weight, bias))
    large = packed_floats("f32" if dtype == torch.float32 else "bf16", normal(rng, dtype, 9, 40, scale=1e15))
    cases.append((normal(rng, dtype, 3, 40, scale=1e15), large, normal(rng, dtype, 9)))
    return [*cases, *packed_linear_inputs(rng, dtype)]


def known_ids_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    return [(torch.randint(90, (rows,), generator=rng), limit) for rows, limit in ((0, 5), (1, 90), (40, 60))]


def embedding_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    cases: list[Case] = []
    for i, format in enumerate(FORMATS):
        ids, scale = torch.randint(37, (i,), generator=rng), 48**0.5 if i % 2 else 1.0
        cases.append((ids, PackedMatrix(tuple(packed_part(rng, format, outputs, 256) for outputs in (33, 4))), scale, dtype))
        if format in _BLOCKS:
            blocks = random_blocks(rng, format, 37, 512)
            cases.append((ids, BlockRows(format.upper(), blocks.reshape(-1), (37, 512)), scale, dtype))
    for rows, vocab, hidden, scale in [(1, 1, 1, 1.0), (17, 50, 33, 1.0), (9, 31, 64, 3072**0.5), (300, 31, 48, 0.3)]:
        ids = torch.randint(vocab, (rows,), generator=rng)
        cases.append((ids, packed_floats("bf16" if rows % 2 else "f32", normal(rng, dtype, vocab, hidden)), scale, dtype))
    for name, source in (("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)):
        table = normal(rng, source, 11, 33).view(torch.uint8).numpy().reshape(-1)
        cases.append((torch.randint(11, (5,), generator=rng), BlockRows(name, table, (11, 33)), 2.5, dtype))
    return cases


_NORM_SHAPES: Sequence[tuple[tuple[int, ...], float]] = (
    ((0, 16), 1.0),
    ((1, 1), 1.0),
    ((3, 576), 1.0),
    ((2, 5, 4, 67), 1.0),
    ((70, 513), 30.0),
    ((4, 96), 1e-12),
    ((4, 96), 1e15),
)


def rms_norm_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    return [
        (normal(rng, dtype, *shape, scale=scale), normal(rng, dtype, shape[-1]), 1e-6, plus_one, cast_first)
        for shape, scale in _NORM_SHAPES
        for plus_one, cast_first in ((False, True), (True, False), (False, False), (True, True))
    ]


def add_rms_norm_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    return [(case[0], normal(rng, dtype, *case[0].shape), *case[1:]) for case in rms_norm_inputs(rng, dtype)]


def layer_norm_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    cases: list[Case] = []
    for rows, width, shift in ((0, 16, 0.0), (1, 1, 0.0), (3, 576, 0.0), (70, 513, 5.0), (2, 67, -100.0)):
        x, (weight, bias) = normal(rng, dtype, rows, width) + shift, (normal(rng, dtype, width) for _ in range(2))
        cases += [(x, weight, bias, 1e-5), (x, weight, None, 1e-3)]
    return cases


def sparse_relu_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    return [(x, deviations) for x, _ in _strided(rng, dtype) for deviations in (1.6448536, -0.5)]


_STREAM_SHAPES = ((0, 4, 16), (1, 2, 1), (5, 4, 67), (33, 3, 130))


def mix_streams_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    return [
        (normal(rng, dtype, rows, count * width), normal(rng, dtype, rows, count * count, scale=9.0), 0.1)
        for rows, count, width in _STREAM_SHAPES
    ]


def add_to_streams_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    """The row is one of several streams, as it is when a layer corrects what it predicted."""
    cases: list[Case] = []
    for rows, count, width in _STREAM_SHAPES:
        x, row = normal(rng, dtype, rows, count * width), normal(rng, dtype, rows, 3 * width)[:, width : 2 * width]
        cases += [(x, row, normal(rng, dtype, rows, count), 0.3, 1.0, 0), (x, row.contiguous(), None, 1.0, 0.0, 1)]
    return cases


def match_streams_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    cases: list[Case] = []
    for rows, count, width in _STREAM_SHAPES:
        row, others = normal(rng, dtype, rows, 2 * width, scale=3.0)[:, :width], normal(rng, dtype, rows, (count - 1) * width)
        others[-1:] = 0
        cases.append((row, others))
    return cases


def head_linear_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    cases: list[Case] = []
    for rows, heads, width, outputs in ((0, 2, 8, 4), (1, 1, 1, 1), (5, 3, 12, 20), (40, 4, 33, 7)):
        x = normal(rng, dtype, rows, heads, width + 3)[..., :width]
        cases.append((x, normal(rng, dtype, heads, outputs, width, scale=width**-0.5)))
        cases.append((x, normal(rng, dtype, heads, width, outputs, scale=width**-0.5).transpose(1, 2)))
    return cases


def concat_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    return [
        (normal(rng, dtype, rows, 2 * width + 3)[:, :width], normal(rng, dtype, rows, other))
        for rows, width, other in ((0, 8, 8), (1, 1, 3), (5, 37, 64), (70, 256, 129))
    ] + [
        (normal(rng, dtype, rows, heads, width), normal(rng, dtype, rows, heads, 11 + other)[:, :, 11:])
        for rows, heads, width, other in ((0, 2, 8, 8), (1, 3, 4, 1), (9, 32, 64, 20))
    ]


def gated_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    cases: list[Case] = [
        (normal(rng, dtype, rows, 2 * width, scale=scale),)
        for rows, width, scale in ((0, 8, 1.0), (1, 1, 1.0), (3, 37, 4.0), (70, 129, 1.0), (2, 1536, 100.0), (3, 40, 1e12))
    ]
    edges = torch.tensor([0.0, -0.0, 88.0, -88.0, 89.0, -89.0, 104.0, -104.0, 1e4, -1e4, 1e30, -1e30, 1e-30, -1e-30], dtype=dtype)
    cases.append((torch.stack((torch.cat((edges, torch.ones_like(edges))), torch.cat((edges, edges.flip(0) * 1e-5)))),))
    return cases


def _strided(rng: Generator, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Pairs [T, N], dense and as parts of fused projections."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for rows, width, scale in ((0, 8, 1.0), (1, 1, 1.0), (3, 37, 4.0), (70, 129, 1.0), (2, 1536, 30.0)):
        pairs.append((normal(rng, dtype, rows, width, scale=scale), normal(rng, dtype, rows, width, scale=scale)))
        x, _, y = normal(rng, dtype, rows, 2 * width + 3, scale=scale).split((width, 3, width), 1)
        pairs.append((x, y))
    return pairs


def elementwise_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    return [(x,) for x, _ in _strided(rng, dtype)]


def scale_columns_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    return [(x, normal(rng, torch.float32, x.shape[1])) for x, _ in _strided(rng, dtype)]


def pair_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    return list(_strided(rng, dtype))


def weighted_sum_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    return [(x, y, a, b) for x, y in _strided(rng, dtype) for a, b in ((1.0, 1.0), (0.7, -2.5))]


def softcap_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    shapes: list[tuple[tuple[int, ...], float]] = [((0, 7), 1.0), ((5, 33), 40.0), ((2, 3, 257), 1e-3), ((1, 4099), 1e6)]
    cases: list[Case] = [(normal(rng, dtype, *shape, scale=scale), 30.0) for shape, scale in shapes]
    cases.append((normal(rng, dtype, 3, 50, scale=60.0), 50.0))
    return cases


def rotary_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    cases: list[Case] = []
    for rows, q_heads, k_heads, head_dim, rot_dim in [
        (0, 2, 1, 8, 8),
        (1, 1, 1, 2, 2),
        (5, 9, 3, 64, 64),
        (7, 4, 1, 256, 64),
        (70, 3, 1, 20, 12),
    ]:
        angles = torch.rand((90, rot_dim // 2), generator=rng) * 6.3
        table = torch.cat((angles.cos(), angles.sin()), -1)
        positions = torch.randint(90, (rows,), generator=rng)
        fused = normal(rng, dtype, rows, (q_heads + 2 * k_heads) * head_dim)  # q and k as a fused projection leaves them
        q, k = fused[:, : q_heads * head_dim], fused[:, q_heads * head_dim : (q_heads + k_heads) * head_dim]
        heads = q.unflatten(1, (q_heads, head_dim)), k.unflatten(1, (k_heads, head_dim))
        cases += [(*heads, positions, table, rot_dim, interleaved) for interleaved in (False, True)]
        cases.append((heads[0], heads[1][:, :0], positions, table, rot_dim))
    return cases


def empty_cache(
    dtype: torch.dtype, num_blocks: int, heads: int, block_size: int, head_dim: int, fill: float = 0.0, value_dim: int = 0
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Keys, values and their scales (for int8, else None) as `attention_spec` lays them out, every float `fill`; values as wide as
    keys, unless another width is given."""
    lanes = 1 if dtype == torch.float16 else 4 // dtype.itemsize
    is_int8 = dtype == torch.int8
    keys = torch.full((num_blocks, heads, head_dim // lanes, block_size, lanes), 99 if is_int8 else fill).to(dtype)
    values = torch.full((num_blocks, heads, block_size, value_dim or head_dim), 99 if is_int8 else fill).to(dtype)
    if not is_int8:
        return keys, values, None, None
    return keys, values, torch.full((num_blocks, heads, block_size), fill), torch.full((num_blocks, heads, block_size), fill)


def one_cache(
    dtype: torch.dtype, num_blocks: int, heads: int, block_size: int, head_dim: int, value_dim: int, fill: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Keys that lie as values do, and the values that they begin with, in the same memory."""
    rows = torch.full((num_blocks, heads, block_size, head_dim), fill).to(dtype)
    return rows.transpose(2, 3).unsqueeze(-1), rows[..., :value_dim]


CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)


def write_kv_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    cases: list[Case] = []
    num_blocks = 20
    for rows, heads, block_size, head_dim, value_dim in [(0, 1, 4, 8, 8), (1, 1, 1, 4, 4), (9, 3, 16, 20, 36), (60, 2, 5, 64, 64)]:
        for cache_dtype in CACHE_DTYPES:
            slots = torch.randperm(num_blocks * block_size, generator=rng)[:rows]
            slots[1::4] = -1
            k, v = (normal(rng, dtype, rows, heads, width, scale=5.0) for width in (head_dim, value_dim))
            k[4:5] = 0
            if cache_dtype in (torch.float8_e4m3fn, torch.float16):  # from below its smallest to beyond its greatest
                k = k * torch.logspace(*((-4, 3) if cache_dtype == torch.float8_e4m3fn else (-9, 5)), head_dim).to(dtype)
            keys, values, *scales = empty_cache(cache_dtype, num_blocks, heads, block_size, head_dim, 7.0, value_dim)
            cases.append((k, v, keys, values, slots, *scales))
            if cache_dtype != torch.int8:
                keys, values = one_cache(cache_dtype, num_blocks, heads, block_size, head_dim, 0, 7.0)
                cases.append((k, v[..., :0], keys, values, slots, None, None))
    return cases


def attention_case(
    rng: Generator,
    dtype: torch.dtype,
    *,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 64,
    block_size: int = 16,
    requests: Sequence[tuple[int, int]] = ((1, 33), (7, 7), (20, 50)),
    window: int = 0,
    softcap: float = 0.0,
    cache_dtype: torch.dtype | None = None,
    padding: int = 0,
    score_scale: float = 1.0,
    sinks: bool = False,
    value_dim: int = 0,
    chunk: int = 0,
    prompt_lens: Sequence[int] | None = None,
    slopes: bool = False,
    shared: bool = False,
) -> Case:
    """Arguments of `paged_attention` for requests of (queries, positions), their blocks dealt out at random.

    Blocks that no request owns hold NaN; so do blocks that no query sees. `shared`: one cache for keys and values.
    """
    q_heads, k_heads = heads
    counts = [-(-length // block_size) for _, length in requests]
    num_blocks = sum(counts) + 2
    order = torch.randperm(num_blocks - 1, generator=rng).int() + 1
    table = torch.zeros((len(requests), max(counts, default=0) + 1), dtype=torch.int32)
    owned, given = [], 0
    for b, count in enumerate(counts):
        queries, length = requests[b]
        table[b, :count] = order[given : given + count]
        given += count
        seen = ~attention.hidden_keys(queries, length, window, chunk, prompt_lens[b] if prompt_lens else 0).all(0)
        for i, part in enumerate(seen.split(block_size)):
            if part.any():
                owned.append(int(table[b, i]))
            elif queries:
                table[b, i] = 0
    keys, values, *scales = empty_cache(cache_dtype or dtype, num_blocks, k_heads, block_size, head_dim, float("nan"), value_dim)
    slots = (torch.tensor(owned, dtype=torch.int64)[:, None] * block_size + torch.arange(block_size)).flatten()
    k, v = (normal(rng, dtype, len(slots), k_heads, width) for width in (head_dim, value_dim or head_dim))
    if shared:
        keys, values = one_cache(cache_dtype or dtype, num_blocks, k_heads, block_size, head_dim, value_dim or head_dim, float("nan"))
        attention.write_kv(k, v[..., :0], keys, values[..., :0], slots)
    else:
        attention.write_kv(k, v, keys, values, slots, *scales)
    starts = torch.tensor([0, *(queries for queries, _ in requests)]).cumsum(0).int()
    q = normal(rng, dtype, int(starts[-1]) + padding, q_heads, head_dim, scale=score_scale)
    lengths = torch.tensor([length for _, length in requests], dtype=torch.int32)
    extra = normal(rng, torch.float32, q_heads, scale=3.0) if sinks else None
    prompts = None if prompt_lens is None else torch.tensor(prompt_lens, dtype=torch.int32)
    slope = torch.rand(q_heads, generator=rng) if slopes else None
    return (q, keys, values, table, starts, lengths, head_dim**-0.5, window, softcap, extra, *scales, None, chunk, prompts, slope)


def attention_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    """Head sizes, group sizes, block sizes, windows, chunks, prompts in sight, slopes, caps, sinks, types of cache, long contexts,
    mixed and empty batches."""
    cases = [
        attention_case(rng, dtype, head_dim=d, heads=h)
        for d, h in ((4, (1, 1)), (12, (4, 1)), (64, (9, 3)), (256, (4, 1)), (258, (2, 2)), (6, (2, 1)), (80, (14, 2)), (72, (5, 5)))
    ]
    cases += [attention_case(rng, dtype, block_size=size, head_dim=20) for size in (1, 4, 5, 16, 24, 64)]
    cases += [attention_case(rng, dtype, window=w, requests=((1, 100), (30, 75), (6, 6))) for w in (1, 2, 16, 19, 64, 500)]
    cases += [attention_case(rng, dtype, window=w, requests=((1, 700), (40, 600)), sinks=True) for w in (100, 256, 300)]
    cases += [attention_case(rng, dtype, chunk=c, requests=((1, 700), (40, 600), (300, 300), (1, 513))) for c in (1, 48, 256, 500)]
    some = ((1, 700), (40, 600), (300, 300), (64, 90), (1, 520))
    cases += [
        attention_case(rng, dtype, window=w, prompt_lens=r, requests=some, block_size=size, sinks=size == 16)
        for w, r, size in ((20, (300, 40, 400, 33, 0), 16), (256, (256, 512, 7, 90, 519), 5), (1, (1, 590, 299, 64, 513), 24))
    ]
    cases += [attention_case(rng, dtype, slopes=True, window=w, requests=((1, 700), (33, 300), (2, 3))) for w in (0, 90)]
    cases += [
        attention_case(rng, dtype, heads=h, head_dim=d, value_dim=v, requests=((1, 300), (30, 75)), cache_dtype=kind)
        for h, d, v, kind in (((4, 1), 72, 64, None), ((2, 2), 20, 36, None), ((3, 1), 576, 512, None), ((4, 2), 24, 16, torch.int8))
    ]
    cases += [attention_case(rng, dtype, softcap=50.0, score_scale=s, window=w) for s, w in ((1.0, 0), (40.0, 17))]
    cases += [
        attention_case(
            rng, dtype, heads=h, head_dim=d, value_dim=v, block_size=size, cache_dtype=kind, window=w, shared=True, requests=some
        )
        for h, d, v, size, kind, w in (
            ((8, 1), 36, 28, 16, None, 0),
            ((3, 1), 576, 512, 16, None, 0),
            ((33, 1), 27, 21, 5, torch.float16, 0),
            ((6, 2), 64, 64, 8, torch.float8_e4m3fn, 50),
        )
    ]
    for cache_dtype in CACHE_DTYPES:
        long = ((1, 1), (1, 520), (33, 300), (3, 257))
        cases += [
            attention_case(rng, dtype, cache_dtype=cache_dtype, requests=long, head_dim=d, block_size=size, sinks=sinks, heads=h, window=w)
            for d, size, sinks, h, w in ((64, 16, False, (14, 2), 0), (128, 32, True, (4, 4), 0), (36, 7, True, (3, 1), 65))
        ]
    cases += [
        attention_case(rng, dtype, requests=(), padding=0),
        attention_case(rng, dtype, requests=((0, 0), (3, 9), (0, 40)), padding=5),
        attention_case(rng, dtype, heads=(40, 1), requests=((1, 90), (4, 20)), sinks=True),
        attention_case(rng, dtype, score_scale=20.0, requests=((40, 40),)),
    ]
    return cases


def gather_step_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    """Decode rows, chunks of prompts, drafts known to the host and to the device, no rows; one group and several, some without slots."""
    cases: list[Case] = []
    for requests, sizes, has_slots in [
        ((), [4], [True]),
        (((1, 1, 0),), [4], [True]),
        (((1, 1, 0), (5, 0, 0), (4, 4, 3)), [4, 8], [True, True]),
        (((3, 3, 2), (1, 1, 0), (9, 1, 0)), [16], [True]),
        (((2, 1, 0), (7, 1, 0)), [8, 4, 16], [False, True, False]),
    ]:
        rows = torch.randperm(7, generator=rng)[: len(requests)]
        host = torch.cat((rows.unsqueeze(0), torch.tensor(requests, dtype=torch.int64).view(-1, 3).T)).contiguous()
        num_drafts = int(host[3].sum())
        drafts = torch.randint(-1, 90, (num_drafts,), generator=rng)
        ids = torch.randint(90, (7, 40), generator=rng, dtype=torch.int32)
        computed = torch.randint(9, (7,), generator=rng, dtype=torch.int32)
        tables = [torch.randint(1, 50, (7, 40 // size + 1), generator=rng, dtype=torch.int32) for size in sizes]
        table_drafts = torch.randint(90, (7, 3), generator=rng)
        arrays = (ids, computed + 1, computed, table_drafts, tables, sizes, [min(2, t.shape[1]) for t in tables], has_slots)
        cases.append((host, drafts, int(host[1].sum()), int(host[2].sum()), *arrays))
    return cases


def advance_step_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    """Drafts that all stand, that fall in the middle and at once; rows that sample nothing."""
    cases: list[Case] = []
    for requests in [((1, 1, 0),), ((4, 0, 0),), ((4, 4, 3), (5, 0, 0), (1, 1, 0)), ((3, 3, 2), (6, 4, 3), (3, 3, 2))]:
        host = torch.tensor([[i, *r] for i, r in enumerate(requests)]).T.contiguous()
        token_ids = torch.randint(3, (int(host[1].sum()),), generator=rng)
        sampled = torch.randint(3, (int(host[2].sum()),), generator=rng)
        ids = torch.randint(90, (5, 40), generator=rng, dtype=torch.int32)
        computed = torch.randint(9, (5,), generator=rng, dtype=torch.int32)
        sizes = (max(1, int(host[2].max())), int((host[2] > 0).sum()))
        cases.append((host, sampled, token_ids, *sizes, ids, computed + 1, computed))
    return cases


def _logits(rng: Generator) -> list[Tensor]:
    """Rows of odd widths: random, with many ties, all equal, with -inf, and of one token."""
    rows = [torch.randn(3, width, generator=rng) * 3 for width in (1, 2, 63, 64, 1000, 5003)]
    rows.append(torch.randn(4, 2000, generator=rng).mul_(8).round_().div_(8))
    rows.append(torch.zeros(2, 4099))
    masked = torch.randn(3, 700, generator=rng)
    masked[torch.rand(3, 700, generator=rng) < 0.9] = float("-inf")
    masked[:, 5] = 1.0
    return [*rows, masked, torch.zeros(0, 9)]


def greedy_tokens_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    cases: list[Case] = [(logits,) for logits in _logits(rng)]
    odd = torch.randn(5, 40000, generator=rng)
    odd[0, 30000], odd[1], odd[2, 39999], odd[3, 20000] = float("nan"), float("-inf"), 50.0, float("inf")
    return [*cases, (odd,)]


def _limits(rows: int, vocab: int, turn: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every option somewhere: off, one token, few, nearly all, more than there are."""
    top_k = [vocab, 1, 5, max(1, vocab - 1), 40, 3 * vocab, 300]
    top_p = [1.0, 0.5, 0.9, 1e-9, 0.3]
    log_min_p = [float("-inf"), -2.3, 0.0]
    chosen = [((turn + r) * 5 % 7, (turn + r) % 5, (turn + r) % 3) for r in range(rows)]
    k = torch.tensor([top_k[c[0]] for c in chosen], dtype=torch.int64)
    p = torch.tensor([top_p[c[1]] for c in chosen], dtype=torch.float64)
    return k, p, torch.tensor([log_min_p[c[2]] for c in chosen], dtype=torch.float32)


def keep_tokens_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    return [(logits.clone(), *_limits(logits.shape[0], logits.shape[1], turn)) for turn in range(15) for logits in _logits(rng)]


def draw_tokens_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    cases: list[Case] = []
    for turn in range(15):
        for logits in _logits(rng):
            rows, vocab = logits.shape
            limits = _limits(rows, vocab, turn)
            if turn < 3:
                limits = torch.full_like(limits[0], vocab), torch.ones_like(limits[1]), torch.full_like(limits[2], float("-inf"))
            temperature = torch.tensor([0.0, 1.0, 0.7, 1.5, 1.0])[(torch.arange(rows) + turn) % 5]
            seeds = torch.randint(-(2**60), 2**60, (rows,), generator=rng)
            positions = torch.randint(5000, (rows,), generator=rng)
            salts = torch.randint(-(2**31), 2**31, (vocab,), generator=rng).to(torch.int32)
            cases.append((logits, temperature, *limits, seeds, positions, salts, turn >= 3, turn % 4))
    return cases


def allow_tokens_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    cases: list[Case] = []
    for vocab, sizes in [(1, (1,)), (67, (0, 5, 67)), (1000, (3, 40)), (131, ())]:
        ids = [torch.randperm(vocab, generator=rng)[:size] for size in sizes]
        starts = torch.tensor([0, *sizes]).cumsum(0)
        lines = torch.randperm(4, generator=rng)[: len(sizes)]
        cases.append((torch.randn(4, vocab, generator=rng), lines, starts, torch.cat([*ids, torch.empty(0, dtype=torch.int64)])))
    return cases


def mask_tokens_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    """Words with all bits, no bit, and some."""
    cases: list[Case] = []
    for vocab, number in [(1, 1), (32, 3), (67, 4), (1000, 2), (131, 0)]:
        masks = torch.randint(-(2**31), 2**31, (number, (vocab + 31) // 32), generator=rng).to(torch.int32)
        kind = torch.randint(3, masks.shape, generator=rng)
        masks = torch.where(kind == 0, 0, torch.where(kind == 1, -1, masks)).to(torch.int32)
        cases.append((torch.randn(4, vocab, generator=rng), torch.randperm(4, generator=rng)[:number], masks))
    return cases


def add_to_tokens_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    cases: list[Case] = []
    for vocab, number in [(1, 1), (67, 40), (1000, 3), (131, 0)]:
        lines, ids = torch.randint(4, (number,), generator=rng), torch.randint(vocab, (number,), generator=rng)
        values = torch.where(torch.rand(number, generator=rng) < 0.3, -torch.inf, torch.randn(number, generator=rng))
        cases.append((torch.randn(4, vocab, generator=rng), lines, ids, values))
    return cases


def forbid_words_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    """Words over few ids, so that prefixes are often there: whole, cut short by the output's start, and across drafts."""
    cases: list[Case] = []
    for vocab, number, longest, most_drafts in [(1, 1, 1, 0), (3, 60, 3, 0), (3, 200, 4, 3), (131, 5, 2, 1), (131, 0, 1, 0)]:

        def numbers(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=rng)

        lines = numbers(most_drafts, most_drafts + 4, number)
        prefixes, lengths = numbers(0, vocab, number, longest), numbers(0, longest + 1, number)
        prefixes.masked_fill_(torch.arange(longest) < longest - lengths.unsqueeze(1), -1)
        words = lines, numbers(0, vocab, number), prefixes, lengths, numbers(0, 5, number), numbers(0, 5, number)
        drafts = numbers(0, most_drafts + 1, number)
        known = numbers(0, vocab, 5, 9).int(), numbers(1, 10, 5).int()
        inputs = numbers(0, vocab, most_drafts + 4) if most_drafts else None
        cases.append((torch.randn(most_drafts + 4, vocab, generator=rng), *words, drafts, *known, inputs))
    return cases


def penalize_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    cases: list[Case] = []
    for vocab, number, drafts in [(1, 1, 0), (67, 3, 0), (1000, 2, 2), (131, 0, 0)]:
        counts = torch.randint(4, (5, vocab), generator=rng, dtype=torch.int32) * (torch.rand(5, vocab, generator=rng) < 0.3)
        counts = torch.where(torch.rand(5, vocab, generator=rng) < 0.2, counts + (1 << 30), counts).to(torch.int32)
        rows = torch.randperm(5, generator=rng)[:number]
        penalties = [
            torch.tensor(values)[torch.randint(3, (number,), generator=rng)]
            for values in ((1.0, 1.3, 0.7), (0.0, 0.5, -0.25), (0.0, 1.5, -2.0))
        ]
        ids, ones = torch.randint(vocab, (number, drafts), generator=rng), torch.ones(number, drafts, dtype=torch.int32)
        cases.append((torch.randn(4, vocab, generator=rng), torch.arange(number), rows, counts, *penalties, ids, ones))
    return cases


def token_logprobs_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    cases: list[Case] = []
    for logits in _logits(rng):
        rows, vocab = logits.shape
        chosen = torch.randint(vocab, (rows,), generator=rng)
        cases += [(logits, chosen, count) for count in (0, 1, 5, 20, 900, 2000) if count <= vocab]
    return cases
