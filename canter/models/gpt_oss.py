"""gpt-oss (arXiv 2508.10925): windowed and full layers in turn, a learned sink for each head, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from canter.core.errors import UnsupportedModelError
from canter.layers.decoder import Decoder, DecoderArgs
from canter.models import hf_config, names
from canter.models.weights import Rule, WeightMap

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The rope of a config that has none."""


class GptOssArgs(DecoderArgs):
    """gpt-oss: even layers (from 0) slide. Its experts are not served yet: a config that has them is refused."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        num_experts = int(hf_config.number(hf, "num_local_experts", 128))
        if num_experts:
            raise UnsupportedModelError(
                f"gpt-oss models with experts (num_local_experts {num_experts}) are not supported yet: only their attention is."
            )
        num_layers = hf_config.positive_int(hf, "num_hidden_layers", 36)
        if not (hf.get("rope_scaling") or hf.get("rope_parameters")):
            hf = {**hf, "rope_parameters": _YARN}
        types = hf_config.layer_types(hf, num_layers, [hf_config.FULL if i % 2 else hf_config.SLIDING for i in range(num_layers)])
        bias = hf_config.flag(hf, "attention_bias", True)
        window = hf_config.positive_int(hf, "sliding_window", 128)
        shape = hf_config.llama_shape(
            hf,
            default_eps=1e-5,
            default_theta=150000.0,
            default_head_dim=64,
            qkv_bias=bias,
            output_bias=bias,
            types=types,
            window=window,
        )
        norm = replace(shape["norm"], cast_first=False)
        attention = tuple(replace(args, sinks=True) for args in shape["attention"])
        return cls(**{**shape, "norm": norm, "attention": attention})


class GptOssForCausalLM(Decoder):
    """`GptOssForCausalLM` of config.json, its attention: see `GptOssArgs`."""

    Args = GptOssArgs
    WEIGHTS = WeightMap(
        (
            *names.OUTER,
            *names.LLAMA_NORMS,
            *names.SEPARATE_QKV,
            *names.OUTPUT,
            Rule(f"{names.LAYER}.self_attn.sinks", "layers.{i}.attention.sinks"),
            *names.SEPARATE_GATE_UP,
            *names.DOWN,
        ),
        names.BODY_RENAMES,
        names.ROPE_BUFFERS,
    )
