"""Packed weights: what goes in comes out, a row's bits depend on that row alone, wrong sizes are refused."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from canter import _native
from canter.checkpoint import gguf_quants
from canter.kernels import native
from canter.kernels.inputs import FORMATS, packed_floats, packed_part, random_blocks
from canter.kernels.native import dense, packed
from canter.kernels.packed import BlockRows, PackedMatrix, PackedPart, allocate_packed

BLOCK_FORMATS = tuple(format for format in FORMATS if format.startswith("q"))
DTYPES = (torch.float32, torch.bfloat16)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def choice(values: Tensor, *shape: int) -> Tensor:
    return values[torch.randint(len(values), shape, generator=rng(2))]


def same_bits(a: Tensor, b: Tensor) -> bool:
    integers = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return a.shape == b.shape and bool((a.contiguous().view(integers) == b.contiguous().view(integers)).all())


def some_width(format: str, *, odd: bool = True) -> int:
    """A width past one chunk, uneven where the format allows it."""
    return 1280 if format.endswith("_k") else 544 if format == "w4" or format.startswith("q") else 577 if odd else 576


def some_matrix(format: str, outputs: int = 83, width: int = 0) -> PackedMatrix:
    return PackedMatrix((packed_part(rng(1), format, outputs, width or some_width(format)),))


@pytest.mark.parametrize("source", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("outputs,width", ((1, 1), (16, 2), (33, 129), (70, 300)))
def test_floats_come_back(outputs: int, width: int, source: torch.dtype) -> None:
    weight = torch.randn(outputs, width, generator=rng()).to(source)
    weight[0, 0], weight[-1, -1] = torch.finfo(source).tiny / 4, torch.finfo(source).max
    assert torch.equal(packed_floats("f32", weight).unpack(), weight.float())
    assert torch.equal(packed_floats("bf16", weight).unpack(), weight.bfloat16().float())


def test_every_half_comes_back() -> None:
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).view(256, 256)
    for format, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        torch.testing.assert_close(packed_floats(format, halves).unpack(), halves.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


def gguf_rounded(weight: Tensor) -> PackedPart:
    """What packing the blocks gives that GGUF's own quantiser makes of the rows."""
    part = packed.allocate_part("q8_0", *weight.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        packed.pack_blocks(part, gguf.quants.quantize(weight.float().numpy(), gguf.GGMLQuantizationType.Q8_0))
    return part


@pytest.mark.parametrize("source", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("outputs,width", ((1, 32), (37, 288), (70, 1056)))
def test_floats_are_rounded_as_gguf_does(outputs: int, width: int, source: torch.dtype) -> None:
    weight = torch.randn(outputs, width, generator=rng())
    scales = torch.tensor((1.0, 1e-3, 3e-5, 1e-6, 0.0, 300.0))  # of halves, denormal halves, none
    weight = (weight.unflatten(1, (-1, 32)) * choice(scales, outputs, width // 32, 1)).flatten(1).to(source)
    assert torch.equal(packed_floats("q8_0", weight).parts[0].data, gguf_rounded(weight).data)


def test_halves_are_rounded_away_from_zero() -> None:
    weight = ((torch.arange(64) - 31) + 0.5).view(2, 32)
    weight[:, 0] = torch.tensor((127.0, -127.0))
    found = packed_floats("q8_0", weight)
    assert torch.equal(found.parts[0].data, gguf_rounded(weight).data)
    assert found.unpack()[0, 1:4].tolist() == [-30.0, -29.0, -28.0]
    assert found.unpack()[1, 1:4].tolist() == [3.0, 4.0, 5.0]


def test_extreme_floats_as_int8() -> None:
    weight = torch.randn(5, 64, generator=rng())
    weight[0, 3], weight[1, 3] = float("inf"), float("nan")
    weight[2, :32] *= 1e9  # beyond what a scale in float16 holds
    weight[3, :32] *= 1e-37  # too small for it
    weight[4, :32] = 1e-45
    part = packed_floats("q8_0", weight)
    values = part.unpack()
    assert bool(values[:2, :32].isnan().all()) and not bool(values[2, :32].isfinite().any()) and not bool(values[3:, :32].any())
    assert torch.equal(values[:, 32:], PackedMatrix((gguf_rounded(weight[:, 32:]),)).unpack())
    rows = weight[2:4].contiguous()
    assert torch.equal(packed_floats("q8_0", rows).parts[0].data, gguf_rounded(rows).data)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("width", (1, 31, 33, 300, 577))
def test_int8_holds_rows_of_any_width(width: int) -> None:
    """The last block of a row is filled up with zeros, which change no bit of a product."""
    weight, x = torch.randn(45, width, generator=rng()), torch.randn(50, width, generator=rng(1))
    more = -width % 32
    whole, padded = packed_floats("q8_0", weight), packed_floats("q8_0", torch.nn.functional.pad(weight, (0, more)))
    assert torch.equal(whole.parts[0].data, padded.parts[0].data)
    assert torch.equal(whole.unpack(), padded.unpack()[:, :width])
    ids = torch.tensor([44, 0, 17])
    assert torch.equal(dense.embedding(ids, whole, 1.0, torch.float32), whole.unpack()[ids])
    for rows in (1, 4, 50):
        expected = packed.matmul(torch.nn.functional.pad(x[:rows], (0, more)), padded)
        assert same_bits(packed.matmul(x[:rows], whole), expected), rows


@pytest.mark.usefixtures("restored_threads")
def test_packing_floats_does_not_depend_on_threads() -> None:
    weight = torch.randn(300, 1000, generator=rng())
    for format in ("f32", "bf16", "q8_0"):
        data = []
        for threads in (1, 2, 5):
            native.set_num_threads(threads)
            data.append(packed_floats(format, weight).parts[0].data)
        assert torch.equal(data[0], data[1]) and torch.equal(data[0], data[2])


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_blocks_come_back(format: str) -> None:
    blocks = random_blocks(rng(), format, 39, 512)
    part = packed.allocate_part(format, 39, 512)
    packed.pack_blocks(part, blocks)
    expected = gguf_quants.dequantize(blocks.reshape(-1), format.upper(), 39 * 512).reshape(39, 512)
    torch.testing.assert_close(PackedMatrix((part,)).unpack(), torch.from_numpy(expected), rtol=1e-6, atol=1e-7)


def test_codes_come_back() -> None:
    codes, zeros = (torch.randint(16, (33, width), generator=rng(), dtype=torch.uint8) for width in (256, 4))
    scales = torch.rand((33, 4), generator=rng())
    part = packed.allocate_part("w4", 33, 256, 64)
    packed.pack_w4(part, codes, scales, zeros)
    expected = (codes.float() - zeros.float().repeat_interleave(64, 1)) * scales.repeat_interleave(64, 1)
    torch.testing.assert_close(PackedMatrix((part,)).unpack(), expected)

    whole = torch.randint(-128, 128, (21, 37), generator=rng(), dtype=torch.int8)
    part = packed.allocate_part("i8", 21, 37)
    packed.pack_i8(part, whole, scales[:21, 0])
    torch.testing.assert_close(PackedMatrix((part,)).unpack(), whole.float() * scales[:21, :1])


@pytest.mark.parametrize("format", ("f32", "bf16", "i8", "q8_0", "q4_0", "q6_k"))
def test_rows_are_packed_in_any_order_and_in_slices(format: str) -> None:
    width = 512
    order = torch.randperm(90, generator=rng())[:71]
    part, whole = packed.allocate_part(format, 71, width), packed.allocate_part(format, 90, width)
    if format in ("q4_0", "q6_k"):
        blocks = random_blocks(rng(), format, 90, width)
        packed.pack_blocks(whole, blocks)
        packed.pack_blocks(part, blocks, order[:32], 0, 32)
        packed.pack_blocks(part, blocks, order[32:], 32)
    elif format == "i8":
        codes, scales = torch.randint(-128, 128, (90, width), generator=rng(), dtype=torch.int8), torch.rand(90, generator=rng())
        packed.pack_i8(whole, codes, scales)
        packed.pack_i8(part, codes, scales, order[:32], 0, 32)
        packed.pack_i8(part, codes, scales, order[32:], 32)
    else:
        wide = torch.randn(90, 700, generator=rng())[:, 50 : 50 + width]
        packed.pack_floats(whole, wide)
        packed.pack_floats(part, wide, order[:32], 0, 32)
        packed.pack_floats(part, wide, order[32:], 32)
    assert torch.equal(PackedMatrix((part,)).unpack(), PackedMatrix((whole,)).unpack()[order])


def test_large_memory_is_aligned() -> None:
    for nbytes in (0, 1, 1000, (2 << 20) + 4097, 5 << 20):
        memory = allocate_packed(nbytes)
        assert memory.numel() == nbytes
        assert nbytes == 0 or memory.data_ptr() % 64 == 0
        assert not memory.any()
        memory.fill_(1)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_rows_do_not_depend_on_their_number(format: str, dtype: torch.dtype) -> None:
    matrix = some_matrix(format)
    x = torch.randn(130, matrix.shape[1], generator=rng()).to(dtype)
    bias = torch.randn(83, generator=rng(2))
    alone = torch.cat([packed.matmul(x[i : i + 1], matrix, bias) for i in range(130)])
    for rows in (2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 31, 64, 121, 130):
        assert same_bits(packed.matmul(x[:rows], matrix, bias), alone[:rows]), rows
        assert same_bits(packed.matmul(x[130 - rows :], matrix, bias), alone[130 - rows :]), rows


@pytest.mark.usefixtures("isa", "restored_threads")
@pytest.mark.parametrize("format", FORMATS)
def test_rows_do_not_depend_on_threads_and_strides(format: str) -> None:
    matrix = some_matrix(format, 150)
    width = matrix.shape[1]
    wide = torch.randn(61, width + 50, generator=rng())
    native.set_num_threads(1)
    expected = packed.matmul(wide[:, 7 : 7 + width].contiguous(), matrix)
    for threads in (1, 2, 5):
        native.set_num_threads(threads)
        assert same_bits(packed.matmul(wide[:, 7 : 7 + width], matrix), expected)
        for row in (0, 33):
            assert same_bits(packed.matmul(wide[row : row + 1, 7 : 7 + width], matrix), expected[row : row + 1])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("rows", (1, 7, 140))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_have_the_bits_of_matrices(rows: int, dtype: torch.dtype) -> None:
    """Parts of different formats side by side; a bias of either type; the output of either type."""
    parts = tuple(packed_part(rng(i), format, 16 * i + 5, 1280) for i, format in enumerate(FORMATS))
    x = torch.randn(rows, 1280, generator=rng()).to(dtype)
    bias = torch.randn(sum(part.outputs for part in parts), generator=rng(1)).bfloat16()
    whole = packed.matmul(x, PackedMatrix(parts), bias, torch.float32)
    biases = bias.float().split([part.outputs for part in parts])
    each = [packed.matmul(x, PackedMatrix((part,)), b, torch.float32) for part, b in zip(parts, biases, strict=True)]
    assert same_bits(whole, torch.cat(each, 1))
    assert same_bits(packed.matmul(x, PackedMatrix(parts), bias, torch.bfloat16), whole.bfloat16())


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("format", ("bf16", "q4_k"))
def test_rows_past_one_block_of_rows(format: str) -> None:
    """More rows than are converted at a time."""
    matrix = some_matrix(format, 17, 8960)
    x = torch.randn(300, 8960, generator=rng())
    whole = packed.matmul(x, matrix)
    for i in (0, 149, 150, 299):
        assert same_bits(packed.matmul(x[i : i + 1], matrix), whole[i : i + 1])


@pytest.mark.usefixtures("isa")
def test_other_outputs_are_left_alone() -> None:
    """Nothing is written past the outputs, whatever the padding of the last panel holds."""
    matrix = some_matrix("bf16", 21)
    for rows in (1, 9):
        x = torch.randn(rows, 577, generator=rng())
        out = torch.full((rows, 40), 7.0)
        _native.matmul(matrix.native, x.data_ptr(), 0, 577, 0, 0, out.data_ptr(), 0, 40, rows)
        assert same_bits(out[:, :21], packed.matmul(x, matrix))
        assert bool((out[:, 21:] == 7).all())


def test_wrong_sizes_are_refused() -> None:
    matrix = some_matrix("f32", 5, 8)
    with pytest.raises(ValueError, match=r"linear: expected x \[T, 8\]"):
        dense.linear(torch.zeros(2, 9), matrix, None)
    with pytest.raises(ValueError, match="linear"):
        dense.linear(torch.zeros(2, 8), matrix, torch.zeros(4))
    with pytest.raises(ValueError, match="float16"):
        dense.linear(torch.zeros(2, 8, dtype=torch.float16), matrix, None)
    for format, width, group in (("q4_k", 128, 0), ("q4_0", 31, 0), ("f32", 0, 0), ("w4", 64, 24), ("w4", 64, 0), ("bf16", 8, 32)):
        with pytest.raises(ValueError, match=format):
            packed.packed_bytes(format, 16, width, group)
    with pytest.raises(ValueError, match="must be one of f32, bf16"):
        packed.packed_bytes("f8", 16, 16)
    with pytest.raises(ValueError, match="one width"):
        _ = PackedMatrix((matrix.parts[0], some_matrix("f32", 5, 9).parts[0])).native
    with pytest.raises(ValueError, match="at least one part"):
        _ = PackedMatrix(()).native
    part = matrix.parts[0]
    with pytest.raises(ValueError, match="expected 512 contiguous bytes"):
        _ = PackedMatrix((PackedPart("f32", 5, 8, 0, part.data[:-1]),)).native
    with pytest.raises(ValueError, match="aligned"):
        _ = PackedMatrix((PackedPart("f32", 5, 8, 0, allocate_packed(600)[4:516]),)).native


def test_wrong_sources_are_refused() -> None:
    part = packed.allocate_part("f32", 40, 8)
    weight = torch.zeros(50, 8)
    for first, outputs in ((8, 16), (0, 20), (32, 20), (-16, 16), (48, 0)):
        with pytest.raises(ValueError, match="whole panels"):
            packed.pack_floats(part, weight, None, first, outputs)
    with pytest.raises(ValueError, match=r"\[R, 8\]"):
        packed.pack_floats(part, torch.zeros(50, 9))
    with pytest.raises(ValueError, match="can't fill"):
        packed.pack_floats(part, weight[:30])
    with pytest.raises(ValueError, match=r"\[0, 50\)"):
        packed.pack_floats(part, weight, torch.full((40,), 50))
    with pytest.raises(ValueError, match="each of 40"):
        packed.pack_floats(part, weight, torch.zeros(39, dtype=torch.int64))
    for format in ("i8", "q4_0"):
        with pytest.raises(ValueError, match="f32, bf16 or q8_0"):
            packed.pack_floats(packed.allocate_part(format, 16, 32), torch.zeros(16, 32))
    for width, row in ((32, 33), (33, 34)):
        with pytest.raises(ValueError, match=f"not {width} elements of q8_0"):
            packed.pack_blocks(packed.allocate_part("q8_0", 16, width), np.zeros((16, row), np.uint8))
    with pytest.raises(ValueError, match=r"\[0, 15\]"):
        packed.pack_w4(packed.allocate_part("w4", 1, 32, 32), torch.full((1, 32), 16), torch.ones(1, 1), torch.ones(1, 1))


def test_tables_refuse_other_ids_and_sizes() -> None:
    matrix, rows = some_matrix("bf16", 5), BlockRows("F32", np.zeros(5 * 4 * 4, np.uint8), (5, 4))
    for bad in (-1, 5):
        for table in (matrix, rows):
            with pytest.raises(IndexError, match=r"\[0, 5\)"):
                dense.embedding(torch.tensor([0, bad]), table)
    with pytest.raises(ValueError, match="not the bytes"):
        dense.embedding(torch.tensor([0]), BlockRows("F32", np.zeros(81, np.uint8), (5, 4)))
    with pytest.raises(ValueError, match="do not hold"):
        dense.embedding(torch.tensor([0]), BlockRows("F32", np.zeros(80, np.uint8), (5, 5)))
    with pytest.raises(ValueError, match="unknown type"):
        dense.embedding(torch.tensor([0]), BlockRows("F8", np.zeros(80, np.uint8), (5, 4)))
