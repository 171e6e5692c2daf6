"""Chunked, prompt-plus-window and ALiBi attention against the rule written out, key by key; blocks out of sight are not read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from canter.kernels.inputs import attention_case
from canter.kernels.ops import Kernel, implementations

REQUESTS = ((1, 33), (7, 7), (20, 50))
HEADS = (6, 2)
SCALE = 64**-0.5


@pytest.fixture(params=["native", "reference"])
def attend(request: pytest.FixtureRequest) -> Kernel:
    (fn,) = (impl.fn for impl in implementations("paged_attention") if impl.provider == request.param)
    return fn


def written_out(case: tuple[Tensor, ...], sees: Callable[[int, int, int], bool], bias: Callable[[int, int], float]) -> Tensor:
    """`sees(b, i, j)`: whether the query at i of request b sees the key at j. `bias(h, i - j)`: what the score gains."""
    q, keys, values, table, starts, lengths = case[:6]
    keys, values = keys.transpose(2, 3).flatten(3).float(), values.float()
    out = torch.zeros(*q.shape[:2], values.shape[3])
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
def test_a_chunk_hides_what_lies_before_it(chunk: int, attend: Kernel) -> None:
    case = attention_case(torch.Generator().manual_seed(1), torch.float32, requests=REQUESTS, chunk=chunk)
    expected = written_out(case, lambda b, i, j: j // chunk == i // chunk, lambda h, d: 0.0)
    torch.testing.assert_close(attend(*case), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [1, 4, 17, 100])
def test_a_prompt_is_seen_beside_the_window(window: int, attend: Kernel) -> None:
    prompts = (9, 20, 37)  # behind, beyond and within what is computed
    case = attention_case(torch.Generator().manual_seed(2), torch.float32, requests=REQUESTS, window=window, prompt_lens=prompts)
    expected = written_out(case, lambda b, i, j: j < prompts[b] or i - j < window, lambda h, d: 0.0)
    table, dead = case[3], (33 - window) // 16
    table[0, 1:dead] = 10**6  # a gap that was given away
    torch.testing.assert_close(attend(*case), expected, atol=1e-5, rtol=1e-4)


def test_slopes_take_from_keys_by_their_distance(attend: Kernel) -> None:
    case = attention_case(torch.Generator().manual_seed(3), torch.float32, requests=REQUESTS)
    slopes = torch.tensor([0.5, 0.25, 0.1, 1.0, 0.01, 0.0])
    expected = written_out(case, lambda b, i, j: True, lambda h, d: -float(slopes[h]) * d)
    torch.testing.assert_close(attend(*case[:-1], slopes), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("value_dim", [4, 40, 100])
def test_values_are_as_wide_as_they_are(value_dim: int, attend: Kernel) -> None:
    case = attention_case(torch.Generator().manual_seed(4), torch.float32, requests=REQUESTS, value_dim=value_dim)
    expected = written_out(case, lambda b, i, j: True, lambda h, d: 0.0)
    torch.testing.assert_close(attend(*case), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        ({"chunk": 512}, range(4096, 4501)),
        ({"chunk": 4500}, [4500]),
        ({"window": 300, "prompt_lens": (80,)}, [*range(80), *range(4201, 4501)]),
        ({"window": 300, "prompt_lens": (0,)}, range(4201, 4501)),
    ],
)
def test_only_blocks_in_sight_are_read(mask: dict[str, Any], seen: Sequence[int], attend: Kernel) -> None:
    """The table says nothing of the others: what it names instead is not there."""
    case = attention_case(torch.Generator().manual_seed(5), torch.float32, requests=((1, 4501),), block_size=16, **mask)
    expected = attend(*case)
    blocks = {position // 16 for position in seen}
    table = case[3]
    table[0, [i for i in range(table.shape[1]) if i not in blocks]] = -(10**6)
    torch.testing.assert_close(attend(*case), expected, atol=0, rtol=0)
    for block in (min(blocks), max(blocks)):
        spoiled = table.clone()
        spoiled[0, block] = -1
        with pytest.raises(IndexError, match="request 0"):
            attend(*case[:3], spoiled, *case[4:])


def test_a_prompt_and_chunks_are_refused(attend: Kernel) -> None:
    case = attention_case(torch.Generator().manual_seed(6), torch.float32, requests=REQUESTS, chunk=16)
    with pytest.raises(ValueError, match="chunks"):
        attend(*case[:-2], torch.ones(3, dtype=torch.int32))


def test_a_prompt_of_less_than_nothing_is_refused(attend: Kernel) -> None:
    case = attention_case(torch.Generator().manual_seed(7), torch.float32, requests=REQUESTS, window=4)
    with pytest.raises(IndexError, match="request 1"):
        attend(*case[:-2], torch.tensor([1, -1, 2], dtype=torch.int32))
