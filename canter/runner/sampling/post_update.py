"""Moving the request table's device arrays past a step. Pure tensor work: in-place on what is given, no host reads.

Rows -1 are padding and change nothing. All work is laid out over the table's rows, so that no element is written twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class NewTokens:
    """A step's tokens, by row of the table: `token_ids [R, S]` int64, of which the first `counts [R]` int64 are new."""

    token_ids: Tensor
    counts: Tensor


def by_table_row(num_rows: int, rows: Tensor, token_ids: Tensor, num_sampled: Tensor) -> NewTokens:
    """rows [B] (distinct, or -1), token_ids [B, S], num_sampled [B] (0..S) -> the same over the table's rows."""
    target = torch.where(rows < 0, num_rows, rows).to(torch.int64)  # padding goes to a row of its own, cut off below
    sampled = token_ids.new_zeros(num_rows + 1, token_ids.shape[1], dtype=torch.int64)
    counts = torch.zeros(num_rows + 1, dtype=torch.int64, device=rows.device)
    sampled[target] = token_ids.to(torch.int64)
    counts[target] = num_sampled.to(torch.int64)
    return NewTokens(sampled[:num_rows], counts[:num_rows])


def append_tokens(all_token_ids: Tensor, total_len: Tensor, new: NewTokens) -> None:
    """Write each row's new tokens at `total_len` and move that on. all_token_ids [R, max_len], total_len [R]."""
    last = (new.counts - 1).clamp(min=0).unsqueeze(1)
    offsets = torch.arange(new.token_ids.shape[1], device=last.device).minimum(last)  # [R, S]: surplus repeats the last
    at = (total_len.to(torch.int64).unsqueeze(1) + offsets).clamp(max=all_token_ids.shape[1] - 1)
    tokens = new.token_ids.gather(1, offsets).to(all_token_ids.dtype)
    all_token_ids.scatter_(1, at, torch.where(new.counts.unsqueeze(1) > 0, tokens, all_token_ids.gather(1, at)))
    total_len.add_(new.counts.to(total_len.dtype))


def count_outputs(output_counts: Tensor, new: NewTokens) -> None:
    """Add new tokens to output_counts [R, V]."""
    is_new = torch.arange(new.token_ids.shape[1], device=new.counts.device) < new.counts.unsqueeze(1)
    ids = new.token_ids.clamp(0, output_counts.shape[1] - 1)
    output_counts.scatter_add_(1, ids, is_new.to(output_counts.dtype))


def update_last_sampled(last_sampled: Tensor, new: NewTokens) -> None:
    """Keep each row's newest token in last_sampled [R]; rows without a new one keep theirs."""
    newest = new.token_ids.gather(1, (new.counts - 1).clamp(min=0).unsqueeze(1)).squeeze(1).to(last_sampled.dtype)
    last_sampled.copy_(torch.where(new.counts > 0, newest, last_sampled))


def post_update(
    rows: Tensor,
    token_ids: Tensor,
    num_sampled: Tensor,
    all_token_ids: Tensor,
    total_len: Tensor,
    last_sampled: Tensor | None = None,
    output_counts: Tensor | None = None,
) -> None:
    """All of the above: rows [B] (-1 is padding), token_ids [B, S] of which the first num_sampled [B] count."""
    new = by_table_row(all_token_ids.shape[0], rows, token_ids, num_sampled)
    append_tokens(all_token_ids, total_len, new)
    if last_sampled is not None:
        update_last_sampled(last_sampled, new)
    if output_counts is not None:
        count_outputs(output_counts, new)
