from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canter.core.errors import ConfigError
from canter.core.state_specs import CACHE_STORAGE, DTYPE_BYTES, PoolSpec, StateField, StateKind, attention_spec, plan_layout


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
