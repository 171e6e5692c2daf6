"""Names and transforms against models of transformers, with the names of the `gguf` package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from canter.checkpoint.gguf_names import ARCH_NAMES, block_index, hf_name
from canter.checkpoint.gguf_transforms import SubtractOne, UnpermuteRows, transform_for
from canter.checkpoint.model_config import read_model_config
from canter.checkpoint.resolve import resolve
from canter.checkpoint.tensors import open_tensors
from canter.core.errors import CheckpointError, UnsupportedModelError
from tests.checkpoint import samples

COMMON = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def permute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """What the converter does to the rows of query and key projections of Llama-shaped models."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def convert(arch: str, name: str, values: np.ndarray) -> np.ndarray:
    if arch in ("llama", "smollm3") and ("q_proj" in name or "k_proj" in name):
        return permute(values, COMMON["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
    return values + np.float32(1) if arch.startswith("gemma") and name.endswith("norm.weight") else values


def write_model(path: Path, arch: str, model: torch.nn.Module, metadata: dict[str, Any]) -> dict[str, np.ndarray]:
    """Convert a transformers model to GGUF as the converter does; returns its state."""
    numbers = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[arch], COMMON["num_hidden_layers"])
    state = {name: values.detach().numpy() for name, values in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    tensors = {}
    for name, values in state.items():
        stem, suffix = name.rsplit(".", 1)
        tensors[f"{names.get_name(stem)}.{suffix}"] = convert(arch, name, values)
    samples.write_gguf(path, arch, metadata, tensors)
    return state


def metadata_of(arch: str, config: transformers.PretrainedConfig, **extra: Any) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
    }
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id, "padding_token_id": config.pad_token_id}
    metadata = {f"{arch}.{key}": value for key, value in (keys | extra).items()}
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in ids.items()}


def randomise(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)


Case = tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "llama": (transformers.LlamaConfig, {"rope_theta": 20000.0}, {"rope.freq_base": 20000.0, "rope.dimension_count": 8}),
    "llama-biased": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}, {"rope.dimension_count": 8}),
    "qwen2": (transformers.Qwen2Config, {"rope_theta": 1e6}, {"rope.freq_base": 1e6}),
    "qwen3": (transformers.Qwen3Config, {"rope_theta": 1e6, "head_dim": 12}, {"rope.freq_base": 1e6}),
    "smollm3": (
        transformers.SmolLM3Config,
        {"rope_theta": 2e6, "num_hidden_layers": 3},
        {"rope.freq_base": 2e6, "rope.dimension_count": 8},
    ),
    "gemma2": (
        transformers.Gemma2Config,
        {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 5, "tie_word_embeddings": True},
        {"attention.sliding_window": 5, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 5, "tie_word_embeddings": True, "rope_theta": 1e6},
        {"attention.sliding_window": 5, "rope.freq_base": 1e6},
    ),
    "phi3": (
        transformers.Phi3Config,
        {"partial_rotary_factor": 0.75, "sliding_window": 7},
        {"rope.dimension_count": 6, "attention.sliding_window": 7, "rope.scaling.original_context_length": 4096},
    ),
}
SAME = (
    *COMMON,
    *("model_type", "hidden_act", "hidden_activation", "attention_bias", "mlp_bias", "sliding_window", "layer_types", "rope_parameters"),
    *("no_rope_layers", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "partial_rotary_factor"),
)


@pytest.mark.parametrize("case", CASES)
def test_a_converted_model_reads_back(tmp_path: Path, case: str) -> None:
    arch = case.partition("-")[0]
    make_config, changes, extra = CASES[case]
    config = make_config(**(COMMON | changes))
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model)
    state = write_model(tmp_path / "m.gguf", arch, model, metadata_of(arch, config, **extra))

    files = resolve(str(tmp_path / "m.gguf"))
    ours = read_model_config(files, {})
    assert ours.architecture == type(model).__name__
    with open_tensors(files) as source:
        assert sum(tensor.num_elements for tensor in source) == sum(values.size for values in state.values())
    read_back = make_config(**{key: value for key, value in ours.hf.items() if value is not None or not key.startswith("rope")})
    assert read_back.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    for key in SAME:
        if hasattr(config, key):
            assert getattr(read_back, key) == getattr(config, key), key

    with open_tensors(files) as source:
        assert sorted(source.names()) == sorted(state)
        for tensor in source:
            expected = state[tensor.name]
            assert tensor.shape == expected.shape
            np.testing.assert_allclose(tensor.to_float32(), expected, rtol=0, atol=0 if tensor.transform is None else 1e-6)


def test_rotary_rows_come_back_exactly() -> None:
    values = np.random.default_rng(0).standard_normal((6 * 8, 5)).astype(np.float32)
    np.testing.assert_array_equal(UnpermuteRows(6)(permute(values, 6)), values)
    np.testing.assert_array_equal(UnpermuteRows(6)(permute(values[:, 0], 6)), values[:, 0])
    packed = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(48, 3)
    np.testing.assert_array_equal(UnpermuteRows(6)(permute(packed, 6)), packed)


def test_rotary_rows_that_heads_do_not_divide() -> None:
    with pytest.raises(CheckpointError, match="48 rows can't be that of 5 heads"):
        UnpermuteRows(5)(np.zeros((48, 2), np.float32))


def test_transforms_by_name() -> None:
    assert transform_for("llama", "blk.3.attn_q.weight", 6, 2) == UnpermuteRows(6)
    assert transform_for("llama", "blk.3.attn_k.bias", 6, 2) == UnpermuteRows(2)
    assert transform_for("llama", "blk.3.attn_v.weight", 6, 2) is None
    assert transform_for("qwen2", "blk.3.attn_q.weight", 6, 2) is None
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.attn_q_norm.weight", "blk.0.post_ffw_norm.weight"):
        assert transform_for("gemma3", name, 6, 2) == SubtractOne()
    assert transform_for("gemma3", "token_embd.weight", 6, 2) is None


@pytest.mark.parametrize("arch", ARCH_NAMES)
def test_rotary_tables_are_no_weights(arch: str) -> None:
    assert hf_name(arch, "rope_freqs.weight") is None
    assert hf_name(arch, "blk.0.attn_rot_embd.weight") is None
    assert hf_name(arch, "token_embd.weight") == ARCH_NAMES[arch].outside["token_embd.weight"]


@pytest.mark.parametrize(
    "name", ["blk.0.ffn_gate_exps.weight", "blk.0.attn_q", "blk.x.attn_q.weight", "blk.0.attn_q.scale", "other.weight"]
)
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"Tensor '{name}': GGUF architecture 'llama' has no such weight"):
        hf_name("llama", name)


def test_block_index() -> None:
    assert [block_index(name) for name in ("blk.12.attn_q.weight", "blk.0.x.bias", "output.weight")] == [12, 0, None]
