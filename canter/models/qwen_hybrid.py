"""Qwen3-Next and Qwen3.5, text and dense: gated delta layers, every fourth one gated attention (arXiv 2412.06464, 2505.06708)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from canter.core.errors import CheckpointError, UnsupportedModelError
from canter.layers.attention import AttentionArgs
from canter.layers.hybrid import BranchArgs, HybridArgs, HybridDecoder
from canter.layers.mlp import GatedMLPArgs
from canter.layers.norm import NormArgs
from canter.layers.recurrent import DeltaArgs
from canter.layers.rope import read_rope
from canter.models import hf_config, names
from canter.models.weights import Rule, WeightMap

_KINDS = {"linear_attention": "delta", "full_attention": "attention"}


class Qwen3NextArgs(HybridArgs):
    """Qwen3-Next, the layers that have no experts."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        num_layers = hf_config.positive_int(hf, "num_hidden_layers", 48)
        dense = hf.get("mlp_only_layers") or []
        step = hf_config.positive_int(hf, "decoder_sparse_step", 1)
        experts = [i for i in range(num_layers) if i not in dense and (i + 1) % step == 0]
        if experts and hf.get("num_experts", 512):
            raise UnsupportedModelError(f"Config key 'num_experts': experts, as in layer {experts[0]}, are not supported yet.")
        return cls(**_shape(hf, num_layers, default_vocab=151936, default_size=2048, default_intermediate=5632, default_kv_heads=2))


class Qwen35Args(HybridArgs):
    """Qwen3.5, the dense models. All three positions of a text's token are one, so its rope is an ordinary one."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        text = hf.get("text_config")
        if text is not None and not isinstance(text, Mapping):
            raise CheckpointError(f"Config key 'text_config': expected an object, found {text!r:.80}.")
        config = hf if text is None else {"tie_word_embeddings": hf.get("tie_word_embeddings"), **text}
        num_layers = hf_config.positive_int(config, "num_hidden_layers", 32)
        return cls(**_shape(config, num_layers, default_vocab=248320, default_size=4096, default_intermediate=12288, default_kv_heads=4))


def _shape(
    hf: Mapping[str, Any], num_layers: int, default_vocab: int, default_size: int, default_intermediate: int, default_kv_heads: int
) -> dict[str, Any]:
    hf_config.expect_activation(hf, "hidden_act", "silu", "swish")
    norm = NormArgs(hf_config.number(hf, "rms_norm_eps", 1e-6), plus_one=True, cast_first=False)
    heads, kv_heads = hf_config.head_counts(hf, 16, default_kv_heads)
    head_dim, bias = hf_config.positive_int(hf, "head_dim", 256), hf_config.flag(hf, "attention_bias")
    partial = {"partial_rotary_factor": 0.25, **{key: value for key, value in hf.items() if value is not None}}
    attention = AttentionArgs(
        heads,
        kv_heads,
        head_dim,
        head_dim**-0.5,
        read_rope(partial, head_dim),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=norm,
        output_gate=True,
    )
    key_heads, value_heads = (hf_config.positive_int(hf, f"linear_num_{x}_heads", n) for x, n in (("key", 16), ("value", 32)))
    if value_heads % key_heads:
        raise CheckpointError(f"Config key 'linear_num_value_heads': expected a multiple of {key_heads}, found {value_heads}.")
    delta = DeltaArgs(
        key_heads,
        value_heads,
        hf_config.positive_int(hf, "linear_key_head_dim", 128),
        hf_config.positive_int(hf, "linear_value_head_dim", 128),
        hf_config.positive_int(hf, "linear_conv_kernel_dim", 4),
        norm.eps,
    )
    mixers = {"delta": BranchArgs("delta", delta), "attention": BranchArgs("attention", attention)}
    mlp = BranchArgs("mlp", GatedMLPArgs(hf_config.positive_int(hf, "intermediate_size", default_intermediate), "silu"))
    interval = hf_config.positive_int(hf, "full_attention_interval", 4)
    default = ["delta" if (i + 1) % interval else "attention" for i in range(num_layers)]
    return {
        "vocab_size": hf_config.positive_int(hf, "vocab_size", default_vocab),
        "hidden_size": hf_config.positive_int(hf, "hidden_size", default_size),
        "layers": tuple((mixers[kind], mlp) for kind in hf_config.kinds(hf, "layer_types", num_layers, _KINDS, default)),
        "norm": norm,
        "tied_output": hf_config.flag(hf, "tie_word_embeddings"),
    }


_DELTA = f"{names.LAYER}.linear_attn"
_RULES = (
    *names.OUTER,
    *(Rule(f"{names.LAYER}.input_layernorm.weight", f"layers.{{i}}.{name}_norm.weight") for name in ("delta", "attention")),
    Rule(f"{names.LAYER}.post_attention_layernorm.weight", "layers.{i}.mlp_norm.weight"),
    *(
        Rule(f"{names.LAYER}.self_attn.q_proj.{kind}", f"layers.{{i}}.attention.qkv.{kind}", parts=("q", "gate"), grouped=True)
        for kind in ("weight", "bias")
    ),
    *(rule for rule in names.SEPARATE_QKV if rule.part != "q"),
    *names.OUTPUT,
    *names.QK_NORM,
    *names.SEPARATE_GATE_UP,
    *names.DOWN,
    *names.moved((("norm.weight", "norm.weight"), ("out_proj.weight", "output.weight")), _DELTA, "layers.{i}.delta"),
    Rule(f"{_DELTA}.dt_bias", "layers.{i}.delta.decay_bias"),
    Rule(f"{_DELTA}.A_log", "layers.{i}.delta.a", transform=names.negative_exponential),
    Rule(f"{_DELTA}.conv1d.weight", "layers.{i}.delta.conv.weight", transform=names.taps_first),
)
_INPUT = "layers.{i}.delta.input.weight"
_SKIPPED = ("mtp.*", "*visual.*", *names.ROPE_BUFFERS)


class Qwen3NextForCausalLM(HybridDecoder):
    """`Qwen3NextForCausalLM` of config.json."""

    Args = Qwen3NextArgs
    WEIGHTS = WeightMap(
        (
            *_RULES,
            Rule(f"{_DELTA}.in_proj_qkvz.weight", _INPUT, parts=("q", "k", "v", "gate"), grouped=True),
            Rule(f"{_DELTA}.in_proj_ba.weight", _INPUT, parts=("beta", "decay"), grouped=True),
        ),
        names.BODY_RENAMES,
        _SKIPPED,
    )


_QWEN35 = (
    *_RULES,
    Rule(f"{_DELTA}.in_proj_qkv.weight", _INPUT, parts=("q", "k", "v")),
    *(Rule(f"{_DELTA}.in_proj_{name}.weight", _INPUT, part) for name, part in (("z", "gate"), ("b", "beta"), ("a", "decay"))),
)
_RENAMES = (("model.language_model.", "model."), ("language_model.model.", "model."), *names.BODY_RENAMES)


class Qwen35ForCausalLM(HybridDecoder):
    """`Qwen3_5ForCausalLM` of config.json."""

    Args = Qwen35Args
    WEIGHTS = WeightMap(_QWEN35, _RENAMES, _SKIPPED)


class Qwen35ForConditionalGeneration(HybridDecoder):
    """`Qwen3_5ForConditionalGeneration` of config.json, its text part: image towers are left in the file."""

    Args = Qwen35Args
    WEIGHTS = WeightMap(_QWEN35, _RENAMES, _SKIPPED)
