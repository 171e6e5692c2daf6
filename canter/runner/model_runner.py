"""Model Runner V2: the only runner. It turns a plan into tokens, on any device, for any model.

Everything here runs in the device's own order, inside `Device.launch`: the host plans step N+1 while step N computes,
and hands over plans only. Nothing on the way from plan to sampled token reads a value back from the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from canter.core.grammar import Grammars
from canter.core.plan import NewRow, RowError, ScheduledRow, SchedulePlan, StepOutput, TokenLogprobs
from canter.core.sampling_params import SamplingParams
from canter.core.state_specs import StateLayout
from canter.core.timeline import Timeline
from canter.device import Device, HostCopy, Pending
from canter.layers.context import StepContext
from canter.logits_processors.interface import LogitsProcessor
from canter.runner.graphs import Model, make_steps
from canter.runner.input_batch import InputBatch, build_input_batch
from canter.runner.op_spans import with_ops
from canter.runner.request_table import RequestTable
from canter.runner.sampling.output import SamplerOutput, SampleStatus
from canter.runner.sampling.pipeline import Sampler
from canter.runner.sampling.prompt_logprobs import PromptLogprobPlanner, compute_prompt_logprobs, prompt_entries, prompt_targets
from canter.runner.sampling.states import SampleBatch
from canter.runner.state_inputs import StepRows, make_inputs
from canter.runner.state_pool import StatePool
from canter.runner.verify import AcceptedTokens, accept_drafts

WARM_UP_ID = "canter-warm-up"
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class PendingForward:
    """A launched forward: the batch and the hidden states `[T, H]` of its tokens; None when the plan has no rows."""

    plan: SchedulePlan
    launched: Pending[tuple[InputBatch, torch.Tensor] | None]


@dataclass(slots=True)
class _Sampled:
    """A step's results on their way to the host: `copies` of [sampler's tensors | accepted | prompt logprobs]."""

    batch: InputBatch
    output: SamplerOutput
    accepted: AcceptedTokens
    copy: HostCopy
    prompt_parts: list[tuple[str, int]] = field(default_factory=list)
    """(request id, number of host tensors) of the prompt logprobs, in order."""


class ModelRunner:
    """Owns the request table, the cache's tensors and the sampler; runs one model on one device."""

    def __init__(
        self,
        model: Model,
        layout: StateLayout,
        num_blocks: Sequence[int],
        device: Device,
        *,
        vocab_size: int,
        max_num_rows: int,
        max_model_len: int,
        num_draft_tokens: int = 0,
        seed: int = 0,
        enforce_eager: bool = False,
        logits_processors: Sequence[type[LogitsProcessor]] = (),
        timeline: Timeline | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._device = device
        self._timeline = timeline or Timeline()
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._groups = layout.groups
        self._block_sizes = [group.spec.block_size for group in layout.groups]
        self._table = RequestTable(max_num_rows, max_model_len, self._block_sizes, num_draft_tokens, device)
        self._pool = StatePool(layout, num_blocks, device)
        self._inputs = make_inputs(layout.groups)
        self._has_slots = [inputs.has_slots for inputs in self._inputs]
        self._steps = make_steps(model, self._pool.caches, self._pool.group_of_layer, self._inputs, enforce_eager)
        self._sampler = Sampler(max_num_rows, vocab_size, device.torch_device, seed, logits_processors, max_model_len, grammars)
        self._prompt_logprobs = PromptLogprobPlanner()

    @property
    def eager_reason(self) -> str | None:
        """Why every op of a step is called from Python; None where a step is one program."""
        return self._steps.eager_reason

    def execute(self, plan: SchedulePlan) -> PendingForward:
        """Launch the forward of a plan. Plans must come in the scheduler's order."""
        num_tokens = sum(row.num_tokens for row in plan.rows) if self._timeline.is_on else 0
        details = {"step": plan.step_id, "requests": len(plan.rows), "tokens": num_tokens}
        work = with_ops(self._timeline, lambda: self._forward(plan))
        return PendingForward(plan, self._device.launch(self._timeline.around("forward", work, **details)))

    def sample(self, pending: PendingForward) -> PendingOutput:
        """Launch the choice of tokens of a launched forward."""
        work = with_ops(self._timeline, lambda: self._sample(pending))
        return PendingOutput(pending.plan, self._device.launch(self._timeline.around("sample", work, step=pending.plan.step_id)))

    def warm_up(self) -> None:
        """Run a short request through the same path as any other, so that the first user's does not pay for first touches."""
        tokens = list(range(max(1, min(WARM_UP_TOKENS, self._vocab_size, self._max_model_len - 1))))
        # Blocks that nobody has yet; what is written to them is overwritten before it is read.
        blocks = tuple([1] * -(-(len(tokens) + 1) // size) for size in self._block_sizes)
        params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=2)
        new = NewRow(WARM_UP_ID, tokens, len(tokens), 0, blocks, params)
        plans = [SchedulePlan(-3, [ScheduledRow(WARM_UP_ID, len(tokens), 0)], [new]), SchedulePlan(-1, finished_ids=[WARM_UP_ID])]
        if len(tokens) < self._max_model_len:
            plans.insert(1, SchedulePlan(-2, [ScheduledRow(WARM_UP_ID, 1, len(tokens))]))
        for plan in plans:
            self.sample(self.execute(plan)).result()

    def shutdown(self) -> None:
        self._device.shutdown()

    def _forward(self, plan: SchedulePlan) -> tuple[InputBatch, torch.Tensor] | None:
        self._update_rows(plan)
        if not plan.rows:
            return None
        batch = build_input_batch(plan, self._table, self._block_sizes, self._has_slots)
        self._sampler.prepare(self._sample_batch(batch))
        starts, num_prompt_np = [row.num_computed_tokens for row in plan.rows], self._table.prompt_len_np[batch.rows_np]
        rows = StepRows(starts, batch.num_tokens_np, num_prompt_np, batch.query_start_loc, self._upload)
        tables = zip(self._inputs, batch.block_tables, batch.slot_mappings, strict=True)
        ctx = StepContext(
            positions=batch.positions,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            num_reqs=len(plan.rows),
            groups=[inputs.context(rows, table, slots) for inputs, table, slots in tables],
            group_of_layer=self._pool.group_of_layer,
            caches=self._pool.caches,
        )
        return batch, self._steps.forward(batch.token_ids, ctx)

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        return self._device.to_device(torch.from_numpy(values))

    def _update_rows(self, plan: SchedulePlan) -> None:
        """Bring the table and the sampler to the plan's rows: drop, add, append blocks."""
        for request_id in (*plan.finished_ids, *plan.preempted_ids):
            row = self._table.remove(request_id)
            if row is not None:
                self._sampler.remove_row(row)
        for request_id in plan.finished_ids:
            self._sampler.forget(request_id)
            self._prompt_logprobs.forget(request_id)
        for new in plan.new_rows:
            row = self._table.add(new)
            self._sampler.add_row(row, new.request_id, new.sampling, new.token_ids, new.num_prompt_tokens)
            self._prompt_logprobs.add(new.request_id, new.num_prompt_tokens, new.sampling.prompt_logprobs)
        self._table.append_blocks(plan)

    def _sample(self, pending: PendingForward) -> _Sampled | None:
        forwarded = pending.launched.result()
        if forwarded is None:
            return None
        batch, hidden = forwarded
        logits = self._steps.logits(hidden, batch.logits_indices)
        output = self._sampler.sample(logits, self._sample_batch(batch))
        accepted = accept_drafts(self._table, batch, output.token_ids, self._device)
        prompt_tensors, prompt_parts = self._compute_prompt_logprobs(pending.plan, batch, hidden)
        tensors = [*output.tensors, accepted.token_ids, accepted.num_sampled, *prompt_tensors]
        copy = self._device.copy_to_host(tensors)
        if len(accepted.sampling_np):
            rows_np = batch.rows_np[accepted.sampling_np]
            self._sampler.record(
                rows_np, accepted.rows, accepted.token_ids, accepted.num_sampled, partial(_told, copy, len(output.tensors))
            )
        return _Sampled(batch, output, accepted, copy, prompt_parts)

    def _sample_batch(self, batch: InputBatch) -> SampleBatch:
        return SampleBatch(
            rows_np=batch.logit_rows_np,
            rows=batch.logit_rows,
            positions=batch.logit_positions,
            all_token_ids=self._table.all_token_ids,
            total_len=self._table.total_len,
            local_pos_np=batch.local_pos_np if batch.has_drafts else None,
            input_ids=batch.token_ids[batch.logits_indices] if batch.has_drafts else None,
        )

    def _compute_prompt_logprobs(
        self, plan: SchedulePlan, batch: InputBatch, hidden: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[tuple[str, int]]]:
        tensors: list[torch.Tensor] = []
        parts: list[tuple[str, int]] = []
        if not self._prompt_logprobs.owes_any:
            return tensors, parts
        starts = np.concatenate(([0], np.cumsum(batch.num_tokens_np)))
        for i, scheduled in enumerate(plan.rows):
            part = self._prompt_logprobs.take(scheduled.request_id, scheduled.num_computed_tokens, scheduled.num_tokens)
            if part is None:
                continue
            first = int(starts[i])
            rows = torch.arange(first + part.start, first + part.stop, device=hidden.device)
            targets = prompt_targets(self._table.all_token_ids, int(batch.rows_np[i]), part)
            op = self._sampler.states.ops.token_logprobs
            pieces = compute_prompt_logprobs(rows, targets, part.num_top, self._vocab_size, lambda at: self._steps.logits(hidden, at), op)
            found = [t for piece in pieces for t in piece.tensors]
            tensors.extend(found)
            parts.append((scheduled.request_id, len(found)))
        return tensors, parts


def _told(copy: HostCopy, num_before: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted tokens and their counts, on the host."""
    tensors = copy.wait()
    return tensors[num_before], tensors[num_before + 1]


@dataclass(frozen=True, slots=True)
class PendingOutput:
    """A launched step; `result` waits for its tokens."""

    plan: SchedulePlan
    launched: Pending[_Sampled | None]

    def result(self) -> StepOutput:
        sampled = self.launched.result()
        if sampled is None:
            return StepOutput(self.plan.step_id, [], [])
        return _to_host(self.plan, sampled)


def _to_host(plan: SchedulePlan, sampled: _Sampled) -> StepOutput:
    """Lists by request, in the plan's order."""
    tensors = sampled.copy.wait()
    num_sampler = len(sampled.output.tensors)
    if sampled.batch.is_plain and not (sampled.output.logprobs or sampled.prompt_parts or sampled.output.errors):
        token_ids = [[token_id] for token_id in tensors[0].tolist()]
        if all(map(math.isfinite, tensors[1].tolist())):
            return StepOutput(plan.step_id, token_ids, [None] * len(token_ids))
    host = sampled.output.from_host(tensors[:num_sampler])
    token_rows: list[list[int]] = tensors[num_sampler].tolist()
    counts: list[int] = tensors[num_sampler + 1].tolist()
    size = len(plan.rows)
    token_ids = [[] for _ in range(size)]
    logprobs: list[list[TokenLogprobs] | None] = [None] * size
    errors: dict[str, RowError] = {}
    first_logits = (np.cumsum(sampled.batch.num_logits_np) - sampled.batch.num_logits_np).tolist()
    for line, i in enumerate(sampled.accepted.sampling_np.tolist()):
        count, first = counts[line], first_logits[i]
        token_ids[i] = token_rows[line][:count]
        entries = host.logprobs[first : first + count]
        if entries[0] is not None:
            logprobs[i] = [entry for entry in entries if entry is not None]
        bad = next((s for s in host.status[first : first + count] if s is not SampleStatus.OK), None)
        failed = [line for line in range(first, first + count) if line in sampled.output.errors]
        if failed:
            errors[plan.rows[i].request_id] = sampled.output.errors[failed[0]]
        elif bad is not None:
            errors[plan.rows[i].request_id] = bad.error
    return StepOutput(plan.step_id, token_ids, logprobs, _prompt_lists(sampled, tensors[num_sampler + 2 :]), errors=errors)


def _prompt_lists(sampled: _Sampled, tensors: list[torch.Tensor]) -> dict[str, list[TokenLogprobs]]:
    lists: dict[str, list[TokenLogprobs]] = {}
    start = 0
    for request_id, count in sampled.prompt_parts:
        lists[request_id] = prompt_entries(tensors[start : start + count])
        start += count
    return lists
