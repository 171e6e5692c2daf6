"""One manager for each kind of state: the block lifecycle of one group of layers.

Every kind implements every verb (blocks needed, grow, trim, match a prefix, publish, fork, rollback, free). A kind
joins by a class here and a row in `MANAGERS`; coordinator and scheduler know only the `StateManager` protocol.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from canter.core.errors import UnsupportedModelError
from canter.core.state_specs import SnapshotMode, StateGroup, StateKind
from canter.scheduler.cache.block_pool import NULL_BLOCK, BlockPool

UNBOUNDED = sys.maxsize
"""As a number of tokens: more than any request has."""


class BlockTable:
    """The blocks of one request in one group: `blocks[i]` holds tokens from `i * block_size` on, or is the null block.

    `num_held`: blocks that are not null. `num_trimmed`: blocks before this one are as `trim` left them. `num_published`:
    leading blocks that the prefix index has been told of. `num_prompt_tokens` stays what it is when the request is computed
    again after a preemption; `UNBOUNDED` stands for any.
    """

    __slots__ = ("blocks", "num_held", "num_prompt_tokens", "num_published", "num_trimmed")

    def __init__(self, num_prompt_tokens: int = UNBOUNDED) -> None:
        self.blocks: list[int] = []
        self.num_prompt_tokens = num_prompt_tokens
        self.num_held = 0
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
    step_boundary: int
    """What is cached is better if steps end on multiples of so many tokens; 1 if it makes no difference."""

    def begin_step(self) -> None:
        """Another step is planned: what earlier ones publish may be read by it."""

    def is_readable(self, hit: Sequence[int]) -> bool:
        """Whether the step being planned may read these blocks: its rows may run side by side with the row that writes one."""

    def max_blocks(self, num_slots: int, num_prompt_tokens: int = UNBOUNDED) -> int:
        """The most blocks that a request of so many slots ever holds at once."""

    def max_shared_tokens(self, num_prompt_tokens: int) -> int:
        """How many leading tokens of a request other requests may share, those of all groups of the model included."""

    def num_new_blocks(self, table: BlockTable, num_slots: int) -> int:
        """Blocks that `grow` would take."""

    def grow(self, table: BlockTable, num_slots: int, num_computed_tokens: int) -> list[int]:
        """Append blocks, and null blocks for holes, until the table has `num_slots` slots; returns what it appended."""

    def trim(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Free the blocks that no query from `num_computed_tokens` on reads."""

    def find_hit(self, hashes: Sequence[bytes], max_tokens: int, alignment: int) -> list[int]:
        """The table of the longest cached prefix of at most `max_tokens`, a multiple of `alignment` tokens."""

    def adopt(self, table: BlockTable, hit: list[int]) -> None:
        """Start an empty table with the blocks of a hit, and hold them."""

    def publish(self, table: BlockTable, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Tell the prefix index of what the first `num_tokens` tokens have completed."""

    def can_fork(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether a request could go on from these tokens with the blocks that are still held."""

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """A second table that shares the blocks of the first `num_tokens` tokens, a multiple of the block size."""

    def rollback(self, table: BlockTable, num_tokens: int) -> None:
        """Tokens from `num_tokens` on were rejected: the state must be as if they had never been computed."""

    def free(self, table: BlockTable) -> list[int]:
        """Empty the table and return its blocks, head first; the coordinator gives them back to the pool."""


class FullManager:
    """Every token stays in the cache: full attention, latents, compressed entries."""

    is_prefix_closed = True
    step_boundary = 1

    def __init__(self, group: StateGroup, pool: BlockPool, limits: CacheLimits, hash_block_size: int) -> None:
        self.group = group
        self.pool = pool
        self.limits = limits
        self.block_size = group.spec.block_size
        self._hash_stride = self.block_size // hash_block_size
        self._key_suffix = group.group_id.to_bytes(4, "little")

    def begin_step(self) -> None:
        """Nothing: see `is_readable`."""

    def is_readable(self, hit: Sequence[int]) -> bool:
        """Always: in each layer all rows of a step are written before any is read."""
        return True

    def max_blocks(self, num_slots: int, num_prompt_tokens: int = UNBOUNDED) -> int:
        return -(-num_slots // self.block_size)

    def max_shared_tokens(self, num_prompt_tokens: int) -> int:
        return UNBOUNDED

    def num_new_blocks(self, table: BlockTable, num_slots: int) -> int:
        return max(0, -(-num_slots // self.block_size) - len(table.blocks))

    def grow(self, table: BlockTable, num_slots: int, num_computed_tokens: int) -> list[int]:
        num_blocks = self.num_new_blocks(table, num_slots)
        new = self.pool.allocate(num_blocks) if num_blocks else []
        table.blocks += new
        table.num_held += num_blocks
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
        table.num_held = len(hit) - hit.count(NULL_BLOCK)
        table.num_published = len(hit)
        table.num_trimmed = sum(1 for _ in takewhile(lambda block_id: block_id == NULL_BLOCK, hit))

    def publish(self, table: BlockTable, hashes: Sequence[bytes], num_tokens: int) -> None:
        num_full = min(num_tokens // self.block_size, len(table.blocks))
        for i in range(max(table.num_published, table.num_trimmed), num_full):
            self.pool.publish(table.blocks[i], self._key(hashes, i))
        table.num_published = max(table.num_published, num_full)

    def can_fork(self, table: BlockTable, num_tokens: int) -> bool:
        return num_tokens <= len(table.blocks) * self.block_size

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        child = BlockTable(table.num_prompt_tokens)
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
        table.num_held = table.num_published = table.num_trimmed = 0
        return blocks

    def _key(self, hashes: Sequence[bytes], block_index: int) -> bytes:
        """Under which the index knows a request's block."""
        return hashes[(block_index + 1) * self._hash_stride - 1] + self._key_suffix

    def _lookup(self, chain_hash: bytes) -> int | None:
        return self.pool.index.get(chain_hash + self._key_suffix)

    def _drop(self, table: BlockTable, start: int, end: int) -> None:
        """Free the blocks from index `start` to `end - 1`, tail first, and leave null blocks."""
        dropped = table.blocks[start:end]
        self.pool.free(dropped[::-1])
        table.num_held -= len(dropped) - dropped.count(NULL_BLOCK)
        table.blocks[start:end] = [NULL_BLOCK] * len(dropped)


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

    def max_blocks(self, num_slots: int, num_prompt_tokens: int = UNBOUNDED) -> int:
        return min(-(-num_slots // self.block_size), self.admission_cap)

    def trim(self, table: BlockTable, num_computed_tokens: int) -> None:
        end = min(self._first_block(num_computed_tokens), len(table.blocks))
        if end > table.num_trimmed:
            self._drop(table, table.num_trimmed, end)
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


class ChunkedLocalManager(SlidingWindowManager):
    """Positions are cut into chunks of `window` tokens; a query reads itself and what stands before it in its chunk."""

    def find_hit(self, hashes: Sequence[bytes], max_tokens: int, alignment: int) -> list[int]:
        """Nothing need be cached before the chunk that a length ends in, and nothing at all where a chunk begins."""
        length = max_tokens // alignment * alignment
        while length > 0:
            start = length // self.window * self.window
            first = start // self.block_size
            run: list[int] = []
            for i in range(first, length // self.block_size if length > start else first):
                block_id = self._lookup(hashes[(i + 1) * self._hash_stride - 1])
                if block_id is None:
                    break
                run.append(block_id)
            found = (first + len(run)) * self.block_size // alignment * alignment
            if found >= start:
                return ([NULL_BLOCK] * first + run)[: found // self.block_size]
            length = start // alignment * alignment
        return []

    def _first_block(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.window * self.window // self.block_size


class PromptWindowManager(SlidingWindowManager):
    """A query reads the whole prompt, and of what was generated itself and the `window - 1` tokens before it.

    What is behind the prompt and behind every window is freed on the run: a hole in the middle. Generated tokens depend on
    where the prompt ended, in every layer of the model, so other requests share the prompt only.
    """

    is_prefix_closed = True

    def max_blocks(self, num_slots: int, num_prompt_tokens: int = UNBOUNDED) -> int:
        num_prompt_blocks = -(-min(num_prompt_tokens, num_slots) // self.block_size)
        return min(-(-num_slots // self.block_size), num_prompt_blocks + self.admission_cap)

    def max_shared_tokens(self, num_prompt_tokens: int) -> int:
        return num_prompt_tokens

    def trim(self, table: BlockTable, num_computed_tokens: int) -> None:
        start = max(table.num_trimmed, -(-table.num_prompt_tokens // self.block_size))
        end = min(self._first_block(num_computed_tokens), len(table.blocks))
        if end > start:
            self._drop(table, start, end)
            table.num_trimmed = end

    def find_hit(self, hashes: Sequence[bytes], max_tokens: int, alignment: int) -> list[int]:
        return FullManager.find_hit(self, hashes, max_tokens, alignment)

    def adopt(self, table: BlockTable, hit: list[int]) -> None:
        super().adopt(table, hit)
        num_prompt_blocks = -(-table.num_prompt_tokens // self.block_size)
        table.num_trimmed = len(hit) - len(list(takewhile(bool, reversed(hit[num_prompt_blocks:]))))
        table.num_trimmed = table.num_trimmed if NULL_BLOCK in hit else 0


class RecurrentManager(FullManager):
    """One state stands for all tokens before it: a layer reads the state before a step and leaves the one after it.

    Block i holds the state after some token of the i-th stretch of `block_size` tokens. A step that begins behind token s and
    ends with token e reads block `(s - 1) // block_size` and writes block `(e - 1) // block_size`: the same one in place while
    they lie in one stretch, otherwise a new one, so that a state at a boundary is never written again and resuming from it
    needs no copy of its own. Blocks between them are null, unless the kernel fills them (`SnapshotMode.ALL`).
    A boundary's state is published when the step that ends on it is planned; no other row of that step may read it. Drafts can't be
    taken back: raises `UnsupportedModelError` where a request has lookahead.
    """

    is_prefix_closed = False

    def __init__(self, group: StateGroup, pool: BlockPool, limits: CacheLimits, hash_block_size: int) -> None:
        super().__init__(group, pool, limits, hash_block_size)
        if limits.num_lookahead_tokens:
            raise UnsupportedModelError("Recurrent layers can't take drafts back yet: speculative decoding is refused for this model.")
        self._is_cached = group.spec.snapshots is not SnapshotMode.NONE
        self._fills_all = group.spec.snapshots is SnapshotMode.ALL
        self._written_now: set[int] = set()
        if group.spec.snapshots is SnapshotMode.ALIGN:
            self.step_boundary = self.block_size

    def begin_step(self) -> None:
        self._written_now.clear()

    def is_readable(self, hit: Sequence[int]) -> bool:
        return not hit or hit[-1] not in self._written_now

    def max_blocks(self, num_slots: int, num_prompt_tokens: int = UNBOUNDED) -> int:
        reach = self.limits.max_num_batched_tokens if self._fills_all else 1
        return min(-(-num_slots // self.block_size), -(-reach // self.block_size) + 1)

    def max_shared_tokens(self, num_prompt_tokens: int) -> int:
        return UNBOUNDED if self._is_cached else 0

    def num_new_blocks(self, table: BlockTable, num_slots: int) -> int:
        num_columns = super().num_new_blocks(table, num_slots)
        return num_columns if self._fills_all else min(num_columns, 1)

    def grow(self, table: BlockTable, num_slots: int, num_computed_tokens: int) -> list[int]:
        num_columns = super().num_new_blocks(table, num_slots)
        if not num_columns:
            return []
        if not self._fills_all and num_computed_tokens < len(table.blocks) * self.block_size:
            # The step passes the boundary of the last block, which stays a state before it.
            table.num_published = max(table.num_published, len(table.blocks))
        taken = self.pool.allocate(self.num_new_blocks(table, num_slots))
        new = [NULL_BLOCK] * (num_columns - len(taken)) + taken
        table.blocks += new
        table.num_held += len(taken)
        return new

    def trim(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Free all but the state that the next step reads; of states in the output the index keeps the latest only."""
        end = min((num_computed_tokens - 1) // self.block_size, len(table.blocks))
        if end <= table.num_trimmed:
            return
        for i in range(max(table.num_trimmed, table.num_prompt_tokens // self.block_size), end):
            if self.pool.ref_counts[table.blocks[i]] == 1:
                self.pool.withdraw(table.blocks[i])
        self._drop(table, table.num_trimmed, end)
        table.num_trimmed = end

    def find_hit(self, hashes: Sequence[bytes], max_tokens: int, alignment: int) -> list[int]:
        """Searched from the right: one state is all that a hit needs."""
        for length in range(max_tokens // alignment * alignment, 0, -alignment):
            i = length // self.block_size - 1
            block_id = self._lookup(hashes[(i + 1) * self._hash_stride - 1])
            if block_id is not None:
                return [NULL_BLOCK] * i + [block_id]
        return []

    def publish(self, table: BlockTable, hashes: Sequence[bytes], num_tokens: int) -> None:
        num_full = min(num_tokens // self.block_size, len(table.blocks))
        for i in range(table.num_published, num_full):
            block_id = table.blocks[i]
            if block_id != NULL_BLOCK:
                self.pool.publish(block_id, self._key(hashes, i))
                self._written_now.add(block_id)
        table.num_published = max(table.num_published, num_full)

    def can_fork(self, table: BlockTable, num_tokens: int) -> bool:
        i = num_tokens // self.block_size - 1
        return i < 0 or (i < len(table.blocks) and self.pool.key_of(table.blocks[i]) is not None)

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        child = BlockTable(table.num_prompt_tokens)
        i = num_tokens // self.block_size - 1
        self.adopt(child, [NULL_BLOCK] * i + [table.blocks[i]] if i >= 0 else [])
        return child

    def rollback(self, table: BlockTable, num_tokens: int) -> None:
        """Raises `ValueError`: what a state has taken in can't be taken out."""
        raise ValueError(f"a recurrent state can't go back to {num_tokens} tokens")


ManagerFactory = Callable[[StateGroup, BlockPool, CacheLimits, int], StateManager]

MANAGERS: Mapping[StateKind, ManagerFactory] = {
    StateKind.FULL: FullManager,
    StateKind.MLA: FullManager,
    StateKind.COMPRESSED: FullManager,
    StateKind.SLIDING_WINDOW: SlidingWindowManager,
    StateKind.CHUNKED_LOCAL: ChunkedLocalManager,
    StateKind.PROMPT_WINDOW: PromptWindowManager,
    StateKind.RECURRENT: RecurrentManager,
}
"""Kind of state to its manager: called with the group, its pool, the limits and the tokens of a hash block."""


def make_manager(group: StateGroup, pool: BlockPool, limits: CacheLimits, hash_block_size: int) -> StateManager:
    """Build the manager of a group. Raises `UnsupportedModelError` for a kind that has none."""
    factory = MANAGERS.get(group.spec.kind)
    if factory is None:
        known = ", ".join(MANAGERS)
        raise UnsupportedModelError(f"Layers {group.layer_ids} keep state of kind {group.spec.kind!s}; the cache manages {known} only.")
    return factory(group, pool, limits, hash_block_size)
