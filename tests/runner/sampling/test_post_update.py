from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from canter.runner.sampling.post_update import post_update

ROWS, MAX_LEN, VOCAB = 4, 12, 9


def test_appends_counts_and_remembers() -> None:
    all_ids, lengths = torch.zeros(ROWS, MAX_LEN, dtype=torch.int32), torch.tensor([2, 5, 0, 3], dtype=torch.int32)
    last, counts = torch.tensor([70, 71, 72, 73]), torch.zeros(ROWS, VOCAB, dtype=torch.int32)
    rows = torch.tensor([3, -1, 0, 1])
    tokens = torch.tensor([[4, 5, 6], [8, 8, 8], [7, 1, 1], [2, 2, 3]])
    post_update(rows, tokens, torch.tensor([2, 3, 0, 3]), all_ids, lengths, last, counts)
    assert lengths.tolist() == [2, 8, 0, 5]
    assert all_ids[3].tolist() == [0, 0, 0, 4, 5, 0, 0, 0, 0, 0, 0, 0]
    assert all_ids[1].tolist() == [0, 0, 0, 0, 0, 2, 2, 3, 0, 0, 0, 0]
    assert not all_ids[0].any() and not all_ids[2].any()
    assert last.tolist() == [70, 3, 72, 5]
    assert counts[1].tolist() == [0, 0, 2, 1, 0, 0, 0, 0, 0] and counts[3].tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0]
    assert not counts[0].any() and not counts[2].any()


def test_padding_only_changes_nothing() -> None:
    all_ids, lengths = torch.full((ROWS, MAX_LEN), 3), torch.full((ROWS,), MAX_LEN)
    last = torch.arange(ROWS)
    post_update(torch.tensor([-1, -1]), torch.tensor([[1], [2]]), torch.tensor([1, 1]), all_ids, lengths, last)
    assert (all_ids == 3).all() and (lengths == MAX_LEN).all() and last.tolist() == [0, 1, 2, 3]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equals_a_loop(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 3))
    rows = data.draw(st.permutations(range(ROWS)))[: data.draw(st.integers(1, ROWS))]
    rows = [row if data.draw(st.booleans()) else -1 for row in rows]
    starts = [data.draw(st.integers(0, MAX_LEN - width)) for _ in range(ROWS)]
    tokens = [[data.draw(st.integers(0, VOCAB - 1)) for _ in range(width)] for _ in rows]
    numbers = [data.draw(st.integers(0, width)) for _ in rows]
    all_ids = torch.arange(ROWS * MAX_LEN).view(ROWS, MAX_LEN)
    lengths, last, counts = torch.tensor(starts), torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS, VOCAB, dtype=torch.int32)
    expected_ids, expected_counts, expected_last = all_ids.tolist(), counts.tolist(), last.tolist()
    for row, line, number in zip(rows, tokens, numbers, strict=True):
        for offset in range(number if row >= 0 else 0):
            expected_ids[row][starts[row] + offset] = expected_last[row] = line[offset]
            expected_counts[row][line[offset]] += 1
    post_update(torch.tensor(rows), torch.tensor(tokens), torch.tensor(numbers), all_ids, lengths, last, counts)
    assert all_ids.tolist() == expected_ids and counts.tolist() == expected_counts and last.tolist() == expected_last
