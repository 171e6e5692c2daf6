"""The cache of a whole model: all groups of a request move together, over one pool or several."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from canter.core.state_specs import StateLayout
from canter.scheduler.cache.block_pool import NULL_BLOCK, BlockPool
from canter.scheduler.cache.managers import UNBOUNDED, BlockTable, CacheLimits, StateManager, make_manager


class RequestCache:
    """One request's block tables, one for each group.

    `capacity`: tokens that every table has slots for. `max_shared_tokens`: leading tokens that other requests may share.
    `shared_tokens`: so many tokens another request has in common with this one, by the groups that cache every block.
    """

    __slots__ = ("capacity", "max_shared_tokens", "shared_tokens", "tables")

    def __init__(self, tables: tuple[BlockTable, ...], max_shared_tokens: int = UNBOUNDED) -> None:
        self.tables = tables
        self.max_shared_tokens = max_shared_tokens
        self.shared_tokens = 0
        self.capacity = 0

    def block_ids(self) -> tuple[list[int], ...]:
        """A copy of every group's block table."""
        return tuple(table.blocks.copy() for table in self.tables)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The greatest cached length on which all groups agree, and each group's table of it.

    `num_uncached_common_tokens`: how much more the best group alone had cached. `is_readable`: whether the step being planned
    may read all of it; otherwise the next one may.
    """

    num_tokens: int
    blocks: tuple[list[int], ...]
    num_uncached_common_tokens: int = 0
    is_readable: bool = True


class CacheCoordinator:
    """Allocates, shares and frees blocks for all groups of a request at once.

    `num_blocks[p]` counts the blocks of pool p, its null block included.
    Raises `UnsupportedModelError` for a kind of state without a manager.
    """

    def __init__(self, layout: StateLayout, num_blocks: Sequence[int], limits: CacheLimits) -> None:
        self.limits = limits
        self.pools = [BlockPool(count) for count in num_blocks]
        self.hash_block_size = layout.hash_block_size
        self.alignment = math.lcm(*(group.spec.block_size for group in layout.groups))
        self.managers: list[StateManager] = [
            make_manager(group, self.pools[group.pool_id], limits, layout.hash_block_size) for group in layout.groups
        ]
        self._pool_ids = [group.pool_id for group in layout.groups]
        self._step_boundary = math.lcm(*(manager.step_boundary for manager in self.managers))
        self._lookup_order = sorted(range(len(self.managers)), key=lambda g: not self.managers[g].is_prefix_closed)

    # what fits

    def num_slots(self, num_tokens: int) -> int:
        """Slots that computing a request's first `num_tokens` tokens needs: lookahead included."""
        return min(num_tokens + self.limits.num_lookahead_tokens, self.limits.max_model_len)

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a request that computes so many tokens can finish with the cache to itself."""
        wanted = self.max_blocks(num_tokens)
        return all(count <= pool.num_usable for count, pool in zip(wanted, self.pools, strict=True))

    def max_tokens_alone(self) -> int:
        """The most tokens, at most `max_model_len`, that one request can compute with the cache to itself."""
        low, high = 0, self.limits.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits_alone(middle) else (low, middle - 1)
        return low

    def num_outstanding(self, cache: RequestCache, num_tokens: int) -> list[int]:
        """For each pool, the blocks that the request still has to take to compute its first `num_tokens` tokens."""
        counts = [0] * len(self.pools)
        slots = self.num_slots(num_tokens)
        for manager, table, pool_id in zip(self.managers, cache.tables, self._pool_ids, strict=True):
            counts[pool_id] += max(0, manager.max_blocks(slots, table.num_prompt_tokens) - table.num_held)
        return counts

    def max_blocks(self, num_tokens: int) -> list[int]:
        """For each pool, the most blocks that a request which computes so many tokens holds at once."""
        return self.num_outstanding(self.new_cache(), num_tokens)

    # what a step should be

    def begin_step(self) -> None:
        """Another step is planned."""
        for manager in self.managers:
            manager.begin_step()

    def shape_step(self, cache: RequestCache, num_computed_tokens: int, num_tokens: int, total_tokens: int) -> int:
        """How many of the next `num_tokens` tokens a step should compute, of a request that has `total_tokens` so far: at least 1.

        Groups that can keep a state only where a step ends have it end on a boundary: where a prefix ends that is known to be
        shared, at the last boundary before the request's last token, and else at the last one that is within reach.
        """
        size = self._step_boundary
        if size == 1:
            return num_tokens
        end = num_computed_tokens + num_tokens
        boundary = min(end, total_tokens - 1) // size * size
        shared = cache.shared_tokens // size * size
        if num_computed_tokens < shared < end:
            boundary = shared
        return boundary - num_computed_tokens if boundary > num_computed_tokens else num_tokens

    # the life of a request's tables

    def new_cache(self, num_prompt_tokens: int = UNBOUNDED) -> RequestCache:
        """Empty tables; `num_prompt_tokens` holds for the request's life, whatever is computed again."""
        shared = min(manager.max_shared_tokens(num_prompt_tokens) for manager in self.managers)
        return RequestCache(tuple(BlockTable(num_prompt_tokens) for _ in self.managers), shared)

    def find_hit(self, hashes: Sequence[bytes], max_tokens: int) -> PrefixHit:
        """The longest cached prefix of at most `max_tokens` that all groups share; holds no block yet.

        A fixed point: each group may shorten the length, until all can do with the same. Groups whose shorter
        prefixes are hits too are looked up once.
        """
        length = max_tokens // self.alignment * self.alignment
        found: list[list[int] | None] = [None] * len(self.managers)
        longest, agreed = 0, False
        while length and not agreed:
            before = length
            for g in self._lookup_order:
                manager = self.managers[g]
                blocks = found[g]
                if blocks is None or not manager.is_prefix_closed:
                    found[g] = blocks = manager.find_hit(hashes, length, self.alignment)
                    longest = max(longest, len(blocks) * manager.block_size)
                length = min(length, len(blocks) * manager.block_size)
            agreed = length == before
        tables = (blocks or [] for blocks in found)
        cut = tuple(blocks[: length // manager.block_size] for blocks, manager in zip(tables, self.managers, strict=True))
        is_readable = all(manager.is_readable(blocks) for manager, blocks in zip(self.managers, cut, strict=True))
        return PrefixHit(length, cut, longest - length, is_readable)

    def admit(self, cache: RequestCache, hit: PrefixHit | None, num_tokens: int, total_tokens: int, reserved: Sequence[int]) -> bool:
        """Give an empty cache the blocks of the hit and slots for its first `num_tokens` tokens.

        Refused, and nothing changes, unless all `total_tokens` fit beside `reserved[p]` blocks of pool p: a prompt
        is not begun that could not be ended. All hits are held before any block is taken, or one group's new blocks
        could evict another group's hit.
        """
        wanted = self.max_blocks(total_tokens)
        for g, blocks in enumerate(hit.blocks if hit else ()):
            pool = self.managers[g].pool
            held = sum(1 for block_id in blocks if block_id != NULL_BLOCK) - pool.num_free_among(blocks)
            wanted[self._pool_ids[g]] -= held
        if any(want > pool.num_free - kept for want, kept, pool in zip(wanted, reserved, self.pools, strict=True)):
            return False
        if hit:
            for manager, table, blocks in zip(self.managers, cache.tables, hit.blocks, strict=True):
                manager.adopt(table, blocks)
        if self.grow(cache, num_tokens, hit.num_tokens if hit else 0) is None:
            self.free(cache)
            return False
        return True

    def grow(
        self, cache: RequestCache, num_tokens: int, num_computed_tokens: int, num_unsettled_tokens: int = 0
    ) -> tuple[list[int], ...] | None:
        """Slots for the first `num_tokens` tokens and the lookahead: the new blocks of each group, or None if too few are free.

        Blocks that no query behind the `num_computed_tokens` reads are freed first, even if the rest then fails; the last
        `num_unsettled_tokens` of these may yet be taken back.
        """
        slots = self.num_slots(num_tokens)
        wanted = [0] * len(self.pools)
        for manager, table, pool_id in zip(self.managers, cache.tables, self._pool_ids, strict=True):
            manager.trim(table, max(0, num_computed_tokens - num_unsettled_tokens))
            wanted[pool_id] += manager.num_new_blocks(table, slots)
        if any(want > pool.num_free for want, pool in zip(wanted, self.pools, strict=True)):
            return None
        new = tuple(manager.grow(table, slots, num_computed_tokens) for manager, table in zip(self.managers, cache.tables, strict=True))
        capacities = (len(table.blocks) * manager.block_size for manager, table in zip(self.managers, cache.tables, strict=True))
        cache.capacity = min(capacities)
        return new

    def publish(self, cache: RequestCache, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Let later requests find the full blocks among the first `num_tokens` tokens, as far as these may be shared."""
        num_tokens = min(num_tokens, cache.max_shared_tokens)
        for manager, table in zip(self.managers, cache.tables, strict=True):
            manager.publish(table, hashes, num_tokens)

    def fork(self, cache: RequestCache, num_tokens: int) -> tuple[RequestCache, int]:
        """A second request that goes on from the first `num_tokens` computed tokens: its cache, and how many it shares.

        Only whole blocks are shared, so that nothing need be copied; the rest is computed again. Nothing is shared
        when a window has moved on too far.
        """
        length = num_tokens // self.alignment * self.alignment
        pairs = list(zip(self.managers, cache.tables, strict=True))
        if not all(manager.can_fork(table, length) for manager, table in pairs):
            length = 0
        child = RequestCache(tuple(manager.fork(table, length) for manager, table in pairs), cache.max_shared_tokens)
        child.capacity = length
        return child, length

    def rollback(self, cache: RequestCache, num_tokens: int) -> None:
        """Drafts from position `num_tokens` on were rejected."""
        for manager, table in zip(self.managers, cache.tables, strict=True):
            manager.rollback(table, num_tokens)

    def free(self, cache: RequestCache) -> None:
        """Give all blocks back, tail first over all groups of a pool: a hit needs every group, so they age together."""
        by_pool: list[list[list[int]]] = [[] for _ in self.pools]
        for manager, table, pool_id in zip(self.managers, cache.tables, self._pool_ids, strict=True):
            by_pool[pool_id].append(manager.free(table))
        for pool, tables in zip(self.pools, by_pool, strict=True):
            blocks = tables[0] if len(tables) == 1 else list(chain.from_iterable(zip_longest(*tables, fillvalue=NULL_BLOCK)))
            pool.free(reversed(blocks))
        cache.capacity = cache.shared_tokens = 0

    # the whole

    def num_free_blocks(self) -> int:
        return sum(pool.num_free for pool in self.pools)

    def num_usable_blocks(self) -> int:
        return sum(pool.num_usable for pool in self.pools)

    def usage(self) -> float:
        """Used fraction of the fullest pool."""
        return max(pool.num_used / max(1, pool.num_usable) for pool in self.pools)

    def reset(self) -> bool:
        """Forget every cached prefix, if no block of any pool is in use; says whether it did."""
        if any(pool.num_used for pool in self.pools):
            return False
        self.forget_prefixes()
        return True

    def forget_prefixes(self) -> None:
        """Let no later request find what is cached now."""
        for pool in self.pools:
            pool.forget_prefixes()

    def check(self, caches: Iterable[RequestCache]) -> None:
        """Verify every pool against the tables of all live requests. Raises `AssertionError`."""
        holders: list[Counter[int]] = [Counter() for _ in self.pools]
        for cache in caches:
            for table, pool_id in zip(cache.tables, self._pool_ids, strict=True):
                held = [block_id for block_id in table.blocks if block_id != NULL_BLOCK]
                holders[pool_id].update(held)
                if len(held) != table.num_held:
                    raise AssertionError(f"{table.num_held} blocks counted in {table.blocks}")
        for pool, expected in zip(self.pools, holders, strict=True):
            pool.check(expected)
