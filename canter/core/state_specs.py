"""What each layer remembers of a request, how layers share block tables, and how much memory a block takes.

Pure arithmetic: no tensors. `models` declare specs, `scheduler/cache` manages blocks by them, `runner/state_pool`
allocates tensors by them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from canter.core.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1, "float8_e4m3fn": 1}


class StateKind(StrEnum):
    """The kinds of memory. One manager in `scheduler/cache` and one kernel family serve each."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    PROMPT_WINDOW = "prompt_window"
    MLA = "mla"
    SPARSE_INDEX = "sparse_index"
    RECURRENT = "recurrent"
    CROSS_ATTENTION = "cross_attention"
    ENCODER_OUTPUT = "encoder_output"


@dataclass(frozen=True, slots=True)
class StateField:
    """One array of a block: `shape` is what a block of the owning spec holds, block dimension left out."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What one layer remembers.

    `block_size`: tokens a block stands for. `window`: tokens a query sees, itself included (SLIDING_WINDOW,
    PROMPT_WINDOW) or tokens of a chunk (CHUNKED_LOCAL); None otherwise.
    """

    kind: StateKind
    block_size: int
    fields: tuple[StateField, ...]
    window: int | None = None

    @property
    def block_bytes(self) -> int:
        return sum(field.num_bytes for field in self.fields)


CACHE_STORAGE = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8_e4m3": "float8_e4m3fn",
    "int8_per_token_head": "int8",
}
"""Types of cached keys and values -> how they are stored."""


def attention_spec(num_kv_heads: int, head_dim: int, cache_dtype: str, block_size: int, window: int | None = None) -> StateSpec:
    """Keys and values of one attention layer; a window makes it SLIDING_WINDOW. `cache_dtype` is one of `CACHE_STORAGE`.

    A block of keys is `[num_kv_heads, head_dim / x, block_size, x]` with x elements in 4 bytes, but 1 for float16, which processors
    widen as it lies: a kernel finds neighbouring keys in neighbouring lanes, and needs no sums across lanes. A block of values is
    `[num_kv_heads, block_size, head_dim]`. int8 rows have a float scale each. Raises `ConfigError` for a head size of which a row
    is no multiple of 4 bytes.
    """
    storage = CACHE_STORAGE[cache_dtype]
    step = 4 // DTYPE_BYTES[storage]
    if head_dim % step:
        raise ConfigError(f"kv_cache_dtype {cache_dtype} needs a head size that is a multiple of {step}; the model's is {head_dim}.")
    lanes = 1 if storage == "float16" else step
    fields = [
        StateField("k", (num_kv_heads, head_dim // lanes, block_size, lanes), storage),
        StateField("v", (num_kv_heads, block_size, head_dim), storage),
    ]
    if cache_dtype == "int8_per_token_head":
        fields += [StateField(name, (num_kv_heads, block_size), "float32") for name in ("k_scale", "v_scale")]
    kind = StateKind.FULL if window is None else StateKind.SLIDING_WINDOW
    return StateSpec(kind, block_size, tuple(fields), window)


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Layers that share one block table: equal specs. `layer_ids[i]` uses storage slot i of pool `pool_id`."""

    group_id: int
    pool_id: int
    spec: StateSpec
    layer_ids: tuple[int, ...]


_LINE = 64
"""Bytes of a cache line: where fields begin."""
_APART = 32 * _LINE
"""Large blocks are an odd number of these: else a layer's share of every block would fall on the same few sets of the caches."""


def _padded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Blocks of one size: `num_slots` arrays of `num_blocks` blocks; block ids are unique across the groups of a pool."""

    pool_id: int
    num_slots: int
    fields: tuple[StateField, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes from one storage slot to the next: what all slots keep of a block lies together."""
        return sum(_padded(field.num_bytes, _LINE) for field in self.fields)

    def field_starts(self, slot: int) -> list[int]:
        """Where each field of a storage slot begins within a block, in bytes."""
        starts = [slot * self.slot_bytes]
        for field in self.fields:
            starts.append(starts[-1] + _padded(field.num_bytes, _LINE))
        return starts[:-1]

    @property
    def block_bytes(self) -> int:
        """Bytes that one block id takes over all storage slots, from its block to the next: padding included."""
        num_bytes = self.num_slots * self.slot_bytes
        unit = _APART if num_bytes >= 32 * _APART else _LINE
        units = -(-num_bytes // unit)
        return (units + (units % 2 == 0)) * unit


@dataclass(frozen=True, slots=True)
class StateLayout:
    """How the layers of a model are laid out in memory. Group order is stable: full attention first."""

    groups: tuple[StateGroup, ...]
    pools: tuple[PoolSpec, ...]

    @property
    def hash_block_size(self) -> int:
        """Tokens in the finest prefix-cache block: every group's block is a multiple of it."""
        return math.gcd(*(group.spec.block_size for group in self.groups))

    def slot_of_layer(self) -> dict[int, tuple[int, int, int]]:
        """layer id -> (group id, pool id, storage slot)."""
        return {layer: (g.group_id, g.pool_id, slot) for g in self.groups for slot, layer in enumerate(g.layer_ids)}


def plan_layout(specs: Mapping[int, StateSpec]) -> StateLayout:
    """Group layers of equal spec, and pools of equal fields.

    Within a pool, kinds with many layers are cut into groups of g layers, g the count of the rarest kind (or of the
    commonest, when that is less than 1.5 times more), so that every group uses the same g storage slots and one block
    id serves any group. Layers of a kind are dealt out in strides, so that pipeline stages stay balanced.
    """
    by_spec: dict[StateSpec, list[int]] = {}
    for layer_id in sorted(specs):
        by_spec.setdefault(specs[layer_id], []).append(layer_id)
    by_fields: dict[tuple[StateField, ...], list[StateSpec]] = {}
    for spec in sorted(by_spec, key=lambda s: (s.kind is not StateKind.FULL, s.kind.value, s.window or 0)):
        by_fields.setdefault(spec.fields, []).append(spec)
    groups: list[StateGroup] = []
    pools: list[PoolSpec] = []
    for pool_id, (fields, pool_specs) in enumerate(by_fields.items()):
        counts = [len(by_spec[spec]) for spec in pool_specs]
        slots = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
        pools.append(PoolSpec(pool_id, slots, fields))
        for spec in pool_specs:
            layers = by_spec[spec]
            num_groups = math.ceil(len(layers) / slots)
            for i in range(num_groups):
                groups.append(StateGroup(len(groups), pool_id, spec, tuple(layers[i::num_groups])))
    return StateLayout(tuple(groups), tuple(pools))
