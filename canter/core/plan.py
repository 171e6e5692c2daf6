"""What the scheduler tells the runner, and what the runner tells back. Values only; the runner adds no state to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from canter.core.sampling_params import SamplingParams

DRAFT_ON_DEVICE = -1
"""In `ScheduledRow.draft_token_ids`: the draft's value is known to the device only."""


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request that takes a row of the request table: a new one, or one that comes back after preemption.

    `token_ids` are all tokens known so far (prompt, then output); the first `num_prompt_tokens` are the prompt.
    `block_ids[g]` is the whole block table of group g so far; `num_cached_tokens` counts the prefix hit.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[list[int], ...]
    sampling: SamplingParams


@dataclass(slots=True)
class ScheduledRow:
    """One request's share of a step: `num_tokens` from position `num_computed_tokens` on, drafts (to verify) last.

    Nobody changes one; it isn't frozen because making a frozen one takes three times as long, for each row of each step.

    `new_block_ids[g]` is appended to the request's block table of group g; empty for a row that is in `new_rows`.
    Under speculation `num_computed_tokens` is an upper bound until the device's own count is known.
    """

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    new_block_ids: tuple[list[int], ...] = ()
    draft_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class SchedulePlan:
    """One step. The runner first drops `finished_ids` and `preempted_ids`, then adds `new_rows`, then runs `rows`.

    A finished request may have lost its row to a preemption before.
    """

    step_id: int
    rows: list[ScheduledRow] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    finished_ids: list[str] = field(default_factory=list)
    preempted_ids: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def has_work(self) -> bool:
        """Whether the runner must see this plan: tokens to run or rows to drop."""
        return bool(self.rows or self.finished_ids or self.preempted_ids)


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities at one position. Entry 0 is the chosen token; the rest are the most likely, best first.

    `rank` of the chosen token: 1 is the most likely. The chosen token may stand again among the rest.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a request's tokens of a step mean nothing. `error_type`: the class in `core.errors`, None for the engine's own fault."""

    message: str
    error_type: str | None = None


@dataclass(slots=True)
class StepOutput:
    """What a step produced, in the order of `SchedulePlan.rows`.

    `sampled_token_ids[i]` is empty for a row whose prompt is not finished; more than one where drafts were verified.
    `draft_token_ids[i]`: what is likely, or certain, to follow them, whatever is in flight by then; None leaves those of the device.
    `logprobs[i]` has one entry for each sampled token, or is None when not asked for.
    `prompt_logprobs[id]`: entries for the prompt positions 1.. whose predictions this step computed, in order; of a
    request that is computed again after a preemption those delivered before may be left out.
    """

    step_id: int
    sampled_token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs] | None]
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    draft_token_ids: Sequence[list[int] | None] | None = None
    errors: dict[str, RowError] = field(default_factory=dict)
    """Requests whose tokens of this step mean nothing: they end with an error."""
