"""Every format of weights by itself: products and look-ups against its dequantised weights, at odd sizes and extreme values.

What codes and scales mean is worked out here without the compiled module, and products are summed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from canter.checkpoint import gguf_quants
from canter.kernels.inputs import FORMATS, packed_floats, random_blocks
from canter.kernels.native import dense, packed
from canter.kernels.native.program import NativeProgram, new_recorder
from canter.kernels.native.record import embedding as record_embedding
from canter.kernels.native.record import linear as record_linear
from canter.kernels.packed import BlockRows, PackedMatrix
from canter.kernels.reference import linear as reference
from canter.kernels.reference.linear import round_runs

DTYPES = (torch.float32, torch.bfloat16)
BLOCKS = tuple(format for format in FORMATS if format.startswith("q"))
WIDTH = 512
GROUP = 64

HALVES = (0.0, 65504.0, -65504.0, 2.0**-24, -(2.0**-15), 0.01)
"""Scales of blocks: none, the greatest, denormals."""
SCALES = (0.0, 1e20, -1e20, 1e-20, 1e-40, 0.01)
"""Scales in float32."""


@dataclass(frozen=True)
class Stored:
    """Weights in a format, and the numbers [N, K] that they mean, in float64."""

    matrix: PackedMatrix
    meaning: Tensor

    @property
    def run(self) -> int:
        """Elements of x that share a scale; 0 where x stays as it is."""
        return {"f32": 0, "bf16": 0, "w4": 16}.get(self.matrix.parts[0].format, 32)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def choice(values: Sequence[float], *shape: int, seed: int = 9) -> Tensor:
    return torch.tensor(values)[torch.randint(len(values), shape, generator=rng(seed))]


def store(format: str, outputs: int, extreme: bool = False) -> Stored:
    """Random weights [outputs, WIDTH]; `extreme`: with every odd scale there is."""
    if format in BLOCKS:
        blocks = random_blocks(rng(outputs), format, outputs, WIDTH, HALVES if extreme else ())
        part = packed.allocate_part(format, outputs, WIDTH)
        packed.pack_blocks(part, blocks)
        meaning = torch.from_numpy(gguf_quants.dequantize(blocks.reshape(-1), format.upper(), outputs * WIDTH)).view(outputs, WIDTH)
    elif format == "w4":
        codes, zeros = (torch.randint(16, (outputs, n), generator=rng(n), dtype=torch.uint8) for n in (WIDTH, WIDTH // GROUP))
        scales = choice(SCALES if extreme else (0.01, -0.02), outputs, WIDTH // GROUP)
        part = packed.allocate_part(format, outputs, WIDTH, GROUP)
        packed.pack_w4(part, codes, scales, zeros)
        meaning = (codes.double() - zeros.double().repeat_interleave(GROUP, 1)) * scales.double().repeat_interleave(GROUP, 1)
    elif format == "i8":
        whole = torch.randint(-128, 128, (outputs, WIDTH), generator=rng(outputs), dtype=torch.int8)
        scales = choice(SCALES if extreme else (0.01, -0.02), outputs)
        part = packed.allocate_part(format, outputs, WIDTH)
        packed.pack_i8(part, whole, scales)
        meaning = whole.double() * scales.double().unsqueeze(1)
    else:
        floats = torch.randn(outputs, WIDTH, generator=rng(outputs)) * (choice(SCALES, outputs, WIDTH) if extreme else 0.05)
        return Stored(packed_floats(format, floats), (floats.bfloat16() if format == "bf16" else floats).double())
    return Stored(PackedMatrix((part,)), meaning.double())


def assert_product(found: Tensor, x: Tensor, stored: Stored, bias: Tensor | None = None) -> None:
    """`found` is the product of the rounded x and the weights, to within a few roundings of the largest of its terms."""
    rounded = round_runs(x.float(), stored.run).double()
    expected = rounded @ stored.meaning.T + (0 if bias is None else bias.double())
    # Formats with minima sum codes and minima apart, so a term is as large as the largest weight near it.
    near = stored.meaning.abs().unflatten(1, (-1, 32)).amax(-1).repeat_interleave(32, 1)
    tolerance = 3e-6 * (rounded.abs() @ near.T) + expected.abs() * (2**-8 if x.dtype == torch.bfloat16 else 1e-6) + 1e-37
    # An instruction for pairs of bfloat16 takes denormal factors for zeros.
    tolerance += torch.finfo(torch.float32).tiny * (rounded.abs().sum(1, keepdim=True) + stored.meaning.abs().sum(1))
    assert found.dtype == x.dtype and bool(found.isfinite().all())
    worst = ((found.double() - expected).abs() / tolerance).max() if found.numel() else torch.tensor(0.0)
    assert worst <= 1, f"{float(worst):.3g} times what is allowed"


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def odd_rows(dtype: torch.dtype) -> Tensor:
    """Rows of every kind: zeros, huge, tiny, denormal, one outlier in a run, mixed from run to run."""
    x = torch.randn(9, WIDTH, generator=rng(4))
    x[1] = 0
    x[2] *= 1e10
    x[3] *= 1e-10
    x[4] *= 1e-40
    x[5, ::32] = 1e10
    x[6] *= choice((0.0, 1e8, 1e-8, 1.0), WIDTH // 32).repeat_interleave(32)
    x[7] = 127.5
    x[8, 1:] = -0.0
    return x.to(dtype)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_products_mean_the_dequantised_weights(format: str, dtype: torch.dtype) -> None:
    for rows, outputs in ((0, 5), (1, 1), (1, 15), (2, 16), (7, 33), (25, 83)):
        stored = store(format, outputs)
        x = torch.randn(rows, WIDTH, generator=rng(rows)).to(dtype)
        bias = torch.randn(outputs, generator=rng(outputs)) if rows % 2 else None
        assert_product(dense.linear(x, stored.matrix, bias), x, stored, bias)
        assert_product(reference.linear(x, stored.matrix, bias), x, stored, bias)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_extreme_values(format: str, dtype: torch.dtype) -> None:
    """Also: one row, a few and many have equal bits."""
    stored, x = store(format, 35, extreme=True), odd_rows(dtype)
    found = dense.linear(x, stored.matrix, None)
    assert_product(found, x, stored)
    assert not found[1].any()
    for rows in (1, 2, 5):
        assert same_bits(dense.linear(x[:rows], stored.matrix, None), found[:rows])
    many = torch.cat([x.flip(0)] * 8)
    assert same_bits(dense.linear(many, stored.matrix, None), torch.cat([found.flip(0)] * 8))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("value", (float("nan"), float("inf"), float("-inf")))
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_finite_shows_in_its_row_alone(format: str, value: float) -> None:
    stored, x = store(format, 35), torch.randn(9, WIDTH, generator=rng(6))
    expected = dense.linear(x, stored.matrix, None)
    others = [0, 1, 3, 4, 5, 6, 7]
    x[2, 300] = x[8, WIDTH - 1] = value
    for linear in (dense.linear, reference.linear):
        found = linear(x, stored.matrix, None)
        assert not found[[2, 8]].isfinite().any()
        assert bool(found[others].isfinite().all())
    assert same_bits(dense.linear(x, stored.matrix, None)[others], expected[others])
    assert not dense.linear(x[2:3], stored.matrix, None).isfinite().any()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first,second", list(zip(FORMATS, FORMATS[1:] + FORMATS[:1], strict=True)))
def test_fused_parts_of_two_formats(first: str, second: str, dtype: torch.dtype) -> None:
    parts = [store(first, 21), store(second, 5), store(first, 16)]
    fused = PackedMatrix(tuple(part for stored in parts for part in stored.matrix.parts))
    bias = torch.randn(42, generator=rng()).bfloat16()
    for rows in (1, 4, 30):
        x = torch.randn(rows, WIDTH, generator=rng(rows)).to(dtype)
        columns = dense.linear(x, fused, bias).split((21, 5, 16), 1)
        for found, stored, b in zip(columns, parts, bias.split((21, 5, 16)), strict=True):
            assert_product(found, x, stored, b)
            assert same_bits(found, dense.linear(x, stored.matrix, b))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extreme", (False, True), ids=("", "extreme"))
@pytest.mark.parametrize("format", FORMATS)
def test_look_ups_are_the_dequantised_rows(format: str, extreme: bool, dtype: torch.dtype) -> None:
    stored = store(format, 37, extreme)
    tables: list[PackedMatrix | BlockRows] = [stored.matrix]
    if format in BLOCKS:
        blocks = random_blocks(rng(37), format, 37, WIDTH, HALVES if extreme else ())  # those that are packed
        tables.append(BlockRows(format.upper(), blocks.reshape(-1), (37, WIDTH)))
    largest = float(stored.meaning.abs().max())
    for ids in (torch.tensor([], dtype=torch.int64), torch.tensor([36]), torch.tensor([0, 36, 5, 5, 16, 15])):
        for scale in (1.0, 0.37):
            expected = stored.meaning.float()[ids].to(dtype) * torch.tensor(scale, dtype=dtype)
            for table in tables:
                for embedding in (dense.embedding, reference.embedding):
                    found = embedding(ids, table, scale, dtype)
                    assert found.dtype == dtype
                    # A code's share and a minimum are rounded together or apart: what is left of them may be small.
                    torch.testing.assert_close(found, expected, rtol=2e-6 if dtype == torch.float32 else 2**-7, atol=2e-7 * largest)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_programs_give_the_bits_of_calls(format: str, dtype: torch.dtype) -> None:
    matrix, bias = store(format, 35).matrix, torch.randn(35, generator=rng())
    recorder = new_recorder()
    product = NativeProgram(recorder, record_linear(recorder.given("x", dtype, WIDTH), matrix, bias))
    for rows in (0, 1, 4, 30):
        x = torch.randn(rows, WIDTH, generator=rng(rows)).to(dtype)
        assert same_bits(product.run(rows, [x.data_ptr()]), dense.linear(x, matrix, bias))
    recorder = new_recorder()
    table = NativeProgram(recorder, record_embedding(recorder.given("ids", torch.int64), matrix, 0.37, dtype))
    ids = torch.tensor([34, 0, 0, 17])
    assert same_bits(table.run(4, [ids.data_ptr()]), dense.embedding(ids, matrix, 0.37, dtype))
