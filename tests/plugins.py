"""Logits processors that tests load by name."""

from __future__ import annotations

import torch
from torch import Tensor

from canter.core.errors import InvalidRequestError
from canter.core.sampling_params import SamplingParams
from canter.logits_processors.interface import BatchUpdate, LogitsBatch, LogitsProcessor, ProcessorConfig


class Force(LogitsProcessor):
    """The token `force` is the only one that may follow, from the output's token `force_from` on."""

    arguments = frozenset(("force", "force_from"))

    def __init__(self, config: ProcessorConfig) -> None:
        super().__init__(config)
        self.rows: dict[int, SamplingParams] = {}

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if "force" in (params.extra_args or {}) and not isinstance(params.extra_args["force"], int):
            raise ValueError(f"force must be a token id, got {params.extra_args['force']!r}.")

    def update_state(self, update: BatchUpdate) -> None:
        for row in update.removed:
            del self.rows[row]
        for added in update.added:
            self.rows[added.row] = added.params

    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        result = logits.clone()
        for line, row in enumerate(batch.rows):
            args = self.rows[row].extra_args or {}
            if len(batch.output_ids(line)) >= args.get("force_from", 0):
                result[line] = float("-inf")
                result[line, args["force"]] = 0.0
        return result


class Shift(LogitsProcessor):
    """Adds a bias that depends on the whole sequence: a check that each row gets its own tokens."""

    arguments = frozenset(("shift",))

    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        for line, tokens in enumerate(batch.token_ids):
            logits[line, int(tokens.sum()) % logits.shape[1]] += 8.0
        return logits


class Broken(LogitsProcessor):
    """Raises where a request asks for it: when it comes (`add`), when it goes (`remove`) or when its output has a length."""

    arguments = frozenset(("broken", "refused", "shape", "nan"))

    def __init__(self, config: ProcessorConfig) -> None:
        super().__init__(config)
        self.args: dict[int, dict] = {}

    def update_state(self, update: BatchUpdate) -> None:
        for row in update.removed:
            if self.args.pop(row).get("broken") == "remove":
                raise RuntimeError("remove")
        for added in update.added:
            self.args[added.row] = added.params.extra_args or {}
            if self.args[added.row].get("broken") == "add":
                raise RuntimeError("add")

    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        for line, row in enumerate(batch.rows):
            args, length = self.args[row], len(batch.output_ids(line))
            logits[line] = 0.0  # spoils the rows before one that raises
            logits[line, 7] = 5.0
            if args.get("broken") == length:
                raise RuntimeError("apply")
            if args.get("refused") == length:
                raise InvalidRequestError("This one is not wanted.")
            if args.get("nan") == length:
                logits[line] = float("nan")
            if args.get("shape") == length:
                return torch.zeros(len(batch.rows), 3)
        return logits


class Everyone(LogitsProcessor):
    """Applies to every request, but to greedy ones only as it says of itself that it never changes the likeliest token."""

    def applies_to(self, params: SamplingParams) -> bool:
        return True

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        keep = torch.full_like(logits, float("-inf"))
        keep[:, 11] = 1.0
        return keep


class NoProcessor:
    """Not what it should be."""
