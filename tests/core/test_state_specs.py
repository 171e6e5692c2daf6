from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canter.core.errors import ConfigError, UnsupportedModelError
from canter.core.state_specs import (
    CACHE_STORAGE,
    DTYPE_BYTES,
    PoolSpec,
    SharedState,
    SnapshotMode,
    StateField,
    StateKind,
    attention_spec,
    compressed_spec,
    mla_spec,
    open_window_spec,
    place_snapshots,
    plan_layout,
    recurrent_spec,
)


def spec(window: int | None = None, heads: int = 2, dim: int = 16):
    return attention_spec(heads, dim, "float32", 16, window)


@pytest.mark.parametrize("cache_dtype", CACHE_STORAGE)
def test_keys_lie_in_lanes_of_four_bytes(cache_dtype: str) -> None:
    fields = {f.name: f for f in attention_spec(2, 64, cache_dtype, 16).fields}
    size = DTYPE_BYTES[fields["k"].dtype]
    lanes = 1 if cache_dtype == "float16" else 4 // size
    assert fields["k"].shape == (2, 64 // lanes, 16, lanes)
    assert fields["v"].shape == (2, 16, 64)
    assert ("k_scale" in fields) == ("v_scale" in fields) == (cache_dtype == "int8_per_token_head")


def test_head_sizes_that_lanes_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="fp8_e4m3 needs a head size that is a multiple of 4; the model's is 6"):
        attention_spec(2, 6, "fp8_e4m3", 16)
    with pytest.raises(ConfigError, match="multiple of 2"):
        attention_spec(2, 7, "bfloat16", 16)
    attention_spec(2, 7, "float32", 16)


def test_equal_layers_are_one_group() -> None:
    layout = plan_layout({i: spec() for i in range(4)})
    assert [g.layer_ids for g in layout.groups] == [(0, 1, 2, 3)]
    assert [(p.num_slots, p.block_bytes) for p in layout.pools] == [(4, 4 * 2 * 2 * 16 * 16 * 4 + 64)]


def test_blocks_are_an_odd_number_of_units_and_fields_begin_on_lines() -> None:
    """Small blocks are counted in cache lines, from 64 KiB on in 2 KiB; what lies between is memory too."""
    small = PoolSpec(0, 2, (StateField("k", (5,), "float32"), StateField("v", (33,), "bfloat16")))
    assert [small.field_starts(slot) for slot in range(2)] == [[0, 64], [192, 256]]
    assert small.block_bytes == 7 * 64
    odd = PoolSpec(0, 1, (StateField("k", (3, 16), "float32"),))
    assert odd.block_bytes == 3 * 64
    large = PoolSpec(0, 24, (StateField("k", (2, 32, 16, 2), "bfloat16"), StateField("v", (2, 16, 64), "bfloat16")))
    assert large.block_bytes == 97 * 2048


def test_five_window_layers_to_one_full() -> None:
    """Gemma 3's pattern: three full layers set the group size, fifteen windowed ones make five groups of three."""
    layout = plan_layout({i: spec(None if i % 6 == 5 else 512) for i in range(18)})
    assert [(g.spec.kind, len(g.layer_ids)) for g in layout.groups] == [(StateKind.FULL, 3)] + [(StateKind.SLIDING_WINDOW, 3)] * 5
    assert len(layout.pools) == 1 and layout.pools[0].num_slots == 3
    assert layout.groups[1].layer_ids == (0, 6, 12), "dealt in strides"


def test_nearly_equal_counts_share_the_larger_group() -> None:
    layout = plan_layout({i: spec(None if i < 4 else 8) for i in range(9)})
    assert [len(g.layer_ids) for g in layout.groups] == [4, 5]
    assert layout.pools[0].num_slots == 5


def test_different_blocks_need_different_pools() -> None:
    layout = plan_layout({0: spec(), 1: spec(8, heads=4), 2: spec()})
    assert [(g.pool_id, g.layer_ids) for g in layout.groups] == [(0, (0, 2)), (1, (1,))]


@given(st.lists(st.sampled_from([None, 4, 8]), min_size=1, max_size=40))
def test_every_layer_has_one_place(windows: list[int | None]) -> None:
    layout = plan_layout({i: spec(w) for i, w in enumerate(windows)})
    places = layout.slot_of_layer()
    assert sorted(places) == list(range(len(windows)))
    for group in layout.groups:
        assert len(group.layer_ids) <= layout.pools[group.pool_id].num_slots
        assert len({places[layer][2] for layer in group.layer_ids}) == len(group.layer_ids)


def test_values_may_be_narrower_than_keys() -> None:
    spec = attention_spec(2, 24, "bfloat16", 16, value_dim=16)
    assert [f.shape for f in spec.fields] == [(2, 12, 16, 2), (2, 16, 16)]
    assert spec.block_bytes == 2 * 16 * (24 + 16) * 2


def test_latents_and_the_keys_of_their_index_lie_in_one_block() -> None:
    spec = mla_spec(512, 64, "bfloat16", 16, index_dim=128)
    assert (spec.kind, [(f.name, f.shape) for f in spec.fields]) == (StateKind.MLA, [("latent", (16, 576)), ("index_k", (16, 128))])
    assert spec.block_bytes == 16 * (576 + 128) * 2


def test_compressed_entries_stand_for_several_tokens() -> None:
    spec = compressed_spec(4, 512, "bfloat16", 16)
    assert (spec.kind, spec.fields[0].shape) == (StateKind.COMPRESSED, (4, 512))
    window = open_window_spec(4, 1024, "float32", 16, overlaps=True)
    assert (window.kind, window.window, window.fields[0].shape) == (StateKind.SLIDING_WINDOW, 8, (16, 1024))
    with pytest.raises(ConfigError, match="block_size must be a multiple of 128"):
        compressed_spec(128, 512, "bfloat16", 16)


def test_recurrent_states_have_a_pool_that_does_not_grow_with_length() -> None:
    """Every mixer has the same state, so one group and one block for all of a request; its fields are whole runs of memory."""
    state = recurrent_spec({"conv": ((3, 10), "bfloat16"), "state": ((2, 4, 5), "float32")})
    specs = {0: state, 1: spec(), 2: state, 3: state}
    layout = plan_layout(place_snapshots(specs, SnapshotMode.ALIGN, 64))
    assert [(g.spec.kind, g.layer_ids, g.spec.block_size) for g in layout.groups] == [
        (StateKind.FULL, (1,), 16),
        (StateKind.RECURRENT, (0, 2, 3), 64),
    ]
    assert [pool.grows for pool in layout.pools] == [True, False]
    assert layout.pools[1].block_bytes == 3 * (3 * 10 * 2 + 2 * 4 * 5 * 4)
    assert layout.uses(StateKind.RECURRENT) and not layout.uses(StateKind.MLA)
    assert layout.hash_block_size == 16


def test_a_layer_that_shares_has_the_place_of_its_owner() -> None:
    layout = plan_layout({0: spec(), 1: spec(8), 2: SharedState(0), 3: SharedState(1)})
    places = layout.slot_of_layer()
    assert places[2] == places[0] and places[3] == places[1]
    assert sum(len(group.layer_ids) for group in layout.groups) == 2
    with pytest.raises(UnsupportedModelError, match="Layer 0 reads the memory of layer 1"):
        plan_layout({0: SharedState(1), 1: SharedState(0)})
