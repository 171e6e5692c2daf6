from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from canter.checkpoint.resolve import resolve
from canter.checkpoint.tensors import open_tensors
from canter.core.errors import CheckpointError, UnsupportedModelError
from tests.checkpoint import samples


def write_shards(root: Path, shards: dict[str, dict[str, np.ndarray]], index: dict[str, str] | None = None) -> Path:
    for file, tensors in shards.items():
        save_file(tensors, root / file)
    weight_map = index or {name: file for file, tensors in shards.items() for name in tensors}
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return root


def test_a_single_file(tmp_path: Path) -> None:
    values = torch.randn(3, 4)
    stored = {"a": values, "b": values.to(torch.bfloat16), "c": values.to(torch.float16), "d": torch.arange(5)}
    save_torch(stored, tmp_path / "model.safetensors")
    source = open_tensors(resolve(str(tmp_path)))
    assert sorted(source.names()) == ["a", "b", "c", "d"]
    for name in "abc":
        tensor = source.get(name)
        assert (tensor.name, tensor.shape, tensor.dtype) == (name, (3, 4), str(stored[name].dtype).removeprefix("torch."))
        assert tensor.nbytes == stored[name].nbytes and tensor.transform is None
        np.testing.assert_array_equal(tensor.to_float32(), stored[name].float().numpy())
    assert source.get("d").data.view("<i8").tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(UnsupportedModelError, match="Tensor 'd': expected floats, found int64"):
        source.get("d").to_float32()


def test_shards(tmp_path: Path) -> None:
    one, two = {"a": np.ones(3, np.float32), "b": np.zeros(2, np.float32)}, {"c": np.full(4, 2, np.float32)}
    root = write_shards(tmp_path, {"model-1.safetensors": one, "model-2.safetensors": two})
    (root / "other.safetensors").write_bytes(b"not in the index")
    with open_tensors(resolve(str(root))) as source:
        assert source.names() == ["a", "b", "c"] and len(source) == 3 and "c" in source and "d" not in source
        for tensor in source:
            np.testing.assert_array_equal(tensor.to_float32(), (one | two)[tensor.name])
    assert source.names() == []


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="tensor 'z': expected it, found none among 1"):
        open_tensors(resolve(str(tmp_path))).get("z")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    tensors = {"a": np.ones(3, np.float32)}
    root = write_shards(
        tmp_path, {"x.safetensors": tensors, "y.safetensors": tensors | {"b": tensors["a"]}}, {"a": "x.safetensors", "b": "y.safetensors"}
    )
    with pytest.raises(CheckpointError, match=r"y.safetensors: tensor 'a' is also in x.safetensors"):
        open_tensors(resolve(str(root)))


def test_a_tensor_that_the_index_puts_elsewhere(tmp_path: Path) -> None:
    shards = {"x.safetensors": {"a": np.ones(3, np.float32)}, "y.safetensors": {"b": np.ones(3, np.float32)}}
    root = write_shards(tmp_path, shards, {"a": "x.safetensors", "b": "y.safetensors", "c": "y.safetensors"})
    with pytest.raises(CheckpointError, match=r"tensor 'c': expected it in y.safetensors, found it in no file"):
        open_tensors(resolve(str(root)))


def test_a_gguf_file(tmp_path: Path) -> None:
    tensors = samples.llama_tensors()
    source = open_tensors(resolve(str(samples.write_llama(tmp_path / "m.gguf"))))
    assert len(source) == len(tensors)
    assert source.names()[:3] == ["model.embed_tokens.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight"]
    packed = source.get("model.layers.0.self_attn.v_proj.weight")
    expected = tensors["blk.0.attn_v.weight"]
    assert (packed.dtype, packed.shape, packed.nbytes) == ("gguf:Q8_0", expected.shape, expected.size // 32 * 34)
    quantised = gguf.quants.quantize(expected, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(packed.to_float32(), gguf.quants.dequantize(quantised, gguf.GGMLQuantizationType.Q8_0))
    assert source.get("model.norm.weight").dtype == "gguf:F32"
    for tensor in source:
        assert tensor.to_float32().shape == tensor.shape


def test_data_stays_readable_after_its_pages_were_given_back(tmp_path: Path) -> None:
    values = {name: np.full(50_000, index, np.float32) for index, name in enumerate("abc")}
    save_file(values, tmp_path / "model.safetensors")
    source = open_tensors(resolve(str(tmp_path)))
    kept = list(source)
    source.close()
    for tensor in kept:
        np.testing.assert_array_equal(tensor.data.view("<f4"), values[tensor.name])
        assert not tensor.data.flags.writeable


def test_gguf_types_that_can_not_be_dequantised(tmp_path: Path) -> None:
    metadata = samples.llama_metadata() | samples.tokenizer_metadata()
    tensors = samples.llama_tensors()
    path = samples.write_gguf(tmp_path / "m.gguf", "llama", metadata, tensors)
    content = bytearray(path.read_bytes())
    name = b"blk.1.ffn_up.weight"
    at = content.index(name) + len(name) + 4 + 16
    assert content[at : at + 4] == bytes(4)
    content[at] = 24  # I8
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=r"tensor 'blk.1.ffn_up.weight': expected a type of F32.*found I8"):
        open_tensors(resolve(str(path)))


def test_unknown_gguf_tensors_are_refused(tmp_path: Path) -> None:
    tensors = samples.llama_tensors() | {"blk.0.ffn_gate_inp.weight": np.zeros((8, samples.HIDDEN), np.float32)}
    path = samples.write_llama(tmp_path / "m.gguf", None, tensors)
    with pytest.raises(UnsupportedModelError, match=r"Tensor 'blk.0.ffn_gate_inp.weight'"):
        open_tensors(resolve(str(path)))


def test_checkpoint_does_not_import_torch() -> None:
    code = "import sys, canter.checkpoint.tensors, canter.checkpoint.model_config; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
