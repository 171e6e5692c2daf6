"""Log-probabilities of chosen and most likely tokens, from the logits as the model gave them.

The log-softmax of a whole row is never made: a row needs its normaliser, its largest logits and the chosen one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from canter.core.plan import TokenLogprobs
from canter.runner.sampling.rows import IntArray, upload
from canter.runner.sampling.states import NO_LOGPROBS

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


TokenLogprobsOp = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]


def compute_logprobs(logits: Tensor, chosen: Tensor, num_top: int, op: TokenLogprobsOp) -> LogprobTensors:
    """Logprobs of `chosen [N]` and the `num_top` most likely tokens (-1: all) of logits [N, V] float32, by the op `token_logprobs`."""
    vocab_size = logits.shape[1]
    return LogprobTensors(*op(logits, chosen, vocab_size if num_top == WHOLE_VOCABULARY else min(num_top, vocab_size)))


def group_logprobs(raw: Tensor, index: IntArray, counts: IntArray, chosen: Tensor, op: TokenLogprobsOp) -> list[LogprobGroup]:
    """Logprobs of raw [n, V], the logits `index` (host, [n]) of a batch, with chosen tokens [n] and counts [n] of
    wanted tokens. One group for each count: what a row gets doesn't depend on what others ask."""
    groups = []
    for count in np.unique(counts):
        lines = np.flatnonzero(counts == count)
        at = upload(lines, raw.device)
        rows = raw if len(lines) == len(index) else raw[at]
        groups.append(LogprobGroup(index[lines], compute_logprobs(rows, chosen[at], int(count), op)))
    return groups


def named_logprobs(raw: Tensor, index: int, ids: IntArray, chosen: Tensor, op: TokenLogprobsOp) -> LogprobGroup:
    """Logprobs of the tokens that a request names, in its order, in place of the likeliest: of raw [1, V], the logit `index`."""
    own_ids, own, ranks = op(raw, chosen, 0)
    named = upload(ids, raw.device).unsqueeze(0)
    normalizer = raw.gather(1, own_ids) - own
    found = (raw.gather(1, named) - normalizer).nan_to_num(nan=-math.inf, neginf=-math.inf)  # a chosen logit of -inf tells no normaliser
    data = LogprobTensors(torch.cat((own_ids, named), 1), torch.cat((own, found), 1), ranks)
    return LogprobGroup(np.array([index]), data)


def wanted_logprobs(counts: IntArray) -> IntArray:
    """Places of those that want logprobs at all."""
    return np.flatnonzero(counts != NO_LOGPROBS)


def to_entries(token_ids: Tensor, logprobs: Tensor, ranks: Tensor) -> Iterable[TokenLogprobs]:
    """One value for each position, from tensors on the host."""
    return map(TokenLogprobs, token_ids.tolist(), logprobs.tolist(), ranks.tolist())
