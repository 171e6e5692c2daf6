"""Drawing a token from each row: the largest of logit plus Gumbel noise is a sample of the softmax."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from canter.runner.sampling.random import negative_gumbel
from canter.runner.sampling.rows import IntArray, chunks, first_argmax, take_rows, upload
from canter.runner.sampling.truncation import NEG_INF, Kept


def draw_from_all(x: Tensor, index: IntArray, keys: Tensor, salts: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from the whole rows `index` of x [L, V]: keys [n, 2], salts [V] -> winning scores [n] and tokens [n] int64."""
    scores, tokens = [], []
    for part in chunks(len(index), x.shape[1], x.device):
        noise = negative_gumbel(keys[part], salts)
        best, token = first_argmax(torch.sub(take_rows(x, index[part]), noise, out=noise))
        scores.append(best)
        tokens.append(token)
    return torch.cat(scores), torch.cat(tokens)


def draw_from_kept(kept: Kept, keys: Tensor, salts: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from what truncation left: noise is made for the candidates only, and is the same as in a draw from all.

    keys [n, 2] -> largest logits [n] and tokens [n]. Equal scores go to the lowest id, as in `first_argmax`.
    """
    scores = kept.values - negative_gumbel(keys, salts[kept.ids])
    scores.masked_fill_(~kept.keep, NEG_INF)
    is_best = (scores == scores.amax(-1, keepdim=True)) & kept.keep
    last = salts.shape[0] - 1
    return kept.values.amax(-1), torch.where(is_best, kept.ids, last).amin(-1)


def mask_to_kept(x: Tensor, index: IntArray, sets: list[Kept]) -> None:
    """Set every token of rows `index` of x that truncation dropped to -inf, in place. `sets` cover `index`."""
    for kept in sets:
        at = upload(np.asarray(index[kept.index], np.int64), x.device)
        rows = torch.full((len(kept.index), x.shape[1]), NEG_INF, device=x.device)
        rows.scatter_(1, kept.ids, torch.where(kept.keep, kept.values, NEG_INF))
        x.index_copy_(0, at, rows)
