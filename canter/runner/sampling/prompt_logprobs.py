"""Log-probabilities of a prompt's own tokens, for requests that ask for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from canter.core.plan import TokenLogprobs
from canter.runner.sampling.logprobs import LogprobTensors, TokenLogprobsOp, compute_logprobs, to_entries

MAX_SLICE_ROWS = 1024
MAX_SLICE_ELEMENTS = 1 << 24
"""Logits made at once: 64 MiB of float32."""


def compute_prompt_logprobs(
    rows: Tensor, target_ids: Tensor, num_top: int, vocab_size: int, logits_fn: Callable[[Tensor], Tensor], op: TokenLogprobsOp
) -> list[LogprobTensors]:
    """Logprobs of target_ids [N] given the hidden states of the tokens before them, which are rows [N] of the step's.

    `logits_fn` is the step's head: [n] rows -> their logits [n, V] float32, of which nothing is kept; it is given at most
    1024 rows, fewer for a large vocabulary. Returns the slices' results in order.
    """
    step = max(1, min(MAX_SLICE_ROWS, MAX_SLICE_ELEMENTS // vocab_size))
    results = []
    for start in range(0, rows.shape[0], step):
        part = slice(start, start + step)
        results.append(compute_logprobs(logits_fn(rows[part]), target_ids[part], num_top, op))
    return results


def prompt_entries(host_tensors: list[Tensor]) -> list[TokenLogprobs]:
    """One entry for each position. `host_tensors`: `LogprobTensors.tensors` of each slice, one after the other."""
    slices = zip(host_tensors[::3], host_tensors[1::3], host_tensors[2::3], strict=True)
    return [entry for token_ids, logprobs, ranks in slices for entry in to_entries(token_ids, logprobs, ranks)]


@dataclass(slots=True)
class _Progress:
    num_prompt_tokens: int
    num_top: int
    num_done: int = 0
    """Positions whose prediction has been delivered, from the prompt's start; the last position has none in the prompt."""


@dataclass(frozen=True, slots=True)
class PromptSlice:
    """Part of a request's prompt to compute in a step: tokens `start`..`stop` of the request's share of the step have
    targets, which stand at prompt positions `first_target`.. on."""

    start: int
    stop: int
    first_target: int
    num_top: int


@dataclass(slots=True)
class PromptLogprobPlanner:
    """Which requests still owe prompt logprobs, and for which positions. Host only.

    A request that comes back after preemption computes its prompt again; what it has delivered is not made twice.
    """

    _progress: dict[str, _Progress] = field(default_factory=dict)

    def add(self, request_id: str, num_prompt_tokens: int, num_top: int | None) -> None:
        """Call when a request takes a row, new or back. `num_top`: `SamplingParams.prompt_logprobs`."""
        if num_top is not None and request_id not in self._progress:
            self._progress[request_id] = _Progress(num_prompt_tokens, num_top)

    @property
    def owes_any(self) -> bool:
        """Whether any live request wants prompt logprobs."""
        return bool(self._progress)

    def forget(self, request_id: str) -> None:
        """Call when a request finishes; unknown ids are ignored."""
        self._progress.pop(request_id, None)

    def take(self, request_id: str, num_computed_tokens: int, num_tokens: int) -> PromptSlice | None:
        """What a step that runs tokens [num_computed_tokens, + num_tokens) is to compute for a request, or None.

        Counts it as delivered. Raises `RuntimeError` when positions before the step were never delivered: the
        scheduler must not skip them (a request with prompt logprobs takes no prefix hit).
        """
        progress = self._progress.get(request_id)
        if progress is None:
            return None
        begin = max(num_computed_tokens, progress.num_done)
        end = min(num_computed_tokens + num_tokens, progress.num_prompt_tokens - 1)
        if begin >= end:
            return None
        if begin > progress.num_done:
            raise RuntimeError(f"request {request_id}: prompt positions {progress.num_done}..{begin} were skipped without logprobs")
        progress.num_done = end
        return PromptSlice(begin - num_computed_tokens, end - num_computed_tokens, begin + 1, progress.num_top)


def prompt_targets(all_token_ids: Tensor, row: int, part: PromptSlice) -> Tensor:
    """The tokens to score: [stop - start] int64, from the request table's tokens [R, max_len]."""
    return all_token_ids[row, part.first_target : part.first_target + part.stop - part.start].to(torch.int64)
