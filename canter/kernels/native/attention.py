"""Native rotary embedding, cache writing and paged attention. Meaning: `canter.kernels.reference`.

Queries, keys and values may be views into a fused projection: only each token's heads must lie in one run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from canter import _native
from canter.kernels.native.layout import contiguous, has_packed_blocks, has_packed_rows, packed_rows, require, type_code


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, rot_dim: int) -> None:
    """As the reference."""
    fits = q.dim() == k.dim() == 3 and q.shape[0] == k.shape[0] == positions.shape[0] and q.shape[2] == k.shape[2] and q.dtype == k.dtype
    fits = fits and has_packed_rows(q) and has_packed_rows(k)
    require(fits, "rotary", "q [T, Hq, D] and k [T, Hk, D] of one type, each token's heads in one run, positions [T]", q, k, positions)
    fits = cos_sin.dim() == 2 and cos_sin.shape[1] == rot_dim <= q.shape[2] and rot_dim % 2 == 0 and cos_sin.dtype == torch.float32
    require(fits and cos_sin.is_contiguous(), "rotary", f"contiguous float32 cos_sin [max_pos, {rot_dim}]", cos_sin)
    positions = contiguous(positions, torch.int64)
    rows, q_heads, head_dim = q.shape
    strides = q.stride(0), k.stride(0)
    sizes = rows, q_heads, k.shape[1], head_dim, rot_dim, cos_sin.shape[0]
    _native.rotary(q.data_ptr(), k.data_ptr(), type_code("rotary", q), *strides, positions.data_ptr(), cos_sin.data_ptr(), *sizes)


def _require_caches(op: str, k_cache: Tensor, v_cache: Tensor, heads: int, head_dim: int) -> None:
    fits = k_cache.dim() == 4 and k_cache.shape == v_cache.shape and k_cache.dtype == v_cache.dtype
    fits = fits and k_cache.shape[1] == heads and k_cache.shape[3] == head_dim and has_packed_blocks(k_cache) and has_packed_blocks(v_cache)
    require(fits, op, f"caches [NB, {heads}, BS, {head_dim}] of one type, each block in one run", k_cache, v_cache)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """As the reference."""
    fits = k.dim() == 3 and k.shape == v.shape and k.dtype == v.dtype and slot_mapping.shape == (k.shape[0],)
    require(fits, "write_kv", "k and v [T, Hk, D] of one type and slot_mapping [T]", k, v, slot_mapping)
    rows, heads, head_dim = k.shape
    _require_caches("write_kv", k_cache, v_cache, heads, head_dim)
    k, v, slots = packed_rows(k), packed_rows(v), contiguous(slot_mapping, torch.int64)
    new = k.data_ptr(), v.data_ptr(), type_code("write_kv", k), k.stride(0), v.stride(0)
    caches = k_cache.data_ptr(), v_cache.data_ptr(), type_code("write_kv", k_cache), k_cache.stride(0), v_cache.stride(0)
    _native.write_kv(*new, *caches, slots.data_ptr(), rows, heads, head_dim, k_cache.shape[0], k_cache.shape[2])


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
    """As the reference."""
    require(
        q.dim() == 3 and k_cache.dim() == 4 and q.shape[1] % k_cache.shape[1] == 0,
        "paged_attention",
        "q [T, Hq, D], Hq in whole groups",
        q,
        k_cache,
    )
    rows, q_heads, head_dim = q.shape
    num_blocks, k_heads, block_size, _ = k_cache.shape
    _require_caches("paged_attention", k_cache, v_cache, k_heads, head_dim)
    requests = seq_lens.shape[0]
    fits = block_table.dim() == 2 and block_table.shape[0] == requests and query_start_loc.shape == (requests + 1,)
    require(fits, "paged_attention", "block_table [B, MB], query_start_loc [B + 1], seq_lens [B]", block_table, query_start_loc, seq_lens)
    table, starts, lengths = (contiguous(x, torch.int32) for x in (block_table, query_start_loc, seq_lens))
    q = packed_rows(q)
    out = torch.empty((rows, q_heads, head_dim), dtype=q.dtype)
    query = q.data_ptr(), type_code("paged_attention", q), q.stride(0)
    caches = k_cache.data_ptr(), v_cache.data_ptr(), type_code("paged_attention", k_cache), k_cache.stride(0), v_cache.stride(0)
    sizes = rows, requests, table.shape[1], q_heads, k_heads, head_dim, num_blocks, block_size
    places = table.data_ptr(), starts.data_ptr(), lengths.data_ptr(), out.data_ptr()
    _native.paged_attention(*query, *caches, *places, *sizes, window, scale, softcap)
    return out
