"""Jamba (arXiv 2403.19887): Mamba, every eighth layer attention without positions, each followed by a gated feed-forward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

from canter.core.errors import UnsupportedModelError
from canter.layers.attention import AttentionArgs
from canter.layers.hybrid import BranchArgs, HybridArgs, HybridDecoder
from canter.layers.mlp import GatedMLPArgs
from canter.layers.norm import NormArgs
from canter.layers.recurrent import Mamba1Args
from canter.models import hf_config, names
from canter.models.weights import Rule, WeightMap


class JambaArgs(HybridArgs):
    """Jamba, the models without experts (`num_experts` 1). Step widths, B and C are normalised."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        hf_config.expect_activation(hf, "hidden_act", "silu", "swish")
        num_layers = hf_config.positive_int(hf, "num_hidden_layers", 32)
        period, offset = hf_config.positive_int(hf, "expert_layer_period", 2), hf_config.number(hf, "expert_layer_offset", 1)
        if hf_config.positive_int(hf, "num_experts", 16) > 1 and any(i % period == offset for i in range(num_layers)):
            raise UnsupportedModelError(f"Config key 'num_experts': {hf.get('num_experts', 16)} experts are not supported yet, only 1 is.")
        hidden_size = hf_config.positive_int(hf, "hidden_size", 4096)
        norm = NormArgs(hf_config.number(hf, "rms_norm_eps", 1e-6))
        heads, kv_heads = hf_config.head_counts(hf, 32, None if hf.get("num_key_value_heads", 8) is None else 8)
        head_dim = hf_config.positive_int(hf, "head_dim", hidden_size // heads)
        rank = hf.get("mamba_dt_rank", "auto")
        mamba = Mamba1Args(
            width=hidden_size * hf_config.positive_int(hf, "mamba_expand", 2),
            state_size=hf_config.positive_int(hf, "mamba_d_state", 16),
            rank=math.ceil(hidden_size / 16) if rank == "auto" else hf_config.positive_int(hf, "mamba_dt_rank"),
            taps=hf_config.positive_int(hf, "mamba_d_conv", 4),
            bias=hf_config.flag(hf, "mamba_proj_bias"),
            conv_bias=hf_config.flag(hf, "mamba_conv_bias", True),
            norm=norm,
        )
        mixers = {
            True: BranchArgs("attention", AttentionArgs(heads, kv_heads, head_dim, head_dim**-0.5, None)),
            False: BranchArgs("mamba", mamba),
        }
        mlp = BranchArgs("mlp", GatedMLPArgs(hf_config.positive_int(hf, "intermediate_size", 14336), "silu"))
        period, offset = hf_config.positive_int(hf, "attn_layer_period", 8), hf_config.number(hf, "attn_layer_offset", 4)
        return cls(
            vocab_size=hf_config.positive_int(hf, "vocab_size", 65536),
            hidden_size=hidden_size,
            layers=tuple((mixers[i % period == offset], mlp) for i in range(num_layers)),
            norm=norm,
            tied_output=hf_config.flag(hf, "tie_word_embeddings"),
        )


_RULES = (
    Rule("model.embed_tokens.weight", "embed.weight"),
    Rule("model.final_layernorm.weight", "norm.weight"),
    Rule("lm_head.weight", "head.weight", tied=True),
    *(Rule(f"{names.LAYER}.input_layernorm.weight", f"layers.{{i}}.{name}_norm.weight") for name in ("mamba", "attention")),
    Rule(f"{names.LAYER}.pre_ff_layernorm.weight", "layers.{i}.mlp_norm.weight"),
    *names.attention(f"{names.LAYER}.self_attn"),
    *names.mamba1(f"{names.LAYER}.mamba", "layers.{i}.mamba"),
    *names.gated_mlp(f"{names.LAYER}.feed_forward"),
)


class JambaForCausalLM(HybridDecoder):
    """`JambaForCausalLM` of config.json."""

    Args = JambaArgs
    WEIGHTS = WeightMap(_RULES, (*names.BODY_RENAMES, ("final_layernorm.", "model.final_layernorm.")), names.ROPE_BUFFERS)
