"""Native rotary embedding, cache writing and paged attention. Meaning: `canter.kernels.reference`.

Queries, keys and values may be views into a fused projection: only each token's heads must lie in one run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from canter import _native
from canter.kernels.attention_plan import AttentionPlan
from canter.kernels.native.layout import contiguous, has_packed_blocks, has_packed_rows, packed_rows, require, type_code

CACHE_TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.int8: 3, torch.float16: 4}
"""Types of cached keys and values that the compiled module knows."""


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, rot_dim: int, interleaved: bool = False) -> None:
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
    given = q.data_ptr(), k.data_ptr(), type_code("rotary", q), *strides, positions.data_ptr(), cos_sin.data_ptr()
    _native.rotary(*given, *sizes, interleaved)


def keys_hold_values(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether keys are rows in memory, [NB, Hk, BS, D] seen as [NB, Hk, D, BS, 1], and the values are the beginnings of these rows."""
    rows = k_cache.dim() == 5 and k_cache.shape[4] == 1 and k_cache.stride()[2:4] == (1, k_cache.shape[2])
    same = k_cache.untyped_storage().data_ptr() == v_cache.untyped_storage().data_ptr()
    return rows and same and k_cache.storage_offset() == v_cache.storage_offset()


def cache_arguments(
    op: str, k_cache: Tensor, v_cache: Tensor, heads: int, head_dim: int, k_scale: Tensor | None, v_scale: Tensor | None
) -> tuple[int, int, int, int, int, int, int, int, int]:
    """What the compiled module needs to know of a layer's cache, after checking its layout."""
    code = CACHE_TYPE_CODES.get(k_cache.dtype)
    if code is None or k_cache.device.type != "cpu":
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in CACHE_TYPE_CODES)
        raise ValueError(f"{op}: expected a cache on the CPU of a type among {known}; got {k_cache.dtype} on {k_cache.device}.")
    size = k_cache.element_size()
    if keys_hold_values(k_cache, v_cache):
        num_blocks, _, _, block_size, _ = k_cache.shape
        fits = k_cache.shape[1:3] == (heads, head_dim) and k_cache.dtype == v_cache.dtype and code != 3
        fits = fits and v_cache.shape[:3] == (num_blocks, heads, block_size) and v_cache.shape[3] <= head_dim
        fits = fits and v_cache.stride(0) == k_cache.stride(0) and v_cache.stride(2) == head_dim
        fits = fits and (heads == 1 or k_cache.stride(1) == v_cache.stride(1) == head_dim * block_size)
        wanted = f"keys [NB, {heads}, {head_dim}, BS, 1] of floats whose first Dv elements are the values, each block in one run"
        require(fits, op, wanted, k_cache, v_cache)
        return (k_cache.data_ptr(), k_cache.data_ptr(), code, k_cache.stride(0) * size, k_cache.stride(0) * size, 0, 0, 0, 0)
    lanes = 1 if k_cache.dtype == torch.float16 else 4 // size
    fits = k_cache.dim() == 5 and v_cache.dim() == 4 and k_cache.dtype == v_cache.dtype and head_dim * size % 4 == 0
    fits = fits and k_cache.shape[1:3] == (heads, head_dim // lanes) and k_cache.shape[4] == lanes
    value_dim = v_cache.shape[-1]
    fits = fits and v_cache.shape == (k_cache.shape[0], heads, k_cache.shape[3], value_dim) and value_dim * size % 4 == 0
    fits = fits and has_packed_blocks(k_cache) and has_packed_blocks(v_cache)
    wanted = f"keys [NB, {heads}, {head_dim}/{lanes}, BS, {lanes}] and values [NB, {heads}, BS, Dv] of one type, each block in one run"
    require(fits, op, wanted, k_cache, v_cache)
    scales = (0, 0, 0, 0)
    if code == 3:
        fits = k_scale is not None and v_scale is not None and k_scale.dtype == v_scale.dtype == torch.float32
        require(fits, op, "float32 scales for an int8 cache", k_scale, v_scale)
        assert k_scale is not None and v_scale is not None
        fits = k_scale.shape == v_scale.shape == v_cache.shape[:3] and has_packed_blocks(k_scale) and has_packed_blocks(v_scale)
        require(fits, op, "scales [NB, Hk, BS], each block in one run", k_scale, v_scale)
        scales = (k_scale.data_ptr(), v_scale.data_ptr(), k_scale.stride(0), v_scale.stride(0))
    return (k_cache.data_ptr(), v_cache.data_ptr(), code, k_cache.stride(0) * size, v_cache.stride(0) * size, *scales)


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """As the reference."""
    value_dim = v_cache.shape[-1]
    fits = k.dim() == 3 and v.shape == (k.shape[0], k.shape[1], value_dim) and k.dtype == v.dtype and slot_mapping.shape == (k.shape[0],)
    require(fits, "write_kv", "k [T, Hk, D] and v [T, Hk, Dv] of one type and slot_mapping [T]", k, v, slot_mapping)
    rows, heads, head_dim = k.shape
    caches = cache_arguments("write_kv", k_cache, v_cache, heads, head_dim, k_scale, v_scale)
    if keys_hold_values(k_cache, v_cache):
        require(value_dim == 0, "write_kv", "nothing as values where keys hold them", v, v_cache)
        k, v, head_dim, value_dim = v, k, 0, head_dim  # they lie as values do elsewhere
    k, v, slots = packed_rows(k), packed_rows(v), contiguous(slot_mapping, torch.int64)
    new = k.data_ptr(), v.data_ptr(), type_code("write_kv", k), k.stride(0), v.stride(0)
    _native.write_kv(*new, *caches, slots.data_ptr(), rows, heads, head_dim, value_dim, k_cache.shape[0], v_cache.shape[2])


def _make_plan(plan: AttentionPlan, rows: int, shape: tuple[int, ...], prompt_lens: Tensor | None) -> _native.AttentionPlan:
    """The compiled module's plan for layers of one shape: (Hq, Hk, D, Dv, NB, BS, window, chunk)."""
    key = (rows, *shape, prompt_lens is not None)
    if key in plan.made:
        made: _native.AttentionPlan = plan.made[key][0]
        return made
    q_heads, k_heads, chunk = shape[0], shape[1], shape[-1]
    require(q_heads % k_heads == 0, "paged_attention", f"query heads in whole groups, got {q_heads} for {k_heads} key heads")
    requests = plan.seq_lens.shape[0]
    fits = plan.block_table.dim() == 2 and plan.block_table.shape[0] == requests and plan.query_start_loc.shape == (requests + 1,)
    given = plan.block_table, plan.query_start_loc, plan.seq_lens
    require(fits, "paged_attention", "block_table [B, MB], query_start_loc [B + 1], seq_lens [B]", *given)
    if prompt_lens is not None:
        require(prompt_lens.shape == (requests,) and chunk == 0, "paged_attention", "prompt_lens [B], and no chunks", prompt_lens)
        prompt_lens = contiguous(prompt_lens, torch.int32)
    table, starts, lengths = arrays = tuple(contiguous(x, torch.int32) for x in given)
    native = _native.AttentionPlan()
    addresses = table.data_ptr(), starts.data_ptr(), lengths.data_ptr(), 0 if prompt_lens is None else prompt_lens.data_ptr()
    native.make(*addresses, rows, requests, table.shape[1], *shape)
    plan.made[key] = native, arrays, prompt_lens  # the native plan points into the arrays
    return native


def _by_head(x: Tensor | None, heads: int) -> Tensor | None:
    """Sinks or slopes, where there are any: a float for each head, in one run."""
    if x is None:
        return None
    require(x.shape == (heads,), "paged_attention", f"sinks and slopes [{heads}]", x)
    return contiguous(x, torch.float32)


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
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: AttentionPlan | None = None,
    chunk: int = 0,
    prompt_lens: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """As the reference."""
    require(q.dim() == 3 and v_cache.dim() == 4, "paged_attention", "q [T, Hq, D] and v_cache [NB, Hk, BS, Dv]", q, v_cache)
    rows, q_heads, head_dim = q.shape
    num_blocks, k_heads, block_size, value_dim = v_cache.shape
    caches = cache_arguments("paged_attention", k_cache, v_cache, k_heads, head_dim, k_scale, v_scale)
    shape = q_heads, k_heads, head_dim, value_dim, num_blocks, block_size, window, chunk
    native = _make_plan(plan or AttentionPlan(block_table, query_start_loc, seq_lens), rows, shape, prompt_lens)
    sinks, slopes = _by_head(sinks, q_heads), _by_head(slopes, q_heads)
    q = packed_rows(q)
    out = torch.empty((rows, q_heads, value_dim), dtype=q.dtype)
    query = q.data_ptr(), type_code("paged_attention", q), q.stride(0)
    by_head = 0 if sinks is None else sinks.data_ptr(), 0 if slopes is None else slopes.data_ptr()
    _native.paged_attention(native, *query, *caches, *by_head, out.data_ptr(), scale, softcap, keys_hold_values(k_cache, v_cache))
    return out
