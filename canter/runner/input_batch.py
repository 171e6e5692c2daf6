"""One step's tensors, gathered from the request table. Built on the device: no value that the device computed is read
by the host, so a step can be queued before the one that produces its inputs has run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from canter.core.plan import DRAFT_ON_DEVICE, SchedulePlan
from canter.device import Device
from canter.runner.request_table import RequestTable

PAD_SLOT = -1
"""In a slot mapping: write nothing."""


@dataclass(slots=True)
class InputBatch:
    """B requests, T tokens, L logits (one for each token that a request samples or verifies).

    Host: `request_ids` in the plan's order, `rows_np [B]`, `num_tokens_np [B]`, `num_drafts_np [B]`,
    `num_logits_np [B]` (0: the row's prompt goes on in a later step), `logit_rows_np [L]`, `local_pos_np [L]`.
    Device: `rows [B]`, `num_tokens [B]`, `query_start_loc [B+1]`, `seq_lens [B]`, `token_ids [T]`, `positions [T]`,
    `logits_indices [L]`, `block_tables[g] [B, M]`, `slot_mappings[g] [T]`.
    """

    request_ids: list[str]
    rows_np: np.ndarray
    num_tokens_np: np.ndarray
    num_drafts_np: np.ndarray
    num_logits_np: np.ndarray
    logit_rows_np: np.ndarray
    local_pos_np: np.ndarray
    rows: torch.Tensor
    num_tokens: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    logits_indices: torch.Tensor
    block_tables: list[torch.Tensor]
    slot_mappings: list[torch.Tensor]

    @property
    def has_drafts(self) -> bool:
        return bool(self.num_drafts_np.any())


def build_input_batch(plan: SchedulePlan, table: RequestTable, block_sizes: list[int], device: Device) -> InputBatch:
    """Gather the plan's rows. Writes the drafts to verify into the table, behind each row's last known token."""
    rows_np = np.fromiter((table.row_of[r.request_id] for r in plan.rows), np.int64, len(plan.rows))
    num_tokens_np = np.fromiter((r.num_tokens for r in plan.rows), np.int64, len(plan.rows))
    num_drafts_np = np.fromiter((len(r.draft_token_ids) for r in plan.rows), np.int64, len(plan.rows))
    planned_end_np = np.fromiter((r.num_computed_tokens for r in plan.rows), np.int64, len(plan.rows)) + num_tokens_np
    num_logits_np = np.where(planned_end_np >= table.prefill_len_np[rows_np], num_drafts_np + 1, 0)
    starts_np = np.concatenate(([0], np.cumsum(num_tokens_np)))
    total = int(starts_np[-1])

    host = torch.from_numpy(np.stack((rows_np, num_tokens_np, starts_np[:-1])))
    rows, num_tokens, starts = device.to_device(host).unbind(0)
    query_start_loc = device.to_device(torch.from_numpy(starts_np.astype(np.int32)))
    if num_drafts_np.any():
        _place_drafts(plan, table, rows_np, device)

    computed = table.num_computed[rows].to(torch.int64)  # [B]
    if total == len(plan.rows):  # one token each: the request of a token is its own index
        positions, token_rows = computed, rows
        request_of_token = None
    else:
        request_of_token = torch.repeat_interleave(num_tokens, output_size=total)  # [T]
        offsets = torch.arange(total, device=device.torch_device) - starts[request_of_token]
        positions = computed[request_of_token] + offsets  # [T]
        token_rows = rows[request_of_token]
    token_ids = table.all_token_ids[token_rows, positions].to(torch.int64)

    # The last `num_logits` tokens of each row that samples.
    logit_request_np = np.repeat(np.arange(len(plan.rows)), num_logits_np)
    first_np = np.cumsum(num_logits_np) - num_logits_np
    local_pos_np = np.arange(len(logit_request_np)) - first_np[logit_request_np]
    logits_indices_np = starts_np[1:][logit_request_np] - num_logits_np[logit_request_np] + local_pos_np

    block_tables, slot_mappings = [], []
    for block_table, size in zip(table.block_tables, block_sizes, strict=True):
        used = max(1, -(-int(planned_end_np.max(initial=1)) // size))
        gathered = block_table[:, :used][rows]
        blocks = block_table[token_rows, torch.div(positions, size, rounding_mode="floor")].to(torch.int64)
        block_tables.append(gathered)
        slot_mappings.append(blocks * size + positions % size)
    return InputBatch(
        request_ids=[r.request_id for r in plan.rows],
        rows_np=rows_np,
        num_tokens_np=num_tokens_np,
        num_drafts_np=num_drafts_np,
        num_logits_np=num_logits_np,
        logit_rows_np=rows_np[logit_request_np],
        local_pos_np=local_pos_np,
        rows=rows,
        num_tokens=num_tokens,
        query_start_loc=query_start_loc,
        seq_lens=(computed + num_tokens).to(torch.int32),
        token_ids=token_ids,
        positions=positions,
        logits_indices=device.to_device(torch.from_numpy(logits_indices_np)),
        block_tables=block_tables,
        slot_mappings=slot_mappings,
    )


def _place_drafts(plan: SchedulePlan, table: RequestTable, rows_np: np.ndarray, device: Device) -> None:
    """Put each row's drafts at `total_len`, `total_len + 1`, ...: where they stand if they are right."""
    rows: list[int] = []
    offsets: list[int] = []
    values: list[int] = []
    for row, scheduled in zip(rows_np.tolist(), plan.rows, strict=True):
        for offset, token_id in enumerate(scheduled.draft_token_ids):
            rows.append(row)
            offsets.append(offset)
            values.append(token_id)
    where = device.to_device(torch.tensor([rows, offsets, values], dtype=torch.int64))
    known = where[2]
    drafts = torch.where(known == DRAFT_ON_DEVICE, table.draft_tokens[where[0], where[1]], known)
    table.all_token_ids[where[0], table.total_len[where[0]] + where[1]] = drafts.to(torch.int32)
