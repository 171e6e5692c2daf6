"""Gemma 2 (arXiv 2408.00118) and Gemma 3 (arXiv 2503.19786): text, windowed and full layers in turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from canter.core.errors import UnsupportedModelError
from canter.layers.attention import AttentionArgs
from canter.layers.decoder import Decoder, DecoderArgs
from canter.layers.norm import NormArgs
from canter.layers.rope import RopeArgs, read_rope
from canter.models import hf_config, names
from canter.models.weights import WeightMap

_RULES = (*names.OUTER, *names.BRANCH_NORMS, *names.SEPARATE_QKV, *names.OUTPUT, *names.SEPARATE_GATE_UP, *names.DOWN)


class Gemma2Args(DecoderArgs):
    """Gemma 2: odd layers (from 0: even) slide, scores and logits are capped."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        types = _layer_types(hf, num_layers=hf_config.positive_int(hf, "num_hidden_layers", 26), pattern=2)
        ropes = {kind: read_rope(hf, _head_dim(hf), kind) for kind in types}
        softcap = hf_config.number(hf, "attn_logit_softcapping", 50.0 if "attn_logit_softcapping" not in hf else 0.0)
        logit_softcap = hf_config.number(hf, "final_logit_softcapping", 30.0 if "final_logit_softcapping" not in hf else 0.0)
        return cls(**_shape(hf, types, ropes, default_vocab=256000, softcap=softcap), logit_softcap=logit_softcap)


class Gemma3Args(DecoderArgs):
    """Gemma 3: every sixth layer is full, with a rope of its own; each head's queries and keys are normalised.

    Scores are not capped, whatever `attn_logit_softcapping` says: so it was trained, and published configs have null.
    Keys that published configs leave out have the defaults of the 4B model.
    """

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        text = hf_config.text_config(hf)
        pattern = hf_config.positive_int(text, "sliding_window_pattern", hf_config.positive_int(text, "_sliding_window_pattern", 6))
        types = _layer_types(text, num_layers=hf_config.positive_int(text, "num_hidden_layers", 26), pattern=pattern)
        ropes = {kind: _gemma3_rope(text, kind) for kind in types}
        shape = _shape(text, types, ropes, default_vocab=262208, qk_norm=True)
        return cls(**shape, logit_softcap=hf_config.number(text, "final_logit_softcapping", 0.0))


def _head_dim(hf: Mapping[str, Any]) -> int:
    return hf_config.positive_int(hf, "head_dim", 256)


def _layer_types(hf: Mapping[str, Any], num_layers: int, pattern: int) -> list[str]:
    default = [hf_config.SLIDING if (i + 1) % pattern else hf_config.FULL for i in range(num_layers)]
    return hf_config.layer_types(hf, num_layers, default)


def _gemma3_rope(hf: Mapping[str, Any], kind: str) -> RopeArgs:
    """Newer configs nest `rope_parameters` by kind. In older ones `rope_theta` and `rope_scaling` are the full layers',
    `rope_local_base_freq` is the sliding ones'."""
    nested = hf.get("rope_parameters")
    if kind == hf_config.FULL:
        return read_rope(hf, _head_dim(hf), kind, default_theta=1000000.0)
    own = nested.get(kind) if isinstance(nested, Mapping) else None
    theta = hf_config.number(hf, "rope_local_base_freq", 10000.0)
    return read_rope({**hf, "rope_scaling": None, "rope_theta": theta, "rope_parameters": own}, _head_dim(hf))


def _shape(
    hf: Mapping[str, Any], types: list[str], ropes: Mapping[str, RopeArgs], default_vocab: int, softcap: float = 0.0, qk_norm: bool = False
) -> dict[str, Any]:
    """The fields of `DecoderArgs` that Gemma 2 and 3 share."""
    if hf_config.flag(hf, "use_bidirectional_attention"):
        raise UnsupportedModelError("Config key 'use_bidirectional_attention': true is not supported, only causal models are.")
    hidden_size = hf_config.positive_int(hf, "hidden_size", 2304)
    num_heads, num_kv_heads = hf_config.head_counts(hf, 8, 4)
    norm = NormArgs(hf_config.number(hf, "rms_norm_eps", 1e-6), plus_one=True, cast_first=False)
    bias = hf_config.flag(hf, "attention_bias")
    window = hf_config.positive_int(hf, "sliding_window", 4096)
    attention = tuple(
        AttentionArgs(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(hf),
            scale=hf_config.number(hf, "query_pre_attn_scalar", 256) ** -0.5,
            rope=ropes[kind],
            window=window if kind == hf_config.SLIDING else 0,
            softcap=softcap,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=norm if qk_norm else None,
        )
        for kind in types
    )
    return {
        "vocab_size": hf_config.positive_int(hf, "vocab_size", default_vocab),
        "hidden_size": hidden_size,
        "intermediate_size": hf_config.positive_int(hf, "intermediate_size", 9216),
        "attention": attention,
        "norm": norm,
        "tied_output": hf_config.flag(hf, "tie_word_embeddings", True),
        "activation": str(hf.get("hidden_activation") or "gelu_pytorch_tanh"),
        "branch_norms": True,
        "embed_scale": hidden_size**0.5,
    }


class Gemma2ForCausalLM(Decoder):
    """`Gemma2ForCausalLM` of config.json."""

    Args = Gemma2Args
    WEIGHTS = WeightMap(_RULES, names.BODY_RENAMES, names.ROPE_BUFFERS)


class Gemma3ForCausalLM(Decoder):
    """`Gemma3ForCausalLM` of config.json."""

    Args = Gemma3Args
    WEIGHTS = WeightMap((*_RULES, *names.QK_NORM), names.BODY_RENAMES, names.ROPE_BUFFERS)


class Gemma3ForConditionalGeneration(Decoder):
    """`Gemma3ForConditionalGeneration` of config.json, its text part: image towers are left in the file."""

    Args = Gemma3Args
    WEIGHTS = WeightMap((*_RULES, *names.QK_NORM), names.MULTIMODAL_RENAMES, (*names.VISION, *names.ROPE_BUFFERS))
