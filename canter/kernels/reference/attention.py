"""Attention over a paged cache: blocks of `[heads, block_size, head_dim]`, found through a request's block table."""

from __future__ import annotations

import torch
from torch import Tensor


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store `k[T, Hk, D]` and `v[T, Hk, D]` in `k_cache` and `v_cache` `[NB, Hk, BS, D]`, rounded to the cache's type.

    Token t goes to block `slot_mapping[t] // BS`, place `slot_mapping[t] % BS`; -1 skips the token. Raises
    `IndexError` for a slot outside the cache.
    """
    num_blocks, _, block_size, _ = k_cache.shape
    kept = slot_mapping != -1
    slots = slot_mapping[kept]
    if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < num_blocks * block_size:
        raise IndexError(f"write_kv: slots must be -1 or in [0, {num_blocks * block_size}).")
    blocks, offsets = slots // block_size, slots % block_size
    k_cache[blocks, :, offsets] = k[kept].to(k_cache.dtype)
    v_cache[blocks, :, offsets] = v[kept].to(v_cache.dtype)


def _gather(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """The first `length` positions that a row of the block table names: `[Hk, length, D]` in float32."""
    paged = cache[blocks.long()].float()  # [blocks, Hk, BS, D]
    heads, head_dim = paged.shape[1], paged.shape[3]
    return paged.transpose(0, 1).reshape(heads, -1, head_dim)[:, :length]


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float) -> Tensor:
    """The last `q.shape[1]` positions of a request attend: q `[Hq, Tq, D]`, k and v `[Hk, S, D]`, all float32."""
    group = q.shape[0] // k.shape[0]
    scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * scale  # [Hq, Tq, S]
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    num_queries, length = scores.shape[1:]
    key = torch.arange(length, device=q.device)
    position = torch.arange(length - num_queries, length, device=q.device)[:, None]
    hidden = key > position
    if window:
        hidden = hidden | (key <= position - window)
    # Places that no query sees may hold anything, even NaN, so they must not be multiplied, not even by zero.
    first = max(0, length - num_queries - window + 1) if window else 0
    weights = scores.masked_fill(hidden, float("-inf"))[..., first:].softmax(-1)
    return weights @ v.repeat_interleave(group, 0)[:, first:]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Causal attention of `q[T, Hq, D]` over `k_cache` and `v_cache` `[NB, Hk, BS, D]`: `[T, Hq, D]` in the type of q.

    Request b owns queries `query_start_loc[b] .. query_start_loc[b + 1]` (int32, `[B + 1]`), its last positions out of
    `seq_lens[b]` (int32), and finds position p in block `block_table[b, p // BS]` (int32, `[B, MB]`). Query heads
    share key heads in runs of Hq / Hk. `window` > 0: a query sees itself and window - 1 positions before.
    `softcap` > 0: scaled scores s become `softcap * tanh(s / softcap)`. Softmax and sums are in float32. Rows past
    `query_start_loc[B]` are zero. Raises `IndexError` for a block outside the cache or more positions than the table holds.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    num_blocks, _, block_size, _ = k_cache.shape
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for b, length in enumerate(lengths):
        start, end = starts[b], starts[b + 1]
        if start == end:
            continue
        first = max(0, length - (end - start) - window + 1) // block_size if window else 0
        used = block_table[b, : -(-length // block_size)].clone()
        used[:first] = 0  # blocks behind the window are not read
        if length < end - start or used.numel() * block_size < length or not 0 <= int(used.min()) <= int(used.max()) < num_blocks:
            raise IndexError(f"paged_attention: the lengths or the block table of request {b} do not fit ({length} positions).")
        k, v = _gather(k_cache, used, length), _gather(v_cache, used, length)
        rows = _attend(q[start:end].transpose(0, 1).float(), k, v, scale, window, softcap)
        out[start:end] = rows.transpose(0, 1).to(q.dtype)
    return out
