"""Kimi-Linear (arXiv 2510.26692): Kimi Delta Attention, and latent attention without positions in between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor

from canter.core.errors import CheckpointError, UnsupportedModelError
from canter.layers.hybrid import BranchArgs, HybridArgs, HybridDecoder
from canter.layers.latent import LatentAttentionArgs
from canter.layers.mlp import GatedMLPArgs
from canter.layers.norm import NormArgs
from canter.layers.recurrent import DeltaArgs
from canter.models import hf_config, names
from canter.models.weights import Rule, WeightMap

_KINDS = {"linear_attention": "delta", "full_attention": "attention"}


class KimiLinearArgs(HybridArgs):
    """Kimi-Linear. Layers of experts are refused.

    Original configs count layers from 1, in `linear_attn_config`.
    """

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        hf_config.expect_activation(hf, "hidden_act", "silu", "swish")
        num_layers = hf_config.positive_int(hf, "num_hidden_layers", 27)
        given = hf.get("linear_attn_config") or {}
        if not isinstance(given, Mapping):
            raise CheckpointError(f"Config key 'linear_attn_config': expected an object, found {given!r:.80}.")
        kinds = _kinds(hf, given, num_layers)
        experts = _first_layer_of_experts(hf, num_layers)
        if experts is not None:
            raise UnsupportedModelError(f"Experts, as in layer {experts}, are not supported yet.")
        heads, head_dim, taps = (
            hf_config.positive_int({key: given.get(original, hf.get(key))}, key, default)
            for key, original, default in (
                ("linear_num_heads", "num_heads", 32),
                ("linear_head_dim", "head_dim", 128),
                ("linear_conv_kernel_dim", "short_conv_kernel_size", 4),
            )
        )
        norm = NormArgs(hf_config.number(hf, "rms_norm_eps", 1e-5))
        delta = BranchArgs("delta", DeltaArgs(heads, heads, head_dim, head_dim, taps, norm.eps, gate_rank=head_dim))
        mlp = BranchArgs("mlp", GatedMLPArgs(hf_config.positive_int(hf, "intermediate_size", 9216), "silu"))
        attention = BranchArgs("attention", _latent_attention(hf))
        return cls(
            vocab_size=hf_config.positive_int(hf, "vocab_size", 163840),
            hidden_size=hf_config.positive_int(hf, "hidden_size", 2304),
            layers=tuple((attention if kind == "attention" else delta, mlp) for kind in kinds),
            norm=norm,
            tied_output=hf_config.flag(hf, "tie_word_embeddings"),
        )


_LATENT_EPS = 1e-6


def _latent_attention(hf: Mapping[str, Any]) -> LatentAttentionArgs:
    if hf_config.flag(hf, "attention_bias"):
        raise UnsupportedModelError("Config key 'attention_bias': latent attention with biases is not supported.")
    if not hf_config.flag(hf, "mla_use_nope", True):
        raise UnsupportedModelError("Config key 'mla_use_nope': latent attention with positions is not supported.")
    return LatentAttentionArgs(
        num_heads=hf_config.positive_int(hf, "num_attention_heads", 32),
        key_dim=hf_config.positive_int(hf, "qk_nope_head_dim", 128),
        shared_dim=hf_config.positive_int(hf, "qk_rope_head_dim", 64),
        value_dim=hf_config.positive_int(hf, "v_head_dim", 128),
        latent_dim=hf_config.positive_int(hf, "kv_lora_rank", 512),
        query_rank=0 if hf.get("q_lora_rank") is None else hf_config.positive_int(hf, "q_lora_rank"),
        norm=NormArgs(_LATENT_EPS),
    )


def _kinds(hf: Mapping[str, Any], given: Mapping[str, Any], num_layers: int) -> list[str]:
    full = given.get("full_attn_layers")
    if full is None:
        default = ["attention" if i and i % 4 == 0 else "delta" for i in range(num_layers)]
    elif isinstance(full, (list, tuple)):
        default = ["attention" if i + 1 in full else "delta" for i in range(num_layers)]
    else:
        raise CheckpointError(f"Config key 'linear_attn_config.full_attn_layers': expected a list, found {full!r:.80}.")
    return hf_config.kinds(hf, "layer_types", num_layers, _KINDS, default)


def _first_layer_of_experts(hf: Mapping[str, Any], num_layers: int) -> int | None:
    first_sparse = int(hf_config.number(hf, "first_k_dense_replace", 1))
    default = ["dense" if i < first_sparse else "sparse" for i in range(num_layers)]
    kinds = hf_config.kinds(hf, "mlp_layer_types", num_layers, {"dense": "dense", "sparse": "sparse"}, default)
    return kinds.index("sparse") if "sparse" in kinds else None


def _decays(x: Tensor) -> Tensor:
    return names.negative_exponential(x).flatten()


_DELTA, _TARGET = f"{names.LAYER}.self_attn", "layers.{i}.delta"
_ATTENTION = "layers.{i}.attention"
_INPUTS = (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("g_a_proj", "gate"), ("b_proj", "beta"), ("f_a_proj", "decay"))
_RULES = (
    *names.OUTER,
    *(Rule(f"{names.LAYER}.input_layernorm.weight", f"{place}_norm.weight") for place in (_TARGET, _ATTENTION)),
    Rule(f"{names.LAYER}.post_attention_layernorm.weight", "layers.{i}.mlp_norm.weight"),
    *(Rule(f"{_DELTA}.{name}.weight", f"{_TARGET}.input.weight", part) for name, part in _INPUTS),
    *(Rule(f"{_DELTA}.{p}_conv1d.weight", f"{_TARGET}.conv.weight", p, transform=names.taps_first) for p in ("q", "k", "v")),
    *names.moved(
        (
            ("f_b_proj.weight", "decay.weight"),
            ("g_b_proj.weight", "gate.weight"),
            ("o_norm.weight", "norm.weight"),
            ("o_proj.weight", "output.weight"),
        ),
        _DELTA,
        _TARGET,
    ),
    *names.moved(
        (
            ("q_proj.weight", "query.weight"),
            ("q_a_proj.weight", "query_down.weight"),
            ("q_a_layernorm.weight", "query_norm.weight"),
            ("q_b_proj.weight", "query_up.weight"),
            ("kv_a_proj_with_mqa.weight", "row.weight"),
            ("kv_a_layernorm.weight", "norm.weight"),
            ("o_proj.weight", "output.weight"),
        ),
        _DELTA,
        _ATTENTION,
    ),
    Rule(f"{_DELTA}.kv_b_proj.weight", f"{_ATTENTION}.heads.weight", parts=("k", "v"), grouped=True),
    Rule(f"{_DELTA}.A_log", f"{_TARGET}.a", transform=_decays),
    Rule(f"{_DELTA}.dt_bias", f"{_TARGET}.decay_bias"),
    *names.SEPARATE_GATE_UP,
    *names.DOWN,
)
_MOST_LAYERS = 256
_DENSE_AS_EXPERTS = tuple((f"model.layers.{i}.block_sparse_moe.", f"model.layers.{i}.mlp.") for i in range(_MOST_LAYERS))
"""transformers saves a dense layer's feed-forward under the name of its experts."""


class KimiLinearForCausalLM(HybridDecoder):
    """`KimiLinearForCausalLM` of config.json."""

    Args = KimiLinearArgs
    WEIGHTS = WeightMap(_RULES, (*_DENSE_AS_EXPERTS, *names.BODY_RENAMES), names.ROPE_BUFFERS)
