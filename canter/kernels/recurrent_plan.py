"""What one step does to the recurrent states of its requests: shared by all layers of a state group."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class RecurrentPlan:
    """Each request's rows are cut into segments, in order and without gaps; a request's first segment begins where the last of the
    request before it ends. int32, on the layers' device:

    - `segment_start_loc` [R + 1]: the first segment of each request, and their number.
    - `segment_ends` [S]: the row behind each segment; the first begins at row 0.
    - `read_slots` [R]: where a request's state comes from; -1 for a request that begins, whose state is zero.
    - `write_slots` [S]: where the state behind each segment goes; -1 for nowhere.

    A slot is written by one segment only. A request may write the slot that it reads; nobody else may.
    """

    segment_start_loc: Tensor
    segment_ends: Tensor
    read_slots: Tensor
    write_slots: Tensor

    @property
    def num_requests(self) -> int:
        return self.read_slots.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.segment_start_loc, self.segment_ends, self.read_slots, self.write_slots
