from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from canter.core.plan import TokenLogprobs
from canter.kernels.native.sampling import token_logprobs
from canter.runner.sampling import logprobs as module
from canter.runner.sampling import prompt_logprobs as prompt_module
from canter.runner.sampling.logprobs import LogprobGroup, LogprobTensors
from canter.runner.sampling.prompt_logprobs import (
    PromptLogprobPlanner,
    PromptSlice,
    prompt_entries,
    prompt_targets,
)


def compute_logprobs(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> LogprobTensors:
    return module.compute_logprobs(logits, chosen, num_top, token_logprobs)


def group_logprobs(raw: torch.Tensor, index: np.ndarray, counts: np.ndarray, chosen: torch.Tensor) -> list[LogprobGroup]:
    return module.group_logprobs(raw, index, counts, chosen, token_logprobs)


def compute_prompt_logprobs(rows: torch.Tensor, targets: torch.Tensor, num_top: int, vocab_size: int, fn: Any) -> list[LogprobTensors]:
    return prompt_module.compute_prompt_logprobs(rows, targets, num_top, vocab_size, fn, token_logprobs)


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("num_top", [0, 1, 20, 1023, 1024, 1025, 3000, 5000, -1])
def test_equals_the_whole_log_softmax(num_top: int) -> None:
    vocab_size = 3000
    logits = random_logits(3, vocab_size)
    chosen = torch.tensor([5, int(logits[1].argmax()), int(logits[2].argmin())])
    found = compute_logprobs(logits, chosen, num_top)
    width = vocab_size if num_top == -1 else min(num_top, vocab_size)
    whole = torch.log_softmax(logits.double(), -1)
    best = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :width]
    assert torch.equal(found.token_ids, torch.cat((chosen[:, None], best), 1))
    assert torch.allclose(found.logprobs.double(), whole.gather(1, found.token_ids), atol=2e-6)
    assert found.ranks.tolist() == [int((row >= row[token]).sum()) for row, token in zip(logits, chosen, strict=True)]
    assert found.ranks[1] == 1 and found.ranks[2] == vocab_size


def test_equal_logits_are_listed_by_id_and_share_a_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]])
    found = compute_logprobs(logits, torch.tensor([2]), 3)
    assert found.token_ids.tolist() == [[2, 1, 2, 4]] and found.ranks.tolist() == [3]


def test_excluded_tokens_have_no_probability() -> None:
    logits = torch.full((1, 300), -np.inf)
    logits[0, 7] = 2.0
    found = compute_logprobs(logits, torch.tensor([7]), 2)
    assert found.logprobs[0].tolist() == [0.0, 0.0, -np.inf]


def test_a_row_gets_the_same_alone_and_in_company() -> None:
    logits = random_logits(9, 5003)
    chosen = torch.arange(9)
    together = compute_logprobs(logits, chosen, 7)
    for i in range(9):
        alone = compute_logprobs(logits[i : i + 1].clone(), chosen[i : i + 1], 7)
        assert torch.equal(alone.logprobs[0], together.logprobs[i]) and torch.equal(alone.token_ids[0], together.token_ids[i])


def test_groups_by_wanted_count() -> None:
    logits = random_logits(4, 50)
    index = np.array([1, 4, 6, 9])
    groups = group_logprobs(logits, index, np.array([2, 0, 2, -1]), torch.tensor([3, 4, 5, 6]))
    assert [(g.index.tolist(), tuple(g.data.token_ids.shape)) for g in groups] == [([9], (1, 51)), ([4], (1, 1)), ([1, 6], (2, 3))]
    assert groups[2].data.token_ids[:, 0].tolist() == [3, 5]


@pytest.mark.parametrize("num_positions", [1, 1023, 1024, 1025, 2500])
def test_prompt_logprobs_take_the_head_in_slices(num_positions: int) -> None:
    head = random_logits(8, 40, seed=1)
    hidden, targets = random_logits(num_positions, 8, seed=2), torch.arange(num_positions) % 40
    seen: list[int] = []

    def logits_fn(rows: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return hidden[rows] @ head

    results = compute_prompt_logprobs(torch.arange(num_positions), targets, 3, 40, logits_fn)
    assert sum(seen) == num_positions and max(seen) <= 1024
    entries = prompt_entries([tensor for result in results for tensor in result.tensors])
    whole = compute_logprobs(hidden @ head, targets, 3)
    assert len(entries) == num_positions and all(isinstance(entry, TokenLogprobs) for entry in entries)
    assert [entry.token_ids for entry in entries] == whole.token_ids.tolist()
    assert np.allclose([entry.logprobs for entry in entries], whole.logprobs.numpy(), atol=1e-4)


def test_slices_shrink_with_the_vocabulary() -> None:
    seen: list[int] = []

    def logits_fn(rows: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return torch.zeros(len(rows), 1 << 18)

    compute_prompt_logprobs(torch.arange(70), torch.zeros(70, dtype=torch.int64), 0, 1 << 18, logits_fn)
    assert seen == [64, 6]


def test_planner_covers_each_prompt_position_once() -> None:
    planner = PromptLogprobPlanner()
    planner.add("a", 10, 2)
    planner.add("quiet", 10, None)
    assert planner.take("a", 0, 4) == PromptSlice(0, 4, 1, 2)
    assert planner.take("quiet", 0, 4) is None
    assert planner.take("a", 4, 6) == PromptSlice(0, 5, 5, 2)  # the last position predicts the first output token
    assert planner.take("a", 10, 1) is None


def test_planner_after_preemption_delivers_only_what_is_missing() -> None:
    planner = PromptLogprobPlanner()
    planner.add("a", 10, -1)
    planner.take("a", 0, 4)
    planner.add("a", 10, -1)
    assert planner.take("a", 0, 3) is None
    assert planner.take("a", 3, 4) == PromptSlice(1, 4, 5, -1)
    assert planner.take("a", 7, 8) == PromptSlice(0, 2, 8, -1)
    planner.forget("a")
    planner.forget("a")
    assert planner.take("a", 9, 1) is None


def test_planner_refuses_a_gap_and_a_single_token_prompt_has_nothing() -> None:
    planner = PromptLogprobPlanner()
    planner.add("a", 10, 1)
    with pytest.raises(RuntimeError, match="skipped"):
        planner.take("a", 4, 2)
    planner.add("one", 1, 1)
    assert planner.take("one", 0, 1) is None


def test_targets_are_the_following_prompt_tokens() -> None:
    tokens = torch.arange(30, dtype=torch.int32).view(2, 15)
    assert prompt_targets(tokens, 1, PromptSlice(1, 4, 5, 0)).tolist() == [20, 21, 22]
