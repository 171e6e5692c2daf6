"""Choosing tokens from rows of logits [L, V] float32: the meaning of the native kernels, and what serves a GPU.

Truncation, for a row's logits over its temperature in descending order, equal ones by ascending id: min-p keeps values
of at least max + log(min_p); top-k keeps those of at least the k-th (ties kept); top-p keeps, of what is left, the
shortest beginning whose share of the probability is at least p, never less than one token. top_k = V or more, top_p = 1
or more and log_min_p = -inf are off.

Probabilities are summed as integers (`masses`), so that a sum has one value in whatever order a device adds.
Nothing here reads a value back from a device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from canter.kernels.reference.random import negative_gumbel, position_keys

NEG_INF = float("-inf")
MASS_SCALE = 2.0**44
"""The likeliest token's mass. The sum over 2^18 tokens stays within 63 bits."""
IN_PROMPT = 1 << 30
"""In token counts: the token occurs in the prompt. The bits below count its occurrences in the output."""


def greedy_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value of each row and the lowest column that holds it; NaN counts as larger than all: [L], [L] int64."""
    columns = logits.argmax(-1, keepdim=True)
    return logits.gather(1, columns).squeeze(1), columns.squeeze(1)


def masses(values: Tensor, peak: Tensor) -> Tensor:
    """exp(values - peak) in units of 2^-44: int64. peak is the row's largest value."""
    return values.sub(peak).exp_().mul_(MASS_SCALE).to(torch.int64)


def keep_sorted(values: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> Tensor:
    """Which of the values [L, V], each row in its order, may be drawn: bool. Limits are [L]."""
    peak = values.amax(-1, keepdim=True)
    kth = values.gather(1, top_k.unsqueeze(1).clamp(max=values.shape[1]) - 1)
    candidate = (values >= kth) & (values > NEG_INF) & (values >= peak + log_min_p.unsqueeze(1))
    mass = masses(values, peak) * candidate
    before = mass.cumsum(-1) - mass
    # A row without top-p keeps tokens too unlikely to have a mass.
    share = torch.where(top_p >= 1.0, float("inf"), top_p).unsqueeze(1)
    return candidate & (before.to(torch.float64) < share * mass.sum(-1, keepdim=True).to(torch.float64))


def keep_tokens(logits: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> None:
    """Set the logits that truncation drops to -inf, in place. Rows whose largest logit is not finite have no meaning."""
    values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    keep = keep_sorted(values, top_k, top_p, log_min_p)
    logits.scatter_(1, ids, torch.where(keep, values, NEG_INF))


def draw_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    seed_keys: Tensor,
    positions: Tensor,
    salts: Tensor,
    truncates: bool,
    stream: int = 0,
) -> tuple[Tensor, Tensor]:
    """Draw a token of each row, the largest of logit plus Gumbel noise: [L] scores, [L] int64 tokens.

    Rows of temperature 0 take their largest logit. `seed_keys`, `positions` [L] int64 and `salts` [V] int32 say which
    random numbers are used (`random.py`). `truncates` False promises that no row's limits matter. A score is the row's
    largest logit over its temperature, NaN if any is: where it is not finite, the token means nothing.
    """
    draws = temperature > 0
    y = logits / torch.where(draws, temperature, 1.0).unsqueeze(1)
    peaks, best = greedy_tokens(y)
    if truncates:
        keep_tokens(y, top_k, top_p, log_min_p)
    noisy = y - negative_gumbel(position_keys(seed_keys, positions, stream), salts)
    return peaks, torch.where(draws, noisy.argmax(-1), best)


def allow_tokens(logits: Tensor, lines: Tensor, starts: Tensor, ids: Tensor) -> None:
    """Of logits `lines` [N] (distinct) keep those of ids[starts[n]] to ids[starts[n + 1]], and set all others to -inf, in place.

    All int64; starts [N + 1] ends with the number of ids.
    """
    at = lines.repeat_interleave(starts.diff(), output_size=ids.shape[0])
    kept = logits[at, ids]
    logits.index_fill_(0, lines, NEG_INF)
    logits[at, ids] = kept


def mask_tokens(logits: Tensor, lines: Tensor, masks: Tensor) -> None:
    """Of logits `lines` [N] int64 (distinct) keep those whose bit in `masks` [N, ceil(V / 32)] int32 is set, and set all others to
    -inf, in place. The lowest bit of a row's first word is token 0."""
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (masks.unsqueeze(2) >> bits & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits[lines] = logits[lines].masked_fill(~allowed, NEG_INF)


def add_to_tokens(logits: Tensor, lines: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add values [K] float32 to the logits (lines [K], ids [K]), in place. -inf may meet -inf, and stays."""
    logits.index_put_((lines, ids), values, accumulate=True)


def forbid_words(
    logits: Tensor,
    lines: Tensor,
    last: Tensor,
    prefixes: Tensor,
    lengths: Tensor,
    rows: Tensor,
    first: Tensor,
    drafts: Tensor,
    token_ids: Tensor,
    total_len: Tensor,
    input_ids: Tensor | None,
) -> None:
    """Set the logits (lines [K], last [K]) to -inf, in place, where the tokens before end in the prefix of the word.

    A word's prefix is the last `lengths` [K] of `prefixes` [K, M]. The tokens before a logit are those of its `rows` [K] from
    index `first` [K] on: the `total_len` [R] int32 known ones of `token_ids` [R, W] int32, then its `drafts` [K], the last of
    them the logit's own among `input_ids` [L] (None: no drafts). What has no type here is int64.
    """
    back = torch.arange(prefixes.shape[1] - 1, -1, -1, device=logits.device)  # tokens between a place and the logit
    drafts = drafts.unsqueeze(1)
    at = (total_len[rows].unsqueeze(1) + (drafts - 1)) - back
    tokens = token_ids[rows.unsqueeze(1), at.clamp(0, token_ids.shape[1] - 1)].to(torch.int64)
    if input_ids is not None:
        tokens = torch.where(back < drafts, input_ids[(lines.unsqueeze(1) - back).clamp_(min=0)], tokens)
    same = (tokens == prefixes) & (at >= first.unsqueeze(1))
    complete = (same | (back >= lengths.unsqueeze(1))).all(1)
    add_to_tokens(logits, lines, last, torch.where(complete, NEG_INF, 0.0))


def penalize(
    logits: Tensor,
    lines: Tensor,
    rows: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    draft_ids: Tensor,
    draft_counts: Tensor,
) -> None:
    """Apply penalties [N] to logits `lines` [N] (distinct), whose tokens are counted in counts[rows] [R, V] int32, in place.

    `draft_ids` [N, D] int64 with `draft_counts` [N, D] int32 count as output beside. Repetition first: a positive logit
    of a token that occurs is divided, another multiplied; then frequency x count and presence are subtracted.
    """
    x, seen = logits[lines], counts[rows]
    seen.scatter_add_(1, draft_ids, draft_counts)
    _repel(x, seen, repetition.unsqueeze(1))
    seen.bitwise_and_(IN_PROMPT - 1)
    x.sub_(seen.to(torch.float32).mul_(frequency.unsqueeze(1)))
    x.sub_(seen.clamp_(max=1).to(torch.float32).mul_(presence.unsqueeze(1)))
    logits.index_copy_(0, lines, x)


def _repel(x: Tensor, counts: Tensor, repetition: Tensor) -> None:
    """Divide positive logits of tokens that occur, multiply others. x [n, V] in place; repetition [n, 1].

    Of the quotient and the product, the smaller is meant when the penalty is above 1 and the larger when it is below;
    arithmetic does that several times faster than selections by a condition.
    """
    occurs = counts.clamp(max=1).to(torch.float32)
    factor = occurs.mul(repetition).add_(occurs.neg_().add_(1.0))  # the penalty or 1, exactly
    side = torch.where(repetition >= 1.0, 1.0, -1.0)
    product = x.mul(factor).mul_(side)
    x.div_(factor).mul_(side)
    torch.minimum(x, product, out=product)
    torch.mul(product, side, out=x)


def token_logprobs(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of `chosen` [L] and the `num_top` most likely tokens, equal ones by id.

    Returns ids [L, 1 + num_top] int64, the chosen one first, their logprobs float32, and ranks [L] int64: how many
    logits are at least the chosen one's. The normaliser is summed in float64.
    """
    ids = chosen.to(torch.int64).unsqueeze(1)
    own = logits.gather(1, ids)
    peak = logits.amax(-1, keepdim=True)
    normalizer = peak + logits.sub(peak).exp_().sum(-1, keepdim=True, dtype=torch.float64).log_().to(torch.float32)
    ranks = (logits >= own).sum(-1)
    values, top_ids = torch.sort(logits, dim=-1, descending=True, stable=True) if num_top else (logits, ids)
    found = torch.cat((own, values[:, :num_top]), 1).sub_(normalizer)
    return torch.cat((ids, top_ids[:, :num_top]), 1), found, ranks
