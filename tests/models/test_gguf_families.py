"""GGUF files of other than Llama-shaped models, converted as llama.cpp's converter does, against transformers' logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from canter.checkpoint.gguf_config import read_config
from canter.checkpoint.gguf_reader import GGUFParts
from canter.core.errors import CheckpointError, UnsupportedModelError
from tests.checkpoint import samples
from tests.models.families import FAMILIES, Family, build_oracle, oracle_logits, token_ids
from tests.models.harness import Harness
from tests.models.loading import load

VOCAB = 131
BY_NAME = {family.name: family for family in FAMILIES}


def _family(name: str, **changes: Any) -> Family:
    family = BY_NAME[name]
    return replace(family, settings={**family.settings, **changes})


CASES = {
    # name: GGUF architecture, a model whose constants such a file can hold
    "mamba": ("mamba", _family("mamba")),
    "falcon-mamba": ("mamba", _family("falcon-mamba", mixer_rms_eps=1e-6)),
    "mamba2": ("mamba2", _family("mamba2", time_step_limit=[0.0, 1e9], use_bias=False)),
    "lfm2": ("lfm2", _family("lfm2")),
    "bloom": ("bloom", _family("bloom")),
    "bloom-six-heads": ("bloom", _family("bloom-six-heads")),
}


def _converted(arch: str, name: str, values: np.ndarray, config: Any) -> np.ndarray:
    """What the converter makes of a tensor."""
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return values.squeeze(1)
    if name.endswith("A_log"):
        values = -np.exp(values)
    if arch == "mamba2" and name.endswith(("A_log", ".D")):
        return values.reshape(-1, 1)
    if arch == "mamba2" and name.endswith("mixer.norm.weight"):
        return values.reshape(config.n_groups, -1)
    if "query_key_value" in name:
        heads = values.reshape(config.n_head, 3, config.hidden_size // config.n_head, *values.shape[1:])
        return np.concatenate([heads[:, part].reshape(-1, *values.shape[1:]) for part in range(3)])
    return values


def _metadata(arch: str, config: Any) -> dict[str, Any]:
    common = {"block_count": config.num_hidden_layers, "context_length": 64, "embedding_length": config.hidden_size}
    if arch == "bloom":
        return common | {"attention.head_count": config.n_head, "attention.layer_norm_epsilon": config.layer_norm_epsilon}
    if arch == "lfm2":
        width = build_oracle(CASES["lfm2"][1]).model.layers[0].feed_forward.w1.weight.shape[0]  # transformers derives it
        counts = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
        heads = {"attention.head_count": config.num_attention_heads, "attention.head_count_kv": counts}
        others = {"rope.freq_base": config.rope_parameters["rope_theta"], "shortconv.l_cache": config.conv_L_cache}
        return common | heads | others | {"feed_forward_length": width, "attention.layer_norm_rms_epsilon": config.norm_eps}
    state = {"ssm.state_size": config.state_size, "ssm.conv_kernel": config.conv_kernel, "ssm.inner_size": 2 * config.hidden_size}
    state |= {"attention.layer_norm_rms_epsilon": config.layer_norm_epsilon}
    if arch == "mamba2":
        return common | state | {"ssm.time_step_rank": config.num_heads, "ssm.group_count": config.n_groups}
    return common | state | {"ssm.time_step_rank": config.time_step_rank, "ssm.dt_b_c_rms": config.model_type == "falcon_mamba"}


def _write(path: Path, arch: str, family: Family, **changes: Any) -> Path:
    model = build_oracle(family)
    numbers = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[arch], model.config.num_hidden_layers)
    tensors: dict[str, np.ndarray] = {}
    for name, parameter in model.state_dict().items():
        if (name.startswith("lm_head") and model.config.tie_word_embeddings) or name.endswith("_rms"):
            continue
        known = name.replace("dt_bias", "dt_proj.bias").removeprefix("transformer.")
        stored = names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        tensors[stored] = _converted(arch, name, parameter.float().numpy(), model.config)
    metadata = {f"{arch}.{key}": value for key, value in (_metadata(arch, model.config) | changes).items() if value is not None}
    metadata |= samples.tokenizer_metadata()
    metadata |= {"tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB)], "tokenizer.ggml.token_type": [1] * VOCAB}
    samples.write_gguf(path, arch, metadata, tensors)
    return path


@pytest.mark.parametrize("provider", ["reference", "native"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANTER_KERNELS", provider)
    arch, family = CASES[case]
    loaded = load(_write(tmp_path / "model.gguf", arch, family))
    assert loaded.architecture == family.architecture
    logits = Harness(loaded, 4).run(token_ids()[0].tolist(), [9, 1, 13])
    torch.testing.assert_close(logits, oracle_logits(family)[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("case", "change", "error", "words"),
    [
        ("mamba2", {"ssm.time_step_rank": 7}, CheckpointError, "time_step_rank.*divisor of the 96 channels"),
        ("mamba2", {"ssm.inner_size": 72, "ssm.time_step_rank": 6}, UnsupportedModelError, "72 channels for a hidden size of 48"),
        ("lfm2", {"attention.head_count_kv": 2}, CheckpointError, "head_count_kv.*4 counts of heads"),
        ("lfm2", {"attention.head_count_kv": [0, 2, 3, 0]}, UnsupportedModelError, "differ in number or size"),
        ("lfm2", {"rope.scaling.type": "yarn"}, UnsupportedModelError, "stretched rope"),
        ("bloom", {"feed_forward_length": 100}, UnsupportedModelError, "four times the hidden size"),
        ("mamba", {"ssm.state_size": None}, CheckpointError, "state_size"),
    ],
)
def test_files_that_make_no_sense_are_refused(
    case: str, change: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    arch, family = CASES[case]
    path = _write(tmp_path / "model.gguf", arch, family, **change)
    with pytest.raises(error, match=words):
        read_config(GGUFParts([path]))


@pytest.mark.parametrize("arch", ["granitehybrid", "falcon-h1", "nemotron_h", "jamba", "qwen3next", "qwen35", "gemma3n", "gemma4", "mpt"])
def test_other_architectures_are_refused_by_name(arch: str, tmp_path: Path) -> None:
    samples.write_gguf(tmp_path / "model.gguf", arch, samples.llama_metadata(arch), samples.llama_tensors())
    with pytest.raises(UnsupportedModelError, match=f"GGUF architecture '{arch}' is not supported"):
        read_config(GGUFParts([tmp_path / "model.gguf"]))
