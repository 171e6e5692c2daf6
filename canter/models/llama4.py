"""Llama 4 (text): layers that attend within chunks and layers without positions that see everything, the dense part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from canter.core.errors import CheckpointError, UnsupportedModelError
from canter.layers.attention import AttentionArgs
from canter.layers.decoder import Decoder, DecoderArgs
from canter.layers.norm import NormArgs
from canter.layers.rope import QueryGrowth, read_rope
from canter.models import hf_config, names
from canter.models.weights import Rule, WeightMap

_CHUNKED = "chunked_attention"


class Llama4Args(DecoderArgs):
    """Llama 4: layers with a rope attend within chunks, the others see everything with queries that grow with their position.

    Experts are not served yet: a config that has layers of them is refused.
    """

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        text = hf_config.text_config(hf)
        num_layers = hf_config.positive_int(text, "num_hidden_layers", 48)
        _require_dense(text, num_layers)
        rotated = _rotated(text, num_layers)
        norm = NormArgs(hf_config.number(text, "rms_norm_eps", 1e-5))
        num_heads, num_kv_heads = hf_config.head_counts(text, 40, 8)
        hidden_size = hf_config.positive_int(text, "hidden_size", 5120)
        head_dim = hf_config.positive_int(text, "head_dim", hidden_size // num_heads)
        bias = hf_config.flag(text, "attention_bias")
        rope = replace(read_rope(text, head_dim, default_theta=500000.0), interleaved=True)
        qk_norm = replace(norm, cast_first=False, weighted=False) if hf_config.flag(text, "use_qk_norm", True) else None
        local = AttentionArgs(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=rope,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=qk_norm,
            norms_rotated=True,
        )
        growth = None
        if hf_config.flag(text, "attn_temperature_tuning", True):
            growth = QueryGrowth(hf_config.number(text, "attn_scale", 0.1), hf_config.positive_int(text, "floor_scale", 8192))
        whole = replace(local, rope=None, qk_norm=None, growth=growth)
        chunk = hf_config.positive_int(text, "attention_chunk_size", 8192)
        attention = tuple(
            replace(local if has_rope else whole, chunk=chunk if kind == _CHUNKED else 0)
            for has_rope, kind in zip(rotated, _layer_types(text, rotated), strict=True)
        )
        return cls(
            vocab_size=hf_config.positive_int(text, "vocab_size", 202048),
            hidden_size=hidden_size,
            intermediate_size=hf_config.positive_int(text, "intermediate_size_mlp", 16384),
            attention=attention,
            norm=norm,
            tied_output=hf_config.flag(text, "tie_word_embeddings"),
            activation=str(text.get("hidden_act") or "silu"),
        )


def _require_dense(text: Mapping[str, Any], num_layers: int) -> None:
    layers = text.get("moe_layers")
    if layers is None:
        step = hf_config.positive_int(text, "interleave_moe_layer_step", 1)
        layers = list(range(step - 1, num_layers, step))
    if layers:
        named = ", ".join(map(str, layers))
        raise UnsupportedModelError(f"Llama 4 models with experts (in layers {named:.60}) are not supported yet: dense ones are.")


def _rotated(text: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Which layers have a rope: `no_rope_layers` says 1 of those that have one, or every layer but each fourth does."""
    given = text.get("no_rope_layers")
    if not given:
        interval = hf_config.positive_int(text, "no_rope_layer_interval", 4)
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if not isinstance(given, (list, tuple)) or len(given) < num_layers or any(value not in (0, 1) for value in given):
        raise CheckpointError(f"Config key 'no_rope_layers': expected {num_layers} of 0 and 1, found {given!r:.120}.")
    return [bool(value) for value in given[:num_layers]]


def _layer_types(text: Mapping[str, Any], rotated: list[bool]) -> list[str]:
    given = text.get("layer_types")
    if given is None:
        return [_CHUNKED if has_rope else hf_config.FULL for has_rope in rotated]
    known = isinstance(given, (list, tuple)) and all(value in (_CHUNKED, hf_config.FULL) for value in given)
    if not known or len(given) < len(rotated):
        raise CheckpointError(
            f"Config key 'layer_types': expected {len(rotated)} of {_CHUNKED!r} and {hf_config.FULL!r}, found {given!r:.120}."
        )
    return list(given[: len(rotated)])


_RULES = (
    *names.OUTER,
    *names.LLAMA_NORMS,
    *names.SEPARATE_QKV,
    *names.OUTPUT,
    *(Rule(f"{names.LAYER}.feed_forward.{part}_proj.weight", "layers.{i}.mlp.gate_up.weight", part) for part in ("gate", "up")),
    Rule(f"{names.LAYER}.feed_forward.down_proj.weight", "layers.{i}.mlp.down.weight"),
)


class Llama4ForCausalLM(Decoder):
    """`Llama4ForCausalLM` of config.json."""

    Args = Llama4Args
    WEIGHTS = WeightMap(_RULES, names.BODY_RENAMES, names.ROPE_BUFFERS)


class Llama4ForConditionalGeneration(Decoder):
    """`Llama4ForConditionalGeneration` of config.json, its text part: image towers are left in the file."""

    Args = Llama4Args
    WEIGHTS = WeightMap(_RULES, names.MULTIMODAL_RENAMES, (*names.VISION, *names.ROPE_BUFFERS))
