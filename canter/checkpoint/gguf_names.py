"""GGUF tensor names to Hugging Face names, and the work of the GGUF converter undone.

The converter reorders the rows of query and key projections of Llama-shaped models for interleaved rotation, and stores Gemma's
norms with their one already added. `Transform`s turn the dequantised values back into what a Hugging Face checkpoint holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are configuration: `gguf_config` reads them, and they are no weights."""

_BLOCK_NAME = re.compile(r"blk\.([0-9]{1,6})\.(.+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class ArchNames:
    """How the tensors of one GGUF architecture map: names within a block, and what the converter did to them."""

    block: Mapping[str, str]
    rows_permuted: bool = False
    norms_plus_one: bool = False
    ignored: frozenset[str] = field(default=frozenset({"attn_rot_embd"}))


ARCH_NAMES: dict[str, ArchNames] = {
    "llama": ArchNames(_LLAMA, rows_permuted=True),
    "smollm3": ArchNames(_LLAMA, rows_permuted=True),
    "qwen2": ArchNames(_LLAMA),
    "qwen3": ArchNames(_LLAMA | _QK_NORMS),
    "gemma2": ArchNames(_GEMMA2, norms_plus_one=True),
    "gemma3": ArchNames(_GEMMA2 | _QK_NORMS, norms_plus_one=True),
    "phi3": ArchNames(_PHI3),
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
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match = _BLOCK_NAME.fullmatch(name)
    if match and match[2] in names.ignored:
        return None
    if not match or match[2] not in names.block:
        known = ", ".join([*_OUTSIDE, *(f"blk.N.{stem}" for stem in names.block)])
        raise UnsupportedModelError(f"Tensor {name!r}: GGUF architecture {arch!r} has no such weight here; known: {known}.")
    return f"model.layers.{int(match[1])}.{names.block[match[2]]}.{match[3]}"


def transform_for(arch: str, name: str, num_heads: int, num_kv_heads: int) -> Transform | None:
    """What undoes the converter's work on the GGUF tensor `name`; None where it did none."""
    names, match = ARCH_NAMES[arch], _BLOCK_NAME.fullmatch(name)
    stem = match[2] if match else name.removesuffix(".weight")
    if names.rows_permuted and stem in ("attn_q", "attn_k"):
        return UnpermuteRows(num_heads if stem == "attn_q" else num_kv_heads)
    if names.norms_plus_one and stem.endswith("norm"):
        return SubtractOne()
    return None
