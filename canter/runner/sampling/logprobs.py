"""Log-probabilities of chosen and most likely tokens, from the logits as the model gave them.

The log-softmax of a whole row is never made: a row needs its normaliser, its largest logits and the chosen one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from canter.core.plan import TokenLogprobs
from canter.runner.sampling.rows import IntArray, chunks, sort_candidates, upload
from canter.runner.sampling.states import NO_LOGPROBS
from canter.runner.sampling.truncation import top_candidates

WHOLE_VOCABULARY = -1


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Of n positions: `token_ids` int64 and `logprobs` float32 [n, 1 + k], the chosen token first, then the k most likely,
    best first; `ranks [n]` int64, the chosen token's place: how many logits are at least its own."""

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        return [self.token_ids, self.logprobs, self.ranks]


@dataclass(frozen=True, slots=True)
class LogprobGroup:
    """Logprobs of the logits `index` (host), all with the same number of tokens."""

    index: IntArray
    data: LogprobTensors


def log_normalizer(logits: Tensor) -> Tensor:
    """log(sum(exp(row))) of logits [N, V] float32 -> [N, 1] float32. The sum is in float64."""
    peak = logits.amax(-1, keepdim=True)
    total = logits.sub(peak).exp_().sum(-1, keepdim=True, dtype=torch.float64)
    return peak + total.log_().to(torch.float32)


def compute_logprobs(logits: Tensor, chosen: Tensor, num_top: int) -> LogprobTensors:
    """Logprobs of `chosen [N]` and the `num_top` most likely tokens (-1: all) of logits [N, V] float32."""
    num_rows, vocab_size = logits.shape
    num_top = vocab_size if num_top == WHOLE_VOCABULARY else min(num_top, vocab_size)
    ids = chosen.to(torch.int64).unsqueeze(1)
    own = logits.gather(1, ids)
    parts = list(chunks(num_rows, vocab_size, logits.device))
    normalizer = torch.cat([log_normalizer(logits[part]) for part in parts])
    ranks = torch.cat([(logits[part] >= own[part]).sum(-1) for part in parts])
    values, top_ids = _largest(logits, num_top)
    return LogprobTensors(torch.cat((ids, top_ids), 1), torch.cat((own, values), 1).sub_(normalizer), ranks)


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row and their ids, ordered by value and id."""
    if count == logits.shape[1]:
        return torch.sort(logits, dim=-1, descending=True, stable=True)
    if count == 0:
        return logits[:, :0], logits[:, :0].to(torch.int64)
    return sort_candidates(*top_candidates(logits, count))


def group_logprobs(raw: Tensor, index: IntArray, counts: IntArray, chosen: Tensor) -> list[LogprobGroup]:
    """Logprobs of raw [n, V], the logits `index` (host, [n]) of a batch, with chosen tokens [n] and counts [n] of
    wanted tokens. One group for each count: what a row gets doesn't depend on what others ask."""
    groups = []
    for count in np.unique(counts):
        lines = np.flatnonzero(counts == count)
        at = upload(lines, raw.device)
        rows = raw if len(lines) == len(index) else raw[at]
        groups.append(LogprobGroup(index[lines], compute_logprobs(rows, chosen[at], int(count))))
    return groups


def wanted_logprobs(counts: IntArray) -> IntArray:
    """Places of those that want logprobs at all."""
    return np.flatnonzero(counts != NO_LOGPROBS)


def to_entries(token_ids: Tensor, logprobs: Tensor, ranks: Tensor) -> Iterable[TokenLogprobs]:
    """One value for each position, from tensors on the host."""
    return map(TokenLogprobs, token_ids.tolist(), logprobs.tolist(), ranks.tolist())
