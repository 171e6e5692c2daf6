"""Which drafts stand: a draft is right where the target itself drew the same token.

The target's draw at a position is a pure function of (logits, parameters, seed, position), so comparing it with the
draft loses nothing: the output is the one that the target would have given alone, whatever the drafts were.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from canter.device import Device
from canter.runner.input_batch import InputBatch
from canter.runner.request_table import RequestTable


@dataclass(slots=True)
class AcceptedTokens:
    """For each of the S rows that sampled: `token_ids [S, K + 1]`, of which the first `num_sampled [S]` count.

    `sampling_np [S]` are their indices in the batch, `rows [S]` their rows in the request table.
    """

    sampling_np: np.ndarray
    rows: torch.Tensor
    token_ids: torch.Tensor
    num_sampled: torch.Tensor


def accept_drafts(batch: InputBatch, sampled: torch.Tensor, device: Device) -> AcceptedTokens:
    """Keep each row's samples up to and including the first that differs from its draft. `sampled` is `[L]`."""
    sampling_np = np.flatnonzero(batch.num_logits_np)
    index = device.to_device(torch.from_numpy(sampling_np))
    rows = batch.rows[index]
    if not batch.has_drafts:
        return AcceptedTokens(sampling_np, rows, sampled.unsqueeze(1), torch.ones_like(rows))
    num_logits_np = batch.num_logits_np[sampling_np]
    width = int(num_logits_np.max())
    line_np = np.repeat(np.arange(len(sampling_np)), num_logits_np)
    where = device.to_device(torch.from_numpy(np.stack((line_np, batch.local_pos_np))))
    token_ids = sampled.new_zeros(len(sampling_np), width)
    token_ids[where[0], where[1]] = sampled
    # The token after each logit's own is the draft that the logit verifies; a row's last logit verifies none.
    has_draft = device.to_device(torch.from_numpy(batch.local_pos_np + 1 < num_logits_np[line_np]))
    following = (batch.logits_indices + 1).clamp(max=batch.token_ids.shape[0] - 1)
    right = (batch.token_ids[following] == sampled) & has_draft
    matches = torch.zeros(len(sampling_np), width, dtype=torch.int64, device=sampled.device)
    matches[where[0], where[1]] = right.to(torch.int64)
    return AcceptedTokens(sampling_np, rows, token_ids, matches.cumprod(1).sum(1) + 1)


def advance(table: RequestTable, batch: InputBatch, accepted: AcceptedTokens, device: Device) -> None:
    """Move the request table past a step: append what was accepted, count what was computed and not rejected."""
    table.num_computed[batch.rows] += batch.num_tokens.to(torch.int32)
    if not len(accepted.sampling_np):
        return
    start = table.total_len[accepted.rows].to(torch.int64)  # [S]
    columns = start.unsqueeze(1) + torch.arange(accepted.token_ids.shape[1], device=start.device)
    # Tokens behind the accepted ones are written too: they lie behind `total_len`, where nothing is read.
    table.all_token_ids[accepted.rows.unsqueeze(1), columns] = accepted.token_ids.to(torch.int32)
    table.total_len[accepted.rows] += accepted.num_sampled.to(torch.int32)
    if batch.has_drafts:
        num_logits = device.to_device(torch.from_numpy(batch.num_logits_np[accepted.sampling_np]))
        table.num_computed[accepted.rows] -= (num_logits - accepted.num_sampled).to(torch.int32)
