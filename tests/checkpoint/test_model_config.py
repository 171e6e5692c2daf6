from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from canter.checkpoint.model_config import ModelConfig, merge, read_model_config
from canter.checkpoint.resolve import resolve
from canter.core.errors import CheckpointError, UnsupportedModelError
from tests.checkpoint import samples

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def read(root: Path, config: Any, generation: Any = None, overrides: dict[str, Any] | None = None) -> ModelConfig:
    if config is not None:
        (root / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (root / "generation_config.json").write_text(json.dumps(generation))
    save_file({"a": np.ones((3, 4), np.float16), "b": np.ones(5, np.float32)}, root / "model.safetensors")
    return read_model_config(resolve(str(root)), overrides)


def test_a_plain_configuration(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA)
    assert (config.architecture, config.hf) == ("LlamaForCausalLM", LLAMA)
    assert config.facts.architecture == "LlamaForCausalLM"
    assert (config.facts.dtype, config.facts.context_length) == ("bfloat16", 64)
    assert config.generation == {"eos_token_id": 2, "bos_token_id": 1}


def test_generation_config_wins(tmp_path: Path) -> None:
    generation = {"eos_token_id": [2, 7], "temperature": 0.6}
    assert read(tmp_path, LLAMA, generation).generation == {"eos_token_id": [2, 7], "bos_token_id": 1, "temperature": 0.6}


def test_overrides_are_merged(tmp_path: Path) -> None:
    config = {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "layers": [1, 2]}
    changes = {"max_position_embeddings": 32, "rope_scaling": {"factor": 4.0}, "layers": [3]}
    read_config = read(tmp_path, config, overrides=changes)
    assert read_config.facts.context_length == 32
    assert read_config.hf["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert read_config.hf["layers"] == [3]


def test_merge_leaves_its_arguments() -> None:
    base, over = {"a": {"b": 1}}, {"a": {"c": 2}, "d": {"e": 3}}
    assert merge(base, over) == {"a": {"b": 1, "c": 2}, "d": {"e": 3}}
    assert (base, over) == ({"a": {"b": 1}}, {"a": {"c": 2}, "d": {"e": 3}})


def test_a_nested_text_configuration(tmp_path: Path) -> None:
    text = {"max_position_embeddings": 77, "eos_token_id": 1, "dtype": "float16"}
    config = read(tmp_path, {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]})
    assert (config.facts.context_length, config.facts.dtype) == (77, "float16")
    assert config.generation["eos_token_id"] == [1, 106]


def test_a_published_configuration_that_leaves_its_context_to_the_class(tmp_path: Path) -> None:
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    config = read(tmp_path, {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "torch_dtype": "bfloat16"})
    assert config.facts.context_length == 131072


@pytest.mark.parametrize(
    ("extra", "dtype"),
    [({"dtype": "float32"}, "float32"), ({"torch_dtype": "torch.float16"}, "float16"), ({"torch_dtype": "auto"}, "float16")],
)
def test_dtype(tmp_path: Path, extra: dict[str, Any], dtype: str) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    assert read(tmp_path, config | extra).facts.dtype == dtype


def test_yarn_stretches_the_context(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert read(tmp_path, {**LLAMA, "rope_scaling": scaling}).facts.context_length == 256
    assert read(tmp_path, {**LLAMA, "max_position_embeddings": 512, "rope_parameters": scaling}).facts.context_length == 512


def test_dynamic_ropes_stretch_the_context(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    assert read(tmp_path, {**LLAMA, "rope_parameters": scaling}).facts.context_length == 128
    assert read(tmp_path, {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}).facts.context_length == 64


def test_a_gguf_file(tmp_path: Path) -> None:
    config = read_model_config(resolve(str(samples.write_llama(tmp_path / "m.gguf"))), {"rope_theta": 7.0})
    assert config.architecture == config.facts.architecture == "LlamaForCausalLM"
    assert (config.facts.dtype, config.facts.context_length) == ("float32", 128)
    assert config.hf["rope_theta"] == 7.0
    assert config.generation["eos_token_id"] == [2, samples.VOCAB - 2]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "expected a config.json beside the weights, found none"),
        ("{", r"config.json: expected JSON"),
        ("[]", r"config.json: expected a JSON object, found list"),
        ({**LLAMA, "architectures": None}, "key 'architectures': expected a list with the model's class, found None"),
        ({**LLAMA, "architectures": []}, "key 'architectures'"),
        ({**LLAMA, "max_position_embeddings": "many"}, "key 'max_position_embeddings': expected an integer of at least 1, found 'many'"),
        ({"architectures": ["X"]}, "key 'max_position_embeddings': expected the model's context length, found none"),
    ],
)
def test_configurations_that_make_no_sense(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, config)


def test_quantised_checkpoints_are_recognised_or_refused(tmp_path: Path) -> None:
    config = {**LLAMA, "quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(UnsupportedModelError, match=r"key 'quantization_config': checkpoints quantised with 'fp8' are not supported.*awq"):
        read(tmp_path, config)
    assert read(tmp_path, config, overrides={"quantization_config": None}).facts.quantization == "none"
    known = read(tmp_path, {**LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4}})
    assert (known.facts.quantization, known.quantization) == ("awq", {"quant_method": "awq", "bits": 4})
