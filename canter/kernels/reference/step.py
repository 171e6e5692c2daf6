"""A step's inputs out of the request table, and the table moved past the step. Nothing is read back from a device."""

from __future__ import annotations

import torch
from torch import Tensor

DRAFT_IN_TABLE = -1
"""Among `drafts`: the value stands in `draft_tokens`."""


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
    """Gather B requests, T tokens, L logits.

    `host` [4, B] int64, in host memory: table rows, tokens, logits (0: none; else the last so many tokens have one) and
    drafts of each request. `drafts` [D] int64, host: their values, which are written behind each row's known tokens.
    `used[g]`: columns of group g's block tables that the step reads. `has_slots[g]`: whether its slots are asked for.

    Returns token_ids [T], positions [T], logits_indices [L], logit_positions [L] and logit_rows [L] int64,
    query_start_loc [B + 1] and seq_lens [B] int32, then every group's block table [B, used] int32, then every group's
    slots: int64, [T] where they are asked for, else [0].
    """
    where = all_token_ids.device
    rows, counts, logits, num_drafts = host.to(where, non_blocking=True).unbind(0)
    if len(drafts):
        _place_drafts(rows, num_drafts, drafts.to(where, non_blocking=True), all_token_ids, total_len, draft_tokens)
    ends = counts.cumsum(0)
    query_start_loc = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
    computed = num_computed[rows].to(torch.int64)
    request = torch.repeat_interleave(counts, output_size=num_tokens)  # [T]
    positions = computed[request] + torch.arange(num_tokens, device=where) - (ends - counts)[request]
    token_rows = rows[request]
    token_ids = all_token_ids[token_rows, positions].to(torch.int64)
    logit_request = torch.repeat_interleave(logits, output_size=num_logits)  # [L]
    first = logits.cumsum(0) - logits
    logits_indices = (ends - logits - first)[logit_request] + torch.arange(num_logits, device=where)
    tables, slots = [], []
    for table, size, width, has in zip(block_tables, block_sizes, used, has_slots, strict=True):
        tables.append(table[:, :width][rows])
        if has:
            blocks = table[token_rows, torch.div(positions, size, rounding_mode="floor")].to(torch.int64)
            slots.append(blocks * size + positions % size)
        else:
            slots.append(positions.new_empty(0))
    found = token_ids, positions, logits_indices, positions[logits_indices], rows[logit_request]
    return (*found, query_start_loc, (computed + counts).to(torch.int32), *tables, *slots)


def _place_drafts(rows: Tensor, num_drafts: Tensor, known: Tensor, all_token_ids: Tensor, total_len: Tensor, draft_tokens: Tensor) -> None:
    """Put each row's drafts at `total_len`, `total_len + 1`, ...: where they stand if they are right."""
    request = torch.repeat_interleave(num_drafts, output_size=len(known))
    offset = torch.arange(len(known), device=rows.device) - (num_drafts.cumsum(0) - num_drafts)[request]
    row = rows[request]
    drafts = torch.where(known == DRAFT_IN_TABLE, draft_tokens[row, offset.clamp(max=draft_tokens.shape[1] - 1)], known)
    all_token_ids[row, total_len[row] + offset] = drafts.to(torch.int32)


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
    """Keep each request's samples up to and including the first that differs from its draft, and move the table on.

    `host` as for `gather_step`; `sampled` [L] and `token_ids` [T], the step's inputs, int64. `width`: most logits of a
    request; `num_sampling`: S, requests with logits. Returns tokens [S, width] int64 and how many of each count [S] int64.
    """
    rows, counts, logits, _ = host.to(all_token_ids.device, non_blocking=True).unbind(0)
    num_computed[rows] += counts.to(torch.int32)
    has_logits = (logits > 0).to(torch.int64)
    line_of_request = has_logits.cumsum(0) - 1
    request = torch.repeat_interleave(has_logits, output_size=num_sampling)  # [S]
    rows, num_logits = rows[request], logits[request]
    logit_request = torch.repeat_interleave(logits, output_size=len(sampled))  # [L]
    line, place = line_of_request[logit_request], torch.arange(len(sampled), device=rows.device)
    place = place - (logits.cumsum(0) - logits)[logit_request]
    tokens = sampled.new_zeros(num_sampling, width)
    tokens[line, place] = sampled
    # The token after each logit's own is the draft that the logit verifies; a row's last logit verifies none.
    following = (counts.cumsum(0) - logits)[logit_request] + place + 1
    right = (token_ids[following.clamp(max=token_ids.shape[0] - 1)] == sampled) & (place + 1 < logits[logit_request])
    matches = torch.zeros(num_sampling, width, dtype=torch.int64, device=rows.device)
    matches[line, place] = right.to(torch.int64)
    accepted = matches.cumprod(1).sum(1) + 1
    columns = total_len[rows].to(torch.int64).unsqueeze(1) + torch.arange(width, device=rows.device)
    # Behind the accepted ones stays what was there: there, nothing is read.
    keeps = torch.arange(width, device=rows.device) < accepted.unsqueeze(1)
    columns = columns.clamp(max=all_token_ids.shape[1] - 1)
    kept = torch.where(keeps, tokens.to(torch.int32), all_token_ids[rows.unsqueeze(1), columns])
    all_token_ids[rows.unsqueeze(1), columns] = kept
    total_len[rows] += accepted.to(torch.int32)
    num_computed[rows] -= (num_logits - accepted).to(torch.int32)
    return tokens, accepted
