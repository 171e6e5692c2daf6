"""Mamba (arXiv 2312.00752), Falcon Mamba (arXiv 2410.05355) and Mamba-2 (arXiv 2405.21060): nothing but recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

from canter.core.errors import CheckpointError
from canter.layers.hybrid import BranchArgs, HybridArgs, HybridDecoder, MixerArgs
from canter.layers.norm import NormArgs
from canter.layers.recurrent import Mamba1Args, Mamba2Args
from canter.models import hf_config, names
from canter.models.weights import Rule, WeightMap

_LAYER = "backbone.layers.{i}"
_OUTER = (
    Rule("backbone.embeddings.weight", "embed.weight"),
    Rule("backbone.norm_f.weight", "norm.weight"),
    Rule("lm_head.weight", "head.weight", tied=True),
    Rule(f"{_LAYER}.norm.weight", "layers.{i}.mamba_norm.weight"),
)
_RENAMES = (
    ("backbone.embedding.", "backbone.embeddings."),
    ("layers.", "backbone.layers."),
    ("embeddings.", "backbone.embeddings."),
    ("norm_f.", "backbone.norm_f."),
)


class MambaArgs(HybridArgs):
    """Mamba."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        return cls(**_shape(hf, _mamba1(hf), default_tied=True))


class FalconMambaArgs(HybridArgs):
    """Falcon Mamba: step widths, B and C are normalised, without weights."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        norm = NormArgs(hf_config.number(hf, "mixer_rms_eps", 1e-6), weighted=False)
        return cls(**_shape(hf, _mamba1(hf, norm), default_tied=True))


class Mamba2ModelArgs(HybridArgs):
    """Mamba-2."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        hf_config.expect_activation(hf, "hidden_act", "silu", "swish")
        hidden_size = hf_config.positive_int(hf, "hidden_size", 4096)
        heads, head_dim = hf_config.positive_int(hf, "num_heads", 128), hf_config.positive_int(hf, "head_dim", 64)
        if heads * head_dim != hidden_size * hf_config.positive_int(hf, "expand", 2):
            raise CheckpointError(f"Config keys 'num_heads' and 'head_dim': {heads} of {head_dim} are not expand times {hidden_size}.")
        bias = hf_config.flag(hf, "use_bias")
        mixer = Mamba2Args(
            num_heads=heads,
            head_dim=head_dim,
            groups=hf_config.positive_int(hf, "n_groups", 8),
            state_size=hf_config.positive_int(hf, "state_size", 128),
            taps=hf_config.positive_int(hf, "conv_kernel", 4),
            norm_eps=hf_config.number(hf, "layer_norm_epsilon", 1e-5),
            bias=bias,
            output_bias=bias,
            conv_bias=hf_config.flag(hf, "use_conv_bias", True),
            step_limits=hf_config.limits(hf, "time_step_limit"),
        )
        return cls(**_shape(hf, mixer, default_tied=False))


def _mamba1(hf: Mapping[str, Any], norm: NormArgs | None = None) -> Mamba1Args:
    hf_config.expect_activation(hf, "hidden_act", "silu", "swish")
    hidden_size = hf_config.positive_int(hf, "hidden_size", 768)
    width = hf.get("intermediate_size") or hidden_size * hf_config.positive_int(hf, "expand", 2)
    rank = hf.get("time_step_rank", "auto")
    return Mamba1Args(
        width=hf_config.positive_int({"intermediate_size": width}, "intermediate_size"),
        state_size=hf_config.positive_int(hf, "state_size", 16),
        rank=math.ceil(hidden_size / 16) if rank == "auto" else hf_config.positive_int(hf, "time_step_rank"),
        taps=hf_config.positive_int(hf, "conv_kernel", 4),
        bias=hf_config.flag(hf, "use_bias"),
        conv_bias=hf_config.flag(hf, "use_conv_bias", True),
        norm=norm,
    )


def _shape(hf: Mapping[str, Any], mixer: MixerArgs, default_tied: bool) -> dict[str, Any]:
    return {
        "vocab_size": hf_config.positive_int(hf, "vocab_size"),
        "hidden_size": hf_config.positive_int(hf, "hidden_size"),
        "layers": ((BranchArgs("mamba", mixer),),) * hf_config.positive_int(hf, "num_hidden_layers"),
        "norm": NormArgs(hf_config.number(hf, "layer_norm_epsilon", 1e-5)),
        "tied_output": hf_config.flag(hf, "tie_word_embeddings", default_tied),
    }


class MambaForCausalLM(HybridDecoder):
    """`MambaForCausalLM` of config.json."""

    Args = MambaArgs
    WEIGHTS = WeightMap((*_OUTER, *names.mamba1(f"{_LAYER}.mixer", "layers.{i}.mamba")), _RENAMES)


class FalconMambaForCausalLM(HybridDecoder):
    """`FalconMambaForCausalLM` of config.json."""

    Args = FalconMambaArgs
    WEIGHTS = WeightMap((*_OUTER, *names.mamba1(f"{_LAYER}.mixer", "layers.{i}.mamba")), _RENAMES, ("*.b_c_rms", "*.dt_rms"))


class Mamba2ForCausalLM(HybridDecoder):
    """`Mamba2ForCausalLM` of config.json."""

    Args = Mamba2ModelArgs
    WEIGHTS = WeightMap((*_OUTER, *names.mamba2(f"{_LAYER}.mixer", "layers.{i}.mamba")), _RENAMES)
