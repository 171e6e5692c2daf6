"""The work of the GGUF converter undone.

The converter reorders the rows of query and key projections of Llama-shaped models for interleaved rotation, and stores Gemma's
norms with their one already added, decays as rates instead of their logarithms, and the parts of some projections apart. `Transform`s turn
the dequantised values back into what a Hugging Face checkpoint holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from canter.checkpoint.gguf_names import ARCH_NAMES, split_name
from canter.checkpoint.gguf_quants import Floats
from canter.core.errors import CheckpointError


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


def transform_for(arch: str, name: str, num_heads: int, num_kv_heads: int) -> Transform | None:
    """What undoes the converter's work on the GGUF tensor `name`; None where it did none."""
    names, (block, inner) = ARCH_NAMES[arch], split_name(name)
    stem = inner.removesuffix(".weight").removesuffix(".bias")
    if block is not None and inner == "ssm_a":
        return LogOfNegative()
    if names.qkv_apart and stem == "attn_qkv":
        return GroupRows(num_heads, len("qkv"))
    if names.rows_permuted and stem in ("attn_q", "attn_k"):
        return UnpermuteRows(num_heads if stem == "attn_q" else num_kv_heads)
    if names.norms_plus_one and stem.endswith("norm"):
        return SubtractOne()
    return None
