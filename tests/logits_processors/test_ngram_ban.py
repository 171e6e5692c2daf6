"""The bundled n-gram ban against its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from canter.core.sampling_params import SamplingParams
from canter.logits_processors.interface import AddedRow, BatchUpdate, LogitsBatch, ProcessorConfig
from canter.logits_processors.ngram_ban import NGramBan

VOCAB = 6


def banned(output: list[int], size: int, window: int, whitelist: list[int]) -> set[int]:
    recent = output[-window:]
    found = set()
    for token in range(VOCAB):
        gram = ([*recent, token])[-size:]
        grams = [recent[i : i + size] for i in range(len(recent) - size + 1)]
        if len(gram) == size and gram in grams and token not in whitelist:
            found.add(token)
    return found


def apply(rows: list[tuple[list[int], list[int], dict]]) -> list[set[int]]:
    ban = NGramBan(ProcessorConfig(VOCAB, 8, 100, torch.device("cpu")))
    for row, (prompt, output, args) in enumerate(rows):
        params = SamplingParams(extra_args=args)
        NGramBan.validate_params(params)
        ban.update_state(BatchUpdate(added=[AddedRow(row, params, prompt + output, len(prompt))]))
    tokens = [torch.tensor(prompt + output, dtype=torch.int32) for prompt, output, _ in rows]
    batch = LogitsBatch(list(range(len(rows))), tokens, [len(prompt) for prompt, _, _ in rows])
    logits = ban.apply(torch.zeros(len(rows), VOCAB), batch)
    ban.update_state(BatchUpdate(removed=list(range(len(rows)))))
    assert not ban._rules
    return [set(torch.isinf(line).nonzero().flatten().tolist()) for line in logits]


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=20)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(tokens, tokens, st.integers(1, 4), st.integers(4, 12), st.lists(st.integers(0, VOCAB - 1), max_size=2)), min_size=1)
)
def test_it_equals_the_definition_in_any_company(cases: list) -> None:
    cases = cases[:8]
    rows = [(p, o, {"ngram_size": n, "window_size": w, "whitelist_token_ids": a}) for p, o, n, w, a in cases]
    assert apply(rows) == [banned(o, n, w, a) for _, o, n, w, a in cases]


def test_by_hand() -> None:
    output = [1, 2, 3, 1, 2]
    assert apply([([9], output, {"ngram_size": 3})]) == [{3}]
    assert apply([([1, 2, 4], [1, 2], {"ngram_size": 3})]) == [set()], "the prompt does not count"
    assert apply([([], output, {"ngram_size": 3, "whitelist_token_ids": [3]})]) == [set()]
    assert apply([([], output, {"ngram_size": 3, "window_size": 4})]) == [set()], "the first gram has left the window"


@pytest.mark.parametrize(
    "args",
    [
        {"window_size": 5},
        {"ngram_size": 0},
        {"ngram_size": True},
        {"ngram_size": "3"},
        {"ngram_size": 1025},
        {"ngram_size": 2.0},
        {"ngram_size": 5, "window_size": 4},
        {"ngram_size": 5, "window_size": 2**17},
        {"ngram_size": 5, "whitelist_token_ids": 3},
        {"ngram_size": 5, "whitelist_token_ids": [-1]},
        {"ngram_size": 5, "whitelist_token_ids": ["x"]},
    ],
)
def test_arguments_that_make_no_sense(args: dict) -> None:
    with pytest.raises(ValueError, match=r"ngram_size|window_size|whitelist_token_ids"):
        NGramBan.validate_params(SamplingParams(extra_args=args))
