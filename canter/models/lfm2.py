"""LFM2 (arXiv 2511.23404): double-gated short convolutions and grouped-query attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from canter.core.errors import CheckpointError
from canter.layers.attention import AttentionArgs
from canter.layers.hybrid import BranchArgs, HybridArgs, HybridDecoder
from canter.layers.mlp import GatedMLPArgs
from canter.layers.norm import NormArgs
from canter.layers.recurrent import ShortConvArgs
from canter.layers.rope import read_rope
from canter.models import hf_config, names
from canter.models.weights import Rule, WeightMap

_KINDS = {"conv": "conv", "full_attention": "attention"}


class LFM2Args(HybridArgs):
    """LFM2, the dense models. Older configs give the layers of attention by number, and the feed-forward's width as `block_ff_dim`."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        hidden_size, num_layers = hf_config.positive_int(hf, "hidden_size", 2560), hf_config.positive_int(hf, "num_hidden_layers", 32)
        heads, kv_heads = hf_config.head_counts(hf, 32, 8)
        head_dim = hf_config.positive_int(hf, "head_dim", hidden_size // heads)
        norm = NormArgs(hf_config.number(hf, "norm_eps", 1e-5))
        attention = AttentionArgs(heads, kv_heads, head_dim, head_dim**-0.5, read_rope(hf, head_dim, default_theta=1000000.0), qk_norm=norm)
        conv = ShortConvArgs(hf_config.positive_int(hf, "conv_L_cache", 3), hf_config.flag(hf, "conv_bias"))
        mixers = {"conv": BranchArgs("conv", conv), "attention": BranchArgs("attention", attention)}
        mlp = BranchArgs("mlp", GatedMLPArgs(_intermediate_size(hf), "silu"))
        tied = hf_config.flag(hf, "tie_embedding", hf_config.flag(hf, "tie_word_embeddings", True))
        return cls(
            vocab_size=hf_config.positive_int(hf, "vocab_size", 65536),
            hidden_size=hidden_size,
            layers=tuple((mixers[kind], mlp) for kind in _kinds(hf, num_layers)),
            norm=norm,
            tied_output=tied,
        )


def _kinds(hf: Mapping[str, Any], num_layers: int) -> list[str]:
    full = hf.get("full_attn_idxs")
    if full is None:
        full = list(range(num_layers))
    if not isinstance(full, (list, tuple)) or not all(isinstance(i, int) for i in full):
        raise CheckpointError(f"Config key 'full_attn_idxs': expected a list of numbers, found {full!r:.80}.")
    default = ["attention" if i in full else "conv" for i in range(num_layers)]
    return hf_config.kinds(hf, "layer_types", num_layers, _KINDS, default)


def _intermediate_size(hf: Mapping[str, Any]) -> int:
    """Two thirds of the width where it is adjusted, times a factor and rounded up to a multiple."""
    size = hf_config.positive_int(hf, "block_ff_dim" if hf.get("block_ff_dim") is not None else "intermediate_size", 12288)
    if not hf_config.flag(hf, "block_auto_adjust_ff_dim", True):
        return size
    size = 2 * size // 3
    if "block_ffn_dim_multiplier" in hf and hf["block_ffn_dim_multiplier"] is None:
        return size
    multiple = hf_config.positive_int(hf, "block_multiple_of", 256)
    return -(-int(hf_config.factor(hf, "block_ffn_dim_multiplier") * size) // multiple) * multiple


_RULES = (
    Rule("model.embed_tokens.weight", "embed.weight"),
    Rule("model.embedding_norm.weight", "norm.weight"),
    Rule("lm_head.weight", "head.weight", tied=True),
    Rule(f"{names.LAYER}.operator_norm.weight", "layers.{i}.conv_norm.weight"),
    Rule(f"{names.LAYER}.operator_norm.weight", "layers.{i}.attention_norm.weight"),
    Rule(f"{names.LAYER}.ffn_norm.weight", "layers.{i}.mlp_norm.weight"),
    *names.attention(f"{names.LAYER}.self_attn", output="out_proj"),
    *(Rule(f"{names.LAYER}.self_attn.{p}_layernorm.weight", f"layers.{{i}}.attention.{p}_norm.weight") for p in ("q", "k")),
    *names.moved(
        (
            ("in_proj.weight", "input.weight"),
            ("in_proj.bias", "input.bias"),
            ("conv.bias", "conv.bias"),
            ("out_proj.weight", "output.weight"),
            ("out_proj.bias", "output.bias"),
        ),
        f"{names.LAYER}.conv",
        "layers.{i}.conv",
    ),
    Rule(f"{names.LAYER}.conv.conv.weight", "layers.{i}.conv.conv.weight", transform=names.taps_first),
    *names.gated_mlp(f"{names.LAYER}.feed_forward", gate="w1", up="w3", down="w2"),
)


class Lfm2ForCausalLM(HybridDecoder):
    """`Lfm2ForCausalLM` of config.json."""

    Args = LFM2Args
    WEIGHTS = WeightMap(_RULES, (*names.BODY_RENAMES, ("embedding_norm.", "model.embedding_norm.")), names.ROPE_BUFFERS)
