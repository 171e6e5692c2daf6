"""Attention over a paged cache, found through a request's block table.

Keys lie in blocks of `[heads, D / x, block_size, x]` with x elements in 4 bytes (float32 1, bfloat16 2, 8-bit types 4; but
float16 1, which processors widen as it lies), so that a kernel finds neighbouring keys in neighbouring lanes; values in blocks
of `[heads, block_size, Dv]`, as wide as keys or not. Where the values are the beginnings of the keys, one cache may hold both: keys are
a view `[NB, heads, D, block_size, 1]` of blocks of `[heads, block_size, D]`, values the first Dv elements of these, and none are written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from canter.kernels.attention_plan import AttentionPlan

GREATEST = {torch.float8_e4m3fn: 448.0, torch.float16: 65504.0}
"""Of the types of cache that reach less far than bfloat16."""


def _encode(rows: Tensor, cache: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """`rows[T, Hk, D]` in the cache's type, and the scale `[T, Hk]` of each where they are int8."""
    if cache.dtype == torch.int8:
        if scales is None:
            raise ValueError("write_kv: an int8 cache needs k_scale and v_scale.")
        found = rows.float().abs().amax(-1) / 127
        codes = (rows.float() / found.unsqueeze(-1)).round()
        return torch.where(found.unsqueeze(-1) == 0, torch.zeros_like(codes), codes).clamp(-127, 127).to(torch.int8), found
    if cache.dtype in GREATEST:
        most = GREATEST[cache.dtype]
        return rows.float().clamp(-most, most).to(cache.dtype), None
    return rows.to(cache.dtype), None


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Store `k[T, Hk, D]` in `k_cache[NB, Hk, D/x, BS, x]` and `v[T, Hk, Dv]` in `v_cache[NB, Hk, BS, Dv]`, in the cache's type.

    Token t goes to block `slot_mapping[t] // BS`, place `slot_mapping[t] % BS`; -1 skips the token. Floats are rounded,
    those beyond float16 or float8_e4m3fn to its greatest; an int8 cache keeps, of each token and head, the greatest magnitude / 127 in
    `k_scale` and `v_scale` (float32, `[NB, Hk, BS]`) and the row divided by it. Raises `IndexError` for a slot outside the cache.
    """
    num_blocks, _, block_size, _ = v_cache.shape
    kept = slot_mapping != -1
    slots = slot_mapping[kept]
    if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < num_blocks * block_size:
        raise IndexError(f"write_kv: slots must be -1 or in [0, {num_blocks * block_size}).")
    blocks, offsets = slots // block_size, slots % block_size
    codes, scales = _encode(k[kept], k_cache, k_scale)
    k_cache[blocks, :, :, offsets] = codes.unflatten(-1, (-1, k_cache.shape[-1]))
    if k_scale is not None and scales is not None:
        k_scale[blocks, :, offsets] = scales
    codes, scales = _encode(v[kept], v_cache, v_scale)
    v_cache[blocks, :, offsets] = codes
    if v_scale is not None and scales is not None:
        v_scale[blocks, :, offsets] = scales


def _gather(cache: Tensor, scales: Tensor | None, blocks: Tensor, length: int) -> Tensor:
    """The first `length` positions that a row of the block table names: `[Hk, length, D]` in float32."""
    paged = cache[blocks.long()].float()
    if paged.dim() == 5:
        paged = paged.transpose(2, 3).flatten(3)
    if scales is not None:
        paged = paged * scales[blocks.long()].unsqueeze(-1)
    heads, head_dim = paged.shape[1], paged.shape[3]  # [blocks, Hk, BS, D]
    return paged.transpose(0, 1).reshape(heads, -1, head_dim)[:, :length]


def hidden_keys(num_queries: int, length: int, window: int, chunk: int, prompt_len: int, device: torch.device | str = "cpu") -> Tensor:
    """Which of a request's `length` keys its last queries may not see: `[num_queries, length]`."""
    key = torch.arange(length, device=device)
    position = torch.arange(length - num_queries, length, device=device)[:, None]
    hidden = key > position
    if window:
        hidden = hidden | ((key <= position - window) & (key >= prompt_len))
    if chunk:
        hidden = hidden | (key < position // chunk * chunk)
    return hidden


def _attend(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float, softcap: float, sinks: Tensor | None, slopes: Tensor | None
) -> Tensor:
    """The last `q.shape[1]` positions of a request attend: q `[Hq, Tq, D]`, k and v `[Hk, S, D]`, all float32."""
    # Places that no query sees may hold anything, even NaN, so they must not be multiplied, not even by zero.
    seen = ~hidden.all(0)
    k, v, hidden = k[:, seen], v[:, seen], hidden[:, seen]
    group = q.shape[0] // k.shape[0]
    scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * scale  # [Hq, Tq, S]
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    num_queries, length = scores.shape[1], seen.shape[0]
    if slopes is not None:
        position = torch.arange(length - num_queries, length, device=q.device)[:, None]
        scores = scores + slopes.float()[:, None, None] * (seen.nonzero().flatten() - position)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        extra = sinks.float()[:, None, None].expand(-1, num_queries, 1)
        scores = torch.cat((scores, extra), -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return weights @ v.repeat_interleave(group, 0)


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
    """Causal attention of `q[T, Hq, D]` over `k_cache[NB, Hk, D/x, BS, x]` and `v_cache[NB, Hk, BS, Dv]`: `[T, Hq, Dv]` like q.

    Request b owns queries `query_start_loc[b] .. query_start_loc[b + 1]` (int32, `[B + 1]`), its last positions out of
    `seq_lens[b]` (int32), and finds position p in block `block_table[b, p // BS]` (int32, `[B, MB]`). Query heads
    share key heads in runs of Hq / Hk. `window` > 0: a query sees itself and window - 1 positions before; with `prompt_lens`
    (int32, `[B]`, not together with `chunk`) also all of its request's first `prompt_lens[b]` positions. `chunk` > 0: a query at p
    sees nothing before position `p // chunk * chunk`.
    `softcap` > 0: scaled scores s become `softcap * tanh(s / softcap)`. `slopes` (`[Hq]` float32): a key that lies d positions back
    loses `slopes[h] * d` of its score, after the cap (ALiBi, arXiv 2108.12409). `sinks` (`[Hq]`): scores of one more key without
    a value, which only takes weight away. `k_scale`, `v_scale`: as `write_kv` left them for an int8 cache. Softmax and sums are
    in float32. Rows past `query_start_loc[B]` are zero. `plan` (of `plan_attention`, for the same table, starts and lengths)
    lets the layers of a group share work. Blocks of which no position is seen are not read, whatever the table says of them.
    Raises `IndexError` for a block outside the cache, more positions than the table holds or a prompt of less than none.
    """
    if chunk and prompt_lens is not None:
        raise ValueError("paged_attention: chunks have no prompt in sight.")
    num_blocks, _, block_size, value_dim = v_cache.shape
    out = q.new_zeros(*q.shape[:2], value_dim)
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    prompts = [0] * len(lengths) if prompt_lens is None else prompt_lens.tolist()
    for b, length in enumerate(lengths):
        start, end = starts[b], starts[b + 1]
        if start == end:
            continue
        used = block_table[b, : -(-length // block_size)].clone()
        if length < end - start or used.numel() * block_size < length or prompts[b] < 0:
            raise IndexError(f"paged_attention: the lengths or the block table of request {b} do not fit ({length} positions).")
        hidden = hidden_keys(end - start, length, window, chunk, prompts[b], q.device)
        used[[bool(blind.all()) for blind in hidden.all(0).split(block_size)]] = 0
        if not 0 <= int(used.min()) <= int(used.max()) < num_blocks:
            raise IndexError(f"paged_attention: the block table of request {b} names a block outside the cache.")
        k, v = _gather(k_cache, k_scale, used, length), _gather(v_cache, v_scale, used, length)
        rows = _attend(q[start:end].transpose(0, 1).float(), k, v, hidden, scale, softcap, sinks, slopes)
        out[start:end] = rows.transpose(0, 1).to(q.dtype)
    return out
