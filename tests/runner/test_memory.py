from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canter.core.errors import ConfigError
from canter.core.state_specs import SnapshotMode, attention_spec, place_snapshots, plan_layout, recurrent_spec
from canter.runner.memory import size_cache

LAYOUT = plan_layout({i: attention_spec(2, 16, "float32", 16) for i in range(3)})
BLOCK_BYTES = 3 * 2 * 2 * 16 * 16 * 4 + 64  # an odd number of cache lines


def blocks_for(num_tokens: int) -> list[int]:
    return [-(-num_tokens // 16)]


def size(available: int, max_model_len: int = 256, seqs: int = 8, override: int | None = None, may_shorten: bool = False):
    return size_cache(LAYOUT, blocks_for, max_model_len, seqs, available, override, may_shorten)


def test_the_layout_has_one_pool_of_three_slots() -> None:
    assert [p.block_bytes for p in LAYOUT.pools] == [BLOCK_BYTES]


def test_memory_becomes_blocks_and_one_is_null() -> None:
    result = size(BLOCK_BYTES * 41)
    assert result.num_blocks == (41,)
    assert result.num_tokens == 40 * 16
    assert "640 tokens" in result.sentence and "2.5 requests of 256 tokens" in result.sentence


def test_never_more_than_all_requests_need() -> None:
    assert size(BLOCK_BYTES * 10_000, seqs=4).num_blocks == (4 * 16 + 1,)


def test_too_little_memory_says_how_much_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"one request of 256 tokens.*enough for 64 tokens.*kv-cache-memory-bytes"):
        size(BLOCK_BYTES * 5)


def test_an_unasked_context_is_cut_to_what_fits() -> None:
    result = size(BLOCK_BYTES * 5, may_shorten=True)
    assert result.max_model_len == 64
    assert "cut from 256 to 64" in result.sentence


def test_nothing_fits() -> None:
    with pytest.raises(ConfigError, match="enough for 0 tokens"):
        size(BLOCK_BYTES, may_shorten=True)


def test_override_is_exact_and_checked() -> None:
    assert size(0, override=17).num_blocks == (17,)
    with pytest.raises(ConfigError, match="at least 17"):
        size(0, override=16)


@given(st.integers(0, 10**8), st.integers(1, 4096), st.integers(1, 64))
def test_what_is_used_never_exceeds_what_is_there(available: int, max_model_len: int, seqs: int) -> None:
    try:
        result = size(available, max_model_len, seqs, may_shorten=True)
    except ConfigError:
        return
    assert result.num_bytes <= available
    assert result.num_blocks[0] - 1 >= blocks_for(result.max_model_len)[0]


HYBRID = plan_layout(
    place_snapshots(
        {0: attention_spec(2, 16, "float32", 16), 1: recurrent_spec({"state": ((8, 32, 16), "float32")})}, SnapshotMode.ALIGN, 64
    )
)
STATE_BYTES = 8 * 32 * 16 * 4
KV_BYTES = 2 * 2 * 16 * 16 * 4 + 64


def hybrid_blocks(num_tokens: int) -> list[int]:
    return [-(-num_tokens // 16), 2]


def test_states_are_sized_by_the_number_of_requests_and_reported_apart() -> None:
    assert [pool.block_bytes for pool in HYBRID.pools] == [KV_BYTES, STATE_BYTES]
    result = size_cache(HYBRID, hybrid_blocks, 256, 4, 10**8, None, False)
    # Two live states of each of 4 requests, and as many again that later requests may go on from.
    assert result.num_blocks == (4 * 16 + 1, 2 * 2 * 4 + 1)
    assert result.num_bytes == 65 * KV_BYTES + 17 * STATE_BYTES
    assert "are for recurrent states, those of up to 8 requests of any length at once." in result.sentence


def test_states_leave_half_of_a_small_memory_to_keys_and_values() -> None:
    available = 40 * STATE_BYTES
    result = size_cache(HYBRID, hybrid_blocks, 256, 64, available, None, False)
    assert 18 <= result.num_blocks[1] - 1 <= 20
    assert result.num_bytes <= available
    assert result.num_blocks[0] * KV_BYTES >= available / 2 - 2 * STATE_BYTES


def test_one_request_fits_whatever_states_want() -> None:
    least = 17 * KV_BYTES + 3 * STATE_BYTES
    result = size_cache(HYBRID, hybrid_blocks, 256, 64, least, None, False)
    assert result.num_blocks == (17, 3)
    with pytest.raises(ConfigError, match="for one request of 256 tokens"):
        size_cache(HYBRID, hybrid_blocks, 256, 64, least - 1, None, False)


def test_a_model_of_states_alone_uses_all_of_the_memory() -> None:
    layout = plan_layout(place_snapshots({0: recurrent_spec({"state": ((8, 32, 16), "float32")})}, SnapshotMode.ALIGN, 64))
    result = size_cache(layout, lambda num_tokens: [2], 4096, 64, 41 * STATE_BYTES, None, False)
    assert result.num_blocks == (41,) and result.num_tokens == 20 * 4096
