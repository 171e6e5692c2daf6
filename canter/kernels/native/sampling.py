"""Native choice of tokens. Meaning: `canter.kernels.reference.sampling`."""

from __future__ import annotations

import torch
from torch import Tensor

from canter import _native
from canter.kernels.native.layout import contiguous, require
from canter.kernels.reference import sampling as reference
from canter.kernels.reference.random import stream_offset


def _addresses(tensors: tuple[Tensor, ...], *numbers: int) -> list[int]:
    """Arguments of the compiled module: where the tensors lie, then numbers."""
    return [*[t.data_ptr() for t in tensors], *numbers]


def _require_logits(op: str, logits: Tensor) -> tuple[int, int]:
    fits = logits.dim() == 2 and logits.shape[1] > 0 and logits.dtype == torch.float32 and logits.is_contiguous()
    require(fits and logits.device.type == "cpu", op, "contiguous float32 logits [L, V] on the CPU", logits)
    return logits.shape[0], logits.shape[1]


def _limits(op: str, rows: int, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    require(top_k.shape == top_p.shape == log_min_p.shape == (rows,), op, f"limits [{rows}]", top_k, top_p, log_min_p)
    return contiguous(top_k, torch.int64), contiguous(top_p, torch.float64), contiguous(log_min_p, torch.float32)


def greedy_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference."""
    rows, vocab = _require_logits("greedy_tokens", logits)
    scores, tokens = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    _native.greedy_tokens(logits.data_ptr(), scores.data_ptr(), tokens.data_ptr(), rows, vocab)
    return scores, tokens


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
    """As the reference; `truncates` changes nothing. Sums of probabilities and noise differ from it in the last places."""
    rows, vocab = _require_logits("draw_tokens", logits)
    fits = temperature.shape == seed_keys.shape == positions.shape == (rows,) and salts.shape == (vocab,)
    require(fits, "draw_tokens", f"temperature, seed_keys, positions [{rows}], salts [{vocab}]", temperature, seed_keys, positions, salts)
    limits = _limits("draw_tokens", rows, top_k, top_p, log_min_p)
    temperature, salts = contiguous(temperature, torch.float32), contiguous(salts, torch.int32)
    seed_keys, positions = contiguous(seed_keys, torch.int64), contiguous(positions, torch.int64)
    scores, tokens = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    places = (logits, temperature, *limits, seed_keys, positions, salts, scores, tokens)
    _native.draw_tokens(*_addresses(places, rows, vocab, stream_offset(stream)))
    return scores, tokens


def keep_tokens(logits: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> None:
    """As the reference; rows whose largest logit is not finite stay as they are."""
    rows, vocab = _require_logits("keep_tokens", logits)
    limits = _limits("keep_tokens", rows, top_k, top_p, log_min_p)
    _native.keep_tokens(*_addresses((logits, *limits), rows, vocab))


def allow_tokens(logits: Tensor, lines: Tensor, starts: Tensor, ids: Tensor) -> None:
    """As the reference."""
    rows, vocab = _require_logits("allow_tokens", logits)
    require(starts.shape == (lines.shape[0] + 1,), "allow_tokens", "lines [N], starts [N + 1], ids [K]", lines, starts, ids)
    lines, starts, ids = (contiguous(t, torch.int64) for t in (lines, starts, ids))
    _native.allow_tokens(*_addresses((logits, lines, starts, ids), lines.shape[0], rows, vocab))


def mask_tokens(logits: Tensor, lines: Tensor, masks: Tensor) -> None:
    """As the reference."""
    rows, vocab = _require_logits("mask_tokens", logits)
    fits = masks.shape == (lines.shape[0], (vocab + 31) // 32)
    require(fits, "mask_tokens", "lines [N], masks [N, ceil(V / 32)]", lines, masks)
    lines, masks = contiguous(lines, torch.int64), contiguous(masks, torch.int32)
    _native.mask_tokens(*_addresses((logits, lines, masks), lines.shape[0], rows, vocab))


def add_to_tokens(logits: Tensor, lines: Tensor, ids: Tensor, values: Tensor) -> None:
    """As the reference."""
    rows, vocab = _require_logits("add_to_tokens", logits)
    require(lines.shape == ids.shape == values.shape, "add_to_tokens", "lines, ids, values [K]", lines, ids, values)
    lines, ids, values = contiguous(lines, torch.int64), contiguous(ids, torch.int64), contiguous(values, torch.float32)
    _native.add_to_tokens(*_addresses((logits, lines, ids, values), lines.shape[0], rows, vocab))


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
    """As the reference."""
    num_lines, vocab = _require_logits("forbid_words", logits)
    columns = lines, last, lengths, rows, first, drafts
    fits = all(column.shape == (prefixes.shape[0],) for column in columns) and total_len.shape == (token_ids.shape[0],)
    fits = fits and token_ids.is_contiguous() and token_ids.dtype == total_len.dtype == torch.int32
    fits = fits and (input_ids is None or input_ids.shape == (num_lines,))
    require(fits, "forbid_words", "words [K], token_ids [R, W] int32, total_len [R] int32", *columns, prefixes, token_ids, total_len)
    lines, last, prefixes, lengths, rows, first, drafts = (
        contiguous(t, torch.int64) for t in (lines, last, prefixes, lengths, rows, first, drafts)
    )
    total_len = contiguous(total_len, torch.int32)
    inputs = None if input_ids is None else contiguous(input_ids, torch.int64)
    places = _addresses((logits, lines, last, prefixes, lengths, rows, first, drafts, token_ids, total_len))
    sizes = [*prefixes.shape, *token_ids.shape, num_lines, vocab]
    _native.forbid_words(*places, *[0 if inputs is None else inputs.data_ptr(), *sizes])


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
    """As the reference."""
    _, vocab = _require_logits("penalize", logits)
    number = lines.shape[0]
    fits = rows.shape == repetition.shape == frequency.shape == presence.shape == (number,) and counts.shape[1:] == (vocab,)
    fits = fits and counts.is_contiguous() and counts.dtype == torch.int32 and draft_ids.shape == draft_counts.shape
    require(
        fits and draft_ids.shape[0] == number, "penalize", "lines, rows, penalties [N], drafts [N, D], counts [R, V]", lines, rows, counts
    )
    lines, rows, draft_ids = (contiguous(t, torch.int64) for t in (lines, rows, draft_ids))
    penalties = [contiguous(t, torch.float32) for t in (repetition, frequency, presence)]
    draft_counts = contiguous(draft_counts, torch.int32)
    places = (logits, lines, rows, counts, *penalties, draft_ids, draft_counts)
    _native.penalize(*_addresses(places, number, vocab, draft_ids.shape[1], reference.IN_PROMPT))


def token_logprobs(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference, which also serves more than 1024 tokens: a sort is then what is asked for."""
    if num_top > _native.MAX_TOP_LOGPROBS:
        return reference.token_logprobs(logits, chosen, num_top)
    rows, vocab = _require_logits("token_logprobs", logits)
    require(chosen.shape == (rows,) and 0 <= num_top <= vocab, "token_logprobs", f"chosen [{rows}], at most {vocab} tokens", chosen)
    chosen = contiguous(chosen, torch.int64)
    ids, found = torch.empty((rows, 1 + num_top), dtype=torch.int64), torch.empty((rows, 1 + num_top))
    ranks = torch.empty(rows, dtype=torch.int64)
    places = (logits, chosen, ids, found, ranks)
    _native.token_logprobs(*_addresses(places, rows, vocab, num_top))
    return ids, found, ranks
