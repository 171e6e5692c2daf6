"""From stored tensors to parameters: rules, types, what is missing or wrong, and how much memory it takes."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from canter.checkpoint.tensors import StoredTensor
from canter.core.errors import CheckpointError, UnsupportedModelError
from canter.layers.build import Build
from canter.layers.quant.weights import read_tensor
from canter.models.weights import LoadOptions, LoadPlan, Progress, Rule, WeightMap
from tests.models.families import FAMILIES, Family, oracle_logits, save_oracle, token_ids
from tests.models.harness import Harness
from tests.models.loading import load

BY_NAME = {family.name: family for family in FAMILIES}


class MemorySource:
    """The part of `TensorSource` that loading uses, over tensors in memory."""

    def __init__(self, *tensors: StoredTensor) -> None:
        self.tensors = {tensor.name: tensor for tensor in tensors}

    def names(self) -> list[str]:
        return list(self.tensors)

    def get(self, name: str) -> StoredTensor:
        return self.tensors[name]

    def release(self, name: str) -> None:
        assert name in self.tensors


def stored(name: str, tensor: Tensor) -> StoredTensor:
    data = tensor.contiguous().view(torch.uint8).flatten().numpy()
    return StoredTensor(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), data)


WEIGHTS = WeightMap(
    rules=(
        Rule("net.{i}.a", "layers.{i}.fused", "a"),
        Rule("net.{i}.b", "layers.{i}.fused", "b"),
        Rule("net.{i}.both", "layers.{i}.whole"),
        Rule("out", "head", tied=True),
        Rule("net.{i}.bias", "layers.{i}.bias"),
    ),
    renames=(("old.", "net."),),
    skip=("junk.*",),
)


def make_build(dtype: torch.dtype = torch.float32, tied: bool = False) -> Build:
    build = Build("cpu", dtype, 16)
    for i in range(2):
        layer = build.at(f"layers.{i}")
        layer.parameter("fused", (5, 3), {"a": 2, "b": 3})
        layer.parameter("whole", (4,))
    if not tied:
        build.parameter("head", (2, 3))
    return build


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def make_tensors() -> dict[str, Tensor]:
    named = {"out": values(2, 3)}
    for i in range(2):
        named |= {f"net.{i}.a": values(2, 3) + i, f"net.{i}.b": values(3, 3) + i, f"net.{i}.both": values(4) + i}
    return named


def load_from(build: Build, tensors: list[StoredTensor], progress: Progress | None = None) -> None:
    LoadPlan(build, WEIGHTS, 2, MemorySource(*tensors), LoadOptions()).load(progress)


def fill(build: Build, tensors: dict[str, Tensor]) -> None:
    load_from(build, [stored(name, t) for name, t in tensors.items()])


def test_every_part_lands_in_its_rows() -> None:
    build, tensors = make_build(), make_tensors()
    fill(build, tensors | {"junk.position_ids": torch.zeros(1, dtype=torch.int64)})
    for i in range(2):
        fused = torch.cat((tensors[f"net.{i}.a"], tensors[f"net.{i}.b"]))
        assert torch.equal(build.parameters[f"layers.{i}.fused"].tensor, fused)
        assert torch.equal(build.parameters[f"layers.{i}.whole"].tensor, tensors[f"net.{i}.both"])
    assert torch.equal(build.parameters["head"].tensor, tensors["out"])


def test_renamed_and_tied_tensors() -> None:
    tensors = {name.replace("net.", "old."): tensor for name, tensor in make_tensors().items()}
    build = make_build(tied=True)
    fill(build, tensors)
    assert torch.equal(build.parameters["layers.1.whole"].tensor, tensors["old.1.both"])
    assert "head" not in build.parameters


def grouped_source() -> tuple[Build, Tensor, WeightMap]:
    """Two groups, each of which has one row of a, two of b and one of c; a and b are stored group by group."""
    build = Build("cpu", torch.float32, 16)
    build.matrix("fused", (8, 32), {"a": 2, "b": 4, "c": 2}, groups=2)
    rules = (Rule("ab", "fused", parts=("a", "b"), grouped=True), Rule("c", "fused", "c"))
    return build, values(6, 32), WeightMap(rules)


@pytest.mark.parametrize("int8", [False, True])
def test_parts_stored_group_by_group(int8: bool) -> None:
    build, ab, weights = grouped_source()
    c = values(2, 32)
    plan = LoadPlan(build, weights, 1, MemorySource(stored("ab", ab), stored("c", c)), LoadOptions(int8=int8))
    done: list[tuple[int, int]] = []
    plan.load(lambda *progress: done.append(progress))
    expected = torch.cat((ab[[0, 3]], ab[[1, 2, 4, 5]], c))
    value = build.parameters["fused"].value
    found = value if isinstance(value, Tensor) else value.unpack()
    torch.testing.assert_close(found, expected, atol=0.02 if int8 else 0, rtol=0)
    assert done[-1] == (ab.nbytes + c.nbytes,) * 2 and max(count for count, _ in done) == ab.nbytes + c.nbytes


def test_parts_one_after_the_other_and_a_bias_group_by_group() -> None:
    build = Build("cpu", torch.float32, 16)
    build.parameter("bias", (6,), {"a": 2, "b": 4}, groups=2)
    build.parameter("plain", (6,), {"a": 2, "b": 4}, groups=2)
    rules = (Rule("bias", "bias", parts=("a", "b"), grouped=True), Rule("plain", "plain", parts=("a", "b")))
    tensors = stored("bias", torch.arange(6.0)), stored("plain", torch.arange(6.0))
    LoadPlan(build, WeightMap(rules), 1, MemorySource(*tensors), LoadOptions()).load()
    assert build.parameters["bias"].tensor.tolist() == [0, 3, 1, 2, 4, 5]
    assert build.parameters["plain"].tensor.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_transform_is_applied_in_float32_and_parts_may_lie_along_another_dimension() -> None:
    build = Build("cpu", torch.bfloat16, 16)
    build.parameter("decay", (3,), dtype=torch.float32)
    build.parameter("taps", (2, 5), {"q": 2, "k": 3}, dtype=torch.float32, dim=1)
    rules = (
        Rule("log", "decay", transform=lambda x: -x.exp()),
        *(Rule(f"{part}.taps", "taps", part, transform=lambda x: x.squeeze(1).t()) for part in ("q", "k")),
    )
    log, q, k = values(3), values(2, 1, 2), values(3, 1, 2)
    tensors = [stored("log", log), stored("q.taps", q), stored("k.taps", k)]
    plan = LoadPlan(build, WeightMap(rules), 1, MemorySource(*tensors), LoadOptions())
    plan.load()
    assert torch.equal(build.parameters["decay"].tensor, -log.exp())
    assert torch.equal(build.parameters["taps"].tensor, torch.cat((q, k)).squeeze(1).t())
    assert plan.bytes_by_format == {"float32": (3 + 10) * 4}


@pytest.mark.parametrize("shape", [(3, 1, 2), (2, 2, 2), (2,)])
def test_a_tensor_that_a_transform_does_not_fit(shape: tuple[int, ...]) -> None:
    build = Build("cpu", torch.float32, 16)
    build.parameter("taps", (2, 2))
    weights = WeightMap((Rule("taps", "taps", transform=lambda x: x.squeeze(1).t()),))
    with pytest.raises(CheckpointError, match="'taps'"):
        LoadPlan(build, weights, 1, MemorySource(stored("taps", values(*shape))), LoadOptions())


def test_grouped_parts_of_a_wrong_size_and_missing_ones() -> None:
    build, ab, weights = grouped_source()
    c = stored("c", values(2, 32))
    with pytest.raises(CheckpointError, match=r"'ab'.*expected shape \[6, 32\], found \[5, 32\]"):
        LoadPlan(build, weights, 1, MemorySource(stored("ab", ab[:5]), c), LoadOptions())
    with pytest.raises(CheckpointError, match=r"lacks 'ab' of shape \[6, 32\]"):
        LoadPlan(build, weights, 1, MemorySource(c), LoadOptions())


@pytest.mark.parametrize("file_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_conversion_rounds_as_torch_does(file_dtype: torch.dtype, dtype: torch.dtype) -> None:
    build = make_build(dtype)
    tensors = {name: tensor.to(file_dtype) for name, tensor in make_tensors().items()}
    fill(build, tensors)
    assert torch.equal(build.parameters["head"].tensor, tensors["out"].to(dtype))


def change(tensors: dict[str, Tensor], what: str) -> dict[str, Tensor]:
    if what == "missing":
        del tensors["net.1.b"]
    elif what == "unexpected":
        tensors["net.1.extra"] = values(2)
    elif what == "unplaced":  # a rule knows the name, but this model has no such parameter
        tensors["net.0.bias"] = values(2)
    elif what == "beyond":
        tensors["net.2.both"] = values(4)
    elif what == "shape":
        tensors["net.0.a"] = values(3, 2)
    else:
        tensors["old.0.both"] = values(4)
    return tensors


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("missing", ["'net.1.b'", "[3, 3]", "lacks", "expected 7", "found 6"]),
        ("unexpected", ["'net.1.extra'", "[2]", "no place"]),
        ("unplaced", ["'net.0.bias'", "[2]", "no place"]),
        ("beyond", ["'net.2.both'", "[4]", "no place"]),
        ("shape", ["'net.0.a'", "expected shape [2, 3]", "found [3, 2]"]),
        ("twice", ["'net.0.both'", "'old.0.both'", "expected one"]),
    ],
)
def test_what_does_not_fit_is_named(what: str, words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        fill(make_build(), change(make_tensors(), what))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_parameter_that_no_rule_fills_is_named() -> None:
    build = make_build()
    build.parameter("forgotten", (1,))
    with pytest.raises(CheckpointError, match="'forgotten'"):
        fill(build, make_tensors())


def test_integer_weights_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'net\.0\.a'.*int32.*float32, float16, bfloat16"):
        fill(make_build(), make_tensors() | {"net.0.a": torch.zeros(2, 3, dtype=torch.int32)})


def test_unaligned_and_read_only_data() -> None:
    raw = np.zeros(17, np.uint8)
    raw[1:] = np.frombuffer(np.arange(4, dtype=np.float32).tobytes(), np.uint8)
    data = raw[1:]
    data.flags.writeable = False
    assert read_tensor(StoredTensor("x", (2, 2), "float32", data)).tolist() == [[0, 1], [2, 3]]


def test_quantised_tensors_are_dequantised_and_transformed() -> None:
    scale = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    codes = np.arange(-16, 16, dtype=np.int8).view(np.uint8)
    block = np.concatenate((scale, codes))
    tensor = StoredTensor("x", (4, 8), "gguf:Q8_0", block, transform=lambda v: v[::-1] + 1)
    expected = (torch.arange(-16, 16).view(4, 8) * 0.5).flip(0) + 1
    assert torch.equal(read_tensor(tensor), expected.float())


def test_progress_counts_bytes() -> None:
    tensors = [stored(name, tensor) for name, tensor in make_tensors().items()]
    seen: list[tuple[int, int]] = []
    load_from(make_build(), tensors, lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in tensors)
    assert [done for done, _ in seen] == np.cumsum([t.nbytes for t in tensors]).tolist()
    assert {end for _, end in seen} == {total} and seen[-1] == (total, total)


def test_one_tensor_is_alive_at_a_time() -> None:
    alive: list[weakref.ref[np.ndarray]] = []

    def track(array: np.ndarray) -> np.ndarray:
        assert sum(ref() is not None for ref in alive) <= 1
        fresh = array + 0
        alive.append(weakref.ref(fresh))
        return fresh

    tensors = []
    for name, tensor in make_tensors().items():
        plain = stored(name, tensor)
        tensors.append(StoredTensor(name, plain.shape, plain.dtype, plain.data, transform=track))
    build = make_build()
    load_from(build, tensors)
    assert len(alive) == 7
    assert torch.equal(build.parameters["head"].tensor, make_tensors()["out"])


def _check_logits(family: Family, directory: Path) -> None:
    logits = Harness(load(directory, max_model_len=64), 16).run(token_ids()[0].tolist(), [23])
    torch.testing.assert_close(logits, oracle_logits(family)[0], atol=1e-4, rtol=0)


def _rewrite(directory: Path, rename: list[tuple[str, str]], drop: str = "") -> None:
    path = directory / "model.safetensors"
    tensors = {}
    for name, tensor in safetensors.torch.load_file(path).items():
        for old, new in rename:
            if name.startswith(old):
                name = new + name[len(old) :]
                break
        if not drop or not name.startswith(drop):
            tensors[name] = tensor
    safetensors.torch.save_file(tensors, path)


def test_newer_names_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    family = BY_NAME["gemma3-multimodal"]
    save_oracle(family, tmp_path)
    _rewrite(
        tmp_path,
        [
            ("language_model.model.", "model.language_model."),
            ("vision_tower.", "model.vision_tower."),
            ("multi_modal_projector.", "model.multi_modal_projector."),
        ],
    )
    _check_logits(family, tmp_path)


def test_names_without_model_prefix(tmp_path: Path) -> None:
    family = BY_NAME["qwen2"]
    save_oracle(family, tmp_path)
    _rewrite(tmp_path, [("model.", "")])
    _check_logits(family, tmp_path)


def test_a_stored_copy_of_tied_weights_is_passed_over(tmp_path: Path) -> None:
    family = BY_NAME["qwen2"]
    save_oracle(family, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file(tensors | {"lm_head.weight": torch.zeros_like(tensors["model.embed_tokens.weight"])}, path)
    _check_logits(family, tmp_path)


def test_sharded_checkpoint(tmp_path: Path) -> None:
    family = BY_NAME["llama"]
    from_one = save_oracle(family, tmp_path / "one")
    tensors = list(safetensors.torch.load_file(from_one / "model.safetensors").items())
    shards = {"model-00001-of-00002.safetensors": dict(tensors[::2]), "model-00002-of-00002.safetensors": dict(tensors[1::2])}
    directory = tmp_path / "two"
    directory.mkdir()
    (directory / "config.json").write_text((from_one / "config.json").read_text())
    for name, part in shards.items():
        safetensors.torch.save_file(part, directory / name)
    index = ", ".join(f'"{tensor}": "{name}"' for name, part in shards.items() for tensor in part)
    (directory / "model.safetensors.index.json").write_text(f'{{"metadata": {{}}, "weight_map": {{{index}}}}}')
    _check_logits(family, directory)


def test_missing_output_layer_of_an_untied_model(tmp_path: Path) -> None:
    family = BY_NAME["llama"]
    save_oracle(family, tmp_path)
    _rewrite(tmp_path, [], drop="lm_head.")
    with pytest.raises(CheckpointError, match=r"lacks 'lm_head\.weight' of shape \[131, 48\]"):
        load(tmp_path)
