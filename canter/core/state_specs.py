"""What each layer remembers of a request, how layers share block tables, and how much memory a block takes.

Pure arithmetic: no tensors. `models` declare specs, `scheduler/cache` manages blocks by them, `runner/state_pool`
allocates tensors by them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from canter.core.errors import ConfigError, UnsupportedModelError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1, "float8_e4m3fn": 1}


class StateKind(StrEnum):
    """The kinds of memory: how long a layer keeps what. One manager in `scheduler/cache` serves each.

    What a layer does with its memory is not told here: sinks, soft caps, ALiBi, scales and positions are the layer's own.
    """

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    PROMPT_WINDOW = "prompt_window"
    MLA = "mla"
    COMPRESSED = "compressed"
    RECURRENT = "recurrent"
    CROSS_ATTENTION = "cross_attention"
    ENCODER_OUTPUT = "encoder_output"


class SnapshotMode(StrEnum):
    """When the state of a recurrent layer is kept for later requests.

    NONE: never; a request holds one state. ALIGN: where a step ends on a block boundary. ALL: at every block boundary; the
    layer's kernel writes them while it runs over a step's tokens.
    """

    NONE = "none"
    ALIGN = "align"
    ALL = "all"


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

    `block_size`: tokens a block stands for; of a recurrent layer, whose block is the whole state after some token, the
    distance between the places where a state may be kept. `window`: tokens a query sees, itself included (SLIDING_WINDOW,
    PROMPT_WINDOW), or tokens of a chunk (CHUNKED_LOCAL); None otherwise. `snapshots`: of a recurrent layer.
    """

    kind: StateKind
    block_size: int
    fields: tuple[StateField, ...]
    window: int | None = None
    snapshots: SnapshotMode = SnapshotMode.NONE

    @property
    def block_bytes(self) -> int:
        return sum(f.num_bytes for f in self.fields)

    @property
    def grows(self) -> bool:
        """Whether a longer request needs more of it; otherwise its memory is sized by the number of requests."""
        return self.kind is not StateKind.RECURRENT


@dataclass(frozen=True, slots=True)
class SharedState:
    """In place of a spec: a layer that stores nothing and reads what layer `layer_id`, which it follows, has stored."""

    layer_id: int


CACHE_STORAGE = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8_e4m3": "float8_e4m3fn",
    "int8_per_token_head": "int8",
}
"""Types of cached keys and values -> how they are stored."""


def attention_spec(
    num_kv_heads: int,
    head_dim: int,
    cache_dtype: str,
    block_size: int,
    window: int | None = None,
    *,
    kind: StateKind | None = None,
    value_dim: int | None = None,
) -> StateSpec:
    """Keys and values of one attention layer. `cache_dtype` is one of `CACHE_STORAGE`; `value_dim` where values are not as wide as keys.

    `kind` is SLIDING_WINDOW with a window and FULL without, unless it says something else of the window. A block of keys is
    `[num_kv_heads, head_dim / x, block_size, x]` with x elements in 4 bytes, but 1 for float16, which processors widen as it
    lies: a kernel finds neighbouring keys in neighbouring lanes, and needs no sums across lanes. A block of values is
    `[num_kv_heads, block_size, value_dim]`. int8 rows have a float scale each. Raises `ConfigError` for a head size of which a
    row is no multiple of 4 bytes.
    """
    storage = CACHE_STORAGE[cache_dtype]
    step = 4 // DTYPE_BYTES[storage]
    value_dim = value_dim or head_dim
    for dim in (head_dim, value_dim):
        if dim % step:
            raise ConfigError(f"kv_cache_dtype {cache_dtype} needs a head size that is a multiple of {step}; the model's is {dim}.")
    lanes = 1 if storage == "float16" else step
    fields = [
        StateField("k", (num_kv_heads, head_dim // lanes, block_size, lanes), storage),
        StateField("v", (num_kv_heads, block_size, value_dim), storage),
    ]
    if cache_dtype == "int8_per_token_head":
        fields += [StateField(name, (num_kv_heads, block_size), "float32") for name in ("k_scale", "v_scale")]
    if kind is None:
        kind = StateKind.FULL if window is None else StateKind.SLIDING_WINDOW
    return StateSpec(kind, block_size, tuple(fields), window)


def rows_spec(
    kind: StateKind, block_size: int, rows: Mapping[str, tuple[int, str]], *, window: int | None = None, tokens_per_row: int = 1
) -> StateSpec:
    """Plain rows: name -> (width, dtype). Each field of a block is `[block_size / tokens_per_row, width]`.

    Raises `ConfigError` for a block that rows do not fill.
    """
    if block_size % tokens_per_row:
        raise ConfigError(f"block_size must be a multiple of {tokens_per_row} for this model, got {block_size}.")
    fields = (StateField(name, (block_size // tokens_per_row, width), dtype) for name, (width, dtype) in rows.items())
    return StateSpec(kind, block_size, tuple(fields), window)


def mla_spec(latent_dim: int, rope_dim: int, dtype: str, block_size: int, index_dim: int = 0) -> StateSpec:
    """Multi-head latent attention: for each token the normed latent and the rotated shared key, `latent [., latent_dim + rope_dim]`.

    With `index_dim` the keys of the layer's own sparse indexer lie in the same blocks, as `index_k`: they live as long as what
    they index, and one table finds both.
    """
    rows = {"latent": (latent_dim + rope_dim, dtype)}
    if index_dim:
        rows["index_k"] = (index_dim, dtype)
    return rows_spec(StateKind.MLA, block_size, rows)


def compressed_spec(ratio: int, width: int, dtype: str, block_size: int, index_dim: int = 0) -> StateSpec:
    """One `entry` for every `ratio` tokens (DeepSeek V4), and the indexer's `index_k` beside it where there is one.

    Entries are found by position, so that one which rejected drafts had completed is written again. Raises `ConfigError` for a
    block that is no multiple of the ratio.
    """
    rows = {"entry": (width, dtype)}
    if index_dim:
        rows["index_k"] = (index_dim, dtype)
    return rows_spec(StateKind.COMPRESSED, block_size, rows, tokens_per_row=ratio)


def open_window_spec(ratio: int, width: int, dtype: str, block_size: int, overlaps: bool) -> StateSpec:
    """The raw rows of which compressed entries are made, until theirs is: `raw [., width]` of the last `ratio` tokens.

    Twice as many where entries overlap. They are stored by position like keys, so a rejected draft costs nothing and a prefix
    hit finds them in its last blocks.
    """
    return rows_spec(StateKind.SLIDING_WINDOW, block_size, {"raw": (width, dtype)}, window=2 * ratio if overlaps else ratio)


def recurrent_spec(fields: Mapping[str, tuple[tuple[int, ...], str]]) -> StateSpec:
    """The whole state of a recurrent or convolution layer: name -> (shape, dtype).

    A block is one state. Where states are kept is not the model's to say: see `place_snapshots`.
    """
    arrays = (StateField(name, shape, dtype) for name, (shape, dtype) in fields.items())
    return StateSpec(StateKind.RECURRENT, 1, tuple(arrays))


def place_snapshots(specs: Mapping[int, StateSpec | SharedState], mode: SnapshotMode, interval: int) -> dict[int, StateSpec | SharedState]:
    """Let recurrent layers keep their states at multiples of `interval` tokens; specs of other kinds stay as they are.

    With NONE the interval is what no request exceeds.
    """
    return {
        layer_id: replace(spec, block_size=interval, snapshots=mode)
        if isinstance(spec, StateSpec) and spec.kind is StateKind.RECURRENT
        else spec
        for layer_id, spec in specs.items()
    }


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
    """Blocks of one size: `num_slots` arrays of `num_blocks` blocks; block ids are unique across the groups of a pool.

    `grows`: as that of its specs. What all slots keep of a block lies together where it does; otherwise each field of a slot is
    one run of all blocks, for a recurrent state is large by itself and its kernels walk over whole ones.
    """

    pool_id: int
    num_slots: int
    fields: tuple[StateField, ...]
    grows: bool = True

    @property
    def slot_bytes(self) -> int:
        """Bytes from one storage slot to the next: what all slots keep of a block lies together."""
        return sum(_padded(f.num_bytes, _LINE) for f in self.fields)

    def field_starts(self, slot: int) -> list[int]:
        """Where each field of a storage slot begins within a block, in bytes."""
        starts = [slot * self.slot_bytes]
        for f in self.fields:
            starts.append(starts[-1] + _padded(f.num_bytes, _LINE))
        return starts[:-1]

    @property
    def block_bytes(self) -> int:
        """Bytes that one block id takes over all storage slots, from its block to the next: padding included."""
        if not self.grows:
            return self.num_slots * sum(f.num_bytes for f in self.fields)
        num_bytes = self.num_slots * self.slot_bytes
        unit = _APART if num_bytes >= 32 * _APART else _LINE
        units = -(-num_bytes // unit)
        return (units + (units % 2 == 0)) * unit


@dataclass(frozen=True, slots=True)
class StateLayout:
    """How the layers of a model are laid out in memory. Group order is stable: full attention first.

    `shared`: layer -> the layer whose memory it reads.
    """

    groups: tuple[StateGroup, ...]
    pools: tuple[PoolSpec, ...]
    shared: Mapping[int, int] = field(default_factory=dict)

    @property
    def hash_block_size(self) -> int:
        """Tokens in the finest prefix-cache block: every group's block is a multiple of it."""
        return math.gcd(*(group.spec.block_size for group in self.groups))

    def slot_of_layer(self) -> dict[int, tuple[int, int, int]]:
        """layer id -> (group id, pool id, storage slot)."""
        places = {layer: (g.group_id, g.pool_id, slot) for g in self.groups for slot, layer in enumerate(g.layer_ids)}
        return places | {layer: places[owner] for layer, owner in self.shared.items()}

    @property
    def can_roll_back(self) -> bool:
        """Whether tokens that were computed can be taken back, as drafts are that turn out wrong."""
        return not self.uses(StateKind.RECURRENT)

    def uses(self, kind: StateKind) -> bool:
        """Whether any layer's memory is of this kind."""
        return any(group.spec.kind is kind for group in self.groups)


def plan_layout(specs: Mapping[int, StateSpec | SharedState]) -> StateLayout:
    """Group layers of equal spec, and pools of equal fields. A layer with several memories takes an id for each.

    Within a pool, kinds with many layers are cut into groups of g layers, g the count of the rarest kind (or of the
    commonest, when that is less than 1.5 times more), so that every group uses the same g storage slots and one block
    id serves any group. Layers of a kind are dealt out in strides, so that pipeline stages stay balanced.
    Raises `UnsupportedModelError` for a layer that shares what its owner does not store.
    """
    by_spec: dict[StateSpec, list[int]] = {}
    shared: dict[int, int] = {}
    for layer_id in sorted(specs):
        spec = specs[layer_id]
        if isinstance(spec, SharedState):
            if not isinstance(specs.get(spec.layer_id), StateSpec):
                raise UnsupportedModelError(f"Layer {layer_id} reads the memory of layer {spec.layer_id}, which has none of its own.")
            shared[layer_id] = spec.layer_id
        else:
            by_spec.setdefault(spec, []).append(layer_id)
    by_fields: dict[tuple[tuple[StateField, ...], bool], list[StateSpec]] = {}
    for spec in sorted(by_spec, key=lambda s: (s.kind is not StateKind.FULL, s.kind.value, s.window or 0)):
        by_fields.setdefault((spec.fields, spec.grows), []).append(spec)
    groups: list[StateGroup] = []
    pools: list[PoolSpec] = []
    for pool_id, ((fields, grows), pool_specs) in enumerate(by_fields.items()):
        counts = [len(by_spec[spec]) for spec in pool_specs]
        slots = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
        pools.append(PoolSpec(pool_id, slots, fields, grows))
        for spec in pool_specs:
            layers = by_spec[spec]
            num_groups = math.ceil(len(layers) / slots)
            for i in range(num_groups):
                groups.append(StateGroup(len(groups), pool_id, spec, tuple(layers[i::num_groups])))
    return StateLayout(tuple(groups), tuple(pools), shared)
