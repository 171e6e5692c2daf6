"""What a logits processor is. docs/guides/write-a-logits-processor.md shows how to write one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from canter.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ProcessorConfig:
    """The engine that a processor works in. Rows are numbered from 0 to `max_num_rows - 1`."""

    vocab_size: int
    max_num_rows: int
    max_model_len: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class AddedRow:
    """A request that takes a row. `token_ids`: all it has, prompt first; more than the prompt when it comes back."""

    row: int
    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """Which rows change hands. Removals come first: a row that is removed and added belongs to the new request."""

    added: Sequence[AddedRow] = ()
    removed: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class LogitsBatch:
    """Of each of n logits rows: the table row of its request, the tokens before it and how many of them are the prompt.

    The token ids are one-dimensional int32 tensors on the device, prompt first. They belong to the engine: read them, don't
    write, and don't keep them.
    """

    rows: Sequence[int]
    token_ids: Sequence[Tensor]
    num_prompt_tokens: Sequence[int]

    def output_ids(self, line: int) -> Tensor:
        """The tokens of a logits row that the model has written."""
        return self.token_ids[line][self.num_prompt_tokens[line] :]


class LogitsProcessor(ABC):
    """Changes the logits of those requests that ask for it. One object serves all requests of an engine.

    The logits of a request must follow from that request alone: then its tokens don't depend on its company.
    """

    arguments: ClassVar[frozenset[str]] = frozenset()
    """Names in `vllm_xargs` that this processor reads. Those that no loaded processor reads are refused."""

    def __init__(self, config: ProcessorConfig) -> None:
        self.config = config

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise `ValueError` for arguments (`params.extra_args`) that make no sense: the request is refused with its text."""
        return

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether a request is to be given to `apply`. Unless overridden: whether it brings one of the arguments."""
        return not self.arguments.isdisjoint(params.extra_args or {})

    def is_argmax_invariant(self) -> bool:
        """Whether the likeliest token never changes: then greedy requests are left out."""
        return False

    def update_state(self, update: BatchUpdate) -> None:
        """Take note of requests that come and go; may be called several times before an `apply`. Only those that this processor
        applies to are told of."""
        return

    @abstractmethod
    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        """The new logits for `logits` [n, vocabulary] float32, which may be changed in place.

        Must leave the processor's own state alone: if it raises, it is called again with each row by itself, to learn whose
        fault it was.
        """
