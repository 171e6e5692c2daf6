"""The sampler's meaning in plain Python and numpy, one row at a time, and builders of batches for the tests."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from canter.core.sampling_params import SamplingParams
from canter.runner.sampling.pipeline import Sampler
from canter.runner.sampling.states import SampleBatch

MASK_64 = (1 << 64) - 1
MASK_32 = (1 << 32) - 1
GOLDEN = 0x9E3779B97F4A7C15
DEFAULT_SEED = 7


@dataclass
class Req:
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    prompt: list[int] = field(default_factory=lambda: [1, 2, 3])
    output: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def num_logits(self) -> int:
        return len(self.drafts) + 1


def build(reqs: list[Req], vocab_size: int, rows: list[int] | None = None, max_rows: int = 16) -> tuple[Sampler, SampleBatch]:
    """A sampler that holds the requests in the given rows, and the batch of all their logits."""
    sampler = Sampler(max_rows, vocab_size, torch.device("cpu"), DEFAULT_SEED)
    rows = list(range(len(reqs))) if rows is None else rows
    for row, req in zip(rows, reqs, strict=True):
        sampler.add_row(row, f"r{row}", req.params, req.tokens, len(req.prompt))
    return sampler, batch_of(reqs, rows, max_rows)


def batch_of(reqs: list[Req], rows: list[int], max_rows: int = 16) -> SampleBatch:
    width = max(len(req.tokens) + len(req.drafts) for req in reqs) + 2
    all_token_ids = torch.full((max_rows, width), 5, dtype=torch.int32)  # garbage behind the known tokens
    total_len = torch.zeros(max_rows, dtype=torch.int32)
    logit_rows, positions, local, inputs = [], [], [], []
    for row, req in zip(rows, reqs, strict=True):
        all_token_ids[row, : len(req.tokens)] = torch.tensor(req.tokens, dtype=torch.int32)
        total_len[row] = len(req.tokens)
        for place, token in enumerate([req.tokens[-1], *req.drafts]):
            logit_rows.append(row)
            positions.append(len(req.tokens) - 1 + place)
            local.append(place)
            inputs.append(token)
    rows_np = np.array(logit_rows, np.int64)
    return SampleBatch(
        rows_np, torch.from_numpy(rows_np.copy()), torch.tensor(positions), all_token_ids, total_len, np.array(local), torch.tensor(inputs)
    )


def constrain(logits: np.ndarray, req: Req, place: int = 0) -> np.ndarray:
    """Everything before the temperature, for the logit behind `place` drafts."""
    x, p = logits.astype(np.float32).copy(), req.params
    output = req.output + req.drafts[:place]
    if p.allowed_token_ids is not None:
        for token in range(len(x)):
            if token not in p.allowed_token_ids:
                x[token] = -np.inf
    for token, value in (p.logit_bias or {}).items():
        x[token] = x[token] + np.float32(value)
    if len(output) < p.min_tokens:
        for token in p.all_stop_token_ids:
            x[token] = -np.inf
    known_output = [t for t in output if t >= 0]
    for token in set(req.prompt) | set(known_output):
        repetition = np.float32(p.repetition_penalty)
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in set(known_output):
        x[token] = x[token] - np.float32(p.frequency_penalty) * np.float32(known_output.count(token))
        x[token] = x[token] - np.float32(p.presence_penalty)
    for word in p.bad_words_token_ids:
        head = word[:-1]
        if not head or output[-len(head) :] == head:
            x[word[-1]] = -np.inf
    return x


def kept_tokens(x: np.ndarray, params: SamplingParams) -> list[int]:
    """Ids that min-p, top-k and top-p leave, likeliest first. x: logits after the temperature."""
    order = sorted((t for t in range(len(x)) if x[t] > -np.inf), key=lambda t: (-x[t], t))
    peak = x[order[0]]
    if params.min_p > 0:
        floor = peak + np.float32(math.log(params.min_p))
        order = [t for t in order if x[t] >= floor]
    if params.top_k:
        kth = x[order[min(params.top_k, len(order)) - 1]]
        order = [t for t in order if x[t] >= kth]
    if params.top_p < 1:
        weights = (torch.from_numpy(x[order] - peak).exp() * 2.0**44).long().tolist()  # units of 2^-44, as integers
        total, before, kept = sum(weights), 0, []
        for token, weight in zip(order, weights, strict=True):
            if before >= params.top_p * total:
                break
            kept.append(token)
            before += weight
        order = kept
    return order


def mix64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
    return z ^ (z >> 31)


def bits(seed: int, position: int, token: int, stream: int = 0) -> int:
    """31 random bits, by unbounded integers."""
    key = mix64((mix64((seed + GOLDEN) & MASK_64) + position * GOLDEN + stream * 0xBF58476D1CE4E5B9 + GOLDEN) & MASK_64)
    salt = token + 1
    salt = ((salt ^ (salt >> 16)) * 0x7FEB352D) & MASK_32
    salt = ((salt ^ (salt >> 15)) * 0x846CA68B) & MASK_32
    salt ^= salt >> 16
    x = (((salt ^ (key & MASK_32)) + (key >> 32)) * 0x7FEB352D) & MASK_32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK_32
    x = ((x ^ (x >> 16)) * 0x9E3779B1) & MASK_32
    return x ^ (x >> 15) ^ (0xFFFE0000 if x >> 31 else 0)  # a shift that copies the sign


def noise(seed: int, position: int, vocab_size: int) -> np.ndarray:
    u = (np.array([bits(seed, position, t) for t in range(vocab_size)]) + 0.5) * ((1 - 2.0**-24) * 2.0**-31)
    return -np.log(-np.log1p(-u))


def draw(logits: np.ndarray, req: Req, place: int = 0) -> int:
    """The token that a request gets from these logits."""
    x = constrain(logits, req, place)
    if req.params.is_greedy:
        return int(np.argmax(x))
    x = (x / np.float32(req.params.temperature)).astype(np.float32)
    kept = kept_tokens(x, req.params)
    assert req.params.seed is not None
    g = noise(req.params.seed, len(req.tokens) - 1 + place, len(x))
    return max(kept, key=lambda t: x[t].astype(np.float64) + g[t])


def nobody_asks() -> tuple[torch.Tensor, torch.Tensor]:
    """For `Sampler.record`, where no row has a grammar to tell the tokens to."""
    raise AssertionError("the tokens were asked for")
