"""GGUF tensor names to Hugging Face names, and what the GGUF converter did to the values of each (`gguf_transforms` undoes it)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from canter.core.errors import UnsupportedModelError

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = _ATTENTION | _MLP | {"ffn_norm": "post_attention_layernorm"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA2 = (
    _ATTENTION
    | _MLP
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
_PHI3 = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}

_KINDS = ("weight", "bias")

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are configuration: `gguf_config` reads them, and they are no weights."""

_BLOCK_NAME = re.compile(r"blk\.([0-9]{1,6})\.(.+)")

Shape = tuple[int, ...]


def _flat(shape: Shape) -> Shape:
    return (math.prod(shape),)


def _channels_first(shape: Shape) -> Shape:
    """A depthwise convolution's weights, [C, K], as [C, 1, K]."""
    return (shape[0], 1, shape[1]) if len(shape) == 2 else shape


_MAMBA = {
    "attn_norm": "norm",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_x": "mixer.x_proj",
    "ssm_dt": "mixer.dt_proj",
    "ssm_out": "mixer.out_proj",
}
_MAMBA2 = {name: own for name, own in _MAMBA.items() if name not in ("ssm_x", "ssm_dt")} | {"ssm_norm": "mixer.norm"}
_MAMBA_OUTSIDE = {
    "token_embd.weight": "backbone.embeddings.weight",
    "output_norm.weight": "backbone.norm_f.weight",
    "output.weight": "lm_head.weight",
}
_STATE = {"ssm_a": "mixer.A_log", "ssm_d": "mixer.D"}
_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_LFM2_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "token_embd_norm.weight": "model.embedding_norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOOM = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_BLOOM_OUTSIDE = {
    "token_embd.weight": "transformer.word_embeddings.weight",
    "output.weight": "lm_head.weight",
    **{
        f"{stem}.{kind}": f"transformer.{name}.{kind}"
        for stem, name in (("token_embd_norm", "word_embeddings_layernorm"), ("output_norm", "ln_f"))
        for kind in ("weight", "bias")
    },
}


@dataclass(frozen=True, slots=True)
class ArchNames:
    """How the tensors of one GGUF architecture map: names within a block, and what the converter did to them.

    `exact`: names within a block that have an ending of their own, or none. `outside`: names outside the blocks, `layers`: where the
    blocks are. `qkv_apart`: queries, keys and values of all heads lie apart in the file. `shapes`: by name within a block, what shape of
    the file's is the checkpoint's.
    """

    block: Mapping[str, str]
    rows_permuted: bool = False
    norms_plus_one: bool = False
    exact: Mapping[str, str] = field(default_factory=dict)
    outside: Mapping[str, str] = field(default_factory=lambda: _OUTSIDE)
    layers: str = "model.layers"
    qkv_apart: bool = False
    shapes: Mapping[str, Callable[[Shape], Shape]] = field(default_factory=dict)
    ignored: frozenset[str] = field(default=frozenset({"attn_rot_embd"}))


ARCH_NAMES: dict[str, ArchNames] = {
    "llama": ArchNames(_LLAMA, rows_permuted=True),
    "smollm3": ArchNames(_LLAMA, rows_permuted=True),
    "qwen2": ArchNames(_LLAMA),
    "qwen3": ArchNames(_LLAMA | _QK_NORMS),
    "gemma2": ArchNames(_GEMMA2, norms_plus_one=True),
    "gemma3": ArchNames(_GEMMA2 | _QK_NORMS, norms_plus_one=True),
    "phi3": ArchNames(_PHI3),
    "mamba": ArchNames(
        _MAMBA, exact=_STATE, outside=_MAMBA_OUTSIDE, layers="backbone.layers", shapes={"ssm_conv1d.weight": _channels_first}
    ),
    "mamba2": ArchNames(
        _MAMBA2,
        exact=_STATE | {"ssm_dt.bias": "mixer.dt_bias"},
        outside=_MAMBA_OUTSIDE,
        layers="backbone.layers",
        shapes={"ssm_conv1d.weight": _channels_first, "ssm_a": _flat, "ssm_d": _flat, "ssm_norm.weight": _flat},
    ),
    "lfm2": ArchNames(_LFM2, outside=_LFM2_OUTSIDE, shapes={"shortconv.conv.weight": _channels_first}),
    "bloom": ArchNames(_BLOOM, outside=_BLOOM_OUTSIDE, layers="transformer.h", qkv_apart=True),
}


def split_name(name: str) -> tuple[int | None, str]:
    """The layer that a GGUF tensor belongs to, None for those outside the layers, and its name there."""
    match = _BLOCK_NAME.fullmatch(name)
    return (int(match[1]), match[2]) if match else (None, name)


def block_index(name: str) -> int | None:
    """The layer that a GGUF tensor belongs to, None for those outside the layers."""
    return split_name(name)[0]


def hf_name(arch: str, name: str) -> str | None:
    """The Hugging Face name of the GGUF tensor `name`; None for one that is no weight.

    Raises `UnsupportedModelError` for a name that the architecture does not have: its layers would compute something else.
    """
    names = ARCH_NAMES[arch]
    if name in ROPE_TENSORS:
        return None
    if name in names.outside:
        return names.outside[name]
    match = _BLOCK_NAME.fullmatch(name)
    inner = match[2] if match else ""
    stem, _, kind = inner.rpartition(".")
    if match and inner in names.exact:
        return f"{names.layers}.{int(match[1])}.{names.exact[inner]}"
    if match and kind in _KINDS and stem in names.ignored:
        return None
    if not match or kind not in _KINDS or stem not in names.block:
        known = ", ".join([*names.outside, *(f"blk.N.{stem}" for stem in (*names.block, *names.exact))])
        raise UnsupportedModelError(f"Tensor {name!r}: GGUF architecture {arch!r} has no such weight here; known: {known}.")
    return f"{names.layers}.{int(match[1])}.{names.block[stem]}.{kind}"


def hf_shape(arch: str, name: str, shape: Shape) -> Shape:
    """The shape in a Hugging Face checkpoint of the GGUF tensor `name`, the same values in the same order."""
    match = _BLOCK_NAME.fullmatch(name)
    reshape = ARCH_NAMES[arch].shapes.get(match[2]) if match else None
    return shape if reshape is None else reshape(shape)
