"""The hit of a model with several kinds of memory, against a search over all lengths."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from canter.core.state_specs import SnapshotMode, StateKind, StateSpec, attention_spec, plan_layout, recurrent_spec
from canter.scheduler.cache.block_pool import NULL_BLOCK
from canter.scheduler.cache.coordinator import CacheCoordinator
from canter.scheduler.cache.hashing import PrefixHasher
from canter.scheduler.cache.managers import CacheLimits

NUM_TOKENS = 48


@dataclass(frozen=True)
class Kind:
    """One group: its kind, the tokens of a block, its window."""

    kind: StateKind
    block_size: int
    window: int

    def spec(self, width: int) -> StateSpec:
        if self.kind is StateKind.RECURRENT:
            spec = recurrent_spec({"state": ((width,), "float32")})
            return StateSpec(spec.kind, self.block_size, spec.fields, None, SnapshotMode.ALL)
        window = None if self.kind is StateKind.FULL else self.window
        return attention_spec(width, 8, "float32", self.block_size, window, kind=self.kind)

    def needs(self, length: int) -> range:
        """The blocks without which a request can't go on from `length` tokens."""
        end, first = length // self.block_size, 0
        if self.kind is StateKind.RECURRENT:
            first = max(0, end - 1)
        elif self.kind is StateKind.SLIDING_WINDOW:
            first = max(0, length - self.window + 1) // self.block_size
        elif self.kind is StateKind.CHUNKED_LOCAL:
            first = length // self.window * self.window // self.block_size
        return range(min(first, end), end)


KINDS = st.builds(
    Kind,
    st.sampled_from([StateKind.FULL, StateKind.SLIDING_WINDOW, StateKind.CHUNKED_LOCAL, StateKind.PROMPT_WINDOW, StateKind.RECURRENT]),
    st.sampled_from([2, 4, 4, 8]),
    st.integers(1, 20),
)


@settings(deadline=None, max_examples=400)
@given(kinds=st.lists(KINDS, min_size=1, max_size=4), max_tokens=st.integers(0, NUM_TOKENS), data=st.data())
def test_the_hit_is_the_greatest_length_with_which_every_group_can_go_on(kinds: list[Kind], max_tokens: int, data: st.DataObject) -> None:
    # Another width for each layer, so that each has a group and a pool of its own.
    layout = plan_layout({i: kind.spec(i + 1) for i, kind in enumerate(kinds)})
    by_group = [kinds[group.layer_ids[0]] for group in layout.groups]
    cache = CacheCoordinator(layout, [100] * len(layout.pools), CacheLimits(NUM_TOKENS, NUM_TOKENS))
    tables = cache.new_cache()
    assert cache.grow(tables, NUM_TOKENS, 0) is not None
    hashes: list[bytes] = []
    PrefixHasher(cache.hash_block_size).extend(hashes, range(NUM_TOKENS), None)
    cached: list[set[int]] = []
    for kind, manager, table in zip(by_group, cache.managers, tables.tables, strict=True):
        manager.publish(table, hashes, NUM_TOKENS)
        num_blocks = NUM_TOKENS // kind.block_size
        kept = data.draw(st.sets(st.integers(0, num_blocks - 1), min_size=num_blocks // 3))
        for i in set(range(num_blocks)) - kept:
            manager.pool.withdraw(table.blocks[i])
        cached.append(kept)

    def goes_on(length: int) -> bool:
        return all(set(kind.needs(length)) <= kept for kind, kept in zip(by_group, cached, strict=True))

    lengths = range(max_tokens // cache.alignment * cache.alignment, -1, -cache.alignment)
    cache.begin_step()
    hit = cache.find_hit(hashes, max_tokens)
    assert hit.num_tokens == next(length for length in lengths if goes_on(length))
    assert hit.is_readable
    for kind, blocks, table in zip(by_group, hit.blocks, tables.tables, strict=True):
        assert len(blocks) == hit.num_tokens // kind.block_size
        needed = set(kind.needs(hit.num_tokens))
        assert all(block == table.blocks[i] if i in needed else block in (NULL_BLOCK, table.blocks[i]) for i, block in enumerate(blocks))
