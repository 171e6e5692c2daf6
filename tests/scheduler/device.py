"""A device without arithmetic: runs plans in order on a simulated cache and checks everything that it reads.

Each cache slot holds the digest of the token prefix that ends there. A row's queries verify every slot that they would
read, so a block that is reused too early, shared wrongly, trimmed too soon or published before its time is an error.
The next token is a function of the prefix alone, so every request has one right output, whatever its company.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from canter.core.messages import FINISH_LENGTH, FINISH_STOP, AddRequest
from canter.core.plan import DRAFT_ON_DEVICE, NewRow, ScheduledRow, SchedulePlan, StepOutput, TokenLogprobs
from canter.core.sampling_params import SamplingParams
from canter.core.state_specs import (
    SnapshotMode,
    StateKind,
    StateLayout,
    StateSpec,
    attention_spec,
    place_snapshots,
    plan_layout,
    recurrent_spec,
)

ROOT_DIGEST = 0x9E3779B97F4A7C15


def layout_of(*windows: int | None, block_size: int = 4, head_dims: Sequence[int] | None = None) -> StateLayout:
    """One attention layer for each window (None: full attention); other head dims put layers into other pools."""
    dims = head_dims or [8] * len(windows)
    return plan_layout({i: attention_spec(1, dims[i], "float32", block_size, window) for i, window in enumerate(windows)})


def layout_with_states(mode: SnapshotMode, interval: int, *windows: int | None, kind: StateKind | None = None) -> StateLayout:
    """As `layout_of`, with a kind for those that have a window, and two recurrent layers."""
    specs = {i: attention_spec(1, 8, "float32", 4, w, kind=kind if w else None) for i, w in enumerate(windows)}
    states = {len(specs) + i: recurrent_spec({"state": ((2, 3), "float32")}) for i in range(2)}
    return plan_layout(place_snapshots(specs | states, mode, interval))


def request(request_id: str, prompt: int | Sequence[int], *, priority: int = 0, salt: str | None = None, **sampling: object) -> AddRequest:
    """A request; an integer prompt means so many tokens, different for each id."""
    if isinstance(prompt, int):
        start = 1000 * (1 + sum(ord(c) * 31**i for i, c in enumerate(request_id)) % 1000)
        prompt = list(range(start, start + prompt))
    return AddRequest(request_id, list(prompt), SamplingParams(**sampling), priority=priority, cache_salt=salt)  # type: ignore[arg-type]


def extend_digest(digest: int, token_id: int) -> int:
    return (digest * 6364136223846793005 + token_id * 2 + 1) % 2**64


def next_token(digest: int, vocab_size: int) -> int:
    return (digest >> 24) % vocab_size


def expected_output(message: AddRequest, max_model_len: int, vocab_size: int) -> tuple[list[int], str]:
    """The right tokens of a request and its finish reason."""
    digest = ROOT_DIGEST
    for token_id in message.prompt_token_ids:
        digest = extend_digest(digest, token_id)
    sampling, output = message.sampling, list[int]()
    limit = max_model_len - len(message.prompt_token_ids)
    limit = min(limit, sampling.max_tokens) if sampling.max_tokens is not None else limit
    while True:
        output.append(next_token(digest, vocab_size))
        digest = extend_digest(digest, output[-1])
        if output[-1] in sampling.all_stop_token_ids and len(output) >= sampling.min_tokens:
            return output, FINISH_STOP
        if len(output) == limit:
            return output, FINISH_LENGTH


def _visible(spec: StateSpec, start: int, end: int, num_prompt_tokens: int) -> list[int]:
    """What the queries from `start` to `end - 1` read."""
    first, window = 0, spec.window or 0
    if spec.kind is StateKind.CHUNKED_LOCAL:
        first = start // window * window
    elif window:
        first = max(0, start - window + 1)
    prompt = range(min(num_prompt_tokens, first)) if spec.kind is StateKind.PROMPT_WINDOW else ()
    return [*prompt, *range(first, end)]


@dataclass
class Row:
    """One request on the device. `digests[p]` covers tokens 0..p."""

    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    tables: list[list[int]]
    wants_prompt_logprobs: bool
    digests: list[int] = field(default_factory=list)

    def digest(self, position: int) -> int:
        while len(self.digests) <= position:
            before = self.digests[-1] if self.digests else ROOT_DIGEST
            self.digests.append(extend_digest(before, self.token_ids[len(self.digests)]))
        return self.digests[position]


class FakeDevice:
    """Runs plans. With `num_draft_tokens` it proposes drafts after each sample, right ones with `accuracy`.

    `brings_drafts`: the outputs tell the drafts to the host; else they stay on the device.
    """

    def __init__(
        self, layout: StateLayout, *, vocab_size: int = 7, num_draft_tokens: int = 0, accuracy: float = 0.5, brings_drafts: bool = False
    ) -> None:
        self.layout = layout
        self.vocab_size = vocab_size
        self.num_draft_tokens = num_draft_tokens
        self.accuracy = accuracy
        self.brings_drafts = brings_drafts
        self.rows: dict[str, Row] = {}
        self.lost_rows: set[str] = set()
        self.cache: dict[tuple[int, int, int, int], int] = {}
        self.states: dict[tuple[int, int], int] = {}
        self.drafts: dict[str, list[int]] = {}
        self.random = random.Random(0)
        self.computed: dict[str, list[int]] = {}
        self.max_tokens_seen = 0

    def execute(self, plan: SchedulePlan) -> StepOutput:
        self._update_rows(plan)
        inputs = [self._place_inputs(row) for row in plan.rows]
        self._run_states(plan, inputs)
        for scheduled, start in zip(plan.rows, inputs, strict=True):
            self._write(self.rows[scheduled.request_id], start, scheduled.num_tokens)
        for scheduled, start in zip(plan.rows, inputs, strict=True):
            self._read(scheduled.request_id, start, scheduled.num_tokens)
        self.max_tokens_seen = max(self.max_tokens_seen, plan.num_tokens)
        output = StepOutput(plan.step_id, [], [])
        for scheduled, start in zip(plan.rows, inputs, strict=True):
            self._sample(scheduled, start, output)
        if self.brings_drafts:
            output.draft_token_ids = [self.drafts.get(s.request_id, []) for s in plan.rows]
        return output

    def _update_rows(self, plan: SchedulePlan) -> None:
        assert not set(plan.finished_ids) & set(plan.preempted_ids)
        for request_id in [*plan.finished_ids, *plan.preempted_ids]:
            if request_id in self.lost_rows:  # preempted before it finished
                self.lost_rows.remove(request_id)
                continue
            del self.rows[request_id]
            self.drafts.pop(request_id, None)
        self.lost_rows.update(plan.preempted_ids)
        self.lost_rows.difference_update(new.request_id for new in plan.new_rows)
        for new in plan.new_rows:
            assert new.request_id not in self.rows
            self.rows[new.request_id] = self._make_row(new)
        assert len({s.request_id for s in plan.rows}) == len(plan.rows)
        for scheduled in plan.rows:
            assert scheduled.num_tokens > 0
            for table, new_ids in zip(self.rows[scheduled.request_id].tables, scheduled.new_block_ids, strict=False):
                table += new_ids

    def _make_row(self, new: NewRow) -> Row:
        tables = [list(ids) for ids in new.block_ids]
        wants = new.sampling.prompt_logprobs is not None
        return Row(list(new.token_ids), new.num_prompt_tokens, new.num_computed_tokens, tables, wants)

    def _place_inputs(self, scheduled: ScheduledRow) -> int:
        """Put drafts behind the known tokens; returns the first position. The plan's own count is an upper bound."""
        row = self.rows[scheduled.request_id]
        start = row.num_computed_tokens
        if start < scheduled.num_computed_tokens:
            assert self.num_draft_tokens, "without drafts the plan's count is exact"
        assert start <= scheduled.num_computed_tokens
        if scheduled.draft_token_ids:
            known = self.drafts.get(scheduled.request_id, [])
            given = [known[i] if t == DRAFT_ON_DEVICE else t for i, t in enumerate(scheduled.draft_token_ids)]
            assert start == len(row.token_ids) - 1 or start + scheduled.num_tokens == len(row.token_ids) + len(given)
            row.token_ids += given
        assert start + scheduled.num_tokens <= len(row.token_ids)
        return start

    def _slots(self, row: Row, group: int, positions: Sequence[int]) -> list[tuple[int, int, int, int]]:
        spec, pool = self.layout.groups[group].spec, self.layout.groups[group].pool_id
        slots = []
        for position in positions:
            block = row.tables[group][position // spec.block_size]
            assert block > 0, f"group {group}: position {position} lies in the null block"
            slots.append((pool, group, block, position % spec.block_size))
        return slots

    def _run_states(self, plan: SchedulePlan, inputs: list[int]) -> None:
        """Recurrent layers: rows run side by side, so what one writes no other may read or write."""
        for g, group in enumerate(self.layout.groups):
            spec = group.spec
            if spec.kind is not StateKind.RECURRENT:
                continue
            size, reads, writes = spec.block_size, dict[int, str](), dict[int, str]()
            for scheduled, start in zip(plan.rows, inputs, strict=True):
                row, end = self.rows[scheduled.request_id], start + scheduled.num_tokens
                table = row.tables[g]
                if start:
                    block = table[(start - 1) // size]
                    found = self.states.get((group.pool_id, block))
                    assert block and found == row.digest(start - 1) ^ g, (
                        f"{scheduled.request_id}: group {g}, state {block}: foreign content"
                    )
                    reads[block] = scheduled.request_id
                keeps_all = spec.snapshots is SnapshotMode.ALL
                for column in range(start // size if keeps_all else (end - 1) // size, (end - 1) // size + 1):
                    assert table[column] and table[column] not in writes, f"group {g}: two rows write state {table[column]}"
                    writes[table[column]] = scheduled.request_id
            assert all(writes.get(block, owner) == owner for block, owner in reads.items()), f"group {g}: a row reads what another writes"
            for scheduled, start in zip(plan.rows, inputs, strict=True):
                row, end = self.rows[scheduled.request_id], start + scheduled.num_tokens
                for column in range(start // size, (end - 1) // size + 1):
                    block = row.tables[g][column]
                    if writes.get(block) == scheduled.request_id:
                        self.states[group.pool_id, block] = row.digest(min((column + 1) * size, end) - 1) ^ g

    def _write(self, row: Row, start: int, num_tokens: int) -> None:
        positions = range(start, start + num_tokens)
        for g, group in enumerate(self.layout.groups):
            if group.spec.kind is StateKind.RECURRENT:
                continue
            for (pool, _, block, offset), position in zip(self._slots(row, g, positions), positions, strict=True):
                # A block belongs to one group at a time: the slot remembers which group wrote it last.
                self.cache[pool, 0, block, offset] = row.digest(position) ^ g

    def _read(self, request_id: str, start: int, num_tokens: int) -> None:
        row = self.rows[request_id]
        for g, group in enumerate(self.layout.groups):
            if group.spec.kind is StateKind.RECURRENT:
                continue
            positions = _visible(group.spec, start, start + num_tokens, row.num_prompt_tokens)
            for (pool, _, block, offset), position in zip(self._slots(row, g, positions), positions, strict=True):
                found = self.cache.get((pool, 0, block, offset))
                assert found == row.digest(position) ^ g, f"{request_id}: group {g}, position {position}, block {block}: foreign content"

    def _sample(self, scheduled: ScheduledRow, start: int, output: StepOutput) -> None:
        row = self.rows[scheduled.request_id]
        end = start + scheduled.num_tokens
        self.computed.setdefault(scheduled.request_id, []).append(scheduled.num_tokens)
        if row.wants_prompt_logprobs:
            last = min(end + 1, row.num_prompt_tokens)
            entries = [TokenLogprobs([row.token_ids[p]], [-float(p)], 1) for p in range(start + 1, last)]
            output.prompt_logprobs[scheduled.request_id] = entries
        sampled = list[int]()
        num_drafts = len(scheduled.draft_token_ids)
        row.num_computed_tokens = end
        if end == len(row.token_ids):
            position = end - num_drafts - 1
            while True:
                sampled.append(next_token(row.digest(position), self.vocab_size))
                position += 1
                if position == end or row.token_ids[position] != sampled[-1]:
                    break
            del row.token_ids[position:], row.digests[position:]
            row.token_ids.append(sampled[-1])
            row.num_computed_tokens = position
            self._propose(scheduled.request_id, row)
        output.sampled_token_ids.append(sampled)
        output.logprobs.append([TokenLogprobs([t], [-1.0], 1) for t in sampled])

    def _propose(self, request_id: str, row: Row) -> None:
        digest, drafts = row.digest(len(row.token_ids) - 1), []
        for _ in range(self.num_draft_tokens):
            token_id = next_token(digest, self.vocab_size)
            if self.random.random() > self.accuracy:
                token_id = (token_id + 1) % self.vocab_size
            drafts.append(token_id)
            digest = extend_digest(digest, token_id)
        self.drafts[request_id] = drafts
