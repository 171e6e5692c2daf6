"""What one step tells every layer. Passed explicitly; there is no global forward context."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from canter.kernels.attention_plan import AttentionPlan
from canter.kernels.recurrent_plan import RecurrentPlan


@dataclass(slots=True)
class AttentionContext:
    """Where the layers of one state group keep this step's keys and values. B requests, T tokens."""

    block_table: Tensor
    """[B, max_blocks] int32: block ids in order of position; entries behind a request's last block are never read."""
    slot_mapping: Tensor
    """[T] int64: `block_id * block_size + offset` of each token, or -1 for a token that is not stored."""
    plan: AttentionPlan | None = None
    """What the group's layers share of this step's attention; the first of them makes it where it is not given."""
    prompt_lens: Tensor | None = None
    """[B] int32, where layers see prompts whole: tokens of each request's prompt."""


GroupContext = AttentionContext | RecurrentPlan
"""Of one state group, by what its layers keep: something for each token, or a whole state for each request."""


@dataclass(slots=True)
class StepContext:
    """The tensors that describe one step: the tokens of B requests laid end to end, T in all."""

    positions: Tensor
    """[T] int64: position of each token in its request."""
    query_start_loc: Tensor
    """[B + 1] int32: the tokens of request b are `query_start_loc[b]` to `query_start_loc[b + 1] - 1`."""
    seq_lens: Tensor
    """[B] int32: tokens of each request once this step is done, earlier steps included."""
    num_reqs: int
    groups: list[GroupContext]
    """By state group id."""
    group_of_layer: list[int]
    """By layer id."""
    caches: list[dict[str, Tensor]]
    """By layer id: the fields of the layer's `core.state_specs.StateSpec`, each [num_blocks, *shape]."""

    def attention(self, layer_id: int) -> AttentionContext:
        """Where an attention layer keeps this step's keys and values."""
        context = self.groups[self.group_of_layer[layer_id]]
        assert isinstance(context, AttentionContext)
        return context

    def recurrent_plan(self, layer_id: int) -> RecurrentPlan:
        """What this step does to the states of a recurrent layer."""
        plan = self.groups[self.group_of_layer[layer_id]]
        assert isinstance(plan, RecurrentPlan)
        return plan
