"""Recording op by op: symbols, the arena's layout, and programs that give the bits of the ops they hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from canter import _native
from canter.checkpoint.mapped_file import MappedFile
from canter.kernels import bind
from canter.kernels.inputs import FORMATS, packed_floats, packed_part
from canter.kernels.native.program import NativeProgram, new_recorder, observed
from canter.kernels.packed import BlockRows, PackedMatrix
from canter.kernels.recorder import ALIGNMENT, Buffer, RecordError, Symbol, plan_arena

DTYPES = (torch.float32, torch.bfloat16)


def replay(work: Callable[..., Symbol], x: Tensor, *args: Any) -> Tensor:
    """What a program gives that was recorded from `work` on a symbol of x and the other arguments as they are."""
    recorder = new_recorder()
    program = NativeProgram(recorder, work(recorder.given("x", x.dtype, *x.shape[1:]), *args))
    return program.run(x.shape[0], [x.data_ptr()]).clone()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", (1, 3, 40))
def test_packed_products(rows: int, dtype: torch.dtype) -> None:
    parts = [packed_part(torch.Generator().manual_seed(n), name, n, 256) for n, name in enumerate(FORMATS, 7)]
    weight = PackedMatrix(tuple(parts))
    bias = normal(weight.shape[0], seed=3)
    x, linear = normal(rows, 256, dtype=dtype), bind("linear", "cpu", dtype)
    for given_bias in (bias, None):
        assert same_bits(replay(linear, x, weight, given_bias), linear(x, weight, given_bias))


def resident_bytes(path: Path) -> int:
    """What this process has of a mapped file in memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    return sum(1024 * int(next(line for line in lines if line.startswith("Rss:")).split()[1]) for line in lines if line.endswith(str(path)))


def test_pages_of_a_mapped_table_go_back(tmp_path: Path) -> None:
    path, rows, width = tmp_path / "table", 60_000, 256  # 61 MB
    np.repeat(np.arange(rows, dtype=np.float32), width).tofile(path)
    file = MappedFile(path)
    weight = BlockRows("F32", np.frombuffer(file.slice(0, file.size), np.uint8), (rows, width))
    assert weight.is_mapped and not BlockRows("F32", np.zeros(1024, np.uint8), (1, width)).is_mapped
    recorder = new_recorder()
    ids_symbol = recorder.given("ids", torch.int64)
    program = NativeProgram(recorder, bind("embedding", "cpu", torch.float32)(ids_symbol, weight, 1.0, torch.float32))
    shuffled = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    for begin, count in ((0, 1), (1, 6), (7, 1), (8, 700), (1000, 30_000), (31_000, 91)):
        ids = shuffled[begin : begin + count].contiguous()
        assert torch.equal(program.run(count, [ids.data_ptr()]), ids.float().unsqueeze(1).expand(-1, width))
    assert 0 < resident_bytes(path) < 17 << 20


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", (1.0, 3.3))
def test_packed_tables(dtype: torch.dtype, scale: float) -> None:
    table = normal(30, 64)
    blocks = np.random.default_rng(0).integers(0, 256, (60, 34), np.uint8)  # Q8_0: a float16 scale and 32 codes
    blocks[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    ids, embedding = torch.tensor([3, 29, 0, 3]), bind("embedding", "cpu", dtype)
    for weight in (packed_floats("f32", table), BlockRows("Q8_0", blocks.reshape(-1), (30, 64))):
        expected = embedding(ids, weight, scale, dtype)
        assert same_bits(replay(embedding, ids, weight, scale, dtype), expected)
        with pytest.raises(IndexError, match="token ids"):
            replay(embedding, torch.tensor([0, 30]), weight, scale, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_of_heads_in_a_fused_projection(dtype: torch.dtype) -> None:
    x, weight, norm = normal(9, 5, 24, dtype=dtype), normal(24), bind("rms_norm", "cpu", dtype)
    linear, matrix = bind("linear", "cpu", dtype), packed_floats("f32", normal(120, 120, seed=4))

    def heads(s: Symbol) -> Symbol:
        _, k, _ = linear(s.view(-1, 120), matrix, None).view(-1, 5, 24).split_with_sizes((1, 3, 1), 1)
        return norm(k, weight, 1e-6)  # type: ignore[no-any-return]

    fused = linear(x.view(-1, 120), matrix, None).view(-1, 5, 24)
    expected = norm(fused[:, 1:4].contiguous(), weight, 1e-6)
    assert same_bits(norm(fused[:, 1:4], weight, 1e-6), expected)
    assert same_bits(replay(heads, x), expected)


def test_float_records_a_conversion_only_where_it_changes_the_type() -> None:
    cap = bind("softcap", "cpu", torch.bfloat16)
    x = normal(5, 33, dtype=torch.bfloat16)
    assert same_bits(replay(lambda s: cap(s, 3.0).float().float(), x), cap(x, 3.0).float())
    with pytest.raises(RecordError, match="conversion"):
        replay(lambda s: cap(s, 3.0).to(torch.float16), x)


def test_symbols_know_their_shape() -> None:
    recorder = new_recorder()
    x = recorder.new(torch.bfloat16, 12)
    assert x.shape == (x.rows, 12) and x.dim() == 2 and x.size(1) == 12 and x.device.type == "cpu" and x.is_contiguous()
    heads = x.view(x.shape[0], 3, 4)
    a, b = heads.split_with_sizes((1, 2), 1)
    assert (a.tail, b.tail, b.offset, b.strides) == ((1, 4), (2, 4), 4, (12, 4, 1))
    assert not b.is_contiguous() and x.contiguous() is x
    with pytest.raises(RecordError, match="contiguous copy"):
        b.contiguous()
    with pytest.raises(RecordError, match="split"):
        heads.split_with_sizes((1, 1), 1)
    with pytest.raises(RecordError, match="view"):
        x.view(-1, 5)
    with pytest.raises(RecordError, match="rows"):
        x.view(3, 4)
    _, narrow = heads.split_with_sizes((2, 2), 2)
    with pytest.raises(RecordError, match="do not lie in one run"):
        narrow.view(-1, 6)


Calls = list[tuple[int, list[int], bool]]
WIDTHS = st.sampled_from((3, 16, 40)) | st.integers(1, 300)
CALLS = st.lists(st.tuples(WIDTHS, st.lists(st.integers(0, 8), max_size=3), st.booleans()), min_size=1, max_size=25)
"""Of each call the width of its result, how many results back its arguments were made, and whether it is by row."""


@settings(max_examples=300)
@given(CALLS, st.integers(1, 4), st.integers(1, 9))
def test_no_buffer_is_written_over_before_its_last_use(calls: Calls, block_rows: int, rows: int) -> None:
    """Instructions are run as a program runs them, block by block in stretches; each byte of the arena knows whose it is."""
    recorder = new_recorder()
    made: list[Symbol] = []
    for size, used, by_row in calls:
        out = recorder.new(torch.float32, size)
        reads = [made[-1 - back] for back in used if back < len(made)]
        recorder.add("op", reads, [out], lambda program, at: None, by_row=by_row)
        made.append(out)
    number = {symbol: at for at, symbol in enumerate(made)}
    plan = plan_arena(recorder.instructions, [made[-1]])
    owner = np.full(rows * plan.row_bytes + min(rows, block_rows) * plan.block_bytes, -1)

    def rows_of(symbol: Symbol, first: int, count: int) -> np.ndarray:
        source = symbol.source
        assert isinstance(source, Buffer) and plan.starts[source] % ALIGNMENT == 0
        if source in plan.of_blocks:
            start = rows * plan.row_bytes + plan.starts[source] * count
        else:
            start = plan.starts[source] * rows + source.row_bytes * first
        assert start + source.row_bytes * count <= owner.size
        return owner[start : start + source.row_bytes * count]

    def run(at: int, first: int, count: int) -> None:
        for symbol in recorder.instructions[at].reads:
            assert (rows_of(symbol, first, count) == number[symbol]).all()
        rows_of(made[at], first, count)[:] = at

    next_one = 0
    for begin, end in [*plan.stretches, (len(calls), len(calls))]:
        for at in range(next_one, begin):
            run(at, 0, rows)
        for first in range(0, rows, block_rows):
            for at in range(begin, end):
                assert calls[at][2]
                run(at, first, min(block_rows, rows - first))
        next_one = end
    assert (rows_of(made[-1], 0, rows) == len(made) - 1).all()


@pytest.mark.parametrize("rows", (1, 7, 8, 29))
def test_blocks_of_rows_change_nothing(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("canter.kernels.native.program.BLOCK_ROWS", 7)
    linear, norm, act = (bind(op, "cpu", torch.float32) for op in ("linear", "add_rms_norm", "silu_and_mul"))
    up, down, weight = packed_floats("f32", normal(96, 32)), packed_floats("f32", normal(32, 48, seed=1)), normal(32, seed=2)

    def layers(x: Any) -> Any:
        hidden = residual = linear(x, down, None)
        for _ in range(3):
            hidden, residual = norm(hidden, residual, weight, 1e-6)
            hidden = linear(act(linear(hidden, up, None)), down, None)
        return norm(hidden, residual, weight, 1e-6)[1]

    x = normal(rows, 48, seed=3)
    recorder = new_recorder()
    program = NativeProgram(recorder, layers(recorder.given("x", torch.float32, 48)))
    assert same_bits(program.run(rows, [x.data_ptr()]), layers(x))
    timed: list[list[float]] = []
    with observed(lambda program, rows, seconds: timed.append(seconds)):
        assert same_bits(program.run(rows, [x.data_ptr()]), layers(x))
    assert [len(seconds) for seconds in timed] == [len(program.instructions)] and min(timed[0]) > 0
    assert program.row_bytes < 4 * (3 * 32 + 96)  # what only passes from one to the next holds a block


def test_rows_take_the_place_of_rows_that_are_read_no_more() -> None:
    """Two buffers of all rows, one read and the other written by one stretch, where the rows are equally long."""

    def row_bytes(width: int) -> int:
        recorder = new_recorder()
        made = [recorder.new(torch.float32, size) for size in (16, 32, width, 16)]
        for at, by_row in enumerate((False, True, True, False)):
            recorder.add("op", made[at - 1 : at], [made[at]], lambda program, at: None, by_row=by_row)
        return plan_arena(recorder.instructions, [made[-1]]).row_bytes

    assert row_bytes(16) == 2 * 64  # the first and the third; the second holds a block
    assert row_bytes(48) == 64 + 192


def test_stretches_are_checked() -> None:
    program = _native.Program()
    for stretches, block_rows in (([(0, 1)], 4), ([(0, 0)], 0)):
        with pytest.raises(ValueError, match="Program"):
            program.set_stretches(stretches, 0, block_rows)
