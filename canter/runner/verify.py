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


def accept_drafts(table: RequestTable, batch: InputBatch, sampled: torch.Tensor, device: Device) -> AcceptedTokens:
    """Keep each row's samples up to and including the first that differs from its draft, and move the request table past
    the step: append what was accepted, count what was computed and not rejected. `sampled` is `[L]`."""
    sampling_np = np.flatnonzero(batch.num_logits_np) if not batch.is_plain else np.arange(len(batch.rows_np))
    arrays = table.all_token_ids, table.total_len, table.num_computed
    token_ids, num_sampled = table.advance_step(batch.host, sampled, batch.token_ids, batch.max_logits, len(sampling_np), *arrays)
    rows = device.to_device(torch.from_numpy(batch.rows_np[sampling_np])) if batch.has_drafts else batch.logit_rows
    return AcceptedTokens(sampling_np, rows, token_ids, num_sampled)
