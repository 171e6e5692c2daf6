"""Qwen2, Qwen2.5 (arXiv 2407.10671, 2412.15115) and Qwen3 (arXiv 2505.09388), the dense models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from canter.layers.decoder import Decoder, DecoderArgs
from canter.models import hf_config, names
from canter.models.weights import WeightMap

_RULES = (*names.OUTER, *names.LLAMA_NORMS, *names.SEPARATE_QKV, *names.OUTPUT, *names.SEPARATE_GATE_UP, *names.DOWN)


def _sliding(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Kinds of layers and their window. With `use_sliding_window`, layers from `max_window_layers` on slide unless
    `layer_types` says otherwise; without it `sliding_window` means nothing."""
    num_layers = hf_config.positive_int(hf, "num_hidden_layers")
    if not hf_config.flag(hf, "use_sliding_window") or hf.get("sliding_window", 4096) is None:
        return {}
    first = int(hf_config.number(hf, "max_window_layers", 28))
    default = [hf_config.SLIDING if i >= first else hf_config.FULL for i in range(num_layers)]
    window = hf_config.positive_int(hf, "sliding_window", 4096)
    return {"types": hf_config.layer_types(hf, num_layers, default), "window": window}


class Qwen2Args(DecoderArgs):
    """Qwen2: queries, keys and values have biases, whatever the config says."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        return cls(**hf_config.llama_shape(hf, qkv_bias=True, **_sliding(hf)))


class Qwen3Args(DecoderArgs):
    """Qwen3: each head's queries and keys are normalised; `head_dim` is the config's, 128 where it has none."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        bias = hf_config.flag(hf, "attention_bias")
        return cls(**hf_config.llama_shape(hf, default_head_dim=128, qkv_bias=bias, output_bias=bias, qk_norm=True, **_sliding(hf)))


class Qwen2ForCausalLM(Decoder):
    """`Qwen2ForCausalLM` of config.json."""

    Args = Qwen2Args
    WEIGHTS = WeightMap(_RULES, names.BODY_RENAMES, names.ROPE_BUFFERS)


class Qwen3ForCausalLM(Decoder):
    """`Qwen3ForCausalLM` of config.json."""

    Args = Qwen3Args
    WEIGHTS = WeightMap((*_RULES, *names.QK_NORM), names.BODY_RENAMES, names.ROPE_BUFFERS)
