"""Jump-ahead: tokens that a grammar leaves no choice about are computed together, and not each in a step of its own.

They go the way of drafts. As soon as a step's tokens are on the host, each grammar is asked what must follow them; the request's next
step then computes all of that at once, and samples behind each. So the sampler still has every word: it draws at every position,
from the same logits, with the same masks, penalties, seeds and log-probabilities as it would one by one, and keeps the forced tokens
that it draws itself, which is all of them. A forced token that is none after all, because some other parameter forbids it, costs its
computation and changes nothing.

Only tokens count whose masks hold nothing else. A grammar that forces a text does not always force its tokens: where the text may be cut
into tokens in several ways, the mask holds all of them, and the model chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from canter.core.grammar import Grammars
from canter.core.plan import SchedulePlan, StepOutput
from canter.runner.sampling.bound_output import BoundOutputs

MAX_FORCED_TOKENS = 16
"""Most tokens that a step has more because of this. Where so many rows run that each costs its full time, going ahead gains next to
nothing, and everybody's step would be the longer for it."""


class PendingForward(Protocol):
    """A launched forward."""

    @property
    def plan(self) -> SchedulePlan: ...


class PendingOutput(Protocol):
    """A launched step; `result` waits for its tokens."""

    def result(self) -> StepOutput: ...


class InnerRunner(Protocol):
    """What runs the steps."""

    def execute(self, plan: SchedulePlan) -> Any: ...

    def sample(self, pending: Any) -> PendingOutput: ...

    def shutdown(self) -> None: ...


class ForcedTokens:
    """A runner whose outputs also tell the tokens that must follow, as drafts. `runner` runs the steps.

    It walks the grammars by itself, beside the masks of the next step, which are filled by then: outputs are taken in their order.
    """

    def __init__(self, runner: InnerRunner, grammars: Grammars, vocab_size: int) -> None:
        self._runner = runner
        self._outputs = BoundOutputs(grammars, vocab_size)

    def execute(self, plan: SchedulePlan) -> Any:
        return self._runner.execute(plan)

    def sample(self, pending: PendingForward) -> PendingOutput:
        return _WithForced(self, pending.plan, self._runner.sample(pending))

    def shutdown(self) -> None:
        self._runner.shutdown()

    def take_rows(self, plan: SchedulePlan) -> None:
        """Take note of the requests that a plan begins and drops. Plans must come in their order."""
        for request_id in plan.finished_ids:
            self._outputs.forget(request_id)
        for new in plan.new_rows:
            if new.sampling.structured_outputs is not None:
                self._outputs.add(new.request_id, new.sampling, new.token_ids, new.num_prompt_tokens)

    def add_drafts(self, plan: SchedulePlan, output: StepOutput) -> None:
        """Add what must follow each row's tokens to the drafts of a step's output."""
        if not len(self._outputs):
            return
        drafts = list(output.draft_token_ids or [None] * len(plan.rows))
        room = MAX_FORCED_TOKENS
        for i, (row, sampled) in enumerate(zip(plan.rows, output.sampled_token_ids, strict=True)):
            bound = self._outputs.get(row.request_id)
            if bound is not None and sampled:
                bound.take(sampled)
                forced = list(bound.forced(room + 1))  # the first is, as a rule, in flight
                room -= max(0, len(forced) - 1)
                drafts[i] = forced or drafts[i]
        output.draft_token_ids = drafts


@dataclass(frozen=True, slots=True)
class _WithForced:
    """A launched step; `result` waits for its tokens, and adds what must follow them."""

    forced: ForcedTokens
    plan: SchedulePlan
    pending: PendingOutput

    def result(self) -> StepOutput:
        self.forced.take_rows(self.plan)
        output = self.pending.result()
        self.forced.add_drafts(self.plan, output)
        return output
