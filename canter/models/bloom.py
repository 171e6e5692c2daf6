"""BLOOM (arXiv 2211.05100): positions by distance alone, biases everywhere, embeddings normalised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from canter.core.errors import CheckpointError, UnsupportedModelError
from canter.layers.attention import AttentionArgs
from canter.layers.plain_decoder import PlainDecoder, PlainDecoderArgs, alibi_slopes
from canter.models import hf_config
from canter.models.weights import Rule, WeightMap


class BloomArgs(PlainDecoderArgs):
    """BLOOM: where the number of heads is no power of two, slopes are those of the power below, then every second one of that above."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        if hf_config.flag(hf, "apply_residual_connection_post_layernorm"):
            raise UnsupportedModelError("Config key 'apply_residual_connection_post_layernorm': true is not supported.")
        hidden_size = hf_config.positive_int(hf, "hidden_size", hf_config.positive_int(hf, "n_embed", 64))
        num_heads = hf_config.positive_int(hf, "n_head", hf_config.positive_int(hf, "num_attention_heads", 8))
        if hidden_size % num_heads:
            raise CheckpointError(f"Config key 'n_head': expected a divisor of hidden_size ({hidden_size}), found {num_heads}.")
        head_dim = hidden_size // num_heads
        layer = AttentionArgs(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=None,
            qkv_bias=True,
            output_bias=True,
            slopes=_slopes(num_heads),
        )
        return cls(
            vocab_size=hf_config.positive_int(hf, "vocab_size", 250880),
            hidden_size=hidden_size,
            intermediate_size=4 * hidden_size,
            attention=(layer,) * hf_config.positive_int(hf, "n_layer", hf_config.positive_int(hf, "num_hidden_layers", 2)),
            eps=hf_config.number(hf, "layer_norm_epsilon", 1e-5),
            tied_output=hf_config.flag(hf, "tie_word_embeddings", True),
            activation="gelu_pytorch_tanh",
            norm_bias=True,
            mlp_bias=True,
            embed_norm=True,
        )


def _slopes(num_heads: int) -> tuple[float, ...]:
    power = 1 << (num_heads.bit_length() - 1)
    return alibi_slopes(power) + alibi_slopes(2 * power)[::2][: num_heads - power]


_KINDS = ("weight", "bias")
_OUTER = (("word_embeddings_layernorm", "embed_norm"), ("ln_f", "norm"))
_INNER = (
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "mlp_norm"),
    ("self_attention.dense", "attention.output"),
    ("mlp.dense_h_to_4h", "mlp.up"),
    ("mlp.dense_4h_to_h", "mlp.down"),
)


class BloomForCausalLM(PlainDecoder):
    """`BloomForCausalLM` of config.json. Each head's queries, keys and values lie together in the checkpoint."""

    Args = BloomArgs
    WEIGHTS = WeightMap(
        (
            Rule("transformer.word_embeddings.weight", "embed.weight"),
            Rule("lm_head.weight", "head.weight", tied=True),
            *(Rule(f"transformer.{name}.{kind}", f"{own}.{kind}") for name, own in _OUTER for kind in _KINDS),
            *(Rule(f"transformer.h.{{i}}.{name}.{kind}", f"layers.{{i}}.{own}.{kind}") for name, own in _INNER for kind in _KINDS),
            *(
                Rule(
                    f"transformer.h.{{i}}.self_attention.query_key_value.{kind}",
                    f"layers.{{i}}.attention.qkv.{kind}",
                    parts=("q", "k", "v"),
                    grouped=True,
                )
                for kind in _KINDS
            ),
        ),
        renames=(("word_embeddings", "transformer.word_embeddings"), ("h.", "transformer.h."), ("ln_f.", "transformer.ln_f.")),
    )
