"""Quantised checkpoints against models made of their dequantised weights, through the whole loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from canter.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from canter.kernels.packed import BlockRows, PackedMatrix
from canter.models.loader import LoadedModel
from tests.models import quantized
from tests.models.ggufs import K_TYPES, write_model
from tests.models.harness import Harness
from tests.models.loading import load
from tests.models.quantized import SCHEMES, Quantized

IDS = torch.randint(3, 128, (23,), generator=torch.Generator().manual_seed(5)).tolist()
CODES = 0.06
"""How far int8 activations may move logits, relative to their spread."""


def logits(loaded: LoadedModel) -> Tensor:
    return Harness(loaded, 16).run(IDS, [9, 1, 13])


def formats(loaded: LoadedModel, name: str) -> list[str]:
    value = loaded.model.parameters[name].value
    assert isinstance(value, PackedMatrix)
    return [part.format for part in value.parts]


def off(found: Tensor, expected: Tensor) -> float:
    """The root mean square of the difference, relative to the spread of what is expected."""
    return float((found - expected).square().mean().sqrt() / expected.std())


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_codes_are_computed_as_they_are_stored(scheme: Quantized, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANTER_KERNELS", "native")
    stored, dense = quantized.save_pair(scheme, tmp_path)
    loaded = load(stored)
    expected_format = {"w8a8": "i8", "gptq-act-order": "f32"}.get(scheme.name, "w4")
    assert formats(loaded, "layers.0.attention.qkv.weight") == [expected_format] * 3
    assert formats(loaded, "layers.1.mlp.down.weight") == [expected_format]
    assert formats(loaded, "head.weight") == ["f32"]
    assert isinstance(loaded.model.parameters["embed.weight"].value, BlockRows)
    expected = logits(load(dense))
    assert off(logits(loaded), expected) < (1e-6 if expected_format == "f32" else CODES)
    unpacked = loaded.model.parameters["layers.1.mlp.down.weight"].value.unpack()
    whole = safetensors.torch.load_file(dense / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    torch.testing.assert_close(unpacked, whole, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize(("provider", "asked"), [("native", "none"), ("reference", "auto")])
def test_dequantised_where_asked_or_without_kernels(
    scheme: Quantized, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str, asked: str
) -> None:
    monkeypatch.setenv("CANTER_KERNELS", provider)
    stored, dense = quantized.save_pair(scheme, tmp_path)
    torch.testing.assert_close(logits(load(stored, quantization=asked)), logits(load(dense)), atol=1e-4, rtol=0)


def test_matrices_that_were_not_converted_stay_floats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANTER_KERNELS", "native")
    scheme = SCHEMES[0]
    stored, dense = {}, {}
    for name, weight in quantized.weights().items():
        dense[name] = weight
        if "up_proj." in name:
            tensors, dense[name] = scheme.store(name.removesuffix(".weight"), weight)
            stored |= tensors
        else:
            stored[name] = weight
    config = quantized.CONFIG | {"quantization_config": scheme.config | {"modules_to_not_convert": ["gate_proj", "down_proj", "self_attn"]}}
    loaded = load(quantized.save(tmp_path / "q", stored, config))
    assert formats(loaded, "layers.0.mlp.gate_up.weight") == ["f32", "w4"]  # one matrix, two formats
    assert off(logits(loaded), logits(load(quantized.save(tmp_path / "d", dense, quantized.CONFIG)))) < CODES


@pytest.mark.parametrize("tied", [False, True])
def test_floats_served_as_int8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    monkeypatch.setenv("CANTER_KERNELS", "native")
    tensors = quantized.weights()
    if tied:
        del tensors["lm_head.weight"]
    dense = quantized.save(tmp_path, tensors, quantized.CONFIG | {"tie_word_embeddings": tied})
    loaded = load(dense, quantization="int8")
    assert formats(loaded, "layers.0.mlp.gate_up.weight") == ["q8_0", "q8_0"]
    expected = logits(load(dense))
    assert 0 < off(logits(loaded), expected) < CODES
    assert loaded.num_bytes < load(dense).num_bytes / 3
    monkeypatch.setenv("CANTER_KERNELS", "reference")
    with pytest.raises(ConfigError, match="int8 needs the native kernels"):
        load(dense, quantization="int8")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "fp8"}, ["'fp8'", "awq, gptq, compressed-tensors"]),
        ({"quant_method": "mxfp4"}, ["'mxfp4'", "GGUF"]),
        ({"quant_method": "bitsandbytes"}, ["'bitsandbytes'"]),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, ["awq", "'gemv'", "supported are 4 bits"]),
        ({"quant_method": "gptq", "bits": 8}, ["gptq", "8 bits", "supported are 4 bits"]),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*up.*": {"bits": 8}}}, ["mixed bits"]),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, ["'marlin'", "gptq and gptq_v2"]),
        (quantized._compressed("float-quantized", num_bits=8, type="float", strategy="channel"), ["float", "'int-quantized' with 8 bits"]),
        (quantized._compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group"), ["nvfp4"]),
        (quantized._compressed("pack-quantized", num_bits=8, strategy="channel"), ["8 bits of int"]),
    ],
    ids=lambda value: value.get("quant_method") if isinstance(value, dict) else "",
)
def test_methods_that_are_not_supported_are_named(config: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    directory = quantized.save(tmp_path, quantized.weights(), quantized.CONFIG | {"quantization_config": config})
    with pytest.raises(UnsupportedModelError) as caught:
        load(directory)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("drop", "reshape", "words"),
    [
        ("layers.0.mlp.up_proj.qzeros", None, ["'model.layers.0.mlp.up_proj.weight'", "lacks its qzeros"]),
        (None, ("layers.0.mlp.up_proj.scales", (4, 64)), ["up_proj.scales", "expected shape [4, 128]", "found [4, 64]"]),
        (None, ("layers.0.mlp.up_proj.qweight", (32, 16)), ["up_proj.qweight", "expected shape [128, 64]", "found [128, 32]"]),
    ],
)
def test_tensors_that_do_not_fit_together(
    tmp_path: Path, drop: str | None, reshape: tuple[str, tuple[int, int]] | None, words: list[str]
) -> None:
    stored, _ = quantized.save_pair(SCHEMES[0], tmp_path)
    path = stored / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    if drop:
        del tensors[f"model.{drop}"]
    if reshape:
        name = f"model.{reshape[0]}"
        tensors[name] = torch.zeros(reshape[1], dtype=tensors[name].dtype)
        if "qweight" in name:
            tensors["model.layers.0.mlp.up_proj.scales"] = torch.zeros(1, 128, dtype=torch.float16)
            tensors["model.layers.0.mlp.up_proj.qzeros"] = torch.zeros(1, 16, dtype=torch.int32)
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(CheckpointError) as caught:
        load(stored)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_bias_that_is_not_zero_is_not_passed_over(tmp_path: Path) -> None:
    stored, _ = quantized.save_pair(SCHEMES[1], tmp_path)
    tensors = safetensors.torch.load_file(stored / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.bias"][3] = 1
    safetensors.torch.save_file(tensors, stored / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"Unexpected tensor 'model\.layers\.0\.mlp\.up_proj\.bias'"):
        load(stored)


# GGUF

KERNEL_TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("type_name", KERNEL_TYPES)
def test_blocks_are_computed_as_they_are_stored(type_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANTER_KERNELS", "native")
    path = write_model(tmp_path / "m.gguf", type_name)
    blocks, floats = load(path), load(path, quantization="none")
    assert formats(blocks, "layers.0.attention.qkv.weight") == [type_name.lower()] * 3
    assert formats(floats, "layers.0.attention.qkv.weight") == ["f32"] * 3
    assert blocks.num_bytes < 1.1 * path.stat().st_size < floats.num_bytes
    for name in ("layers.0.attention.qkv.weight", "layers.1.mlp.down.weight", "embed.weight"):  # rows of q and k are permuted
        unpacked = [model.model.parameters[name].value.unpack() for model in (blocks, floats)]
        torch.testing.assert_close(*unpacked, atol=1e-6, rtol=1e-5)
    assert off(logits(blocks), logits(floats)) < CODES


@pytest.mark.parametrize("type_name", ["Q2_K", "IQ4_XS", "IQ4_NL", "F16", "BF16", "F32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_types_without_a_kernel_become_floats(type_name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANTER_KERNELS", "native")
    if type_name == "IQ4_NL":
        monkeypatch.setitem(K_TYPES, "IQ4_NL", (0,))
    path = write_model(tmp_path / "m.gguf", type_name, tied=False)
    loaded = load(path, dtype)
    expected = "bf16" if dtype == "bfloat16" or type_name == "BF16" else "f32"
    assert formats(loaded, "layers.0.attention.qkv.weight") == [expected] * 3
    assert isinstance(loaded.model.parameters["embed.weight"].value, BlockRows)
    found = logits(loaded)
    monkeypatch.setenv("CANTER_KERNELS", "reference")
    reference = logits(load(path, dtype))
    if dtype == "float32":
        torch.testing.assert_close(found, reference, atol=1e-4, rtol=0)
    else:
        assert off(found, reference) < 0.03


def test_parts_of_one_matrix_may_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANTER_KERNELS", "native")
    path = write_model(tmp_path / "m.gguf", "Q4_K", mixed="Q6_K")
    loaded = load(path)
    assert formats(loaded, "layers.0.attention.qkv.weight") == ["q4_k", "q4_k", "q6_k"]
    assert off(logits(loaded), logits(load(path, quantization="none"))) < CODES
