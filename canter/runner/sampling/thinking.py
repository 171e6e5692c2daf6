"""Budgets of thought: after so many tokens of a thought, the tokens that end it are the only ones that may follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from canter.core.sampling_params import MAX_MARKER_TOKENS, SamplingParams
from canter.runner.sampling.processors import NEG_INF
from canter.runner.sampling.rows import IntArray, upload
from canter.runner.sampling.states import Feature, RowStates, SampleBatch

OUTSIDE = -1
"""In `Thoughts.length`: no thought is open."""


class Thoughts(NamedTuple):
    """What is known of n token sequences, all int64: `length [n]` of the open thought, its start marker not counted; `limit [n]`,
    the length at which it is ended; `budget [n]`, what the request grants each thought; `tail [n, M]`, the last tokens."""

    length: Tensor
    limit: Tensor
    budget: Tensor
    tail: Tensor

    def at(self, index: Tensor) -> Thoughts:
        return Thoughts(self.length[index], self.limit[index], self.budget[index], self.tail[index])

    def put(self, index: Tensor, values: Thoughts) -> None:
        for part, new in zip(self, values, strict=True):
            part[index] = new


class Markers(NamedTuple):
    """Token ids of what begins a thought and of what ends it."""

    start: tuple[int, ...]
    end: tuple[int, ...]


@dataclass(slots=True)
class ThinkingBudget:
    """A thought that has reached its budget goes on with the end marker's tokens, one after the other.

    Every thought of an output has the whole budget. One that the prompt has begun counts from its start, and is ended at once where
    the prompt has used the budget up. The device keeps the state, fed with each step's tokens: the host knows them too late.
    """

    states: RowStates
    feature: int = Feature.THINKING
    _markers: dict[int, Markers] | None = None
    _rows: Thoughts | None = None

    def set_row(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Read a row's tokens anew; exact for a request that comes back with output."""
        states = self.states
        if self._rows is None or self._markers is None:
            self._markers = {}
            length, limit, budget = (torch.full((states.num_rows,), OUTSIDE, dtype=torch.int64, device=states.device) for _ in range(3))
            tail = torch.full((states.num_rows, MAX_MARKER_TOKENS), -1, dtype=torch.int64, device=states.device)
            self._rows = Thoughts(length, limit, budget, tail)
        markers = self._markers[row] = Markers(tuple(params.thinking_start_ids), tuple(params.thinking_end_ids))
        granted = params.thinking_token_budget or 0
        tokens = np.asarray(token_ids, np.int64)
        start, at_once = open_thought(tokens, markers), granted
        if start is not None and start == open_thought(tokens[:num_prompt_tokens], markers):
            at_once = max(granted, num_prompt_tokens - start)
        last = tokens[-MAX_MARKER_TOKENS:]
        self._rows.length[row] = OUTSIDE if start is None else len(tokens) - start
        self._rows.limit[row], self._rows.budget[row] = at_once, granted
        self._rows.tail[row] = upload(np.concatenate([np.full(MAX_MARKER_TOKENS - len(last), -1), last]), states.device)

    def record(self, rows_np: IntArray, token_ids: Tensor, num_sampled: Tensor) -> None:
        """Take new output: the first num_sampled [S] of token_ids [S, W], for the distinct table rows `rows_np` [S]."""
        if self._rows is None:
            return
        for markers, lines_np in self._groups(rows_np, np.flatnonzero(self.states.features[rows_np] & self.feature)):
            rows, lines = upload(rows_np[lines_np], token_ids.device), upload(lines_np, token_ids.device)
            state, counts = self._rows.at(rows), num_sampled[lines]
            for place in range(token_ids.shape[1]):
                state = _chosen(counts > place, _feed(state, token_ids[lines, place].to(torch.int64), markers), state)
            self._rows.put(rows, state)

    def apply(self, logits: Tensor, batch: SampleBatch, index: IntArray) -> None:
        for markers, lines_np in self._groups(batch.rows_np, index):
            state = self._states(batch, lines_np, markers)
            is_due = (state.length >= state.limit) & (state.length >= 0)
            end = torch.tensor(markers.end, device=logits.device)
            forced = end[(state.length - state.limit).clamp(0, len(markers.end) - 1)]
            lines = upload(lines_np, logits.device)
            if logits.device.type == "cpu":  # where a look at the device's values costs no wait
                lines, forced, is_due = lines[is_due], forced[is_due], is_due[is_due]
            if len(lines):
                ids = torch.arange(logits.shape[1], device=logits.device)
                only = torch.where(ids == forced.unsqueeze(1), 0.0, NEG_INF)
                logits[lines] = torch.where(is_due.unsqueeze(1), only, logits[lines])

    def _states(self, batch: SampleBatch, lines_np: IntArray, markers: Markers) -> Thoughts:
        """Each line's state, the drafts before it taken in."""
        if self._rows is None:
            raise RuntimeError("a row with a thinking budget was not set up by set_row")
        device = batch.positions.device
        state = self._rows.at(upload(batch.rows_np[lines_np], device))
        if batch.max_drafts and batch.local_pos_np is not None and batch.input_ids is not None:
            for place in range(1, batch.max_drafts + 1):
                here = np.flatnonzero(batch.local_pos_np[lines_np] == place)
                # The line before is the same request's, one draft earlier.
                drafts = batch.input_ids[upload(lines_np[here], device)].to(torch.int64)
                state.put(upload(here, device), _feed(state.at(upload(here - 1, device)), drafts, markers))
        return state

    def _groups(self, rows_np: IntArray, index: IntArray) -> list[tuple[Markers, IntArray]]:
        """Lines with equal markers, which those of one model are."""
        found: dict[Markers, list[int]] = {}
        for line in index.tolist():
            found.setdefault((self._markers or {})[int(rows_np[line])], []).append(line)
        return [(markers, np.array(lines, np.int64)) for markers, lines in found.items()]


def _feed(state: Thoughts, token: Tensor, markers: Markers) -> Thoughts:
    """The states after one more token each."""
    tail = torch.cat((state.tail[:, 1:], token.unsqueeze(1)), 1)
    is_open = state.length >= 0
    begins = ~is_open & _ends_with(tail, markers.start)
    ends = is_open & _ends_with(tail, markers.end)
    length = torch.where(is_open & ~ends, state.length + 1, torch.where(begins, 0, OUTSIDE))
    return Thoughts(length, torch.where(ends, state.budget, state.limit), state.budget, tail)


def _ends_with(tail: Tensor, marker: tuple[int, ...]) -> Tensor:
    return (tail[:, tail.shape[1] - len(marker) :] == torch.tensor(marker, device=tail.device)).all(1)


def _chosen(which: Tensor, new: Thoughts, old: Thoughts) -> Thoughts:
    """The new states of some sequences, the old ones of the others."""
    length, limit = torch.where(which, new.length, old.length), torch.where(which, new.limit, old.limit)
    return Thoughts(length, limit, old.budget, torch.where(which.unsqueeze(1), new.tail, old.tail))


def open_thought(tokens: IntArray, markers: Markers) -> int | None:
    """Where the thought begins that is open at the end of these tokens: the place behind its start marker."""
    events = [(end, True) for end in _places(tokens, markers.start)] + [(end, False) for end in _places(tokens, markers.end)]
    start: int | None = None
    for place, begins in sorted(events):
        if begins and start is None:
            start = place
        elif not begins:
            start = None
    return start


def _places(tokens: IntArray, marker: tuple[int, ...]) -> list[int]:
    """Where copies of the marker end."""
    count = len(tokens) - len(marker) + 1
    if count <= 0:
        return []
    hits = np.ones(count, bool)
    for offset, token_id in enumerate(marker):
        hits &= tokens[offset : offset + count] == token_id
    return [int(place) for place in np.flatnonzero(hits) + len(marker)]
