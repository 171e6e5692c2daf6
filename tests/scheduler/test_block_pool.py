from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from canter.scheduler.cache.block_pool import NULL_BLOCK, BlockPool
from canter.scheduler.cache.prefix_index import PrefixIndex


def test_null_block_is_never_handed_out_or_counted() -> None:
    pool = BlockPool(5)
    assert pool.num_usable == pool.num_free == 4
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.num_free == 0 and pool.num_used == 4
    pool.touch([NULL_BLOCK])
    pool.free([NULL_BLOCK, 2])
    assert pool.free_order() == [2]


def test_allocating_more_than_is_free_changes_nothing() -> None:
    pool = BlockPool(3)
    with pytest.raises(ValueError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    assert pool.free_order() == [1, 2]


def test_unpublished_blocks_are_reused_first_published_ones_last() -> None:
    pool = BlockPool(7)
    blocks = pool.allocate(4)
    pool.publish(blocks[0], b"a")
    pool.publish(blocks[1], b"b")
    pool.free(reversed(blocks))
    assert pool.free_order() == [4, 3, 5, 6, 2, 1]


def test_freed_tail_first_so_a_prefix_outlives_its_extensions() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for block, key in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, key)
    pool.free(reversed(blocks))
    pool.allocate(1)
    assert [pool.index.get(key) for key in (b"a", b"b", b"c")] == [1, 2, None]


def test_touch_takes_a_cached_block_off_the_middle_of_the_free_list() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    for block in blocks:
        pool.publish(block, bytes([block]))
    pool.free(blocks)
    assert pool.num_free_among([NULL_BLOCK, 2, 3]) == 2
    pool.touch([2])
    pool.touch([2])
    assert pool.free_order() == [1, 3, 4]
    pool.free([2])
    assert pool.free_order() == [1, 3, 4]
    pool.free([2])
    assert pool.free_order() == [1, 3, 4, 2]


def test_a_block_is_not_freed_twice() -> None:
    pool = BlockPool(3)
    block = pool.allocate(1)
    pool.free(block)
    with pytest.raises(ValueError, match="nobody holds"):
        pool.free(block)


def test_removing_a_duplicate_removes_exactly_that_block() -> None:
    index = PrefixIndex()
    for block in (5, 6, 7):
        index.add(b"k", block)
    index.remove(b"k", 5)
    assert index.get(b"k") == 6
    index.remove(b"k", 7)
    assert index.get(b"k") == 6 and list(index.items()) == [(b"k", 6)]
    with pytest.raises(KeyError):
        index.remove(b"k", 7)
    index.remove(b"k", 6)
    assert index.get(b"k") is None and len(index) == 0


def test_evicting_a_duplicate_leaves_its_twin() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.publish(first, b"k")
    pool.publish(second, b"k")
    pool.free([first])
    assert pool.allocate(1) == [first]
    assert pool.index.get(b"k") == second


def test_publishing_twice_keeps_the_first_key() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.publish(block, b"a")
    pool.publish(block, b"b")
    assert pool.key_of(block) == b"a" and pool.index.get(b"b") is None


def test_forgetting_prefixes_leaves_holders_alone() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.publish(blocks[0], b"a")
    pool.forget_prefixes()
    pool.check({blocks[0]: 1, blocks[1]: 1})
    assert pool.index.get(b"a") is None and pool.key_of(blocks[0]) is None


@pytest.mark.parametrize("refs", [{}, {1: 2}, {1: 1, 2: 1}])
def test_check_finds_wrong_holders(refs: dict[int, int]) -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.check(refs)


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, publish and free blocks in random order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.holders: list[list[int]] = []

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free:
            expected = self.pool.free_order()[:count]
            taken = self.pool.allocate(count)
            assert taken == expected and all(self.pool.key_of(b) is None for b in taken)
            self.holders.append(taken)

    @rule(key=st.sampled_from([b"a", b"b", b"c"]))
    def share(self, key: bytes) -> None:
        block = self.pool.index.get(key)
        if block is not None:
            assert self.pool.key_of(block) == key
            self.pool.touch([block])
            self.holders.append([block])

    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c"]))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        held = [b for blocks in self.holders for b in blocks]
        if held:
            self.pool.publish(data.draw(st.sampled_from(held)), key)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.holders:
            self.pool.free(reversed(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))))

    @invariant()
    def check(self) -> None:
        counts: dict[int, int] = {}
        for blocks in self.holders:
            for block in blocks:
                counts[block] = counts.get(block, 0) + 1
        self.pool.check(counts)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
