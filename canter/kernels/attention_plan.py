"""What the layers of one state group can share of a step's attention: checks and the division of work."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class AttentionPlan:
    """The requests of one step, as `paged_attention` takes them, and what an implementation worked out about them.

    Made anew for every step. The first layer's call fills `made`; later layers of the same shape (heads, head sizes, blocks,
    what a query sees) find it there. The tensors must not change while the plan is in use.
    """

    __slots__ = ("block_table", "made", "query_start_loc", "seq_lens")

    def __init__(self, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> None:
        self.block_table = block_table
        self.query_start_loc = query_start_loc
        self.seq_lens = seq_lens
        self.made: dict[tuple[int, ...], Any] = {}
        """By shape: whatever the implementation keeps."""


def plan_attention(block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> AttentionPlan:
    """A plan for one step of one state group, to be given to every layer of the group; nothing is computed yet."""
    return AttentionPlan(block_table, query_start_loc, seq_lens)
