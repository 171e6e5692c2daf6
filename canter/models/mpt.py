"""MPT (MosaicML, 2023): positions by distance alone, no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from canter.core.errors import CheckpointError, UnsupportedModelError
from canter.layers.attention import AttentionArgs
from canter.layers.plain_decoder import PlainDecoder, PlainDecoderArgs, alibi_slopes
from canter.models import hf_config
from canter.models.weights import Rule, WeightMap

_REFUSED = ("clip_qkv", "qk_ln", "prefix_lm", "attn_uses_sequence_id", "sliding_window_size", "rope")
"""Options of `attn_config` that change what is computed."""


class MptArgs(PlainDecoderArgs):
    """MPT: where the number of heads is no power of two, slopes are every second one of the next power's, then the others."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        attention = hf.get("attn_config") or {}
        if not isinstance(attention, Mapping):
            raise CheckpointError(f"Config key 'attn_config': expected an object, found {attention!r:.80}.")
        for key in _REFUSED:
            if attention.get(key) not in (None, False, -1):
                raise UnsupportedModelError(f"Config key 'attn_config.{key}': {attention[key]!r:.40} is not supported.")
        if attention.get("attn_type", "multihead_attention") != "multihead_attention" or not hf_config.flag(attention, "alibi", True):
            raise UnsupportedModelError("Config key 'attn_config': MPT models are supported with multihead_attention and alibi only.")
        if hf.get("logit_scale") is not None or not hf_config.flag(hf, "no_bias", True):
            raise UnsupportedModelError(
                "Config keys 'logit_scale', 'no_bias': MPT models are supported without scaled logits and biases only."
            )
        hidden_size, num_heads = hf_config.positive_int(hf, "d_model", 2048), hf_config.positive_int(hf, "n_heads", 16)
        if hidden_size % num_heads:
            raise CheckpointError(f"Config key 'n_heads': expected a divisor of d_model ({hidden_size}), found {num_heads}.")
        head_dim = hidden_size // num_heads
        layer = AttentionArgs(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            scale=hf_config.number(attention, "softmax_scale", head_dim**-0.5),
            rope=None,
            slopes=_slopes(num_heads, hf_config.positive_int(attention, "alibi_bias_max", 8)),
        )
        return cls(
            vocab_size=hf_config.positive_int(hf, "vocab_size", 50368),
            hidden_size=hidden_size,
            intermediate_size=hf_config.positive_int(hf, "expansion_ratio", 4) * hidden_size,
            attention=(layer,) * hf_config.positive_int(hf, "n_layers", 24),
            eps=hf_config.number(hf, "layer_norm_epsilon", 1e-5),
            tied_output=hf_config.flag(hf, "tie_word_embeddings", True),
            activation="gelu",
            norm_bias=False,
            mlp_bias=False,
        )


def _slopes(num_heads: int, most: int) -> tuple[float, ...]:
    power = 1 << (num_heads - 1).bit_length()
    slopes = alibi_slopes(power, most)
    return slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]


_BLOCK = "transformer.blocks.{i}"


class MptForCausalLM(PlainDecoder):
    """`MptForCausalLM` of config.json (also `MPTForCausalLM`, as its authors' own code calls it)."""

    Args = MptArgs
    WEIGHTS = WeightMap(
        (
            Rule("transformer.wte.weight", "embed.weight"),
            Rule("transformer.norm_f.weight", "norm.weight"),
            Rule("lm_head.weight", "head.weight", tied=True),
            Rule(f"{_BLOCK}.norm_1.weight", "layers.{i}.attention_norm.weight"),
            Rule(f"{_BLOCK}.norm_2.weight", "layers.{i}.mlp_norm.weight"),
            Rule(f"{_BLOCK}.attn.Wqkv.weight", "layers.{i}.attention.qkv.weight"),
            Rule(f"{_BLOCK}.attn.out_proj.weight", "layers.{i}.attention.output.weight"),
            Rule(f"{_BLOCK}.ffn.up_proj.weight", "layers.{i}.mlp.up.weight"),
            Rule(f"{_BLOCK}.ffn.down_proj.weight", "layers.{i}.mlp.down.weight"),
        ),
        renames=(("blocks.", "transformer.blocks."), ("wte.", "transformer.wte."), ("norm_f.", "transformer.norm_f.")),
    )
