"""How many cache blocks: from bytes to counts, and the sentence that says what they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from canter.core.errors import ConfigError
from canter.core.state_specs import SnapshotMode, StateLayout

BlocksFor = Callable[[int], Sequence[int]]
"""Tokens of one request -> the most blocks that it may hold at once, by pool."""


STATE_SHARE = 0.5
"""What recurrent states may take of the memory beside keys and values."""
KEPT_SHARE = 0.5
"""Of the memory for recurrent states, what is meant for those that later requests may go on from."""


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
    """Share `available` bytes among the pools as one request of `max_model_len` would use them, once those that don't grow with a
    request's length have what `max_num_seqs` requests need.

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
    growing = [pool.grows for pool in layout.pools]
    num_blocks = _state_blocks(layout, per_request, max_num_seqs, available)
    if override is not None:
        num_blocks = [override if grows else count for count, grows in zip(num_blocks, growing, strict=True)]
        if any(have - 1 < need for have, need in zip(num_blocks, per_request, strict=True)):
            raise ConfigError(
                f"num_gpu_blocks_override must be at least {max(per_request) + 1} for requests of {max_model_len} tokens, got {override}."
            )
    elif any(growing):
        taken = sum(count * size for count, size in zip(num_blocks, block_bytes, strict=True))  # states, and the null blocks
        one = sum(need * size for need, size, grows in zip(per_request, block_bytes, growing, strict=True) if grows)
        scale = min((available - taken) / one, float(max_num_seqs))
        num_blocks = [
            int(need * scale) + 1 if grows else count for need, count, grows in zip(per_request, num_blocks, growing, strict=True)
        ]
    by_pool = [(have - 1) / need for have, need in zip(num_blocks, per_request, strict=True)]
    concurrency = min([share for share, grows in zip(by_pool, growing, strict=True) if grows] or by_pool)
    total = sum(count * size for count, size in zip(num_blocks, block_bytes, strict=True))
    num_tokens = int(concurrency * max_model_len)
    sentences = [f"The cache holds {num_tokens:,} tokens in {_mib(total)}: {concurrency:.1f} requests of {max_model_len:,} tokens at once."]
    if not all(growing):
        states = sum(count * size for count, size, grows in zip(num_blocks, block_bytes, growing, strict=True) if not grows)
        most = int(min(share for share, grows in zip(by_pool, growing, strict=True) if not grows))
        sentences.append(f"{_mib(states)} of it are for recurrent states, those of up to {most} requests of any length at once.")
    return CacheSize(tuple(num_blocks), max_model_len, num_tokens, total, " ".join(sentences) + shortened)


def _state_blocks(layout: StateLayout, per_request: Sequence[int], max_num_seqs: int, available: int) -> list[int]:
    """Blocks of the pools that don't grow with a request's length: as many as all requests hold, and where states are kept for
    later ones, room for these; at most `STATE_SHARE` of the memory where others need some. 1, the null block, of the other pools."""
    wanted = [1] * len(layout.pools)
    kept = {g.pool_id for g in layout.groups if g.spec.snapshots is not SnapshotMode.NONE}
    for pool in layout.pools:
        if not pool.grows:
            live = per_request[pool.pool_id] * max_num_seqs
            wanted[pool.pool_id] = 1 + (int(live / KEPT_SHARE) if pool.pool_id in kept else live)
    sizes = [0 if pool.grows else pool.block_bytes for pool in layout.pools]
    need = sum((count - 1) * size for count, size in zip(wanted, sizes, strict=True))
    if not need:
        return wanted
    others = sum(count * pool.block_bytes for count, pool in zip(per_request, layout.pools, strict=True) if pool.grows)
    fixed = sum(pool.block_bytes for pool in layout.pools)
    limit = min(available * STATE_SHARE, available - fixed - others) if others else available - fixed
    scale = min(1.0, limit / need)
    return [
        count if not size else 1 + max(one, int((count - 1) * scale)) for count, size, one in zip(wanted, sizes, per_request, strict=True)
    ]


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
