"""The blocks of one pool: who holds them, which are free and in what order, and which hold a cached prefix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from canter.scheduler.cache.prefix_index import PrefixIndex

NULL_BLOCK = 0
"""Fills the holes of block tables. Never handed out, never counted, never freed."""


class BlockPool:
    """`num_blocks` block ids, the null block among them.

    Free blocks stand in a doubly linked list in the order in which they will be reused: first the ones that hold
    nothing, then the cached ones, least recently used first. The links are two lists of ints; the null block,
    which is never free, is the sentinel: its next is the head, its prev the tail.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.index = PrefixIndex()
        self.ref_counts = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    def key_of(self, block_id: int) -> bytes | None:
        """The prefix key under which the block is published, or None."""
        return self._keys[block_id]

    def free_order(self) -> list[int]:
        """Free block ids, the next to be reused first."""
        order = []
        block_id = self._next[NULL_BLOCK]
        while block_id != NULL_BLOCK:
            order.append(block_id)
            block_id = self._next[block_id]
        return order

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks from the front of the free list; whatever prefix they held is forgotten.

        Raises `ValueError` when fewer are free: callers count first.
        """
        if num_blocks > self.num_free:
            raise ValueError(f"{num_blocks} blocks wanted, {self.num_free} free")
        following, keys, taken = self._next, self._keys, []
        block_id = following[NULL_BLOCK]
        for _ in range(num_blocks):
            taken.append(block_id)
            self.ref_counts[block_id] = 1
            key = keys[block_id]
            if key is not None:
                self.index.remove(key, block_id)
                keys[block_id] = None
            block_id = following[block_id]
        following[NULL_BLOCK] = block_id
        self._prev[block_id] = NULL_BLOCK
        self.num_free -= num_blocks
        return taken

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add a holder to each block, taking it off the free list if nobody held it. Null blocks are passed over."""
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            if self.ref_counts[block_id] == 0:
                self._unlink(block_id)
            self.ref_counts[block_id] += 1

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """How many of these `touch` would take off the free list."""
        counts = self.ref_counts
        return sum(1 for block_id in block_ids if block_id != NULL_BLOCK and counts[block_id] == 0)

    def free(self, block_ids: Iterable[int]) -> None:
        """Take a holder from each block; pass a request's blocks tail first, so that a prefix outlives its extensions.

        Blocks that nobody holds any more become free: published ones go to the back, others to the front, each in
        the order given. Raises `ValueError` for a block that nobody holds. Null blocks are passed over.
        """
        unpublished = []
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            count = self.ref_counts[block_id] - 1
            if count < 0:
                raise ValueError(f"block {block_id} is freed but nobody holds it")
            self.ref_counts[block_id] = count
            if count == 0:
                if self._keys[block_id] is None:
                    unpublished.append(block_id)
                else:
                    self._link(self._prev[NULL_BLOCK], block_id)
        for block_id in reversed(unpublished):
            self._link(NULL_BLOCK, block_id)

    def publish(self, block_id: int, key: bytes) -> None:
        """Let later requests find this block; a block that is published already stays as it is."""
        if self._keys[block_id] is None:
            self._keys[block_id] = key
            self.index.add(key, block_id)

    def withdraw(self, block_id: int) -> None:
        """Let no later request find this block; nothing happens to one that is not published."""
        key = self._keys[block_id]
        if key is not None:
            self.index.remove(key, block_id)
            self._keys[block_id] = None

    def forget_prefixes(self) -> None:
        """Withdraw every block from the index; who holds what, and the free order, stay as they are."""
        self.index.clear()
        self._keys = [None] * self.num_blocks

    def _link(self, before: int, block_id: int) -> None:
        """Put a block into the free list behind `before`."""
        after = self._next[before]
        self._next[before] = self._prev[after] = block_id
        self._prev[block_id], self._next[block_id] = before, after
        self.num_free += 1

    def _unlink(self, block_id: int) -> None:
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1

    def check(self, expected_refs: Mapping[int, int]) -> None:
        """Verify the pool against the holders of each block. Raises `AssertionError` with what is wrong."""
        order = self.free_order()
        _require(len(order) == self.num_free == len(set(order)), f"free list {order} against count {self.num_free}")
        for block_id in range(1, self.num_blocks):
            count = self.ref_counts[block_id]
            _require(count == expected_refs.get(block_id, 0), f"block {block_id}: {count} refs, {expected_refs.get(block_id, 0)} holders")
        _require(set(order) == {b for b in range(1, self.num_blocks) if self.ref_counts[b] == 0}, "free blocks are those without holders")
        published = {(key, block_id) for block_id, key in enumerate(self._keys) if key is not None}
        _require(set(self.index.items()) == published, "the prefix index and the blocks' keys differ")
        _require(self._keys[NULL_BLOCK] is None and NULL_BLOCK not in expected_refs, "the null block is in use")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
