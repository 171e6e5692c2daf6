"""What a step tells the layers of a state group, for each kind of memory: as tensors, and as the symbols of a recording.

A kind joins by a row in `_INPUTS`; runner and programs know only the `StateInputs` protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from canter.core.state_specs import SnapshotMode, StateGroup, StateKind, StateSpec
from canter.kernels.recorder import Recorder
from canter.kernels.recurrent_plan import RecurrentPlan
from canter.layers.context import AttentionContext, GroupContext


class StateInputs(Protocol):
    """Of one state group. `has_slots`: layers store what belongs to a token in a slot of its own; else the mapping is empty."""

    @property
    def has_slots(self) -> bool: ...

    def context(self, rows: StepRows, block_table: Tensor, slot_mapping: Tensor) -> GroupContext:
        """What this step tells the group's layers."""

    def symbols(self, recorder: Recorder, group_id: int) -> GroupContext:
        """The same as symbols, the slots of which `slots` fills."""

    def slots(self, context: GroupContext, num_rows: int, num_reqs: int) -> tuple[list[Tensor], list[int]]:
        """Tensors that a run of the program reads, and the values of the slots that `symbols` made, in their order."""


class StepRows:
    """The requests of a step as the host knows them: `start_np [B]` and `end_np [B]`, the tokens before it and after it, and
    `num_prompt_np [B]`, those of the prompt.

    `query_start_loc [B + 1]` on the device; `upload` brings host arrays there.
    """

    __slots__ = ("end_np", "num_prompt_np", "query_start_loc", "start_np", "upload")

    def __init__(
        self,
        start: Sequence[int],
        num_tokens: np.ndarray,
        num_prompt_tokens: np.ndarray,
        query_start_loc: Tensor,
        upload: Callable[[np.ndarray], Tensor] = torch.from_numpy,
    ) -> None:
        self.start_np = np.array(start, np.int64)
        self.end_np = self.start_np + num_tokens
        self.num_prompt_np = num_prompt_tokens
        self.query_start_loc = query_start_loc
        self.upload = upload


class AttentionInputs:
    """Keys, values and whatever else lies in blocks by position: block table and slot mapping."""

    has_slots = True

    def context(self, rows: StepRows, block_table: Tensor, slot_mapping: Tensor) -> AttentionContext:
        return AttentionContext(block_table, slot_mapping)

    def symbols(self, recorder: Recorder, group_id: int) -> AttentionContext:
        table = recorder.given(f"block_table.{group_id}", torch.int32)
        recorder.slot(f"block_table.{group_id}.width")
        return AttentionContext(table, recorder.given(f"slot_mapping.{group_id}", torch.int64))  # type: ignore[arg-type]

    def slots(self, context: GroupContext, num_rows: int, num_reqs: int) -> tuple[list[Tensor], list[int]]:
        assert isinstance(context, AttentionContext)
        table = checked(context.block_table, torch.int32, num_reqs)
        mapping = checked(context.slot_mapping, torch.int64, num_rows)
        return [table, mapping], [table.data_ptr(), table.shape[1], mapping.data_ptr()]


class PromptWindowInputs(AttentionInputs):
    """The same for layers that see prompts whole: how long each request's is."""

    def context(self, rows: StepRows, block_table: Tensor, slot_mapping: Tensor) -> AttentionContext:
        context = super().context(rows, block_table, slot_mapping)
        context.prompt_lens = rows.upload(rows.num_prompt_np.astype(np.int32))
        return context

    def symbols(self, recorder: Recorder, group_id: int) -> AttentionContext:
        context = super().symbols(recorder, group_id)
        context.prompt_lens = recorder.given(f"prompt_lens.{group_id}", torch.int32)  # type: ignore[assignment]
        return context

    def slots(self, context: GroupContext, num_rows: int, num_reqs: int) -> tuple[list[Tensor], list[int]]:
        tensors, values = super().slots(context, num_rows, num_reqs)
        assert isinstance(context, AttentionContext)
        prompts = checked(context.prompt_lens, torch.int32, num_reqs)
        return [*tensors, prompts], [*values, prompts.data_ptr()]


class RecurrentInputs:
    """A whole state for each request: where it is read, and where it is kept (`scheduler.cache.managers.RecurrentManager`)."""

    has_slots = False

    def __init__(self, spec: StateSpec) -> None:
        self._block_size = spec.block_size
        self._keeps_all = spec.snapshots is SnapshotMode.ALL

    def context(self, rows: StepRows, block_table: Tensor, slot_mapping: Tensor) -> RecurrentPlan:
        size, num_reqs = self._block_size, len(rows.start_np)
        first_np, last_np = rows.start_np // size, (rows.end_np - 1) // size
        request_np = np.arange(num_reqs)
        if self._keeps_all:
            counts_np = last_np - first_np + 1
            starts_np = np.concatenate(([0], np.cumsum(counts_np)))
            owner_np = np.repeat(request_np, counts_np)
            column_np = np.arange(len(owner_np)) - starts_np[owner_np] + first_np[owner_np]
            ends_np = np.minimum((column_np + 1) * size, rows.end_np[owner_np]) - rows.start_np[owner_np]
            first_row_np = np.cumsum(rows.end_np - rows.start_np) - (rows.end_np - rows.start_np)
            ends = rows.upload((ends_np + first_row_np[owner_np]).astype(np.int32))
        else:
            starts_np, owner_np, column_np = np.arange(num_reqs + 1), request_np, last_np
            ends = rows.query_start_loc[1:]
        # One upload: of each segment its request and its column, then of each request itself and the column it reads.
        read_np = np.maximum(rows.start_np - 1, 0) // size
        at = rows.upload(np.stack((np.concatenate((owner_np, request_np)), np.concatenate((column_np, read_np)))))
        slots = block_table[at[0], at[1]]
        writes, reads = slots[: len(owner_np)], slots[len(owner_np) :]
        begins_np = rows.start_np == 0
        if begins_np.any():
            reads.masked_fill_(rows.upload(begins_np), -1)
        return RecurrentPlan(rows.upload(starts_np.astype(np.int32)), ends, reads, writes)

    def symbols(self, recorder: Recorder, group_id: int) -> RecurrentPlan:
        names = ("segment_start_loc", "segment_ends", "read_slots", "write_slots")
        return RecurrentPlan(*(recorder.given(f"{name}.{group_id}", torch.int32) for name in names))  # type: ignore[arg-type]

    def slots(self, context: GroupContext, num_rows: int, num_reqs: int) -> tuple[list[Tensor], list[int]]:
        assert isinstance(context, RecurrentPlan)
        starts, ends, reads, writes = context.tensors
        num_segments = ends.shape[0]
        tensors = [
            checked(starts, torch.int32, num_reqs + 1),
            checked(ends, torch.int32, num_segments),
            checked(reads, torch.int32, num_reqs),
            checked(writes, torch.int32, num_segments),
        ]
        return tensors, [tensor.data_ptr() for tensor in tensors]


_INPUTS: Mapping[StateKind, Callable[[StateSpec], StateInputs]] = {
    StateKind.FULL: lambda spec: AttentionInputs(),
    StateKind.MLA: lambda spec: AttentionInputs(),
    StateKind.COMPRESSED: lambda spec: AttentionInputs(),
    StateKind.SLIDING_WINDOW: lambda spec: AttentionInputs(),
    StateKind.CHUNKED_LOCAL: lambda spec: AttentionInputs(),
    StateKind.PROMPT_WINDOW: lambda spec: PromptWindowInputs(),
    StateKind.RECURRENT: RecurrentInputs,
}


def make_inputs(groups: Sequence[StateGroup]) -> list[StateInputs]:
    """The inputs of each group, in their order."""
    return [_INPUTS[group.spec.kind](group.spec) for group in groups]


def checked(tensor: Tensor | None, dtype: torch.dtype, size: int) -> Tensor:
    """The tensor, of that type and in one run: itself where it is so already. Raises `ValueError` for another length."""
    if tensor is None or tensor.shape[0] != size:
        raise ValueError(f"expected {size} rows, got {None if tensor is None else list(tensor.shape)}.")
    return tensor if tensor.dtype == dtype and tensor.is_contiguous() else tensor.to(dtype).contiguous()
