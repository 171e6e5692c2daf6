"""Phi-3, Phi-3.5 and Phi-4 (arXiv 2404.14219, 2412.08905): Llama's build with fused matrices in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from canter.layers.decoder import Decoder, DecoderArgs
from canter.models import hf_config, names
from canter.models.weights import Rule, WeightMap

_FUSED = (
    Rule(f"{names.LAYER}.self_attn.qkv_proj.weight", "layers.{i}.attention.qkv.weight"),
    Rule(f"{names.LAYER}.mlp.gate_up_proj.weight", "layers.{i}.mlp.gate_up.weight"),
)


class Phi3Args(DecoderArgs):
    """Phi-3: part of each head may be rotated (`partial_rotary_factor`); contexts are stretched by LongRoPE, which older
    configs call "su" or "yarn". `sliding_window` holds for every layer."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        num_layers = hf_config.positive_int(hf, "num_hidden_layers")
        hf = _with_longrope(hf)
        if hf.get("sliding_window") is None:
            return cls(**hf_config.llama_shape(hf, default_eps=1e-5))
        types, window = [hf_config.SLIDING] * num_layers, hf_config.positive_int(hf, "sliding_window")
        return cls(**hf_config.llama_shape(hf, default_eps=1e-5, types=types, window=window))


def _with_longrope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The config with today's name for its kind of rope, and the context of pre-training that the family defaults to."""
    config = dict(hf)
    for key in ("rope_scaling", "rope_parameters"):
        given = config.get(key)
        if not isinstance(given, Mapping):
            continue
        if (given.get("rope_type") or given.get("type")) in ("su", "yarn"):
            config[key] = {**given, "rope_type": "longrope"}
        if config.get("original_max_position_embeddings") is None:
            config["original_max_position_embeddings"] = given.get("original_max_position_embeddings", 4096)
    return config


class Phi3ForCausalLM(Decoder):
    """`Phi3ForCausalLM` of config.json."""

    Args = Phi3Args
    WEIGHTS = WeightMap((*names.OUTER, *names.LLAMA_NORMS, *_FUSED, *names.OUTPUT, *names.DOWN), names.BODY_RENAMES, names.ROPE_BUFFERS)
