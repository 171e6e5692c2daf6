"""Nemotron-H (arXiv 2504.03624): layers of one mixer each, Mamba-2, attention without positions, or a feed-forward with relu^2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from canter.core.errors import CheckpointError, UnsupportedModelError
from canter.layers.attention import AttentionArgs
from canter.layers.hybrid import BranchArgs, HybridArgs, HybridDecoder, MixerArgs
from canter.layers.mlp import SquaredMLPArgs
from canter.layers.norm import NormArgs
from canter.layers.recurrent import Mamba2Args
from canter.models import hf_config, names
from canter.models.weights import Rule, WeightMap

_KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "experts",
}
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "experts"}


class NemotronHArgs(HybridArgs):
    """Nemotron-H, the models without experts. Older configs give the layers as a pattern of M, * and -.

    Step widths are not clamped: `time_step_min` says how a model began its training.
    """

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        kinds = _layer_kinds(hf)
        if "experts" in kinds:
            raise UnsupportedModelError(
                "Layers of experts are not supported yet: only Nemotron-H models of Mamba, attention and feed-forward are."
            )
        mixers: dict[str, MixerArgs] = {"mamba": _mamba2(hf), "attention": _attention(hf), "mlp": _mlp(hf)}
        branches: dict[str, BranchArgs] = {kind: BranchArgs(kind, mixer) for kind, mixer in mixers.items()}
        return cls(
            vocab_size=hf_config.positive_int(hf, "vocab_size", 131072),
            hidden_size=hf_config.positive_int(hf, "hidden_size", 4096),
            layers=tuple((branches[kind],) for kind in kinds),
            norm=NormArgs(_eps(hf), cast_first=False),
            tied_output=hf_config.flag(hf, "tie_word_embeddings"),
        )


def _layer_kinds(hf: Mapping[str, Any]) -> list[str]:
    for key in ("layers_block_type", "layer_types"):
        values = hf.get(key)
        if values is not None:
            return hf_config.kinds(hf, key, len(values) if isinstance(values, (list, tuple)) else 1, _KINDS, [])
    pattern = hf.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(_PATTERN):
        raise CheckpointError(f"Config key 'hybrid_override_pattern': expected a text of {', '.join(_PATTERN)}, found {pattern!r:.80}.")
    return [_PATTERN[mark] for mark in pattern]


def _mamba2(hf: Mapping[str, Any]) -> Mamba2Args:
    hf_config.expect_activation(hf, "mamba_hidden_act", "silu", "swish")
    bias = hf_config.flag(hf, "use_bias") or hf_config.flag(hf, "mamba_proj_bias")
    return Mamba2Args(
        num_heads=hf_config.positive_int(hf, "mamba_num_heads", 128),
        head_dim=hf_config.positive_int(hf, "mamba_head_dim", 64),
        groups=hf_config.positive_int(hf, "n_groups", 8),
        state_size=hf_config.positive_int(hf, "ssm_state_size", 128),
        taps=hf_config.positive_int(hf, "conv_kernel", 4),
        norm_eps=_eps(hf),
        bias=bias,
        output_bias=bias,
        conv_bias=hf_config.flag(hf, "use_conv_bias", True),
    )


def _attention(hf: Mapping[str, Any]) -> AttentionArgs:
    heads, kv_heads = hf_config.head_counts(hf, 32, 8)
    head_dim = hf_config.positive_int(hf, "head_dim" if hf.get("head_dim") is not None else "attention_head_dim", 128)
    return AttentionArgs(heads, kv_heads, head_dim, head_dim**-0.5, None)  # without biases, whatever `attention_bias` says


def _mlp(hf: Mapping[str, Any]) -> MixerArgs:
    hf_config.expect_activation(hf, "mlp_hidden_act", "relu2")
    return SquaredMLPArgs(hf_config.positive_int(hf, "intermediate_size", 21504), hf_config.flag(hf, "mlp_bias"))


def _eps(hf: Mapping[str, Any]) -> float:
    return hf_config.number(hf, "layer_norm_epsilon" if hf.get("layer_norm_epsilon") is not None else "rms_norm_eps", 1e-5)


_RULES = (
    Rule("model.embeddings.weight", "embed.weight"),
    Rule("model.norm_f.weight", "norm.weight"),
    Rule("lm_head.weight", "head.weight", tied=True),
    *(Rule(f"{names.LAYER}.norm.weight", f"layers.{{i}}.{kind}_norm.weight") for kind in ("mamba", "attention", "mlp")),
    *names.mamba2(f"{names.LAYER}.mixer", "layers.{i}.mamba"),
    *names.attention(f"{names.LAYER}.mixer"),
    *(
        Rule(f"{names.LAYER}.mixer.{name}_proj.{kind}", f"layers.{{i}}.mlp.{name}.{kind}")
        for name in ("up", "down")
        for kind in ("weight", "bias")
    ),
)


class NemotronHForCausalLM(HybridDecoder):
    """`NemotronHForCausalLM` of config.json."""

    Args = NemotronHArgs
    WEIGHTS = WeightMap(_RULES, (("backbone.", "model."), *names.BODY_RENAMES), ("mtp.*",))
