from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canter.checkpoint.gguf_config import read_config, read_generation
from canter.checkpoint.gguf_reader import GGUFParts
from canter.core.errors import CheckpointError, UnsupportedModelError
from tests.checkpoint import samples

HEAD_DIM = samples.HIDDEN // samples.HEADS


def read(tmp_path: Path, extra: dict[str, Any] | None = None, tensors: dict[str, np.ndarray] | None = None) -> dict[str, Any]:
    more = samples.llama_tensors() | (tensors or {})
    return read_config(GGUFParts([samples.write_llama(tmp_path / "m.gguf", extra, more)]))


def read_arch(tmp_path: Path, arch: str, extra: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> dict[str, Any]:
    metadata = samples.llama_metadata(arch) | samples.tokenizer_metadata() | {f"{arch}.{key}": value for key, value in extra.items()}
    more = samples.llama_tensors() | (tensors or {})
    return read_config(GGUFParts([samples.write_gguf(tmp_path / "m.gguf", arch, metadata, more)]))


def test_a_plain_llama(tmp_path: Path) -> None:
    assert read(tmp_path) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": samples.VOCAB,
        "hidden_size": samples.HIDDEN,
        "intermediate_size": samples.INTERMEDIATE,
        "num_hidden_layers": samples.LAYERS,
        "num_attention_heads": samples.HEADS,
        "num_key_value_heads": samples.KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }


def test_defaults_of_keys_that_may_be_missing(tmp_path: Path) -> None:
    gone = {f"llama.{key}": None for key in ("rope.freq_base", "rope.dimension_count", "attention.head_count_kv")}
    config = read(tmp_path, gone | {"tokenizer.ggml.bos_token_id": None})
    assert (config["rope_theta"], config["num_key_value_heads"], config["bos_token_id"]) == (10000.0, samples.HEADS, None)


def test_an_output_layer_unties(tmp_path: Path) -> None:
    assert read(tmp_path, tensors={"output.weight": np.zeros((samples.VOCAB, samples.HIDDEN), np.float32)})["tie_word_embeddings"] is False


def test_equal_values_for_all_layers_are_one(tmp_path: Path) -> None:
    assert read(tmp_path, {"llama.attention.head_count_kv": [2, 2]})["num_key_value_heads"] == 2
    with pytest.raises(UnsupportedModelError, match=r"head_count_kv.*one value for all layers"):
        read(tmp_path, {"llama.attention.head_count_kv": [2, 1]})


def test_a_window_makes_a_mistral(tmp_path: Path) -> None:
    config = read(tmp_path, {"llama.attention.sliding_window": 16})
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 16)
    assert "sliding_window" not in read(tmp_path, {"llama.attention.sliding_window": 0})


def test_rope_factors_of_llama_3(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    config = read(tmp_path, tensors={"rope_freqs.weight": factors})
    assert config["rope_scaling"] == {"rope_type": "explicit_factors", "factors": factors.tolist()}


@pytest.mark.parametrize("factors", [np.ones(3), np.zeros(HEAD_DIM // 2), np.full(HEAD_DIM // 2, np.nan)])
def test_rope_factors_that_make_no_sense(tmp_path: Path, factors: np.ndarray) -> None:
    with pytest.raises(CheckpointError, match=r"tensor 'rope_freqs.weight': expected"):
        read(tmp_path, tensors={"rope_freqs.weight": factors.astype(np.float32)})


def test_linear_and_yarn(tmp_path: Path) -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert read(tmp_path, linear)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    yarn = linear | {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 32}
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert read(tmp_path, yarn)["rope_scaling"] == expected
    tuned = yarn | {"llama.rope.scaling.yarn_beta_fast": 16.0, "llama.rope.scaling.attn_factor": 0.5}
    scaling = read(tmp_path, tuned)["rope_scaling"]
    assert scaling["beta_fast"] == 16.0
    assert scaling["attention_factor"] == pytest.approx(0.5 * (0.1 * np.log(4.0) + 1))
    with pytest.raises(UnsupportedModelError, match=r"rope.scaling.type.*found 'spiral'"):
        read(tmp_path, {"llama.rope.scaling.type": "spiral"})


def test_phi3_longrope(tmp_path: Path) -> None:
    short, long = np.linspace(1, 2, 6, dtype=np.float32), np.linspace(1, 9, 6, dtype=np.float32)
    extra = {"rope.dimension_count": 12, "rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.19}
    both = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    config = read_arch(tmp_path, "phi3", extra, both)
    assert config["rope_scaling"] == {
        "rope_type": "longrope",
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
        "attention_factor": 1.19,
    }
    assert (config["original_max_position_embeddings"], config["partial_rotary_factor"]) == (32, 0.75)
    del both["rope_factors_long.weight"]
    with pytest.raises(CheckpointError, match=r"expected both of rope_factors_short.weight and rope_factors_long.weight"):
        read_arch(tmp_path, "phi3", extra, both)


def test_gemma_constants(tmp_path: Path) -> None:
    config = read_arch(tmp_path, "gemma2", {})
    assert (config["sliding_window"], config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (4096, 50.0, 30.0)
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert config["hidden_activation"] == "gelu_pytorch_tanh" and "hidden_act" not in config
    config = read_arch(tmp_path, "gemma3", {"attention.sliding_window": 8, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    assert (config["rope_local_base_freq"], config["rope_theta"]) == (10000.0, 50000.0)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert config["layer_types"] == ["sliding_attention"] * 2
    assert config["final_logit_softcapping"] is None


def test_gemma_27b_scales_queries_by_width_over_heads(tmp_path: Path) -> None:
    tensors = {f"blk.{layer}.attn_norm.weight": np.zeros(samples.HIDDEN, np.float32) for layer in range(62)}
    extra = {"block_count": 62, "attention.sliding_window": 8, "attention.key_length": 32, "rope.dimension_count": 32}
    config = read_arch(tmp_path, "gemma3", extra, tensors)
    assert (config["head_dim"], config["query_pre_attn_scalar"]) == (32, samples.HIDDEN // samples.HEADS)
    assert config["layer_types"][:7] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]


def test_smollm3_leaves_out_every_fourth_rope(tmp_path: Path) -> None:
    tensors = {f"blk.{layer}.attn_norm.weight": np.zeros(samples.HIDDEN, np.float32) for layer in range(5)}
    assert read_arch(tmp_path, "smollm3", {"block_count": 5}, tensors)["no_rope_layers"] == [1, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.embedding_length": None}, "key 'llama.embedding_length': expected an integer of at least 1, found nothing"),
        ({"llama.embedding_length": "wide"}, "key 'llama.embedding_length': expected an integer of at least 1, found 'wide'"),
        (
            {"llama.embedding_length": 32, "llama.rope.dimension_count": None},
            r"tensor 'token_embd.weight': expected shape \(vocabulary, 32\), found \(20, 64\)",
        ),
        ({"llama.block_count": 3}, "key 'llama.block_count': expected the 2 layers that the tensors make up, found 3"),
        ({"llama.block_count": 0}, "key 'llama.block_count': expected an integer of at least 1, found 0"),
        ({"llama.attention.head_count_kv": 3}, "key 'llama.attention.head_count': expected a multiple of the 3"),
        ({"llama.attention.head_count": 128}, "key 'llama.attention.key_length': expected an integer of at least 1, found 0"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon': expected a number above 0, found 0.0"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon': expected a number above 0, found nan"),
        ({"llama.rope.dimension_count": 8}, "key 'llama.rope.dimension_count': expected the head size 16, found 8"),
        ({"llama.attention.value_length": 8}, r"values of another size than keys \(16\) are not supported"),
        ({"llama.expert_count": 8}, "mixture-of-experts models are not supported"),
        ({"general.architecture": "jamba"}, "GGUF architecture 'jamba' is not supported; supported: llama, qwen2"),
        ({"tokenizer.ggml.eos_token_id": "end"}, "key 'tokenizer.ggml.eos_token_id': expected a token id, found 'end'"),
    ],
)
def test_keys_that_make_no_sense(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    if "general.architecture" in extra:
        path = samples.write_gguf(tmp_path / "m.gguf", extra["general.architecture"], {}, samples.llama_tensors())
    else:
        path = samples.write_llama(tmp_path / "m.gguf", extra)
    with pytest.raises(CheckpointError, match=message):
        read_config(GGUFParts([path]))


def test_missing_embedding(tmp_path: Path) -> None:
    tensors = samples.llama_tensors()
    del tensors["token_embd.weight"]
    with pytest.raises(CheckpointError, match=r"tensor 'token_embd.weight': expected it, found none"):
        read_config(GGUFParts([samples.write_llama(tmp_path / "m.gguf", None, tensors)]))


def test_token_ids_outside_the_vocabulary_count_as_none(tmp_path: Path) -> None:
    assert read(tmp_path, {"tokenizer.ggml.bos_token_id": samples.VOCAB})["bos_token_id"] is None


def generation(tmp_path: Path, extra: dict[str, Any], arch: str = "llama") -> dict[str, Any]:
    metadata = samples.llama_metadata(arch) | samples.tokenizer_metadata() | extra
    return read_generation(GGUFParts([samples.write_gguf(tmp_path / "m.gguf", arch, metadata, samples.llama_tensors())]))


def test_generation_ends_at_every_end_of_turn(tmp_path: Path) -> None:
    im_end, end_of_text = samples.VOCAB - 2, samples.VOCAB - 1
    assert generation(tmp_path, {}) == {"bos_token_id": 1, "eos_token_id": [2, im_end], "pad_token_id": 3}
    more = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 8}
    assert generation(tmp_path, more)["eos_token_id"] == [2, 7, 8, im_end]
    assert generation(tmp_path, {"tokenizer.ggml.eos_token_id": im_end}, "qwen2")["eos_token_id"] == [im_end, end_of_text]
    ordinary = {"tokenizer.ggml.token_type": [1] * samples.VOCAB}
    assert generation(tmp_path, ordinary)["eos_token_id"] == [2]


def test_generation_takes_recommended_sampling(tmp_path: Path) -> None:
    extra = {"general.sampling.temp": 0.7, "general.sampling.top_k": 20, "general.sampling.top_p": 0.95}
    assert {"temperature": 0.7, "top_k": 20, "top_p": 0.95}.items() <= generation(tmp_path, extra).items()
