"""Min-p, top-k and top-p: which tokens of a row may be drawn.

The meaning, for a row's logits in descending order, equal ones by ascending id:
min-p keeps logits of at least max + log(min_p); top-k keeps those of at least the k-th (ties kept); top-p keeps, of
what is left, the shortest beginning whose share of the probability is at least p, never less than one token.

Probabilities are summed as integers (`masses`), so that a sum has one value in whatever order a device adds.

A full sort is rarely needed to know the answer: a row's largest W logits, W small, settle it unless the last of them
is still kept. On the CPU, where the host may look, W grows only for the rows that need it. Other devices sort.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from canter.runner.sampling.rows import BLOCK, BoolArray, IntArray, chunks, host_reads, sort_candidates, take_rows, upload
from canter.runner.sampling.states import RowStates

NEG_INF = float("-inf")
MASS_SCALE = 2.0**44
"""The likeliest token's mass. The sum over 2^18 tokens stays within 63 bits."""

FIRST_WIDTH = 64
WIDTH_GROWTH = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """Truncation of N rows. Host: `top_k_np`, `sums_all_np` (top-p over the whole vocabulary), and what any row uses.
    Device, each [N, 1]: `top_k` int64, `top_p` float64, `log_min_p` float32."""

    top_k_np: IntArray
    sums_all_np: BoolArray
    uses_top_p: bool
    uses_min_p: bool
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor

    @classmethod
    def of(cls, states: RowStates, rows_np: IntArray) -> Limits:
        host = {name: states.columns[name].host[rows_np] for name in ("top_k", "top_p", "log_min_p")}
        rows = upload(rows_np, states.device)
        top_k, top_p, log_min_p = (states.column(name)[rows].unsqueeze(1) for name in ("top_k", "top_p", "log_min_p"))
        sums_all = (host["top_p"] < 1.0) & (host["top_k"] >= states.vocab_size)
        uses_top_p, uses_min_p = bool((host["top_p"] < 1.0).any()), bool((host["log_min_p"] > -np.inf).any())
        return cls(host["top_k"].astype(np.int64), sums_all, uses_top_p, uses_min_p, top_k, top_p, log_min_p)


@dataclass(frozen=True, slots=True)
class Kept:
    """Candidates of the rows `index` (places among the N rows): `values`, `ids` and whether each is `keep`t, all [n, W].

    Ordered by value, highest first (equal ones by id where top-p is in use). No token outside is kept.
    """

    index: IntArray
    values: Tensor
    ids: Tensor
    keep: Tensor


def keep_sets(x: Tensor, limits: Limits) -> list[Kept]:
    """Decide for every row of x [N, V]; each row is in exactly one of the sets returned."""
    if not host_reads(x.device):
        everything = np.arange(x.shape[0])
        return [_keep_by_sort(x, limits, everything)]
    return list(_keep_by_width(x, limits))


def masses(values: Tensor, peak: Tensor) -> Tensor:
    """exp(values - peak) in units of 2^-44: int64. peak is the row's largest value."""
    return values.sub(peak).exp_().mul_(MASS_SCALE).to(torch.int64)


def _keep_by_width(x: Tensor, limits: Limits) -> Iterator[Kept]:
    vocab_size = x.shape[1]
    totals = _total_masses(x, limits)
    bounded = np.where(limits.top_k_np < vocab_size, limits.top_k_np, 0)
    widths = _starting_widths(bounded, vocab_size)
    pending = np.arange(len(widths))
    while len(pending):
        width = int(widths[pending].min())
        is_now = widths[pending] == width
        index, later = pending[is_now], pending[~is_now]
        if width >= vocab_size:
            yield _keep_by_sort(x, limits, index)
            pending = later
            continue
        candidates = top_candidates(take_rows(x, index), width)
        kept = _decide(*(sort_candidates(*candidates) if limits.uses_top_p else candidates), limits, index, totals)
        settled = _is_settled(kept).numpy()
        if settled.any():
            yield _subset(kept, settled)
        widths[index[~settled]] = _grow(width, vocab_size)
        pending = np.sort(np.concatenate((later, index[~settled])))


def _starting_widths(top_k: IntArray, vocab_size: int) -> IntArray:
    """The least power of two above k, but not below FIRST_WIDTH; vocab_size where that would save nothing."""
    widths = np.maximum(FIRST_WIDTH, 1 << np.ceil(np.log2(top_k + 1.0)).astype(np.int64))
    return np.where(widths * 4 > vocab_size, vocab_size, widths)


def _grow(width: int, vocab_size: int) -> int:
    wider = width * WIDTH_GROWTH
    return wider if wider * 4 <= vocab_size else vocab_size


def top_candidates(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest of each row, highest first: values and ids [N, width].

    The order of equal ones is open, and so is which of several equal to the last are found.

    For small widths only blocks with a large maximum are searched: every value above the last one found lies in one
    of the `width` blocks with the largest maxima.
    """
    num_rows, vocab_size = x.shape
    if vocab_size % BLOCK or width * BLOCK * 4 > vocab_size:
        return x.topk(width, -1)
    blocks = x.view(num_rows, vocab_size // BLOCK, BLOCK)
    best = blocks.amax(-1).topk(width, -1, sorted=False).indices  # [N, width]
    lines = torch.arange(num_rows, device=x.device).unsqueeze(1)
    values, inside = blocks[lines, best].view(num_rows, -1).topk(width, -1)
    return values, best.gather(1, inside // BLOCK) * BLOCK + inside % BLOCK


def _keep_by_sort(x: Tensor, limits: Limits, index: IntArray) -> Kept:
    values, ids = torch.sort(take_rows(x, index), dim=-1, descending=True, stable=True)
    return _decide(values, ids, limits, index, None)


def _decide(values: Tensor, ids: Tensor, limits: Limits, index: IntArray, totals: Tensor | None) -> Kept:
    """Apply the limits of rows `index` to their sorted candidates. `totals [N]`: mass of the whole vocabulary where
    top-p needs it and the candidates may not be all; None when they are all."""
    at = upload(index, values.device)
    peak = values.amax(-1, keepdim=True)
    kth = values.gather(1, limits.top_k[at].clamp(max=values.shape[1]) - 1)
    candidate = (values >= torch.where(limits.top_k[at] <= values.shape[1], kth, NEG_INF)) & (values > NEG_INF)
    if limits.uses_min_p:
        candidate &= values >= peak + limits.log_min_p[at]
    if not limits.uses_top_p:
        return Kept(index, values, ids, candidate)
    mass = masses(values, peak) * candidate
    before = mass.cumsum(-1) - mass
    total = mass.sum(-1, keepdim=True)
    if totals is not None:
        sums_all = upload(limits.sums_all_np[index], values.device).unsqueeze(1)
        total = torch.where(sums_all, totals[at].unsqueeze(1), total)
    # A row without top-p has infinity there, and so keeps tokens too unlikely to have a mass.
    keep = candidate & (before.to(torch.float64) < limits.top_p[at] * total.to(torch.float64))
    return Kept(index, values, ids, keep)


def _is_settled(kept: Kept) -> Tensor:
    """Whether a row's candidates hold all that is kept: none as low as the last candidate is. [n] bool"""
    return ~(kept.keep & (kept.values == kept.values[:, -1:])).any(-1)


def _subset(kept: Kept, chosen: BoolArray) -> Kept:
    if chosen.all():
        return kept
    at = upload(np.flatnonzero(chosen), kept.values.device)
    return Kept(kept.index[chosen], kept.values[at], kept.ids[at], kept.keep[at])


def _total_masses(x: Tensor, limits: Limits) -> Tensor:
    """Mass of all tokens that min-p leaves, for rows whose top-p counts the whole vocabulary: [N] int64, else 0."""
    totals = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    index = np.flatnonzero(limits.sums_all_np)
    for part in chunks(len(index), x.shape[1], x.device):
        at = upload(index[part], x.device)
        rows = take_rows(x, index[part])
        peak = rows.amax(-1, keepdim=True)
        mass = masses(rows, peak)
        if limits.uses_min_p:
            mass.mul_(rows >= peak + limits.log_min_p[at])
        totals[at] = mass.sum(-1)
    return totals
