"""Managers and coordinator: hits, windows, bounds, and the order of allocation."""

from __future__ import annotations

import pytest

from canter.core.errors import UnsupportedModelError
from canter.core.state_specs import StateField, StateGroup, StateKind, StateLayout, StateSpec, attention_spec, plan_layout
from canter.scheduler.cache.coordinator import CacheCoordinator, PrefixHit, RequestCache
from canter.scheduler.cache.hashing import PrefixHasher
from canter.scheduler.cache.managers import CacheLimits, SlidingWindowManager, make_manager
from tests.scheduler.device import layout_of

TOKENS = list(range(64))


def coordinator(
    layout: StateLayout, *num_blocks: int, max_model_len: int = 64, max_batched: int = 16, lookahead: int = 0
) -> CacheCoordinator:
    return CacheCoordinator(layout, num_blocks, CacheLimits(max_model_len, max_batched, lookahead))


def hashes_of(cache: CacheCoordinator, num_tokens: int) -> list[bytes]:
    hashes: list[bytes] = []
    PrefixHasher(cache.hash_block_size).extend(hashes, TOKENS[:num_tokens], None)
    return hashes


def computed(cache: CacheCoordinator, num_tokens: int) -> RequestCache:
    """A request whose first tokens are computed in one step and published, windows not yet moved."""
    tables = cache.new_cache()
    assert cache.grow(tables, num_tokens, 0) is not None
    cache.publish(tables, hashes_of(cache, num_tokens), num_tokens)
    return tables


def forget(cache: CacheCoordinator, tables: RequestCache, group: int, block_indices: set[int]) -> None:
    """Withdraw some blocks of a group from the index, as eviction does."""
    for i in block_indices:
        block = tables.tables[group].blocks[i]
        pool = cache.managers[group].pool
        key = pool.key_of(block)
        assert key is not None
        pool.index.remove(key, block)
        pool._keys[block] = None


def test_hybrid_hit_is_the_greatest_length_all_groups_share() -> None:
    """27 tokens, blocks of 4; cached: full 0..5, window (8) 0, 1 and 4. The window needs 2 blocks in a row."""
    cache = coordinator(layout_of(None, 8), 40)
    tables = computed(cache, 27)
    forget(cache, tables, 1, {2, 3, 5})
    full, window = tables.tables
    hit = cache.find_hit(hashes_of(cache, 27), 26)
    assert hit == PrefixHit(8, (full.blocks[:2], window.blocks[:2]), num_uncached_common_tokens=16)


def test_window_admission_cap_and_trimming() -> None:
    cache = coordinator(layout_of(None, 8), 40)
    manager = cache.managers[1]
    assert isinstance(manager, SlidingWindowManager)
    assert manager.admission_cap == manager.max_blocks(64) == 7
    assert manager.max_blocks(9) == 3
    tables = computed(cache, 21)
    before = list(tables.tables[1].blocks)
    assert cache.grow(tables, 22, 21) == ([], [])
    assert tables.tables[1].blocks == [0, 0, 0, *before[3:]]
    assert tables.tables[0].blocks[0] != 0
    cache.check([tables])


@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("window", [1, 2, 5, 8, 9])
def test_a_request_alone_never_holds_more_than_its_bound(window: int, chunk: int) -> None:
    cache = coordinator(layout_of(window), 40, max_batched=chunk)
    tables, position, most = cache.new_cache(), 0, 0
    while position < 64:
        end = min(position + chunk, 64)
        assert cache.grow(tables, end, position) is not None
        most = max(most, cache.pools[0].num_used)
        position = end
    assert most <= cache.max_blocks(64)[0] <= most + 1


def test_window_hit_in_the_middle_leaves_holes_before_it() -> None:
    cache = coordinator(layout_of(8), 40)
    tables = computed(cache, 24)
    forget(cache, tables, 0, {0, 1, 5})
    blocks = tables.tables[0].blocks
    assert cache.find_hit(hashes_of(cache, 24), 23).blocks == ([0, 0, 0, blocks[3], blocks[4]],)


def test_window_run_that_starts_at_the_first_token_may_be_short() -> None:
    cache = coordinator(layout_of(30), 40)
    tables = computed(cache, 24)
    forget(cache, tables, 0, {2})
    assert cache.find_hit(hashes_of(cache, 24), 23).num_tokens == 8


def test_window_of_one_token_needs_no_cached_block() -> None:
    cache = coordinator(layout_of(1), 40)
    hit = cache.find_hit(hashes_of(cache, 24), 23)
    assert hit == PrefixHit(20, ([0] * 5,))


def test_groups_with_other_block_sizes_agree_on_common_multiples() -> None:
    layout = plan_layout({0: attention_spec(1, 8, "float32", 4), 1: attention_spec(1, 8, "float32", 2, 6)})
    cache = coordinator(layout, 20, 40)
    assert (cache.hash_block_size, cache.alignment) == (2, 4)
    tables = computed(cache, 16)
    full, window = (t.blocks for t in tables.tables)
    assert cache.find_hit(hashes_of(cache, 16), 15) == PrefixHit(12, (full[:3], [0, 0, 0, *window[3:6]]))
    forget(cache, tables, 1, {5})
    assert cache.find_hit(hashes_of(cache, 16), 15) == PrefixHit(8, (full[:2], [0, *window[1:4]]), 4)


def test_a_fixed_point_over_two_windows() -> None:
    cache = coordinator(layout_of(None, 5, 9), 60)
    tables = computed(cache, 32)
    forget(cache, tables, 1, {6, 4, 3, 2})
    forget(cache, tables, 2, {5, 0})
    # Window 5 ends at 24, so window 9 must end by 24: blocks 3, 4 end at 20, where window 5 has nothing; the
    # next length for window 5 is 8, where window 9 lacks block 0 before block 1.
    assert cache.find_hit(hashes_of(cache, 32), 31).num_tokens == 0


def test_hits_of_all_groups_are_held_before_any_block_is_taken() -> None:
    """Free are the cached blocks only: blocks for group 0 must not evict the hit of group 1."""
    cache = coordinator(layout_of(None, 8), 13, max_batched=64)
    tables = computed(cache, 20)
    cache.free(tables)
    hit = cache.find_hit(hashes_of(cache, 20), 8)
    assert hit.num_tokens == 8
    fresh = cache.new_cache()
    assert cache.admit(fresh, hit, 24, 24, [0])
    held = fresh.block_ids()
    assert held[0][:2] == hit.blocks[0] and held[1][:2] == hit.blocks[1]
    assert len({*held[0], *held[1]}) == 12
    cache.check([fresh])


def test_admission_counts_cached_blocks_that_would_leave_the_free_list() -> None:
    cache = coordinator(layout_of(None), 6, max_batched=64)
    cache.free(computed(cache, 16))
    hit = cache.find_hit(hashes_of(cache, 16), 15)
    other = cache.new_cache()
    assert cache.grow(other, 4, 0) is not None
    assert cache.pools[0].num_free == 4
    fresh = cache.new_cache()
    assert not cache.admit(fresh, hit, 20, 20, [0])
    assert fresh.block_ids() == ([],)
    assert cache.admit(fresh, hit, 16, 16, [0])
    cache.check([other, fresh])


def test_admission_leaves_reserved_blocks() -> None:
    cache = coordinator(layout_of(None), 6)
    assert not cache.admit(cache.new_cache(), None, 4, 16, [2])
    assert cache.admit(cache.new_cache(), None, 4, 16, [1])


def test_growth_that_fails_still_moves_windows_but_takes_nothing() -> None:
    cache = coordinator(layout_of(None, 4, head_dims=[8, 16]), 3, 9)
    tables = cache.new_cache()
    assert cache.grow(tables, 8, 0) is not None
    assert cache.grow(tables, 9, 8) is None
    assert tables.tables[1].num_trimmed == 1 and len(tables.tables[0].blocks) == 2
    cache.check([tables])


def test_groups_of_a_pool_age_together() -> None:
    cache = coordinator(layout_of(None, 30), 9)
    tables = computed(cache, 16)
    full, window = tables.block_ids()
    cache.free(tables)
    assert cache.pools[0].free_order() == [window[3], full[3], window[2], full[2], window[1], full[1], window[0], full[0]]


def test_fork_shares_whole_blocks() -> None:
    cache = coordinator(layout_of(None), 9)
    tables = computed(cache, 10)
    child, shared = cache.fork(tables, 10)
    assert shared == child.capacity == 8 and child.block_ids() == (tables.tables[0].blocks[:2],)
    cache.check([tables, child])
    cache.free(tables)
    cache.check([child])


def test_fork_shares_nothing_behind_a_window_that_moved_on() -> None:
    cache = coordinator(layout_of(None, 5), 40)
    tables = computed(cache, 25)
    assert cache.grow(tables, 26, 25) is not None
    assert cache.fork(tables, 20)[1] == 0
    at_boundary = computed(cache, 20)
    assert cache.grow(at_boundary, 21, 20) is not None
    child, shared = cache.fork(at_boundary, 20)
    assert shared == 20 and child.tables[1].blocks == [0, 0, 0, 0, at_boundary.tables[1].blocks[4]]
    cache.check([tables, at_boundary, child])


def test_rollback_changes_lengths_only_and_never_reaches_published_blocks() -> None:
    cache = coordinator(layout_of(None, 8), 20)
    tables = computed(cache, 9)
    before = tables.block_ids()
    cache.rollback(tables, 8)
    assert tables.block_ids() == before
    with pytest.raises(ValueError, match="published"):
        cache.rollback(tables, 7)


def test_the_longest_request_that_fits_alone() -> None:
    assert coordinator(layout_of(None), 6).max_tokens_alone() == 20
    assert coordinator(layout_of(None), 6, lookahead=3).max_tokens_alone() == 17
    assert coordinator(layout_of(8), 8).max_tokens_alone() == 64
    assert coordinator(layout_of(8), 7).max_tokens_alone() == 24
    assert coordinator(layout_of(None, 8), 12).max_tokens_alone() == 20
    assert coordinator(layout_of(None, 8, head_dims=[8, 16]), 40, 8).max_tokens_alone() == 64


def test_a_kind_without_manager_is_refused() -> None:
    spec = StateSpec(StateKind.CROSS_ATTENTION, 16, (StateField("state", (4, 4), "float32"),))
    with pytest.raises(UnsupportedModelError, match="cross_attention"):
        coordinator(plan_layout({0: spec}), 4)


def test_a_window_without_width_is_refused() -> None:
    spec = StateSpec(StateKind.SLIDING_WINDOW, 16, (StateField("k", (4, 4), "float32"),))
    cache = coordinator(layout_of(None), 4)
    with pytest.raises(UnsupportedModelError, match="window"):
        make_manager(StateGroup(0, 0, spec, (0,)), cache.pools[0], cache.limits, 16)


def test_a_chunked_hit_needs_nothing_before_its_chunk() -> None:
    spec = attention_spec(1, 8, "float32", 4, 8, kind=StateKind.CHUNKED_LOCAL)
    cache = coordinator(plan_layout({0: spec}), 40)
    tables = computed(cache, 24)
    blocks = list(tables.tables[0].blocks)
    forget(cache, tables, 0, {0, 1, 3})
    assert cache.find_hit(hashes_of(cache, 24), 23).blocks == ([0, 0, 0, 0, blocks[4]],)
    assert cache.find_hit(hashes_of(cache, 24), 15).blocks == ([0, 0, blocks[2]],)


def test_a_prompt_window_frees_the_gap_and_shares_the_prompt_only() -> None:
    spec = attention_spec(1, 8, "float32", 4, 6, kind=StateKind.PROMPT_WINDOW)
    cache = coordinator(plan_layout({0: spec}), 40)
    tables = cache.new_cache(10)
    assert cache.grow(tables, 31, 0) is not None
    cache.publish(tables, hashes_of(cache, 31), 31)
    before = list(tables.tables[0].blocks)
    assert cache.grow(tables, 32, 31) is not None
    assert tables.tables[0].blocks == [*before[:3], 0, 0, 0, *before[6:]]
    cache.check([tables])
    assert cache.find_hit(hashes_of(cache, 31), 30).blocks == (before[:2],)
