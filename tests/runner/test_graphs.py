"""Step programs: the bits of eager steps for every family, and what happens where a program can't be made or fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from canter.core.config import EngineArgs
from canter.engine.build import build_engine
from canter.kernels import native
from canter.kernels.inputs import packed_floats
from canter.kernels.native.program import NativeProgram
from canter.kernels.recorder import RecordError
from canter.layers.build import weights_moved
from canter.layers.context import AttentionContext, GroupContext, StepContext
from canter.models.loader import LoadedModel
from canter.runner.graphs import EagerSteps, StepProgram, make_steps
from tests.engines import tiny_checkpoint
from tests.models.families import FAMILIES, NUM_TOKENS, Family, save_oracle, token_ids
from tests.models.ggufs import write_model
from tests.models.harness import Harness
from tests.models.loading import load


@pytest.fixture(autouse=True)
def native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CANTER_KERNELS", raising=False)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture(scope="module")
def directory(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_oracle(family, tmp_path_factory.mktemp(family.name))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    (family,) = [family for family in FAMILIES if family.name == "llama"]
    return load(save_oracle(family, tmp_path_factory.mktemp("graphs")), "bfloat16")


def mixed_steps(harness: Harness) -> list[Tensor]:
    """Logits of prefills, chunks and decodes in mixed batches, of growing and shrinking size, then what the caches hold."""
    ids = token_ids().tolist()
    a, b, c = (harness.request(ids[i][:length]) for i, length in enumerate((NUM_TOKENS, 9, 14)))
    harness.step([(b, 3)])
    harness.step([(a, 11), (b, 1)])
    harness.step([(a, 1), (b, 1), (c, 13)])
    harness.step([(c, 1), (b, 4), (a, 6)])
    while a.num_computed < NUM_TOKENS:
        harness.step([(a, 1)])
    return [torch.cat(request.logits) for request in (a, b, c)] + [t for cache in harness.caches for t in cache.values()]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    ("dtype", "block_size"),
    [
        ("float32", 16),
        ("bfloat16", 4),
        pytest.param("float32", 4, marks=pytest.mark.slow),
        pytest.param("bfloat16", 16, marks=pytest.mark.slow),
    ],
)
def test_a_program_gives_the_bits_of_eager_steps(family: Family, directory: Path, dtype: str, block_size: int) -> None:
    loaded = load(directory, dtype, family.max_model_len)
    eager = mixed_steps(Harness(loaded, block_size))
    assert_same_bits(mixed_steps(Harness(loaded, block_size, recorded=True)), eager)


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float16"])
def test_a_program_keeps_half_types_beside_float32(tmp_path: Path, cache_dtype: str) -> None:
    (family,) = [family for family in FAMILIES if family.name == "llama"]
    loaded = load(save_oracle(family, tmp_path), "float32", cache_dtype=cache_dtype)
    eager = mixed_steps(Harness(loaded, 16))
    assert_same_bits(mixed_steps(Harness(loaded, 16, recorded=True)), eager)


BLOCK_TYPES = [("Q4_0", "Q8_0"), ("Q4_1", "Q5_1"), ("Q5_0", "F16"), ("Q4_K", "Q6_K"), ("Q5_K", "Q8_0"), ("Q6_K", "Q4_0"), ("BF16", "Q2_K")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("type_name", "mixed"), BLOCK_TYPES)
def test_a_program_of_gguf_blocks_gives_the_bits_of_eager_steps(type_name: str, mixed: str, dtype: str, tmp_path: Path) -> None:
    """Values and down projections are of another type than the rest; the output matrix is the embedding's or its own."""
    for tied in (True, False):
        loaded = load(write_model(tmp_path / f"{tied}.gguf", type_name, tied, mixed), dtype)
        eager = mixed_steps(Harness(loaded, 16))
        assert all(bool(t.isfinite().all()) for t in eager[:3])
        assert_same_bits(mixed_steps(Harness(loaded, 16, recorded=True)), eager)


@pytest.mark.parametrize("isa", native.isas())
def test_a_program_follows_the_instruction_set_and_the_threads(llama: LoadedModel, isa: str) -> None:
    before, threads = native.isa(), native.num_threads()
    try:
        native.set_isa(isa)
        eager = mixed_steps(Harness(llama, 4))
        native.set_num_threads(3)
        assert_same_bits(mixed_steps(Harness(llama, 4, recorded=True)), eager)
    finally:
        native.set_isa(before)
        native.set_num_threads(threads)


def test_recording_touches_no_cache(llama: LoadedModel) -> None:
    harness = Harness(llama, 4)
    before = [t.clone() for cache in harness.caches for t in cache.values()]
    steps = StepProgram(harness.model, harness.caches, [0, 0, 0], harness.inputs)
    assert_same_bits([t for cache in harness.caches for t in cache.values()], before)
    forward, logits = steps.programs
    assert forward.ops[0] == "embedding" and forward.ops.count("paged_attention") == 3
    assert logits.ops == ["gather", "linear", "widen"]


def test_moved_weights_and_caches_are_bound_again(llama: LoadedModel) -> None:
    harness, eager = Harness(llama, 4, recorded=True), Harness(llama, 4)
    norm, down = (llama.model.parameters[f"layers.1.{name}.weight"] for name in ("mlp_norm", "mlp.down"))
    kept, kept_down = norm.tensor.clone(), down.value

    def same_steps() -> tuple[NativeProgram, NativeProgram]:
        assert_same_bits(mixed_steps(harness)[:3], mixed_steps(eager)[:3])
        return harness.steps.programs  # type: ignore[attr-defined,no-any-return]

    bound = same_steps()
    assert same_steps() == bound
    with torch.inference_mode(False):
        norm.tensor.data = kept * 2
    for cache in harness.caches:
        cache["k"] = cache["k"].clone()
    weights_moved()
    moved = same_steps()
    assert set(moved).isdisjoint(bound)
    down.value = packed_floats("f32", kept_down.unpack() * 0.5)  # another matrix in its place
    assert set(same_steps()).isdisjoint(moved)
    norm.tensor.data, down.value = kept, kept_down
    weights_moved()
    assert same_steps() != bound


def test_the_arena_grows_to_the_largest_step(llama: LoadedModel) -> None:
    harness = Harness(llama, 4, recorded=True)
    ids = list(range(3, 63))
    harness.step([(harness.request(ids), 1)])
    first = harness.steps.forward(torch.tensor([5]), context(harness, 1))
    kept = first.clone()
    many = harness.steps.forward(torch.arange(4000) % 100 + 3, context(harness, 4000))
    assert many.shape == (4000, 48)
    assert torch.equal(first, kept), "a smaller arena lives as long as somebody looks into it"
    again = harness.steps.forward(torch.tensor([5]), context(harness, 1))
    assert torch.equal(again, kept)
    assert again.untyped_storage().data_ptr() == many.untyped_storage().data_ptr()


def context(harness: Harness, tokens: int) -> StepContext:
    """One request of so many tokens at position 0 of every token, nothing stored: attention sees block 1."""
    ones = torch.ones(tokens, dtype=torch.int32)
    groups: list[GroupContext] = [
        AttentionContext(torch.ones(tokens, 1, dtype=torch.int32), torch.full((tokens,), -1)) for _ in harness.layout.groups
    ]
    starts = torch.arange(tokens + 1, dtype=torch.int32)
    return StepContext(torch.zeros(tokens, dtype=torch.int64), starts, ones, tokens, groups, [0, 0, 0], harness.caches)


def test_an_op_that_fails_raises_and_leaves_the_program_usable(llama: LoadedModel) -> None:
    harness = Harness(llama, 4, recorded=True)
    ctx = context(harness, 2)
    expected = harness.steps.forward(torch.tensor([5, 6]), ctx).clone()
    with pytest.raises(IndexError, match="token ids must be in"):
        harness.steps.forward(torch.tensor([5, 131]), ctx)
    ctx.positions[1] = 64
    with pytest.raises(IndexError, match="positions must be in"):
        harness.steps.forward(torch.tensor([5, 6]), ctx)
    ctx.positions[1] = 0
    with pytest.raises(ValueError, match="expected 2 rows"):
        harness.steps.forward(torch.tensor([5, 6, 7])[:2], context(harness, 3))
    hidden = harness.steps.forward(torch.tensor([5, 6]), ctx)
    assert torch.equal(hidden, expected)
    with pytest.raises(IndexError, match="gather"):
        harness.steps.logits(hidden, torch.tensor([0, 2]))
    assert harness.steps.logits(hidden, torch.tensor([], dtype=torch.int64)).shape == (0, 131)


def test_metadata_of_other_layouts_is_converted(llama: LoadedModel) -> None:
    harness = Harness(llama, 4, recorded=True)
    expected = harness.steps.forward(torch.tensor([5, 6]), context(harness, 2)).clone()
    ctx = context(harness, 2)
    ctx.seq_lens = ctx.seq_lens.long()
    ctx.attention(0).block_table = torch.ones(2, 8, dtype=torch.int64)[:, ::4]
    assert torch.equal(harness.steps.forward(torch.tensor([5, 6], dtype=torch.int32), ctx), expected)


class Odd:
    """A model that does to its input what a recording can't hold."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def forward(self, token_ids: Tensor, ctx: StepContext) -> Tensor:
        return self._work(token_ids, ctx)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.mark.parametrize(
    "work,reason",
    [
        (lambda x, ctx: x + 1, "__add__"),
        (lambda x, ctx: torch.cat([x, x]), "torch function cat"),
        (lambda x, ctx: x if x.shape[0] > 1 else x.view(-1), "shape"),
        (lambda x, ctx: x if ctx.num_reqs == 1 else x.view(-1), "shape"),
        (lambda x, ctx: x.masked_fill(x, 0), "masked_fill"),
        (lambda x, ctx: x[0], "__getitem__"),
        (lambda x, ctx: x.view(1, -1), "changes the rows"),
        (lambda x, ctx: x, "no instruction writes"),
        (lambda x, ctx: torch.nn.functional.linear(x, x), "linear"),
        (lambda x, ctx: ctx.missing, "AttributeError"),
    ],
)
def test_a_model_that_cannot_be_recorded_runs_eagerly(work: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    steps = make_steps(Odd(work), [], [], [], eager=False)
    assert isinstance(steps, EagerSteps) and steps.eager_reason is not None and reason in steps.eager_reason
    assert reason in caplog.text


def test_reference_kernels_are_not_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CANTER_KERNELS", "reference")
    core = build_engine(EngineArgs(model=str(tiny_checkpoint(tmp_path, "llama")), kv_cache_memory_bytes=1 << 22))
    assert core.info.eager_reason == "embedding by reference can't be recorded"
    core.shutdown()


def test_enforce_eager(tmp_path: Path) -> None:
    path = str(tiny_checkpoint(tmp_path, "gemma3"))
    reasons = []
    for eager in (False, True):
        core = build_engine(EngineArgs(model=path, kv_cache_memory_bytes=1 << 22, enforce_eager=eager))
        reasons.append(core.info.eager_reason)
        core.shutdown()
    assert reasons == [None, "--enforce-eager"]


def test_a_record_error_is_one(llama: LoadedModel) -> None:
    with pytest.raises(RecordError, match="no instruction writes"):
        StepProgram(Odd(lambda x, ctx: x), [], [], [])
