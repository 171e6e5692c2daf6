"""Chunked, prompt-plus-window and ALiBi attention against the rule written out, key by key."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from canter.kernels.inputs import attention_case
from canter.kernels.ops import OPS

REQUESTS = ((1, 33), (7, 7), (20, 50))
HEADS = (6, 2)
SCALE = 64**-0.5


def written_out(case: tuple[Tensor, ...], sees: Callable[[int, int, int], bool], bias: Callable[[int, int], float]) -> Tensor:
    """`sees(b, i, j)`: whether the query at i of request b sees the key at j. `bias(h, i - j)`: what the score gains."""
    q, keys, values, table, starts, lengths = case[:6]
    keys, values = keys.transpose(2, 3).flatten(3).float(), values.float()
    out = torch.zeros_like(q)
    for b, (queries, length) in enumerate(REQUESTS):
        assert lengths[b] == length
        for t in range(queries):
            i = length - queries + t
            places = [(int(table[b, j // 16]), j % 16, j) for j in range(i + 1) if sees(b, i, j)]
            for h in range(HEADS[0]):
                row, head = int(starts[b]) + t, h // (HEADS[0] // HEADS[1])
                scores = [math.fsum((q[row, h] * keys[block, head, at]).tolist()) * SCALE + bias(h, i - j) for block, at, j in places]
                weights = torch.tensor(scores).softmax(0)
                out[row, h] = sum(w * values[block, head, at] for w, (block, at, _) in zip(weights, places, strict=True))
    return out


@pytest.mark.parametrize("chunk", [1, 5, 16, 24, 64])
def test_a_chunk_hides_what_lies_before_it(chunk: int) -> None:
    case = attention_case(torch.Generator().manual_seed(1), torch.float32, requests=REQUESTS)
    expected = written_out(case, lambda b, i, j: j // chunk == i // chunk, lambda h, d: 0.0)
    torch.testing.assert_close(OPS["paged_attention"].reference(*case, chunk=chunk), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [1, 4, 17, 100])
def test_a_prompt_is_seen_beside_the_window(window: int) -> None:
    case = list(attention_case(torch.Generator().manual_seed(2), torch.float32, requests=REQUESTS))
    case[7] = window
    prompts = torch.tensor([9, 20, 37], dtype=torch.int32)  # behind, beyond and within what is computed
    expected = written_out(tuple(case), lambda b, i, j: j < prompts[b] or i - j < window, lambda h, d: 0.0)
    table, dead = case[3], (33 - window) // 16
    table[0, 1:dead] = 10**6  # a gap that was given away
    torch.testing.assert_close(OPS["paged_attention"].reference(*case, prompt_lens=prompts), expected, atol=1e-5, rtol=1e-4)


def test_slopes_take_from_keys_by_their_distance() -> None:
    case = attention_case(torch.Generator().manual_seed(3), torch.float32, requests=REQUESTS)
    slopes = torch.tensor([0.5, 0.25, 0.1, 1.0, 0.01, 0.0])
    expected = written_out(case, lambda b, i, j: True, lambda h, d: -float(slopes[h]) * d)
    torch.testing.assert_close(OPS["paged_attention"].reference(*case, slopes=slopes), expected, atol=1e-5, rtol=1e-4)
