"""MiniMax-Text-01 (arXiv 2501.08313): lightning attention, and attention in between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from canter.core.errors import UnsupportedModelError
from canter.layers.attention import AttentionArgs
from canter.layers.hybrid import BranchArgs, HybridArgs, HybridDecoder
from canter.layers.mlp import GatedMLPArgs
from canter.layers.norm import NormArgs
from canter.layers.recurrent import LightningArgs
from canter.layers.rope import read_rope
from canter.models import hf_config, names
from canter.models.weights import Rule, WeightMap

_KINDS = {"linear_attention": "linear", "full_attention": "full"}
_LIGHTNING_EPS = 1e-6


class MiniMaxArgs(HybridArgs):
    """MiniMax-Text-01 with one expert, which gets every token: a plain feed-forward. Branches add to what is normalised."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        hf_config.expect_activation(hf, "hidden_act", "silu", "swish")
        if hf.get("sliding_window") is not None:
            raise UnsupportedModelError("Config key 'sliding_window': windows of MiniMax models are not supported.")
        experts = hf_config.positive_int(hf, "num_local_experts", 8)
        if experts > 1:
            raise UnsupportedModelError(f"Config key 'num_local_experts': {experts} experts are not supported yet, only 1 is.")
        hidden_size, num_layers = hf_config.positive_int(hf, "hidden_size", 4096), hf_config.positive_int(hf, "num_hidden_layers", 32)
        heads, kv_heads = hf_config.head_counts(hf, 32, 8)
        head_dim = hf_config.positive_int(hf, "head_dim", hidden_size // heads)
        norm = NormArgs(hf_config.number(hf, "rms_norm_eps", 1e-5))
        if hf.get("rotary_dim") is not None:
            hf = {**hf, "partial_rotary_factor": hf_config.positive_int(hf, "rotary_dim") / head_dim}
        attention = AttentionArgs(heads, kv_heads, head_dim, head_dim**-0.5, read_rope(hf, head_dim, default_theta=1000000.0))
        feed_forward = GatedMLPArgs(hf_config.positive_int(hf, "intermediate_size", 14336), "silu")
        mlp = BranchArgs("mlp", feed_forward, hf_config.factor(hf, "mlp_beta_factor"), hf_config.factor(hf, "mlp_alpha_factor"))
        default = ["linear" if i % 2 else "full" for i in range(num_layers)]
        layers = []
        for i, kind in enumerate(hf_config.kinds(hf, "layer_types", num_layers, _KINDS, default)):
            factors = (hf_config.factor(hf, f"{kind}_attn_{greek}_factor") for greek in ("beta", "alpha"))
            lightning = LightningArgs(head_dim, _slopes(heads, i, num_layers), _LIGHTNING_EPS)
            name, mixer = ("lightning", lightning) if kind == "linear" else ("attention", attention)
            layers.append((BranchArgs(name, mixer, *factors), mlp))
        return cls(
            vocab_size=hf_config.positive_int(hf, "vocab_size", 32000),
            hidden_size=hidden_size,
            layers=tuple(layers),
            norm=norm,
            tied_output=hf_config.flag(hf, "tie_word_embeddings"),
        )


_PUBLISHED = {
    f"{part}_{greek}_factor": f"layernorm_{published}_{greek}"
    for part, published in (("linear_attn", "linear_attention"), ("full_attn", "full_attention"), ("mlp", "mlp"))
    for greek in ("alpha", "beta")
}
"""transformers' names of factors, and those of the published config."""
_PUBLISHED_KINDS = {0: "linear_attention", 1: "full_attention"}


class MiniMaxText01Args(MiniMaxArgs):
    """The same, of the config.json that it was published with: other names, and choices that transformers has made."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        if not hf_config.flag(hf, "postnorm"):
            raise UnsupportedModelError(
                "Config key 'postnorm': expected true; branches that add to what is not normalised are not supported."
            )
        if hf.get("shared_intermediate_size"):
            raise UnsupportedModelError("Config key 'shared_intermediate_size': experts for every token are not supported yet.")
        heads = hf_config.positive_int(hf, "num_attention_heads", 32)
        if heads & (heads - 1):
            raise UnsupportedModelError(f"Config key 'num_attention_heads': expected a power of two, found {heads}.")
        num_layers = hf_config.positive_int(hf, "num_hidden_layers", 32)
        key = "decoder_attention_types" if hf.get("attn_type_list") is None else "attn_type_list"
        kinds = hf_config.kinds(hf, key, num_layers, _PUBLISHED_KINDS, ["full_attention"] * num_layers)
        return super().from_hf({**hf, "layer_types": kinds, **{ours: hf.get(published) for ours, published in _PUBLISHED.items()}})


def _slopes(heads: int, layer: int, num_layers: int) -> tuple[float, ...]:
    """How fast each head forgets: later heads and later layers do less so."""
    depth = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    return tuple(2 ** (-8 * (head + 1) / heads) * depth for head in range(heads))


_EXPERT = f"{names.LAYER}.block_sparse_moe.experts.0"
_RULES = (
    *names.OUTER,
    *(Rule(f"{names.LAYER}.input_layernorm.weight", f"layers.{{i}}.{name}_norm.weight") for name in ("lightning", "attention")),
    Rule(f"{names.LAYER}.post_attention_layernorm.weight", "layers.{i}.mlp_norm.weight"),
    *names.attention(f"{names.LAYER}.self_attn"),
    Rule(f"{names.LAYER}.self_attn.qkv_proj.weight", "layers.{i}.lightning.qkv.weight", parts=("q", "k", "v"), grouped=True),
    *names.moved(
        (("output_gate.weight", "gate.weight"), ("norm.weight", "norm.weight"), ("out_proj.weight", "output.weight")),
        f"{names.LAYER}.self_attn",
        "layers.{i}.lightning",
    ),
    *names.gated_mlp(_EXPERT, gate="w1", up="w3", down="w2"),
)
_BUFFERS = ("*.slope_rate", "*.query_decay", "*.key_decay", "*.diagonal_decay", "*.block_sparse_moe.gate.weight")


_WEIGHTS = WeightMap(_RULES, names.BODY_RENAMES, (*_BUFFERS, *names.ROPE_BUFFERS))


class MiniMaxForCausalLM(HybridDecoder):
    """`MiniMaxForCausalLM` of config.json."""

    Args = MiniMaxArgs
    WEIGHTS = _WEIGHTS


class MiniMaxText01ForCausalLM(HybridDecoder):
    """`MiniMaxText01ForCausalLM` of config.json, and MiniMax-M1's `MiniMaxM1ForCausalLM`."""

    Args = MiniMaxText01Args
    WEIGHTS = _WEIGHTS
