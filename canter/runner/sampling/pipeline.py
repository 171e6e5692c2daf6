"""The sampler: logits processors in a fixed order, then a draw from each row.

A row's token depends on its own logits, parameters, tokens, seed and position, never on the other rows of the batch.
Everything here runs in the device's order (inside `Device.launch`) and reads nothing back from a device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from canter.core.grammar import Grammars
from canter.core.sampling_params import SamplingParams
from canter.logits_processors.interface import LogitsProcessor as Plugin
from canter.logits_processors.interface import ProcessorConfig
from canter.runner.sampling.bad_words import BadWords
from canter.runner.sampling.grammar import GrammarMasks, Told
from canter.runner.sampling.logprobs import LogprobGroup, TokenLogprobsOp, group_logprobs, named_logprobs, wanted_logprobs
from canter.runner.sampling.output import SamplerOutput
from canter.runner.sampling.penalties import Penalties
from canter.runner.sampling.plugins import Plugins
from canter.runner.sampling.processors import AllowedIds, LogitBias, LogitsProcessor, MinTokens
from canter.runner.sampling.random import Stream, derive_seed, position_keys, token_salts
from canter.runner.sampling.rows import IntArray, take_rows, upload
from canter.runner.sampling.states import Cached, Feature, RowStates, SampleBatch
from canter.runner.sampling.thinking import ThinkingBudget

SINGLE_OUT = Feature.ALLOWED_IDS | Feature.THINKING | Feature.GRAMMAR
"""Features that hide most logits, and with them what may be wrong with them."""
EDITS = SINGLE_OUT | Feature.LOGIT_BIAS | Feature.MIN_TOKENS | Feature.PENALTIES | Feature.BAD_WORDS | Feature.PLUGINS
"""Features that change logits in place."""


class Limits(NamedTuple):
    """What decides the draw of each logit, all [L], beside the logits and positions."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    seed_key: Tensor


class Sampler:
    """Sampling state of `max_num_rows` rows and the pipeline over it.

    `default_seed`: requests without a seed get one made from it and a count of such requests. `plugins`: classes of loaded
    logits processors, in their order. `grammars`: the compiled grammars of requests that want their outputs to obey one.
    """

    def __init__(
        self,
        max_num_rows: int,
        vocab_size: int,
        device: torch.device,
        default_seed: int,
        plugins: Sequence[type[Plugin]] = (),
        max_model_len: int = 0,
        grammars: Grammars | None = None,
    ) -> None:
        self.states = RowStates(max_num_rows, vocab_size, torch.device(device))
        config = ProcessorConfig(vocab_size, max_num_rows, max_model_len, self.states.device)
        self._penalties = Penalties(self.states)
        self._plugins = Plugins(self.states, [make(config) for make in plugins])
        self._grammar = GrammarMasks(self.states, grammars)
        self._thinking = ThinkingBudget(self.states)
        self.processors: list[LogitsProcessor] = [
            AllowedIds(self.states),
            LogitBias(self.states),
            MinTokens(self.states),
            self._penalties,
            BadWords(self.states),
            self._plugins,
            self._grammar,
            self._thinking,
        ]
        self._cached_limits: Cached[Limits] = Cached()
        self._salts = token_salts(vocab_size, self.states.device)
        self._default_seed = default_seed
        self._unseeded = itertools.count()
        self._made_seeds: dict[str, int] = {}

    def add_row(self, row: int, request_id: str, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """A request takes a row. `token_ids`: all it has, prompt first; more than the prompt when it comes back."""
        self.states.set_row(row, params, self._seed(request_id, params.seed), num_prompt_tokens)
        if self.states.features[row] & Feature.PENALTIES:
            self._penalties.set_row(row, token_ids, num_prompt_tokens)
        if self.states.features[row] & Feature.THINKING:
            self._thinking.set_row(row, params, token_ids, num_prompt_tokens)
        if self.states.features[row] & Feature.GRAMMAR:
            self._grammar.add_row(row, request_id, params, token_ids, num_prompt_tokens)
        if self._plugins.processors and self._plugins.add_row(row, params, token_ids, num_prompt_tokens):
            self.states.features[row] |= Feature.PLUGINS

    def remove_row(self, row: int) -> None:
        """The row's request has finished or was preempted. What a preempted one needs again is kept until `forget`."""
        self.states.clear_row(row)
        self._plugins.remove_row(row)
        self._grammar.remove_row(row)

    def forget(self, request_id: str) -> None:
        """A request has finished: drop what was kept of it. Unknown ids are ignored."""
        self._made_seeds.pop(request_id, None)
        self._grammar.forget(request_id)

    def prepare(self, batch: SampleBatch) -> None:
        """Begin with what the host can do for `sample` before there are logits: the model may run meanwhile."""
        self._grammar.prepare(batch)

    def record(self, rows_np: IntArray, rows: Tensor, token_ids: Tensor, num_sampled: Tensor, told: Told) -> None:
        """Take note of a step's new tokens: the first num_sampled [S] of token_ids [S, W], for distinct rows [S], on host and device.
        `told` waits for the tokens' copies on the host."""
        self._penalties.record(rows, token_ids, num_sampled)
        self._thinking.record(rows_np, token_ids, num_sampled)
        self._grammar.record(rows_np, told)

    def sample(self, logits: Tensor, batch: SampleBatch) -> SamplerOutput:
        """Draw a token from each row of logits [L, V] float32, contiguous. The logits are changed in place."""
        features = self.states.features[batch.rows_np]
        used = int(np.bitwise_or.reduce(features))
        wanted = wanted_logprobs(self.states.num_logprobs[batch.rows_np]) if used & Feature.LOGPROBS else None
        raw = self._raw_rows(logits, wanted, used)
        peaks = logits.amax(-1) if used & SINGLE_OUT else None  # of ids that will be dropped, too
        self._edit(logits, batch, features, used)
        scores, tokens = self._choose(logits, batch, used) if used & Feature.RANDOM else self.states.ops.greedy_tokens(logits)
        if peaks is not None:
            scores = torch.where(peaks < float("inf"), scores, float("nan"))
        errors = self._plugins.errors(batch) if used & Feature.PLUGINS else {}
        if used & Feature.GRAMMAR:
            errors |= self._grammar.errors(batch)
        return SamplerOutput(tokens, scores, self._logprobs(raw, wanted, batch, tokens), errors)

    def process(self, logits: Tensor, batch: SampleBatch) -> Tensor:
        """Apply every stage but the draw, in place: what a request may not draw is -inf. Returns `logits`.

        The softmax of a row is the distribution that `sample` draws from; rows of temperature 0 keep all their logits.
        """
        features = self.states.features[batch.rows_np]
        used = int(np.bitwise_or.reduce(features))
        self._edit(logits, batch, features, used)
        if used & Feature.RANDOM:
            limits = self._limits(batch)
            logits.div_(torch.where(limits.temperature > 0, limits.temperature, 1.0).unsqueeze(1))
            self.states.ops.keep_tokens(logits, limits.top_k, limits.top_p, limits.log_min_p)
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

    def _choose(self, logits: Tensor, batch: SampleBatch, used: int) -> tuple[Tensor, Tensor]:
        """Whether a row could be drawn from (its largest score) and its token: [L], [L] int64."""
        limits = self._limits(batch)
        given = limits.temperature, limits.top_k, limits.top_p, limits.log_min_p, limits.seed_key
        scores, tokens = self.states.ops.draw_tokens(logits, *given, batch.positions, self._salts, bool(used & Feature.TRUNCATION))
        return scores, tokens

    def _limits(self, batch: SampleBatch) -> Limits:
        def make() -> Limits:
            return Limits(*(self.states.column(name)[batch.rows] for name in Limits._fields))

        return self._cached_limits.get(self.states, batch, make)

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
        rows, op = batch.rows_np[wanted], self.states.ops.token_logprobs
        chosen = tokens[upload(wanted, tokens.device)]
        named = np.array([self.states.logprob_ids[row] is not None for row in rows], bool)
        groups = [] if named.all() else _groups_of(raw, wanted, self.states.num_logprobs[rows], chosen, np.flatnonzero(~named), op)
        for line in np.flatnonzero(named):
            ids = self.states.logprob_ids[rows[line]]
            if ids is not None:
                groups.append(named_logprobs(raw[line : line + 1], int(wanted[line]), ids, chosen[line : line + 1], op))
        return groups


def _groups_of(raw: Tensor, wanted: IntArray, counts: IntArray, chosen: Tensor, lines: IntArray, op: TokenLogprobsOp) -> list[LogprobGroup]:
    """Logprobs of some lines of those that want any."""
    if len(lines) == len(wanted):
        return group_logprobs(raw, wanted, counts, chosen, op)
    at = upload(lines, raw.device)
    return group_logprobs(raw[at], wanted[lines], counts[lines], chosen[at], op)
