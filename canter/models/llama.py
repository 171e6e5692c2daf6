"""Llama (arXiv 2302.13971, 2407.21783) and families of its build: Mistral (arXiv 2310.06825) and SmolLM3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from canter.core.errors import CheckpointError
from canter.layers.decoder import Decoder, DecoderArgs
from canter.models import hf_config, names
from canter.models.weights import WeightMap

_WEIGHTS = WeightMap(
    rules=(*names.OUTER, *names.LLAMA_NORMS, *names.SEPARATE_QKV, *names.OUTPUT, *names.SEPARATE_GATE_UP, *names.DOWN),
    renames=names.BODY_RENAMES,
    skip=names.ROPE_BUFFERS,
)


class LlamaArgs(DecoderArgs):
    """Llama: full attention; biases where `attention_bias` and `mlp_bias` say so."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        bias = hf_config.flag(hf, "attention_bias")
        shape = hf_config.llama_shape(hf, qkv_bias=bias, output_bias=bias)
        return cls(**shape, mlp_bias=hf_config.flag(hf, "mlp_bias"))


class MistralArgs(DecoderArgs):
    """Mistral: `sliding_window`, unless it is null, holds for every layer (a config without the key means 4096)."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        num_layers = hf_config.positive_int(hf, "num_hidden_layers")
        if hf.get("sliding_window", 4096) is None:
            return cls(**hf_config.llama_shape(hf))
        types = [hf_config.SLIDING] * num_layers
        return cls(**hf_config.llama_shape(hf, types=types, window=hf_config.positive_int(hf, "sliding_window", 4096)))


class SmolLM3Args(DecoderArgs):
    """SmolLM3: layers that `no_rope_layers` marks with 0, by default every fourth, do without positions (arXiv 2501.18795)."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        num_layers = hf_config.positive_int(hf, "num_hidden_layers")
        rotated = _rotated_layers(hf, num_layers)
        window = hf_config.positive_int(hf, "sliding_window") if _slides(hf) else 0
        default = [hf_config.FULL if has_rope or not window else hf_config.SLIDING for has_rope in rotated]
        bias = hf_config.flag(hf, "attention_bias")
        shape = hf_config.llama_shape(
            hf,
            default_theta=2000000.0,
            default_tied=True,
            qkv_bias=bias,
            output_bias=bias,
            types=hf_config.layer_types(hf, num_layers, default),
            window=window,
            rotated=rotated,
        )
        return cls(**shape, mlp_bias=hf_config.flag(hf, "mlp_bias"))


def _slides(hf: Mapping[str, Any]) -> bool:
    return hf_config.flag(hf, "use_sliding_window") and hf.get("sliding_window") is not None


def _rotated_layers(hf: Mapping[str, Any], num_layers: int) -> list[bool]:
    marks = hf.get("no_rope_layers")
    if marks is None:
        interval = hf_config.positive_int(hf, "no_rope_layer_interval", 4)
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if not isinstance(marks, (list, tuple)) or len(marks) < num_layers:
        raise CheckpointError(f"Config key 'no_rope_layers': expected {num_layers} of 0 and 1, found {marks!r:.120}.")
    return [bool(mark) for mark in marks[:num_layers]]


class LlamaForCausalLM(Decoder):
    """`LlamaForCausalLM` of config.json."""

    Args = LlamaArgs
    WEIGHTS = _WEIGHTS


class MistralForCausalLM(Decoder):
    """`MistralForCausalLM` of config.json."""

    Args = MistralArgs
    WEIGHTS = _WEIGHTS


class SmolLM3ForCausalLM(Decoder):
    """`SmolLM3ForCausalLM` of config.json."""

    Args = SmolLM3Args
    WEIGHTS = _WEIGHTS
