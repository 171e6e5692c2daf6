"""How many cache blocks: from bytes to counts, and the sentence that says what they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from canter.core.errors import ConfigError
from canter.core.state_specs import StateLayout

BlocksFor = Callable[[int], Sequence[int]]
"""Tokens of one request -> the most blocks that it may hold at once, by pool."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """`num_blocks[p]` in pool p, the null block included. `num_tokens`: tokens that fit in requests of `max_model_len`."""

    num_blocks: tuple[int, ...]
    max_model_len: int
    num_tokens: int
    num_bytes: int
    sentence: str


def cache_bytes(layout: StateLayout, num_blocks: Sequence[int]) -> int:
    """Bytes of `num_blocks[p]` blocks in each pool p, and of the pools' null blocks."""
    return sum((count + 1) * pool.block_bytes for count, pool in zip(num_blocks, layout.pools, strict=True))


def size_cache(
    layout: StateLayout,
    blocks_for: BlocksFor,
    max_model_len: int,
    max_num_seqs: int,
    available: int,
    override: int | None,
    may_shorten: bool,
) -> CacheSize:
    """Share `available` bytes among the pools as one request of `max_model_len` would use them.

    Never more than `max_num_seqs` such requests need. When not even one fits, the model length is lowered to what does
    if `may_shorten`; otherwise, or when nothing fits, raises `ConfigError` saying how much is needed.
    """
    block_bytes = [pool.block_bytes for pool in layout.pools]

    def bytes_for(num_tokens: int) -> int:
        return cache_bytes(layout, blocks_for(num_tokens))

    shortened = ""
    if override is None and bytes_for(max_model_len) > available:
        longest = _longest(bytes_for, max_model_len, available)
        if not may_shorten or longest < 1:
            raise ConfigError(
                f"The cache needs {_mib(bytes_for(max_model_len))} for one request of {max_model_len} tokens, but {_mib(available)} "
                f"may be used, enough for {longest} tokens. "
                "Lower --max-model-len, or raise --kv-cache-memory-bytes or --gpu-memory-utilization."
            )
        shortened = (
            f" The context is cut from {max_model_len} to {longest} tokens to fit; --max-model-len and --kv-cache-memory-bytes change this."
        )
        max_model_len = longest
    per_request = blocks_for(max_model_len)
    if override is not None:
        num_blocks = tuple(override for _ in layout.pools)
        if any(have - 1 < need for have, need in zip(num_blocks, per_request, strict=True)):
            raise ConfigError(
                f"num_gpu_blocks_override must be at least {max(per_request) + 1} for requests of {max_model_len} tokens, got {override}."
            )
    else:
        fixed = sum(block_bytes)  # the null blocks
        per_request_bytes = bytes_for(max_model_len) - fixed
        scale = min((available - fixed) / per_request_bytes, float(max_num_seqs))
        num_blocks = tuple(int(count * scale) + 1 for count in per_request)
    concurrency = min((have - 1) / need for have, need in zip(num_blocks, per_request, strict=True))
    total = sum(count * size for count, size in zip(num_blocks, block_bytes, strict=True))
    num_tokens = int(concurrency * max_model_len)
    fits = f"{concurrency:.1f} requests of {max_model_len:,} tokens at once"
    sentence = f"The cache holds {num_tokens:,} tokens in {_mib(total)}: {fits}.{shortened}"
    return CacheSize(num_blocks, max_model_len, num_tokens, total, sentence)


def _longest(bytes_for: Callable[[int], int], limit: int, available: int) -> int:
    """The greatest number of tokens in [0, limit] whose blocks fit."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if bytes_for(middle) <= available:
            low = middle
        else:
            high = middle - 1
    return low


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
