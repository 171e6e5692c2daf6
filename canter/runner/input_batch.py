"""One step's tensors, gathered from the request table. Built on the device: no value that the device computed is read
by the host, so a step can be queued before the one that produces its inputs has run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from canter.core.plan import SchedulePlan
from canter.runner.request_table import RequestTable

PAD_SLOT = -1
"""In a slot mapping: write nothing."""
_NO_DRAFTS = torch.empty(0, dtype=torch.int64)


@dataclass(slots=True)
class InputBatch:
    """B requests, T tokens, L logits (one for each token that a request samples or verifies).

    Host: `host [4, B]` int64 (each request's row of the table, tokens, logits (0: its prompt goes on in a later step)
    and drafts), views of it in numpy, and `logit_rows_np [L]`.
    Device: `query_start_loc [B+1]`, `seq_lens [B]`, `token_ids [T]`, `positions [T]`, `logits_indices [L]`,
    `logit_positions [L]`, `logit_rows [L]`, `block_tables[g] [B, M]`, `slot_mappings[g] [T]`, or [0] where
    the group has none.
    """

    host: torch.Tensor
    rows_np: np.ndarray
    num_tokens_np: np.ndarray
    num_logits_np: np.ndarray
    logit_rows_np: np.ndarray
    has_drafts: bool
    max_logits: int
    """Most logits of a request."""
    token_ids: torch.Tensor
    positions: torch.Tensor
    logits_indices: torch.Tensor
    logit_positions: torch.Tensor
    logit_rows: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: list[torch.Tensor]
    slot_mappings: list[torch.Tensor]

    @property
    def num_logits(self) -> int:
        return len(self.logit_rows_np)

    @property
    def is_plain(self) -> bool:
        """Whether every request has one logit."""
        return self.max_logits == 1 and self.logit_rows_np is self.rows_np

    @property
    def local_pos_np(self) -> np.ndarray:
        """For each logit, how many of its request stand before it: [L]."""
        request_np = np.repeat(np.arange(len(self.num_logits_np)), self.num_logits_np)
        first_np = np.cumsum(self.num_logits_np) - self.num_logits_np
        return np.asarray(np.arange(len(request_np)) - first_np[request_np])


def build_input_batch(plan: SchedulePlan, table: RequestTable, block_sizes: list[int], has_slots: list[bool]) -> InputBatch:
    """Gather the plan's rows. Writes the drafts to verify into the table, behind each row's last known token.

    `has_slots`: the groups whose layers store what belongs to a token in a slot of its own."""
    row_of, prefill_len = table.row_of, table.prefill_len
    rows: list[int] = []
    num_tokens: list[int] = []
    num_logits: list[int] = []
    num_drafts: list[int] = []
    drafts: list[int] = []
    longest = 1
    for scheduled in plan.rows:
        row, count = row_of[scheduled.request_id], scheduled.num_tokens
        end = scheduled.num_computed_tokens + count
        if end > longest:
            longest = end
        draft_ids = scheduled.draft_token_ids
        rows.append(row)
        num_tokens.append(count)
        num_drafts.append(len(draft_ids))
        num_logits.append(len(draft_ids) + 1 if end >= prefill_len[row] else 0)
        if draft_ids:
            drafts.extend(draft_ids)
    host_np = np.array(rows + num_tokens + num_logits + num_drafts, np.int64).reshape(4, -1)
    host, rows_np, num_logits_np = torch.from_numpy(host_np), host_np[0], host_np[2]
    most = max(num_logits, default=0)
    used = [-(-longest // size) for size in block_sizes]
    arrays = table.all_token_ids, table.total_len, table.num_computed, table.draft_tokens, table.block_tables
    draft_values = torch.tensor(drafts, dtype=torch.int64) if drafts else _NO_DRAFTS
    found = table.gather_step(host, draft_values, sum(num_tokens), sum(num_logits), *arrays, block_sizes, used, has_slots)
    token_ids, positions, logits_indices, logit_positions, logit_rows, query_start_loc, seq_lens, *groups = found
    is_plain = most == 1 and 0 not in num_logits
    return InputBatch(
        host=host,
        rows_np=rows_np,
        num_tokens_np=host_np[1],
        num_logits_np=num_logits_np,
        logit_rows_np=rows_np if is_plain else np.repeat(rows_np, num_logits_np),
        has_drafts=bool(drafts),
        max_logits=most,
        token_ids=token_ids,
        positions=positions,
        logits_indices=logits_indices,
        logit_positions=logit_positions,
        logit_rows=logit_rows,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_tables=groups[: len(block_sizes)],
        slot_mappings=groups[len(block_sizes) :],
    )
