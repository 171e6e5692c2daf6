"""What sampling gives back: tensors on the device first, lists on the host once they have been copied."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum

from torch import Tensor

from canter.core.errors import InvalidRequestError
from canter.core.plan import RowError, TokenLogprobs
from canter.runner.sampling.logprobs import LogprobGroup, to_entries


class SampleStatus(IntEnum):
    """Whether a drawn token means anything. Where it doesn't, it is some id, and the request should end with an error."""

    OK = 0
    BAD_LOGITS = 1
    NO_TOKEN = 2

    @property
    def error(self) -> RowError:
        """What to tell the user of a row that is not OK."""
        return _ERRORS[self]


_ERRORS = {
    SampleStatus.BAD_LOGITS: RowError("The model computed logits that are not numbers (NaN or infinite)."),
    SampleStatus.NO_TOKEN: RowError(
        "No token may follow: the request's constraints (allowed_token_ids, logit_bias, min_tokens, bad_words, a logits processor, "
        "structured_outputs) exclude every one.",
        InvalidRequestError.__name__,
    ),
}


@dataclass(slots=True)
class HostOutput:
    """Lists with one element for each logit of the batch, in its order."""

    token_ids: list[int]
    status: list[SampleStatus]
    logprobs: list[TokenLogprobs | None]


@dataclass(slots=True)
class SamplerOutput:
    """`token_ids [L]` int64 and `scores [L]` float32 on the device; `logprobs` of those that want them; `errors` of logits whose
    request can't go on, whatever was drawn.

    A score is what the token won with. It is finite unless the row could not be sampled (`SampleStatus`): NaN or
    infinity where the logits held such, minus infinity where they allowed no token.
    """

    token_ids: Tensor
    scores: Tensor
    logprobs: list[LogprobGroup] = field(default_factory=list)
    errors: dict[int, RowError] = field(default_factory=dict)

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that `from_host` needs, in its order: for a runner that copies other tensors along."""
        return [self.token_ids, self.scores, *(tensor for group in self.logprobs for tensor in group.data.tensors)]

    def to_host(self) -> HostOutput:
        """Copy and wait at once."""
        return self.from_host([tensor.cpu() for tensor in self.tensors])

    def from_host(self, tensors: list[Tensor]) -> HostOutput:
        """Make lists of `tensors`, which are `self.tensors` on the host."""
        token_ids, scores, *rest = tensors
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        for number, group in enumerate(self.logprobs):
            entries = to_entries(*rest[3 * number : 3 * number + 3])
            for at, entry in zip(group.index.tolist(), entries, strict=True):
                logprobs[at] = entry
        return HostOutput(token_ids.tolist(), [_status(score) for score in scores.tolist()], logprobs)


def _status(score: float) -> SampleStatus:
    if math.isfinite(score):
        return SampleStatus.OK
    return SampleStatus.NO_TOKEN if score == -math.inf else SampleStatus.BAD_LOGITS
