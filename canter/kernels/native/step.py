"""Native gathering of a step's inputs, and the request table moved past a step. Meaning: `canter.kernels.reference.step`."""

from __future__ import annotations

import torch
from torch import Tensor

from canter import _native
from canter.kernels.native.layout import require


def _require_host(op: str, host: Tensor) -> int:
    fits = host.dim() == 2 and host.shape[0] == 4 and host.dtype == torch.int64 and host.is_contiguous()
    require(fits, op, "contiguous int64 host [4, B]", host)
    return host.shape[1]


def _require_table(op: str, all_token_ids: Tensor, total_len: Tensor, num_computed: Tensor) -> None:
    fits = all_token_ids.dim() == 2 and all_token_ids.dtype == total_len.dtype == num_computed.dtype == torch.int32
    fits = fits and total_len.shape == num_computed.shape == all_token_ids.shape[:1] and all_token_ids.is_contiguous()
    require(fits, op, "contiguous int32 all_token_ids [R, W], total_len [R], num_computed [R]", all_token_ids, total_len, num_computed)


def gather_step(
    host: Tensor,
    drafts: Tensor,
    num_tokens: int,
    num_logits: int,
    all_token_ids: Tensor,
    total_len: Tensor,
    num_computed: Tensor,
    draft_tokens: Tensor,
    block_tables: list[Tensor],
    block_sizes: list[int],
    used: list[int],
    has_slots: list[bool],
) -> tuple[Tensor, ...]:
    """As the reference. `num_tokens` and `num_logits` must be the sums of their rows of `host`."""
    requests = _require_host("gather_step", host)
    _require_table("gather_step", all_token_ids, total_len, num_computed)
    max_rows, width = all_token_ids.shape
    groups = len(block_tables)
    longs = [num_tokens, num_tokens, num_logits, num_logits, num_logits, *[num_tokens * has for has in has_slots]]
    ints = [requests + 1, requests, *[requests * count for count in used]]
    wide = torch.empty(sum(longs), dtype=torch.int64).split_with_sizes(longs)
    narrow = torch.empty(sum(ints), dtype=torch.int32).split_with_sizes(ints)
    targets = []
    for i in range(groups):
        table = block_tables[i]
        fits = table.dtype == torch.int32 and table.is_contiguous() and used[i] <= table.shape[1]
        require(fits, "gather_step", f"contiguous int32 block tables [R, at least {used[i]}]", table)
        slots = wide[5 + i].data_ptr() if has_slots[i] else 0
        targets.append((table.data_ptr(), table.shape[1], block_sizes[i], used[i], narrow[2 + i].data_ptr(), slots))
    table_places = all_token_ids.data_ptr(), total_len.data_ptr(), num_computed.data_ptr(), draft_tokens.data_ptr(), width
    of_tokens = wide[0].data_ptr(), wide[1].data_ptr()
    of_logits = wide[2].data_ptr(), wide[3].data_ptr(), wide[4].data_ptr()
    of_requests = narrow[0].data_ptr(), narrow[1].data_ptr()
    step_places = host.data_ptr(), drafts.data_ptr(), requests, *of_tokens, *of_logits, *of_requests
    _native.gather_step(*table_places, draft_tokens.shape[1], max_rows, *step_places, targets)
    tables = [narrow[2 + i].view(requests, used[i]) for i in range(groups)]
    return (*wide[:5], *narrow[:2], *tables, *wide[5:])


def advance_step(
    host: Tensor,
    sampled: Tensor,
    token_ids: Tensor,
    width: int,
    num_sampling: int,
    all_token_ids: Tensor,
    total_len: Tensor,
    num_computed: Tensor,
) -> tuple[Tensor, Tensor]:
    """As the reference; `host` must be the one of the step's `gather_step`."""
    requests = _require_host("advance_step", host)
    _require_table("advance_step", all_token_ids, total_len, num_computed)
    fits = sampled.dtype == token_ids.dtype == torch.int64 and sampled.is_contiguous() and token_ids.is_contiguous()
    require(fits, "advance_step", "contiguous int64 sampled [L] and token_ids [T]", sampled, token_ids)
    tokens, counts = torch.empty((num_sampling, width), dtype=torch.int64), torch.empty(num_sampling, dtype=torch.int64)
    table_places = all_token_ids.data_ptr(), total_len.data_ptr(), num_computed.data_ptr(), all_token_ids.shape[1]
    step_places = host.data_ptr(), sampled.data_ptr(), token_ids.data_ptr(), tokens.data_ptr(), counts.data_ptr()
    _native.advance_step(*table_places, *step_places, requests, width)
    return tokens, counts
