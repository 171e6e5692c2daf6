"""GGUF tensor names to Hugging Face names, and the work of the GGUF converter undone.

The converter reorders the rows of query and key projections of Llama-shaped models for interleaved rotation, and stores Gemma's
norms with their one already added, decays as rates instead of their logarithms, and the parts of some projections apart. `Transform`s turn
the dequantised values back into what a Hugging Face checkpoint holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from canter.core.errors import CheckpointError, UnsupportedModelError

Floats = npt.NDArray[np.float32]


class Transform(Protocol):
    """From the values that a GGUF file holds to those of the Hugging Face checkpoint; the shape stays."""

    def __call__(self, values: Floats, /) -> Floats: ...


@dataclass(frozen=True, slots=True)
class UnpermuteRows:
    """Undo the interleaving of a rotary projection: within each head, rows (0, 2, 4, ...; 1, 3, 5, ...) move together again.

    `values` is [num_heads * head_dim, ...]. Only rows move, so it also serves rows of packed blocks.
    """

    num_heads: int

    def __call__(self, values: npt.NDArray[Any], /) -> npt.NDArray[Any]:
        rows = values.shape[0]
        if rows % (2 * self.num_heads):
            raise CheckpointError(f"A rotary projection of {rows} rows can't be that of {self.num_heads} heads of even size.")
        pairs = values.reshape(self.num_heads, rows // self.num_heads // 2, 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)

    def row_index(self, rows: int) -> npt.NDArray[np.int64]:
        """For each of `rows` rows, which stored row it is."""
        return np.ascontiguousarray(self(np.arange(rows, dtype=np.int64)))


@dataclass(frozen=True, slots=True)
class GroupRows:
    """Rows of `num_parts` parts, one part after the other, go back to groups that hold some of each: a head's queries, keys and values."""

    num_groups: int
    num_parts: int

    def __call__(self, values: npt.NDArray[Any], /) -> npt.NDArray[Any]:
        rows = values.shape[0]
        if rows % (self.num_groups * self.num_parts):
            raise CheckpointError(f"A projection of {rows} rows can't be {self.num_parts} parts of {self.num_groups} heads.")
        parts = values.reshape(self.num_parts, self.num_groups, -1, *values.shape[1:])
        return parts.swapaxes(0, 1).reshape(values.shape)

    def row_index(self, rows: int) -> npt.NDArray[np.int64]:
        """For each of `rows` rows, which stored row it is."""
        return np.ascontiguousarray(self(np.arange(rows, dtype=np.int64)))


ROW_ORDERS = (UnpermuteRows, GroupRows)
"""Transforms that only move rows."""


@dataclass(frozen=True, slots=True)
class LogOfNegative:
    """`A_log` of the decay -exp(A_log) that GGUF files hold. Raises `CheckpointError` for a state that would grow."""

    def __call__(self, values: Floats, /) -> Floats:
        if not (values < 0).all():
            raise CheckpointError("A state's decay must be below 0: the file has one that is not.")
        logs: Floats = np.log(-values)
        return logs


@dataclass(frozen=True, slots=True)
class SubtractOne:
    """Gemma multiplies by one plus the norm's weight; GGUF files hold the sum."""

    def __call__(self, values: Floats, /) -> Floats:
        return values - np.float32(1)


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
    return (int(np.prod(shape)),)


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


def block_index(name: str) -> int | None:
    """The layer that a GGUF tensor belongs to, None for those outside the layers."""
    match = _BLOCK_NAME.fullmatch(name)
    return int(match[1]) if match else None


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


def transform_for(arch: str, name: str, num_heads: int, num_kv_heads: int) -> Transform | None:
    """What undoes the converter's work on the GGUF tensor `name`; None where it did none."""
    names, match = ARCH_NAMES[arch], _BLOCK_NAME.fullmatch(name)
    stem = (match[2] if match else name).removesuffix(".weight").removesuffix(".bias")
    if match and match[2] == "ssm_a":
        return LogOfNegative()
    if names.qkv_apart and stem == "attn_qkv":
        return GroupRows(num_heads, len("qkv"))
    if names.rows_permuted and stem in ("attn_q", "attn_k"):
        return UnpermuteRows(num_heads if stem == "attn_q" else num_kv_heads)
    if names.norms_plus_one and stem.endswith("norm"):
        return SubtractOne()
    return None
