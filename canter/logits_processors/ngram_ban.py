"""No n-gram twice within a window: models that transcribe pages fall into loops otherwise, and are published with this rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canter.core.sampling_params import SamplingParams
from canter.logits_processors.interface import BatchUpdate, LogitsBatch, LogitsProcessor, ProcessorConfig

SIZE, WINDOW, WHITELIST = "ngram_size", "window_size", "whitelist_token_ids"
DEFAULT_WINDOW = 100
MAX_SIZE = 1024
MAX_WINDOW = 1 << 16


class _Rule(NamedTuple):
    size: int
    window: int
    allowed: Tensor


class NGramBan(LogitsProcessor):
    """Bans each token that would make the last `ngram_size` tokens equal to as many in a row among the last `window_size`.

    Only the output is looked at. Tokens of `whitelist_token_ids` are never banned: such as a table's, which do repeat.
    """

    arguments = frozenset((SIZE, WINDOW, WHITELIST))

    def __init__(self, config: ProcessorConfig) -> None:
        super().__init__(config)
        self._rules: dict[int, _Rule] = {}

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        args = params.extra_args or {}
        if cls.arguments.isdisjoint(args):
            return
        if SIZE not in args:
            raise ValueError(f"{SIZE} is needed beside {WINDOW} and {WHITELIST}.")
        size = _integer(args, SIZE, 1, MAX_SIZE, None)
        _integer(args, WINDOW, size, MAX_WINDOW, max(size, DEFAULT_WINDOW))
        allowed = args.get(WHITELIST, [])
        if not isinstance(allowed, list) or not all(_is_integer(item) and item >= 0 for item in allowed):
            raise ValueError(f"{WHITELIST} must be a list of token ids, got {allowed!r:.80}.")

    def update_state(self, update: BatchUpdate) -> None:
        for row in update.removed:
            self._rules.pop(row, None)
        for added in update.added:
            args = added.params.extra_args or {}
            size = args[SIZE]
            allowed = torch.tensor(args.get(WHITELIST, []), dtype=torch.int64, device=self.config.device)
            self._rules[added.row] = _Rule(size, args.get(WINDOW, max(size, DEFAULT_WINDOW)), allowed)

    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        for line, row in enumerate(batch.rows):
            rule = self._rules[row]
            recent = batch.output_ids(line)[-rule.window :].to(torch.int64)
            if len(recent) >= rule.size:
                grams = recent.unfold(0, rule.size, 1)
                repeats = (grams[:, :-1] == recent[len(recent) - rule.size + 1 :]).all(1)
                banned = grams[repeats, -1]
                logits[line, banned[~torch.isin(banned, rule.allowed)]] = float("-inf")
        return logits


def _integer(args: Mapping[str, Any], name: str, low: int, high: int, default: int | None) -> int:
    value = args.get(name, default)
    if not _is_integer(value) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer of at least {low} and at most {high}, got {value!r:.80}.")
    return int(value)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
