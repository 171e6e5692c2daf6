"""Bamba, Granite 4 and Falcon-H1: Mamba-2 and attention, in turn or side by side, each followed by a gated feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from canter.core.errors import CheckpointError, UnsupportedModelError
from canter.layers.attention import AttentionArgs
from canter.layers.hybrid import BranchArgs, HybridArgs, HybridDecoder, SideBySideArgs
from canter.layers.mlp import GatedMLPArgs
from canter.layers.norm import NormArgs
from canter.layers.recurrent import Mamba2Args
from canter.layers.rope import RopeArgs, read_rope
from canter.models import hf_config, names
from canter.models.weights import Rule, WeightMap

_KINDS = {"mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention"}


class BambaArgs(HybridArgs):
    """Bamba: half of each head is rotated, where the config doesn't say otherwise."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        num_layers = hf_config.positive_int(hf, "num_hidden_layers", 32)
        attends = hf.get("attn_layer_indices") or []
        if not isinstance(attends, (list, tuple)) or not all(isinstance(i, int) for i in attends):
            raise CheckpointError(f"Config key 'attn_layer_indices': expected a list of numbers, found {attends!r:.80}.")
        head_dim = _head_dim(hf)
        halved = {**hf, "partial_rotary_factor": 0.5}
        mixers = {
            "mamba": BranchArgs("mamba", _mamba2(hf)),
            "attention": BranchArgs("attention", _attention(hf, read_rope(halved, head_dim), head_dim**-0.5)),
        }
        mlp = BranchArgs("mlp", _mlp(hf, hf_config.positive_int(hf, "intermediate_size", 14336)))
        layers = tuple((mixers["attention" if i in attends else "mamba"], mlp) for i in range(num_layers))
        return cls(**_shape(hf, 128000), layers=layers)


class GraniteHybridArgs(HybridArgs):
    """Granite 4, the models without experts: factors on embeddings, branches, scores and logits; positions only where the config asks."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        experts = hf.get("num_local_experts", 8)
        if experts:
            raise UnsupportedModelError(f"Config key 'num_local_experts': {experts!r:.40} experts are not supported yet, only 0 is.")
        num_layers = hf_config.positive_int(hf, "num_hidden_layers", 32)
        positions = hf.get("position_embedding_type")
        if positions not in (None, "nope", "rope"):
            raise UnsupportedModelError(f"Config key 'position_embedding_type': {positions!r:.80} is not supported, only 'rope' is.")
        rope = read_rope(hf, _head_dim(hf)) if positions == "rope" else None
        factor = hf_config.factor(hf, "residual_multiplier")
        attention = _attention(hf, rope, hf_config.factor(hf, "attention_multiplier"))
        mixers = {"mamba": BranchArgs("mamba", _mamba2(hf), factor), "attention": BranchArgs("attention", attention, factor)}
        mlp = BranchArgs("mlp", _mlp(hf, hf_config.positive_int(hf, "shared_intermediate_size", 1024)), factor)
        key = "layer_types" if hf.get("layer_types") is not None else "layers_block_type"
        return cls(
            **_shape(hf, 32000),
            layers=tuple((mixers[kind], mlp) for kind in hf_config.kinds(hf, key, num_layers, _KINDS, ["mamba"] * num_layers)),
            embed_factor=hf_config.factor(hf, "embedding_multiplier"),
            logit_factor=1 / hf_config.positive(hf, "logits_scaling"),
        )


class FalconH1Args(HybridArgs):
    """Falcon-H1: every layer has both, side by side, and factors all over."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        head_dim = _head_dim(hf)
        gate_factor, down_factor = _factors(hf, "mlp_multipliers", 2)
        width = None if hf.get("mamba_d_ssm", 1024) is None else hf_config.positive_int(hf, "mamba_d_ssm", 1024)
        gated = hf_config.flag(hf, "mamba_rms_norm")
        mamba = _mamba2(
            hf,
            width=width,
            norm_first=gated and hf_config.flag(hf, "mamba_norm_before_gate", True),
            factors=_factors(hf, "ssm_multipliers", 5),
            output_bias=hf_config.flag(hf, "projectors_bias"),
            **({} if gated else {"norm_eps": None}),
        )
        # Keys that are multiplied are scores that are multiplied.
        attention = _attention(hf, read_rope(hf, head_dim), head_dim**-0.5 * hf_config.factor(hf, "key_multiplier"))
        sides = SideBySideArgs(
            (
                ("mamba", mamba, hf_config.factor(hf, "ssm_in_multiplier"), hf_config.factor(hf, "ssm_out_multiplier")),
                (
                    "attention",
                    attention,
                    hf_config.factor(hf, "attention_in_multiplier"),
                    hf_config.factor(hf, "attention_out_multiplier"),
                ),
            )
        )
        mlp = _mlp(hf, hf_config.positive_int(hf, "intermediate_size", 14336), gate_factor)
        layer = (BranchArgs("mixers", sides), BranchArgs("mlp", mlp, down_factor))
        return cls(
            **_shape(hf, 128000),
            layers=(layer,) * hf_config.positive_int(hf, "num_hidden_layers", 32),
            embed_factor=hf_config.factor(hf, "embedding_multiplier"),
            logit_factor=hf_config.factor(hf, "lm_head_multiplier"),
        )


def _factors(hf: Mapping[str, Any], key: str, count: int) -> tuple[Any, ...]:
    values = hf.get(key)
    if values is None:
        return (1.0,) * count
    if not isinstance(values, (list, tuple)) or len(values) != count or not all(isinstance(value, (int, float)) for value in values):
        raise CheckpointError(f"Config key {key!r}: expected {count} numbers, found {values!r:.120}.")
    return tuple(float(value) for value in values)


def _head_dim(hf: Mapping[str, Any]) -> int:
    hidden_size = hf_config.positive_int(hf, "hidden_size", 4096)
    return hf_config.positive_int(hf, "head_dim", hidden_size // hf_config.positive_int(hf, "num_attention_heads", 32))


def _attention(hf: Mapping[str, Any], rope: RopeArgs | None, scale: float) -> AttentionArgs:
    heads, kv_heads = hf_config.head_counts(hf, 32, None if hf.get("num_key_value_heads", 8) is None else 8)
    bias = hf_config.flag(hf, "attention_bias")
    return AttentionArgs(heads, kv_heads, _head_dim(hf), scale, rope, qkv_bias=bias, output_bias=bias)


def _mlp(hf: Mapping[str, Any], intermediate_size: int, gate_factor: float = 1.0) -> GatedMLPArgs:
    return GatedMLPArgs(intermediate_size, str(hf.get("hidden_act") or "silu"), hf_config.flag(hf, "mlp_bias"), gate_factor)


def _mamba2(hf: Mapping[str, Any], width: int | None = None, **others: Any) -> Mamba2Args:
    """`width`: of all heads together, by default `mamba_expand` times the model's."""
    heads = hf_config.positive_int(hf, "mamba_n_heads", 128)
    width = width or hf_config.positive_int(hf, "hidden_size", 4096) * hf_config.positive_int(hf, "mamba_expand", 2)
    head_dim = hf.get("mamba_d_head") or "auto"
    head_dim = width // heads if head_dim == "auto" else hf_config.positive_int(hf, "mamba_d_head")
    if heads * head_dim != width:
        raise CheckpointError(f"Config keys 'mamba_n_heads' and 'mamba_d_head': {heads} of {head_dim} are not {width}.")
    bias = hf_config.flag(hf, "mamba_proj_bias")
    return Mamba2Args(
        num_heads=heads,
        head_dim=head_dim,
        groups=hf_config.positive_int(hf, "mamba_n_groups", 1),
        state_size=hf_config.positive_int(hf, "mamba_d_state", 256),
        taps=hf_config.positive_int(hf, "mamba_d_conv", 4),
        conv_bias=hf_config.flag(hf, "mamba_conv_bias", True),
        step_limits=hf_config.limits(hf, "time_step_limit"),
        bias=bias,
        **({"norm_eps": _eps(hf), "output_bias": bias} | others),
    )


def _eps(hf: Mapping[str, Any]) -> float:
    return hf_config.number(hf, "rms_norm_eps", 1e-6 if hf.get("model_type") == "granitemoehybrid" else 1e-5)


def _shape(hf: Mapping[str, Any], default_vocab: int) -> dict[str, Any]:
    return {
        "vocab_size": hf_config.positive_int(hf, "vocab_size", default_vocab),
        "hidden_size": hf_config.positive_int(hf, "hidden_size", 4096),
        "norm": NormArgs(_eps(hf)),
        "tied_output": hf_config.flag(hf, "tie_word_embeddings"),
    }


_MIXERS = (
    *names.attention(f"{names.LAYER}.self_attn"),
    *names.mamba2(f"{names.LAYER}.mamba", "layers.{i}.mamba"),
)
_EMBEDDINGS = (Rule("model.embed_tokens.weight", "embed.weight"), Rule("lm_head.weight", "head.weight", tied=True))
_INPUT_NORMS = tuple(Rule(f"{names.LAYER}.input_layernorm.weight", f"layers.{{i}}.{name}_norm.weight") for name in ("mamba", "attention"))


class BambaForCausalLM(HybridDecoder):
    """`BambaForCausalLM` of config.json."""

    Args = BambaArgs
    WEIGHTS = WeightMap(
        (
            *_EMBEDDINGS,
            Rule("model.final_layernorm.weight", "norm.weight"),
            *_INPUT_NORMS,
            Rule(f"{names.LAYER}.pre_ff_layernorm.weight", "layers.{i}.mlp_norm.weight"),
            *_MIXERS,
            *names.gated_mlp(f"{names.LAYER}.feed_forward"),
        ),
        (*names.BODY_RENAMES, ("final_layernorm.", "model.final_layernorm.")),
        names.ROPE_BUFFERS,
    )


class GraniteMoeHybridForCausalLM(HybridDecoder):
    """`GraniteMoeHybridForCausalLM` of config.json."""

    Args = GraniteHybridArgs
    WEIGHTS = WeightMap(
        (
            *names.OUTER,
            *_INPUT_NORMS,
            Rule(f"{names.LAYER}.post_attention_layernorm.weight", "layers.{i}.mlp_norm.weight"),
            *_MIXERS,
            Rule(f"{names.LAYER}.shared_mlp.input_linear.weight", "layers.{i}.mlp.gate_up.weight"),
            Rule(f"{names.LAYER}.shared_mlp.output_linear.weight", "layers.{i}.mlp.down.weight"),
        ),
        names.BODY_RENAMES,
        names.ROPE_BUFFERS,
    )


class FalconH1ForCausalLM(HybridDecoder):
    """`FalconH1ForCausalLM` of config.json."""

    Args = FalconH1Args
    WEIGHTS = WeightMap(
        (
            *_EMBEDDINGS,
            Rule("model.final_layernorm.weight", "norm.weight"),
            Rule(f"{names.LAYER}.input_layernorm.weight", "layers.{i}.mixers_norm.weight"),
            Rule(f"{names.LAYER}.pre_ff_layernorm.weight", "layers.{i}.mlp_norm.weight"),
            *names.attention(f"{names.LAYER}.self_attn", "layers.{i}.mixers.attention"),
            *names.mamba2(f"{names.LAYER}.mamba", "layers.{i}.mixers.mamba"),
            *names.gated_mlp(f"{names.LAYER}.feed_forward"),
        ),
        (*names.BODY_RENAMES, ("final_layernorm.", "model.final_layernorm.")),
        (*names.ROPE_BUFFERS, "*.mup_vector"),
    )
