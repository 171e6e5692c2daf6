"""Inputs that implementations of the recurrent ops are tried on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from canter.kernels.inputs import Case, normal
from canter.kernels.recurrent_plan import RecurrentPlan

Requests = Sequence[tuple[Sequence[int], bool]]
"""Of each request the rows of its segments, and whether it has begun before."""

ROW_ARGUMENTS: dict[str, tuple[int, ...]] = {
    "causal_conv": (0, 6, 7),
    "ssd_scan": (0, 1, 4, 5),
    "selective_scan": (0, 1, 4, 5, 7),
    "gated_delta": (0, 1, 2, 3, 4),
    "l2_norm": (0,),
    "decay_gate": (0,),
    "gated_rms_norm": (0, 1),
}
"""Of each op the places of those arguments that have a row for every row of a step."""

BATCHES: tuple[Requests, ...] = (
    (),
    (((1,), True),),
    (((5,), False), ((1,), True), ((0,), True), ((17, 16, 3), True), ((), False), ((2, 0, 40), False)),
)


def recurrent_plan(rng: Generator, requests: Requests) -> tuple[RecurrentPlan, int]:
    """A plan with slots dealt out at random, some read and written in place, some segments not kept; and the number of slots."""
    num_segments = sum(len(segments) for segments, _ in requests)
    num_slots = num_segments + len(requests) + 2
    slots = torch.randperm(num_slots, generator=rng).tolist()
    starts, ends, reads, writes = [0], [], [], []
    row = 0
    for i, (segments, begun) in enumerate(requests):
        reads.append(slots.pop() if begun else -1)
        for j, rows in enumerate(segments):
            row += rows
            ends.append(row)
            in_place = begun and j == len(segments) - 1 and i % 2
            writes.append(reads[-1] if in_place else -1 if (i + j) % 4 == 3 else slots.pop())
        starts.append(len(ends))
    return RecurrentPlan(*(torch.tensor(values, dtype=torch.int32) for values in (starts, ends, reads, writes))), num_slots


def _rows(requests: Requests) -> int:
    return sum(sum(segments) for segments, _ in requests)


def causal_conv_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    cases: list[Case] = []
    for i, (channels, taps) in enumerate(((1, 2), (33, 3), (16, 4), (129, 4), (40, 8), (7, 5))):
        for requests in BATCHES:
            plan, slots = recurrent_plan(rng, requests)
            rows = _rows(requests)
            fused = normal(rng, dtype, rows, 3 * channels)
            x, gate_in, gate_out = fused.split(channels, 1)
            bias = normal(rng, torch.float32, channels) if i % 2 else None
            weight, state = normal(rng, torch.float32, taps, channels), normal(rng, dtype, slots, taps - 1, channels)
            cases.append((x, weight, bias, state, plan, bool(i % 3), gate_in if i % 2 else None, gate_out if i > 2 else None))
    return cases


def ssd_scan_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    cases: list[Case] = []
    for i, (heads, groups, depth, width) in enumerate(((1, 1, 1, 1), (4, 2, 16, 24), (6, 1, 33, 64), (2, 2, 128, 17), (3, 3, 256, 8))):
        for requests in BATCHES:
            plan, slots = recurrent_plan(rng, requests)
            rows = _rows(requests)
            fused = normal(rng, dtype, rows, heads * width + 2 * groups * depth)
            x, b, c = fused.split((heads * width, groups * depth, groups * depth), 1)
            b, c = (t.unflatten(1, (groups, depth)) for t in (b * depth**-0.5, c))
            dt = normal(rng, torch.float32 if i == 1 else dtype, rows, heads, scale=2.0) if i != 2 else None
            bias, d = (normal(rng, torch.float32, heads) if i % 2 else None for _ in range(2))
            a = -torch.rand(heads, generator=rng) - 0.01
            limits = (0.01, 0.5) if i == 3 else (0.0, float("inf"))
            state = normal(rng, torch.float32, slots, heads, depth, width)
            cases.append((x.unflatten(1, (heads, width)), dt, bias, a, b, c, d, state, plan, *limits))
    return cases


def selective_scan_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    cases: list[Case] = []
    for i, (depth, width) in enumerate(((1, 1), (16, 70), (8, 33), (256, 9))):
        for requests in BATCHES:
            plan, slots = recurrent_plan(rng, requests)
            rows = _rows(requests)
            x, dt, b, c, gate = normal(rng, dtype, rows, 3 * width + 2 * depth).split((width, width, depth, depth, width), 1)
            bias, d = (normal(rng, torch.float32, width) if i % 2 else None for _ in range(2))
            a = -torch.rand((depth, width), generator=rng) * 4 - 0.01
            state = normal(rng, torch.float32, slots, depth, width)
            cases.append((x, dt, bias, a, b * depth**-0.5, c, d, gate if i % 2 else None, state, plan))
    return cases


def gated_delta_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    cases: list[Case] = []
    for i, (heads, groups, depth, width) in enumerate(((1, 1, 1, 1), (4, 2, 16, 24), (3, 3, 33, 64), (2, 1, 128, 17), (2, 2, 256, 40))):
        for requests in BATCHES:
            plan, slots = recurrent_plan(rng, requests)
            rows = _rows(requests)
            q, k = (torch.nn.functional.normalize(torch.randn(rows, groups, depth, generator=rng), dim=-1) for _ in range(2))
            v, beta = normal(rng, dtype, rows, heads, width), normal(rng, torch.float32 if i == 2 else dtype, rows, heads)
            decay = torch.rand((rows, heads, depth if i % 2 else 1), generator=rng)
            state = normal(rng, torch.float32, slots, heads, depth, width)
            cases.append((q, k, v, decay, beta, state, plan, 2.0 if i == 3 else 1.0))
    return cases


def _heads(rng: Generator, dtype: torch.dtype) -> list[Tensor]:
    shapes = ((0, 2, 8), (1, 1, 1), (5, 3, 33), (40, 2, 128))
    return [normal(rng, dtype, rows, heads + 1, width)[:, :heads] for rows, heads, width in shapes]


def l2_norm_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    return [(x * scale, 1e-6, 0.3) for x in _heads(rng, dtype) for scale in (1.0, 1e-6, 1e6)]


def decay_gate_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    cases: list[Case] = []
    for scale, bound in ((1.0, 0.0), (30.0, 0.0), (3.0, -5.0)):
        for x in _heads(rng, dtype):
            heads, width = x.shape[1:]
            cases.append((x * scale, -torch.rand(heads, generator=rng) - 0.05, normal(rng, torch.float32, heads, width), bound))
    return cases


def gated_rms_norm_inputs(rng: Generator, dtype: torch.dtype) -> list[Case]:
    cases: list[Case] = []
    for rows, width, group in ((0, 8, 8), (1, 1, 1), (5, 96, 32), (3, 577, 577), (40, 66, 33)):
        for gate_first, sigmoid in ((False, False), (True, False), (False, True)):
            x, gate = normal(rng, dtype, rows, 2 * width, scale=3.0).split(width, 1)
            weight = normal(rng, torch.float32, group if sigmoid else width)
            cases.append((x, gate, weight, 1e-5, group, gate_first, sigmoid))
    return cases
