"""Tiny configurations of every family, with every constant randomised, and transformers' own logits for them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

NUM_TOKENS = 23
NUM_SEQUENCES = 3

LLAMA = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 80,
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# transformers checks that the heads divide the hidden size here; the head size is still its own.
GEMMA = LLAMA | {"num_hidden_layers": 6, "sliding_window": 5, "query_pre_attn_scalar": 20}
_HALVES = ["sliding_attention", "full_attention"] * 3
GEMMA3N = LLAMA | {
    "num_hidden_layers": 6,
    "intermediate_size": [80, 72, 64, 56, 88, 96],
    "layer_types": _HALVES,
    "sliding_window": 5,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "laurel_rank": 5,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    },
}
GEMMA4 = LLAMA | {
    "num_hidden_layers": 6,
    "layer_types": _HALVES,
    "sliding_window": 5,
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 131,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    },
}
LLAMA4 = LLAMA | {
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 80,
    "intermediate_size": 24,
    "moe_layers": [],
    "interleave_moe_layer_step": 8,
    "attention_chunk_size": 7,
    "floor_scale": 3,
    "attn_scale": 0.4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PHI_PART = 0.5  # of a head of 16: 8 rotated dimensions, 4 factors
PHI = {key: value for key, value in LLAMA.items() if key != "head_dim"} | {"hidden_size": 96}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "partial_rotary_factor": PHI_PART,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.2, 2.0, 3.5, 6.0],
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@dataclass(frozen=True)
class Family:
    """One test row: a config class and a model class of transformers, and what the config is made of."""

    name: str
    config_class: str
    model_class: str
    settings: Mapping[str, Any] = field(hash=False)
    max_model_len: int = 64
    dense: bool = False
    """Experts give way to a gated MLP: what is left of a model whose experts aren't served."""
    saved_as: str = ""
    """The architecture of a checkpoint that holds more than this model, or is named otherwise."""
    nested: str = ""
    """The key of such a checkpoint's config that this model's lies under."""
    prefix: str = "model."
    """What such a checkpoint's tensors have in place of `model.`"""

    @property
    def architecture(self) -> str:
        return self.saved_as or self.model_class


def _rope(kind: str, theta: float = 100.0, **values: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **values}


def _gemma3_ropes(full: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_attention": _rope("default", 50.0), "full_attention": dict(full)}


FAMILIES = [
    Family("llama", "LlamaConfig", "LlamaForCausalLM", LLAMA | {"rope_parameters": _rope("default"), "tie_word_embeddings": False}),
    Family(
        "llama-biases-llama3",
        "LlamaConfig",
        "LlamaForCausalLM",
        LLAMA | {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    Family("llama-linear", "LlamaConfig", "LlamaForCausalLM", LLAMA | {"rope_parameters": _rope("linear", factor=3.0)}),
    Family(
        "llama-yarn",
        "LlamaConfig",
        "LlamaForCausalLM",
        LLAMA | {"rope_parameters": _rope("yarn", factor=4.0, beta_fast=4.0, beta_slow=0.5, original_max_position_embeddings=16)},
    ),
    Family(
        "llama-dynamic",
        "LlamaConfig",
        "LlamaForCausalLM",
        LLAMA | {"max_position_embeddings": 16, "rope_parameters": _rope("dynamic", factor=2.0)},
        max_model_len=NUM_TOKENS,
    ),
    Family("mistral", "MistralConfig", "MistralForCausalLM", LLAMA | {"sliding_window": 5, "tie_word_embeddings": False}),
    Family("mistral-full", "MistralConfig", "MistralForCausalLM", LLAMA | {"sliding_window": None, "tie_word_embeddings": True}),
    Family(
        "smollm3",
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        LLAMA | {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "rope_parameters": _rope("default")},
    ),
    Family(
        "smollm3-window",
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        LLAMA
        | {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 6,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    Family("qwen2", "Qwen2Config", "Qwen2ForCausalLM", LLAMA | {"head_dim": 8, "tie_word_embeddings": True}),
    Family(
        "qwen2-window",
        "Qwen2Config",
        "Qwen2ForCausalLM",
        LLAMA | {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "tie_word_embeddings": False},
    ),
    Family("qwen3", "Qwen3Config", "Qwen3ForCausalLM", LLAMA | {"tie_word_embeddings": False}),
    Family(
        "qwen3-window",
        "Qwen3Config",
        "Qwen3ForCausalLM",
        LLAMA
        | {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    Family(
        "gemma2",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "tie_word_embeddings": True},
    ),
    Family(
        "gemma2-untied",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True, "tie_word_embeddings": False},
    ),
    Family(
        "gemma3",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        GEMMA | {"sliding_window_pattern": 3, "rope_parameters": _gemma3_ropes(_rope("linear", 500.0, factor=8.0))},
    ),
    Family(
        "gemma3-untied",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        GEMMA
        | {
            "sliding_window_pattern": 2,
            "rope_parameters": _gemma3_ropes(_rope("default", 500.0)),
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
        },
    ),
    Family(
        "gemma3-multimodal",
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        {
            "text_config": GEMMA | {"sliding_window_pattern": 3, "rope_parameters": _gemma3_ropes(_rope("linear", 500.0, factor=8.0))},
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
            "image_token_index": 130,
            "boi_token_index": 129,
            "eoi_token_index": 128,
        },
    ),
    Family(
        "phi3",
        "Phi3Config",
        "Phi3ForCausalLM",
        PHI | {"rope_parameters": _rope("default", partial_rotary_factor=PHI_PART), "sliding_window": 6, "tie_word_embeddings": False},
    ),
    Family(
        "phi3-short",
        "Phi3Config",
        "Phi3ForCausalLM",
        PHI | {"original_max_position_embeddings": 32, "rope_parameters": LONGROPE, "tie_word_embeddings": True},
        max_model_len=32,
    ),
    Family(
        "phi3-long",
        "Phi3Config",
        "Phi3ForCausalLM",
        PHI | {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE, "tie_word_embeddings": False},
    ),
]

# Families whose memory is attention, but not plain: windows over prompts, chunks, others' keys, distances.
ATTENTION = [
    Family(
        "gpt-oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        LLAMA
        | {
            "num_hidden_layers": 4,
            "num_local_experts": 0,
            "sliding_window": 4,
            "rope_parameters": _rope("yarn", factor=4.0, beta_fast=4.0, beta_slow=0.5, truncate=False, original_max_position_embeddings=16),
        },
        dense=True,
    ),
    Family(
        "gpt-oss-default-rope",
        "GptOssConfig",
        "GptOssForCausalLM",
        LLAMA | {"num_local_experts": 0, "sliding_window": 7, "attention_bias": False},
        dense=True,
    ),
    Family(
        "gemma3n",
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        GEMMA3N | {"vocab_size_per_layer_input": 100, "activation_sparsity_pattern": [0.9, 0.4, 0.0, 0.7, 0.0, 0.0]},
    ),
    Family(
        "gemma3n-plain",
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        GEMMA3N
        | {
            "num_kv_shared_layers": 0,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "vocab_size_per_layer_input": 131,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
        },
    ),
    Family("gemma4", "Gemma4TextConfig", "Gemma4ForCausalLM", GEMMA4 | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True}),
    Family(
        "gemma4-values-are-keys",
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 3,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
    ),
    Family("llama4", "Llama4TextConfig", "Llama4ForCausalLM", LLAMA4 | {"no_rope_layer_interval": 2}),
    Family(
        "llama4-plain-queries",
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        LLAMA4
        | {
            "no_rope_layers": [0, 1, 1, 0],
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3_ROPE,
        },
    ),
    Family(
        "mpt",
        "MptConfig",
        "MptForCausalLM",
        {"d_model": 48, "n_heads": 4, "n_layers": 3, "vocab_size": 131, "max_seq_len": 64, "layer_norm_epsilon": 1e-3},
    ),
    Family(
        "mpt-six-heads",
        "MptConfig",
        "MptForCausalLM",
        {
            "d_model": 48,
            "n_heads": 6,
            "n_layers": 3,
            "vocab_size": 131,
            "max_seq_len": 64,
            "attn_config": {"softmax_scale": 0.4},
            "tie_word_embeddings": False,
        },
    ),
    Family(
        "bloom",
        "BloomConfig",
        "BloomForCausalLM",
        {"hidden_size": 48, "n_head": 8, "n_layer": 3, "vocab_size": 131, "layer_norm_epsilon": 1e-3},
    ),
    Family(
        "bloom-six-heads",
        "BloomConfig",
        "BloomForCausalLM",
        {"hidden_size": 72, "n_head": 6, "n_layer": 3, "vocab_size": 131, "tie_word_embeddings": False},
    ),
]
ATTENTION += [
    replace(family, name=f"{family.name}-{part}", saved_as=architecture, nested=nested, prefix=prefix)
    for family in ATTENTION
    for name, part, architecture, nested, prefix in (
        ("gemma3n", "multimodal", "Gemma3nForConditionalGeneration", "text_config", "model.language_model."),
        ("gemma4", "multimodal", "Gemma4ForConditionalGeneration", "text_config", "model.language_model."),
        ("llama4", "multimodal", "Llama4ForConditionalGeneration", "text_config", "language_model.model."),
        ("mpt", "original", "MPTForCausalLM", "", "model."),
    )
    if family.name == name
]
ATTENTION += [
    # With no more generated than the window holds, all is plain attention: see test_prompt_window.py.
    Family(
        f"unlimited-ocr-{nested}",
        "LlamaConfig",
        "LlamaForCausalLM",
        LLAMA | {"rope_parameters": _rope("default"), "tie_word_embeddings": False, "first_k_dense_replace": LLAMA["num_hidden_layers"]},
        saved_as=architecture,
        nested=nested,
        prefix=prefix,
    )
    for nested, architecture, prefix in (
        ("language_config", "UnlimitedOCRForCausalLM", "model."),
        ("text_config", "UnlimitedOcrForConditionalGeneration", "model.language_model."),
    )
]
FAMILIES += ATTENTION


MAMBA2 = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 4,
}
ZAMBA2 = {
    "n_mamba_heads": 6,
    "mamba_ngroups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 3,
    "chunk_size": 4,
    "time_step_min": 1e-12,
    "adapter_rank": 5,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
KIMI = {
    "linear_head_dim": 12,
    "linear_num_heads": 3,
    "linear_conv_kernel_dim": 3,
    "mlp_layer_types": ["dense"] * 3,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "num_key_value_heads": 6,
}
_MIXED = {key: value for key, value in LLAMA.items() if key != "head_dim"}

HYBRIDS = [
    Family(
        "mamba2",
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            "vocab_size": 131,
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "num_heads": 6,
            "head_dim": 16,
            "n_groups": 2,
            "state_size": 8,
            "conv_kernel": 4,
            "chunk_size": 4,
            "layer_norm_epsilon": 1e-3,
            "time_step_limit": [0.2, 0.9],
            "use_bias": True,
        },
    ),
    Family(
        "mamba",
        "MambaConfig",
        "MambaForCausalLM",
        {
            "vocab_size": 131,
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "state_size": 7,
            "time_step_rank": 5,
            "conv_kernel": 3,
            "layer_norm_epsilon": 1e-3,
            "use_bias": True,
        },
    ),
    Family(
        "falcon-mamba",
        "FalconMambaConfig",
        "FalconMambaForCausalLM",
        {
            "vocab_size": 131,
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "state_size": 7,
            "time_step_rank": 5,
            "mixer_rms_eps": 1e-2,
            "tie_word_embeddings": False,
        },
    ),
    Family(
        "lfm2",
        "Lfm2Config",
        "Lfm2ForCausalLM",
        _MIXED
        | {
            "num_hidden_layers": 4,
            "norm_eps": 1e-3,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "conv_bias": True,
            "conv_L_cache": 3,
            "block_multiple_of": 5,
            "block_ffn_dim_multiplier": 1.3,
            "rope_parameters": _rope("default"),
        },
    ),
    Family(
        "bamba",
        "BambaConfig",
        "BambaForCausalLM",
        _MIXED | MAMBA2 | {"attn_layer_indices": [1], "mamba_proj_bias": True, "rope_parameters": _rope("default")},
    ),
    Family(
        "granite-hybrid",
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        _MIXED
        | MAMBA2
        | {
            "num_local_experts": 0,
            "shared_intermediate_size": 72,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "embedding_multiplier": 3.0,
            "logits_scaling": 1.7,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.4,
            "tie_word_embeddings": True,
        },
    ),
    Family(
        "granite-hybrid-rope",
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        _MIXED
        | MAMBA2
        | {
            "num_local_experts": 0,
            "shared_intermediate_size": 72,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "position_embedding_type": "rope",
            "rope_parameters": _rope("default"),
            "tie_word_embeddings": False,
        },
    ),
    Family(
        "zamba2",
        "Zamba2Config",
        "Zamba2ForCausalLM",
        _MIXED
        | ZAMBA2
        | {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"],
            "num_mem_blocks": 2,
            "num_key_value_heads": 6,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "rope_parameters": _rope("default"),
        },
    ),
    Family(
        "zamba2-one-block",
        "Zamba2Config",
        "Zamba2ForCausalLM",
        _MIXED
        | ZAMBA2
        | {
            "num_hidden_layers": 3,
            "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
            "add_bias_linear": True,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    Family(
        "falcon-h1",
        "FalconH1Config",
        "FalconH1ForCausalLM",
        LLAMA
        | MAMBA2
        | {
            "mamba_d_ssm": 60,
            "mamba_d_head": 10,
            "lm_head_multiplier": 0.7,
            "embedding_multiplier": 2.5,
            "mlp_multipliers": [0.8, 1.3],
            "key_multiplier": 0.6,
            "attention_out_multiplier": 0.9,
            "attention_in_multiplier": 1.4,
            "ssm_multipliers": [0.7, 1.2, 0.6, 1.5, 0.9],
            "ssm_in_multiplier": 1.1,
            "ssm_out_multiplier": 0.8,
            "rope_parameters": _rope("default"),
        },
    ),
    Family(
        "falcon-h1-norm",
        "FalconH1Config",
        "FalconH1ForCausalLM",
        LLAMA
        | MAMBA2
        | {
            "mamba_d_ssm": 60,
            "mamba_d_head": 10,
            "mamba_rms_norm": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": _rope("default"),
            "tie_word_embeddings": True,
        },
    ),
    Family(
        "nemotron-h",
        "NemotronHConfig",
        "NemotronHForCausalLM",
        LLAMA
        | {
            "num_hidden_layers": 5,
            "hybrid_override_pattern": "M*-M-",
            "layer_norm_epsilon": 1e-3,
            "mamba_num_heads": 6,
            "mamba_head_dim": 10,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 4,
            "time_step_min": 1e-12,
        },
    ),
    Family(
        "qwen3-next",
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        LLAMA
        | DELTA
        | {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "num_experts": 0,
            "attention_bias": True,
            "rope_parameters": _rope("default", partial_rotary_factor=0.25),
            "tie_word_embeddings": True,
        },
    ),
    Family(
        "qwen3.5",
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        LLAMA
        | DELTA
        | {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "rope_parameters": _rope("default", partial_rotary_factor=0.5, mrope_section=[2, 1, 1]),
        },
    ),
    Family(
        "qwen3.5-multimodal",
        "Qwen3_5Config",
        "Qwen3_5ForConditionalGeneration",
        {
            "text_config": LLAMA
            | DELTA
            | {
                "head_dim": 16,
                "num_hidden_layers": 4,
                "rope_parameters": _rope("default", partial_rotary_factor=0.5, mrope_section=[2, 1, 1]),
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_heads": 2,
                "patch_size": 4,
                "out_hidden_size": 48,
                "num_position_embeddings": 16,
            },
            "image_token_id": 130,
            "video_token_id": 129,
            "vision_start_token_id": 128,
            "vision_end_token_id": 127,
            "tie_word_embeddings": False,
        },
    ),
    Family(
        "jamba",
        "JambaConfig",
        "JambaForCausalLM",
        _MIXED
        | {
            "num_experts": 1,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_d_state": 7,
            "mamba_d_conv": 3,
            "mamba_dt_rank": 5,
            "mamba_proj_bias": True,
        },
    ),
    Family(
        "minimax",
        "MiniMaxConfig",
        "MiniMaxForCausalLM",
        LLAMA
        | {
            "num_local_experts": 1,
            "num_experts_per_tok": 1,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "block_size": 6,
            "full_attn_alpha_factor": 0.8,
            "full_attn_beta_factor": 1.2,
            "linear_attn_alpha_factor": 1.3,
            "linear_attn_beta_factor": 0.7,
            "mlp_alpha_factor": 0.9,
            "mlp_beta_factor": 1.4,
            "rope_parameters": _rope("default"),
        },
    ),
    Family(
        "kimi-linear",
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        _MIXED
        | {
            "linear_head_dim": 12,
            "linear_num_heads": 3,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["linear_attention"] * 3,
            "mlp_layer_types": ["dense"] * 3,
        },
    ),
    Family(
        "kimi-linear-latent",
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        _MIXED | KIMI | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "q_lora_rank": None},
    ),
    Family(
        "kimi-linear-latent-queries",
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        _MIXED | KIMI | {"layer_types": ["full_attention", "linear_attention", "full_attention"], "q_lora_rank": 9},
    ),
]
FAMILIES += HYBRIDS


def token_ids() -> Tensor:
    """[NUM_SEQUENCES, NUM_TOKENS] ids that no config gives a meaning to."""
    return torch.randint(3, 128, (NUM_SEQUENCES, NUM_TOKENS), generator=torch.Generator().manual_seed(5))


@cache
def build_oracle(family: Family) -> transformers.PreTrainedModel:
    """transformers' model of a family, float32, everything random, but numbers that bfloat16 has too: whatever type a checkpoint is
    loaded in, the weights are the same."""
    settings = json.loads(json.dumps(dict(family.settings)))
    config = getattr(transformers, family.config_class)(**settings, attn_implementation="eager")
    torch.manual_seed(11)
    model = getattr(transformers, family.model_class)(config).eval().float()
    if family.dense:
        for layer in model.model.layers:
            layer.mlp = _DenseMLP(config.hidden_size, config.intermediate_size)
    _randomise(model)
    return model


class _DenseMLP(torch.nn.Module):
    """In place of experts, which return their scores too."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(hidden_size, width, bias=False)
        self.up_proj = torch.nn.Linear(hidden_size, width, bias=False)
        self.down_proj = torch.nn.Linear(width, hidden_size, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)), None


def _randomise(model: torch.nn.Module) -> None:
    """Norms and biases away from their constants; matrices wide enough that attention is far from uniform."""
    has_bare_scores = model.config.model_type in ("gemma3n_text", "gemma4_text")  # their norms do what others divide scores by
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if has_bare_scores and name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.copy_((0.2 * noise + 1) * parameter.shape[0] ** -0.25)
            elif "norm" in name and parameter.dim() == 1:
                parameter.copy_(0.2 * noise + parameter.mean())
            elif "sinks" in name or "output_scale" in name:
                parameter.copy_(noise + 1)
            elif model.config.model_type == "zamba2" and name.endswith(("mamba.D", "conv1d.bias")):
                parameter.copy_(0.2 * noise + 1)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            elif any(part in name for part in ("embed", "wte", "lm_head")):
                parameter.copy_(noise * 0.2)
            elif model.config.model_type == "zamba2" and any(part in name for part in ("adapter", "q_proj", "k_proj")):
                parameter.copy_(noise * 0.7 * parameter.shape[1] ** -0.5)
            elif parameter.dim() == 2:
                parameter.copy_(noise * 1.5 * parameter.shape[1] ** -0.5)
            elif "conv" in name:
                parameter.copy_(noise * 0.6)
            parameter.copy_(parameter.bfloat16())
        for name, buffer in model.named_buffers():
            if "layer_scalar" in name:
                buffer.copy_((0.2 * torch.randn(buffer.shape) + 0.8).bfloat16())


@cache
def oracle_logits(family: Family) -> Tensor:
    """[NUM_SEQUENCES, NUM_TOKENS, V] float32, each sequence in one pass."""
    with torch.inference_mode():
        return build_oracle(family)(input_ids=token_ids(), use_cache=False).logits.float()


@cache
def bfloat16_oracle_logits(family: Family) -> Tensor:
    """The same, computed in bfloat16 by transformers."""
    model = copy.deepcopy(build_oracle(family))
    for parameter in model.parameters():  # not `model.bfloat16()`, which rounds the tables of rotations too
        parameter.data = parameter.bfloat16()
    with torch.inference_mode():
        return model(input_ids=token_ids(), use_cache=False).logits.float()


def save_oracle(family: Family, directory: Path) -> Path:
    build_oracle(family).save_pretrained(directory)
    if family.saved_as:
        _wrap(family, directory)
    return directory


def _wrap(family: Family, directory: Path) -> None:
    """Make it what a checkpoint of a model that sees, too, looks like."""
    config = json.loads((directory / "config.json").read_text())
    whole = {"architectures": [family.saved_as], "tie_word_embeddings": config.get("tie_word_embeddings", False)}
    whole |= {family.nested: config} if family.nested else config | whole
    (directory / "config.json").write_text(json.dumps(whole))
    tensors = load_file(directory / "model.safetensors")
    named = {family.prefix + name.removeprefix("model.") if name.startswith("model.") else name: t for name, t in tensors.items()}
    if family.nested:
        named["model.vision_tower.patches.weight"] = torch.ones(2, 2)
    save_file(named, directory / "model.safetensors", {"format": "pt"})
