"""The sampler: logits processors in a fixed order, then a draw from each row.

A row's token depends on its own logits, parameters, tokens, seed and position, never on the other rows of the batch.
Everything here runs in the device's order (inside `Device.launch`) and reads nothing back from a device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from canter.core.sampling_params import SamplingParams
from canter.runner.sampling.bad_words import BadWords
from canter.runner.sampling.draw import draw_from_all, draw_from_kept, mask_to_kept
from canter.runner.sampling.logprobs import LogprobGroup, group_logprobs, wanted_logprobs
from canter.runner.sampling.output import SamplerOutput
from canter.runner.sampling.penalties import Penalties
from canter.runner.sampling.processors import AllowedIds, LogitBias, LogitsProcessor, MinTokens, Temperature
from canter.runner.sampling.random import Stream, derive_seed, position_keys, token_salts
from canter.runner.sampling.rows import IntArray, first_argmax, take_rows, upload
from canter.runner.sampling.states import Feature, RowStates, SampleBatch
from canter.runner.sampling.truncation import Kept, Limits, keep_sets

EDITS = Feature.ALLOWED_IDS | Feature.LOGIT_BIAS | Feature.MIN_TOKENS | Feature.PENALTIES | Feature.BAD_WORDS | Feature.TEMPERATURE
"""Features that change logits in place."""


class Sampler:
    """Sampling state of `max_num_rows` rows and the pipeline over it.

    `default_seed`: requests without a seed get one made from it and a count of such requests.
    """

    def __init__(self, max_num_rows: int, vocab_size: int, device: torch.device, default_seed: int) -> None:
        self.states = RowStates(max_num_rows, vocab_size, torch.device(device))
        self._penalties = Penalties(self.states)
        self.processors: list[LogitsProcessor] = [
            AllowedIds(self.states),
            LogitBias(self.states),
            MinTokens(self.states),
            self._penalties,
            BadWords(self.states),
            Temperature(self.states),
        ]
        self._salts = token_salts(vocab_size, self.states.device)
        self._default_seed = default_seed
        self._unseeded = itertools.count()
        self._made_seeds: dict[str, int] = {}

    def add_row(self, row: int, request_id: str, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """A request takes a row. `token_ids`: all it has, prompt first; more than the prompt when it comes back."""
        self.states.set_row(row, params, self._seed(request_id, params.seed), num_prompt_tokens)
        if self.states.features[row] & Feature.PENALTIES:
            self._penalties.set_row(row, token_ids, num_prompt_tokens)

    def remove_row(self, row: int) -> None:
        """The row's request has finished or was preempted. What a preempted one needs again is kept until `forget`."""
        self.states.clear_row(row)

    def forget(self, request_id: str) -> None:
        """A request has finished: drop the seed that was made for it. Unknown ids are ignored."""
        self._made_seeds.pop(request_id, None)

    def record(self, rows: Tensor, token_ids: Tensor, num_sampled: Tensor) -> None:
        """Take note of a step's new tokens: the first num_sampled [S] of token_ids [S, W], for distinct rows [S]."""
        self._penalties.record(rows, token_ids, num_sampled)

    def sample(self, logits: Tensor, batch: SampleBatch) -> SamplerOutput:
        """Draw a token from each row of logits [L, V] float32, contiguous. The logits are changed in place."""
        features = self.states.features[batch.rows_np]
        used = int(np.bitwise_or.reduce(features, initial=0))
        wanted = wanted_logprobs(self.states.num_logprobs[batch.rows_np]) if used & Feature.LOGPROBS else None
        raw = self._raw_rows(logits, wanted, used)
        peaks = logits.amax(-1) if used & Feature.ALLOWED_IDS else None  # of ids that will be dropped, too
        self._edit(logits, batch, features, used)
        scores, tokens = self._choose(logits, batch, features) if used & Feature.RANDOM else first_argmax(logits)
        if peaks is not None:
            scores = torch.where(peaks < float("inf"), scores, float("nan"))
        return SamplerOutput(tokens, scores, self._logprobs(raw, wanted, batch, tokens))

    def process(self, logits: Tensor, batch: SampleBatch) -> Tensor:
        """Apply every stage but the draw, in place: what a request may not draw is -inf. Returns `logits`.

        The softmax of a row is the distribution that `sample` draws from; rows of temperature 0 keep all their logits.
        """
        features = self.states.features[batch.rows_np]
        self._edit(logits, batch, features, int(np.bitwise_or.reduce(features, initial=0)))
        index = np.flatnonzero(features & Feature.TRUNCATION)
        if len(index):
            mask_to_kept(logits, index, self._truncate(logits, batch, index))
        return logits

    def keys(self, batch: SampleBatch, stream: Stream = Stream.SAMPLE) -> Tensor:
        """Random keys of the batch's logits, [L, 2] int32, for `random.uniform` and `random.gumbel`."""
        return position_keys(self.states.column("seed_key")[batch.rows], batch.positions, stream)

    @property
    def salts(self) -> Tensor:
        """Random salts of the token ids, [V] int32, for `random.uniform` and `random.gumbel`."""
        return self._salts

    def _seed(self, request_id: str, seed: int | None) -> int:
        if seed is not None:
            return seed
        if request_id not in self._made_seeds:
            self._made_seeds[request_id] = derive_seed(self._default_seed, next(self._unseeded))
        return self._made_seeds[request_id]

    def _edit(self, logits: Tensor, batch: SampleBatch, features: IntArray, used: int) -> None:
        if not used & EDITS:
            return
        for processor in self.processors:
            if used & processor.feature:
                processor.apply(logits, batch, np.flatnonzero(features & processor.feature))

    def _choose(self, logits: Tensor, batch: SampleBatch, features: IntArray) -> tuple[Tensor, Tensor]:
        """The winning score (the logit itself in greedy rows) and token of each row: [L], [L] int64."""
        keys = self.keys(batch)
        found: list[tuple[IntArray, tuple[Tensor, Tensor]]] = []
        greedy = np.flatnonzero((features & Feature.RANDOM) == 0)
        if len(greedy):
            found.append((greedy, first_argmax(take_rows(logits, greedy))))
        free = np.flatnonzero((features & (Feature.RANDOM | Feature.TRUNCATION)) == Feature.RANDOM)
        if len(free):
            found.append((free, draw_from_all(logits, free, take_rows(keys, free), self._salts)))
        truncated = np.flatnonzero(features & Feature.TRUNCATION)
        for kept in self._truncate(logits, batch, truncated) if len(truncated) else ():
            index = truncated[kept.index]
            found.append((index, draw_from_kept(kept, take_rows(keys, index), self._salts)))
        return _in_order(found)

    def _truncate(self, logits: Tensor, batch: SampleBatch, index: IntArray) -> list[Kept]:
        return keep_sets(take_rows(logits, index), Limits.of(self.states, batch.rows_np[index]))

    def _raw_rows(self, logits: Tensor, wanted: IntArray | None, used: int) -> Tensor | None:
        """The logits that logprobs are made from, safe from what the stages change."""
        if wanted is None:
            return None
        rows = take_rows(logits, wanted)
        is_view = rows.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
        return rows.clone() if is_view and used & EDITS else rows

    def _logprobs(self, raw: Tensor | None, wanted: IntArray | None, batch: SampleBatch, tokens: Tensor) -> list[LogprobGroup]:
        if raw is None or wanted is None:
            return []
        counts = self.states.num_logprobs[batch.rows_np[wanted]]
        return group_logprobs(raw, wanted, counts, tokens[upload(wanted, tokens.device)])


def _in_order(found: list[tuple[IntArray, tuple[Tensor, Tensor]]]) -> tuple[Tensor, Tensor]:
    """Results for parts of a batch, which together are all of it, in the batch's order."""
    if len(found) == 1:
        return found[0][1]
    place = np.argsort(np.concatenate([index for index, _ in found]))
    best, tokens = (torch.cat(parts) for parts in zip(*(results for _, results in found), strict=True))
    at = upload(place, best.device)
    return best[at], tokens[at]
