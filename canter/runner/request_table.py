"""The state of the requests that a runner holds: one row each, for the request's life in the runner.

Rows are never moved or compacted. Everything that the device itself advances (tokens, lengths, counts) lives on the
device, so that a step can be built before the host has seen the step before it.
"""

from __future__ import annotations

import numpy as np
import torch

from canter.core.plan import NewRow, SchedulePlan
from canter.device import Device
from canter.kernels.dispatch import bind


class RequestTable:
    """Rows `[max_num_rows]` of tokens, counters and block tables.

    Device arrays: `all_token_ids [R, max_tokens]` int32 (prompt, then output, then drafts being verified),
    `total_len [R]` int32 (tokens known), `num_computed [R]` int32 (exact), `draft_tokens [R, K]` int64.
    Host: `prefill_len [R]`, the tokens that must be computed before the row samples.
    Block tables: `block_tables[g] [R, max_blocks of g]` int32, zero (the null block) beyond a row's blocks.
    """

    def __init__(self, max_num_rows: int, max_tokens: int, block_sizes: list[int], num_draft_tokens: int, device: Device) -> None:
        self._device = device
        where = device.torch_device
        self.max_num_rows = max_num_rows
        self.row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_rows - 1, -1, -1))
        # Drafts stand behind the last known token while they are verified.
        width = max_tokens + num_draft_tokens + 1
        self.all_token_ids = device.zeros((max_num_rows, width), torch.int32)
        self.total_len = torch.zeros(max_num_rows, dtype=torch.int32, device=where)
        self.num_computed = torch.zeros(max_num_rows, dtype=torch.int32, device=where)
        self.draft_tokens = torch.zeros(max_num_rows, max(num_draft_tokens, 1), dtype=torch.int64, device=where)
        self.prompt_len_np = np.zeros(max_num_rows, dtype=np.int64)
        self.prefill_len = [0] * max_num_rows
        self.num_blocks_np = np.zeros((len(block_sizes), max_num_rows), dtype=np.int64)
        self.block_tables = [torch.zeros(max_num_rows, -(-width // size) + 1, dtype=torch.int32, device=where) for size in block_sizes]
        self.gather_step = bind("gather_step", where.type, torch.float32)
        self.advance_step = bind("advance_step", where.type, torch.float32)

    def __len__(self) -> int:
        return len(self.row_of)

    def remove(self, request_id: str) -> int | None:
        """Give the row back. Its arrays keep their values: `add` writes every one that is read."""
        row = self.row_of.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row)
        return row

    def add(self, new: NewRow) -> int:
        """Take a row and fill it. The id must not have one."""
        if new.request_id in self.row_of:
            raise RuntimeError(f"request {new.request_id} has a row already")
        row = self._free_rows.pop()
        self.row_of[new.request_id] = row
        count = len(new.token_ids)
        self.all_token_ids[row, :count] = self._upload(new.token_ids, torch.int32)
        self.total_len[row] = count
        self.num_computed[row] = new.num_computed_tokens
        self.prompt_len_np[row] = new.num_prompt_tokens
        self.prefill_len[row] = count
        for group, block_ids in enumerate(new.block_ids):
            table = self.block_tables[group]
            table[row].zero_()
            table[row, : len(block_ids)] = self._upload(block_ids, torch.int32)
            self.num_blocks_np[group, row] = len(block_ids)
        return row

    def append_blocks(self, plan: SchedulePlan) -> None:
        """Write the plan's new block ids behind each continuing row's, one scatter a group."""
        if not any(scheduled.new_block_ids for scheduled in plan.rows):
            return
        for group, table in enumerate(self.block_tables):
            rows: list[int] = []
            columns: list[int] = []
            values: list[int] = []
            counts = self.num_blocks_np[group]
            for scheduled in plan.rows:
                new_ids = scheduled.new_block_ids[group] if scheduled.new_block_ids else ()
                if not new_ids:
                    continue
                row = self.row_of[scheduled.request_id]
                start = int(counts[row])
                rows.extend([row] * len(new_ids))
                columns.extend(range(start, start + len(new_ids)))
                values.extend(new_ids)
                counts[row] = start + len(new_ids)
            if rows:
                where = self._upload([rows, columns], torch.int64)
                table[where[0], where[1]] = self._upload(values, torch.int32)

    def _upload(self, values: list[int] | list[list[int]], dtype: torch.dtype) -> torch.Tensor:
        return self._device.to_device(torch.tensor(values, dtype=dtype))
