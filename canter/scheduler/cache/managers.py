"""One manager for each kind of state: the block lifecycle of one group of layers.

Every kind implements every verb (blocks needed, grow, trim, match a prefix, publish, fork, rollback, free). A kind
joins by a class here and a row in `MANAGERS`; coordinator and scheduler know only the `StateManager` protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from canter.core.errors import UnsupportedModelError
from canter.core.state_specs import StateGroup, StateKind
from canter.scheduler.cache.block_pool import NULL_BLOCK, BlockPool


class BlockTable:
    """The blocks of one request in one group: `blocks[i]` holds tokens from `i * block_size` on, or is the null block.

    `num_trimmed`: leading null blocks. `num_published`: leading blocks that the prefix index has been told of.
    """

    __slots__ = ("blocks", "num_published", "num_trimmed")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.num_published = 0
        self.num_trimmed = 0


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """What bounds one request's share: its greatest length, and the tokens that one step may add to it.

    `num_lookahead_tokens`: slots beyond the scheduled tokens that a step may write (drafts).
    """

    max_model_len: int
    max_num_batched_tokens: int
    num_lookahead_tokens: int = 0


class StateManager(Protocol):
    """The verbs of one group. Token counts are positions of the request, counted from its start."""

    group: StateGroup
    pool: BlockPool
    block_size: int
    is_prefix_closed: bool
    """Whether every shorter length of a hit is a hit too."""

    def max_blocks(self, num_slots: int) -> int:
        """The most blocks that a request of so many slots ever holds at once."""

    def num_new_blocks(self, table: BlockTable, num_slots: int) -> int:
        """Blocks that `grow` would take."""

    def grow(self, table: BlockTable, num_slots: int) -> list[int]:
        """Append blocks until the table has `num_slots` slots; returns what it appended."""

    def trim(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Free the blocks that no query from `num_computed_tokens` on reads."""

    def find_hit(self, hashes: Sequence[bytes], max_tokens: int, alignment: int) -> list[int]:
        """The table of the longest cached prefix of at most `max_tokens`, a multiple of `alignment` tokens."""

    def adopt(self, table: BlockTable, hit: list[int]) -> None:
        """Start an empty table with the blocks of a hit, and hold them."""

    def publish(self, table: BlockTable, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Tell the prefix index of the full blocks among the first `num_tokens` tokens."""

    def can_fork(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether a request could go on from these tokens with the blocks that are still held."""

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """A second table that shares the blocks of the first `num_tokens` tokens, a multiple of the block size."""

    def rollback(self, table: BlockTable, num_tokens: int) -> None:
        """Tokens from `num_tokens` on were rejected: the state must be as if they had never been computed."""

    def free(self, table: BlockTable) -> list[int]:
        """Empty the table and return its blocks, head first; the coordinator gives them back to the pool."""


class FullManager:
    """Every token stays in the cache: full attention."""

    is_prefix_closed = True

    def __init__(self, group: StateGroup, pool: BlockPool, limits: CacheLimits, hash_block_size: int) -> None:
        self.group = group
        self.pool = pool
        self.limits = limits
        self.block_size = group.spec.block_size
        self._hash_stride = self.block_size // hash_block_size
        self._key_suffix = group.group_id.to_bytes(4, "little")

    def max_blocks(self, num_slots: int) -> int:
        return -(-num_slots // self.block_size)

    def num_new_blocks(self, table: BlockTable, num_slots: int) -> int:
        return max(0, -(-num_slots // self.block_size) - len(table.blocks))

    def grow(self, table: BlockTable, num_slots: int) -> list[int]:
        num_blocks = self.num_new_blocks(table, num_slots)
        new = self.pool.allocate(num_blocks) if num_blocks else []
        table.blocks += new
        return new

    def trim(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Nothing: a query reads all tokens before it."""

    def find_hit(self, hashes: Sequence[bytes], max_tokens: int, alignment: int) -> list[int]:
        blocks: list[int] = []
        for chain_hash in hashes[self._hash_stride - 1 : max_tokens // self.block_size * self._hash_stride : self._hash_stride]:
            block_id = self._lookup(chain_hash)
            if block_id is None:
                break
            blocks.append(block_id)
        del blocks[len(blocks) * self.block_size // alignment * alignment // self.block_size :]
        return blocks

    def adopt(self, table: BlockTable, hit: list[int]) -> None:
        self.pool.touch(hit)
        table.blocks = list(hit)
        table.num_published = len(hit)
        table.num_trimmed = sum(1 for _ in takewhile(lambda block_id: block_id == NULL_BLOCK, hit))

    def publish(self, table: BlockTable, hashes: Sequence[bytes], num_tokens: int) -> None:
        num_full = min(num_tokens // self.block_size, len(table.blocks))
        for i in range(max(table.num_published, table.num_trimmed), num_full):
            self.pool.publish(table.blocks[i], hashes[(i + 1) * self._hash_stride - 1] + self._key_suffix)
        table.num_published = max(table.num_published, num_full)

    def can_fork(self, table: BlockTable, num_tokens: int) -> bool:
        return num_tokens <= len(table.blocks) * self.block_size

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        child = BlockTable()
        self.adopt(child, table.blocks[: num_tokens // self.block_size])
        child.num_published = min(table.num_published, len(child.blocks))
        return child

    def rollback(self, table: BlockTable, num_tokens: int) -> None:
        """Length only: later tokens overwrite the slots. Raises `ValueError` if rejected tokens had been published."""
        if table.num_published * self.block_size > num_tokens:
            raise ValueError(f"rollback to {num_tokens} tokens behind {table.num_published} published blocks")

    def free(self, table: BlockTable) -> list[int]:
        blocks = table.blocks
        table.blocks = []
        table.num_published = table.num_trimmed = 0
        return blocks

    def _lookup(self, chain_hash: bytes) -> int | None:
        return self.pool.index.get(chain_hash + self._key_suffix)


class SlidingWindowManager(FullManager):
    """A query reads itself and the `window - 1` tokens before it; blocks behind every window are freed on the run."""

    is_prefix_closed = False

    def __init__(self, group: StateGroup, pool: BlockPool, limits: CacheLimits, hash_block_size: int) -> None:
        super().__init__(group, pool, limits, hash_block_size)
        if group.spec.window is None or group.spec.window < 1:
            raise UnsupportedModelError(f"A sliding-window layer needs a window of at least 1 token, got {group.spec.window}.")
        self.window = group.spec.window
        self._num_hit_blocks = -(-(self.window - 1) // self.block_size)

    @property
    def admission_cap(self) -> int:
        """Blocks that a step's tokens and the window before them can touch; one more as neither need be aligned."""
        limits = self.limits
        reach = self.window - 1 + limits.max_num_batched_tokens + limits.num_lookahead_tokens
        return -(-min(reach, limits.max_model_len) // self.block_size) + 1

    def max_blocks(self, num_slots: int) -> int:
        return min(-(-num_slots // self.block_size), self.admission_cap)

    def trim(self, table: BlockTable, num_computed_tokens: int) -> None:
        end = min(self._first_block(num_computed_tokens), len(table.blocks))
        if end > table.num_trimmed:
            self.pool.free(table.blocks[table.num_trimmed : end][::-1])
            table.blocks[table.num_trimmed : end] = [NULL_BLOCK] * (end - table.num_trimmed)
            table.num_trimmed = end

    def find_hit(self, hashes: Sequence[bytes], max_tokens: int, alignment: int) -> list[int]:
        """Searched from the right: a run of blocks that covers a window, or one that starts at the first token."""
        num_blocks = max_tokens // alignment * alignment // self.block_size
        if self._num_hit_blocks == 0:
            return [NULL_BLOCK] * num_blocks
        run: list[int] = []
        for i in range(num_blocks - 1, -1, -1):
            if not run and (i + 1) * self.block_size % alignment:
                continue
            block_id = self._lookup(hashes[(i + 1) * self._hash_stride - 1])
            if block_id is None:
                run.clear()
                continue
            run.append(block_id)
            if len(run) == self._num_hit_blocks:
                return [NULL_BLOCK] * i + run[::-1]
        return run[::-1]

    def can_fork(self, table: BlockTable, num_tokens: int) -> bool:
        return super().can_fork(table, num_tokens) and table.num_trimmed <= self._first_block(num_tokens)

    def _first_block(self, num_computed_tokens: int) -> int:
        """The first block that a query at position `num_computed_tokens` reads."""
        return max(0, num_computed_tokens - self.window + 1) // self.block_size


ManagerFactory = Callable[[StateGroup, BlockPool, CacheLimits, int], StateManager]

MANAGERS: Mapping[StateKind, ManagerFactory] = {
    StateKind.FULL: FullManager,
    StateKind.SLIDING_WINDOW: SlidingWindowManager,
}
"""Kind of state to its manager: called with the group, its pool, the limits and the tokens of a hash block."""


def make_manager(group: StateGroup, pool: BlockPool, limits: CacheLimits, hash_block_size: int) -> StateManager:
    """Build the manager of a group. Raises `UnsupportedModelError` for a kind that has none."""
    factory = MANAGERS.get(group.spec.kind)
    if factory is None:
        known = ", ".join(MANAGERS)
        raise UnsupportedModelError(f"Layers {group.layer_ids} keep state of kind {group.spec.kind!s}; the cache manages {known} only.")
    return factory(group, pool, limits, hash_block_size)
