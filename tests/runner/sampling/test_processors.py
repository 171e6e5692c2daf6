from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from canter.core.sampling_params import SamplingParams
from canter.runner.sampling.pipeline import Sampler
from canter.runner.sampling.states import SampleBatch
from tests.runner.sampling import naive
from tests.runner.sampling.naive import Req

VOCAB = 12
NEG_INF = -np.inf


def greedy(**keywords: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, **keywords)  # type: ignore[arg-type]


def check(reqs: list[Req], logits: torch.Tensor | None = None) -> torch.Tensor:
    """`process` on the whole batch equals the naive rules on each row; returns the processed logits."""
    sampler, batch = naive.build(reqs, VOCAB, rows=list(range(len(reqs)))[::-1])
    count = sum(req.num_logits for req in reqs)
    if logits is None:
        logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(count)) * 2
    before = logits.clone()
    after = sampler.process(logits, batch)
    line = 0
    for req in reqs:
        for place in range(req.num_logits):
            np.testing.assert_array_equal(after[line].numpy(), naive.constrain(before[line].numpy(), req, place))
            line += 1
    return after


def test_allowed_ids_keep_their_logits_and_nothing_else() -> None:
    after = check([Req(greedy(allowed_token_ids=[2, 5])), Req(), Req(greedy(allowed_token_ids=[0]), drafts=[4])])
    assert torch.isfinite(after[0]).sum() == 2 and torch.isfinite(after[1]).all() and torch.isfinite(after[3]).sum() == 1


def test_logit_bias() -> None:
    check([Req(), Req(greedy(logit_bias={3: 4.5, 0: -100.0})), Req(greedy(logit_bias={3: -1.25}), drafts=[1, 2])])


@pytest.mark.parametrize("produced", [0, 1, 2, 3, 4])
def test_min_tokens_holds_back_stops_until_enough_are_out(produced: int) -> None:
    p = greedy(min_tokens=3, stop_token_ids=[7, 9], eos_token_ids=[0], max_tokens=10)
    after = check([Req(p, output=[4] * produced), Req(greedy(), output=[4])])
    assert torch.isinf(after[0, [0, 7, 9]]).all() == (produced < 3)


def test_min_tokens_counts_drafts() -> None:
    p = greedy(min_tokens=3, eos_token_ids=[0], max_tokens=10)
    after = check([Req(p, output=[4], drafts=[5, 6, 7])])
    assert torch.isinf(after[:, 0]).tolist() == [True, True, False, False]


def test_min_tokens_leaves_eos_alone_when_it_ends_nothing() -> None:
    after = check([Req(greedy(min_tokens=3, eos_token_ids=[0], stop_token_ids=[1], ignore_eos=True, max_tokens=10))])
    assert torch.isfinite(after[0, 0]) and torch.isinf(after[0, 1])


def test_ids_outside_the_vocabulary_are_ignored() -> None:
    p = greedy(min_tokens=2, eos_token_ids=[VOCAB + 5], bad_words_token_ids=[[VOCAB]], max_tokens=9)
    after = check_unchanged(Req(p, output=[]))
    assert torch.isfinite(after).all()


def check_unchanged(req: Req) -> torch.Tensor:
    sampler, batch = naive.build([req], VOCAB)
    logits = torch.randn(1, VOCAB)
    before = logits.clone()
    after = sampler.process(logits, batch)
    assert torch.equal(after, before)
    return after


PENALTIES = greedy(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.25)


def test_penalties_count_output_and_repetition_counts_the_prompt_too() -> None:
    check([Req(PENALTIES, prompt=[1, 1, 2], output=[3, 3, 4, 1]), Req(), Req(greedy(repetition_penalty=0.5), prompt=[0, 11])])


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, 2.0, 0.0, 1.0]])
    req = Req(greedy(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25), prompt=[0, 1], output=[2, 2])
    sampler, batch = naive.build([req], 6)
    assert sampler.process(logits, batch).tolist() == [[1.0, -4.0, 0.0, 2.0, 0.0, 1.0]]


def test_penalties_across_the_draft_boundary() -> None:
    """Drafts before a logit count as output, each once, whether new or repeated; the input of the first logit does not."""
    check([Req(PENALTIES, output=[6], drafts=[6, 7, 7]), Req(PENALTIES, output=[8, 8], drafts=[]), Req(PENALTIES, output=[9], drafts=[2])])


def test_rejected_filler_drafts_count_nothing() -> None:
    check([Req(PENALTIES, output=[6], drafts=[-1, -1])])


def test_penalties_after_preemption_equal_an_uninterrupted_run() -> None:
    fresh = Req(PENALTIES, prompt=[1, 2], output=[3, 4, 3])
    sampler = Sampler(4, VOCAB, torch.device("cpu"), 0)
    sampler.add_row(2, "a", PENALTIES, [1, 2, 3], 2)
    sampler.remove_row(2)
    sampler.add_row(2, "other", PENALTIES, [9, 9, 9, 9], 1)  # leaves its counts in the row
    sampler.remove_row(2)
    sampler.add_row(2, "a", PENALTIES, fresh.tokens, 2)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    expected = naive.constrain(logits[0].numpy(), fresh)
    np.testing.assert_array_equal(sampler.process(logits, naive.batch_of([fresh], [2], 4))[0].numpy(), expected)


def test_count_tables_exist_only_once_a_request_needs_them() -> None:
    sampler = Sampler(4, VOCAB, torch.device("cpu"), 0)
    sampler.add_row(0, "a", greedy(), [1], 1)
    assert sampler._penalties.token_counts is None
    sampler.add_row(1, "b", PENALTIES, [1, 5, 5], 1)
    counts = sampler._penalties.token_counts
    assert counts is not None and counts[1, 5] == 2 and counts[1, 1] > 2


def test_bad_words() -> None:
    words = [[4], [1, 5], [5, 6, 7], [3, 8]]
    check(
        [
            Req(greedy(bad_words_token_ids=words), output=[1]),
            Req(greedy(bad_words_token_ids=words), output=[2, 5, 6]),
            Req(greedy(bad_words_token_ids=[[9, 10]]), output=[9, 9]),
            Req(greedy(), output=[1]),
        ]
    )


def test_bad_words_look_at_the_output_only() -> None:
    after = check([Req(greedy(bad_words_token_ids=[[3, 8], [2, 3, 9]]), prompt=[1, 2, 3], output=[])])
    assert torch.isfinite(after).all()
    after = check([Req(greedy(bad_words_token_ids=[[2, 3, 9]]), prompt=[1, 2], output=[3])])
    assert torch.isfinite(after).all()


def test_bad_words_across_the_draft_boundary() -> None:
    """A prefix may end in drafts, start in the output, or lie in drafts alone; the last sampled token is no draft."""
    p = greedy(bad_words_token_ids=[[6, 7, 8], [7, 8, 9], [5, 6, 10], [6, 6, 11]])
    after = check([Req(p, output=[5, 6], drafts=[7, 8, 3]), Req(p, output=[6], drafts=[6])])
    forbidden = [[t for t in range(VOCAB) if torch.isinf(after[line, t])] for line in range(6)]
    assert forbidden == [[10], [8], [9], [], [], [11]]


def test_two_bad_words_with_one_end() -> None:
    after = check([Req(greedy(bad_words_token_ids=[[1, 5], [2, 5], [3, 5]]), output=[2])])
    assert torch.isinf(after[0, 5])


def test_temperature_divides_drawing_rows_only() -> None:
    hot, plain = SamplingParams(temperature=0.7, seed=1), SamplingParams(temperature=1.0, seed=1)
    sampler, batch = naive.build([Req(hot), Req(), Req(plain), Req(hot)], VOCAB)
    logits = torch.randn(4, VOCAB)
    before = logits.clone()
    after = sampler.process(logits, batch)
    assert torch.equal(after[[1, 2]], before[[1, 2]]) and torch.equal(after[[0, 3]], before[[0, 3]] / torch.tensor(0.7))


def test_process_masks_what_truncation_drops() -> None:
    reqs = [Req(SamplingParams(temperature=1.0, top_k=2)), Req(), Req(SamplingParams(temperature=2.0, top_p=0.4))]
    sampler, batch = naive.build(reqs, VOCAB)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5)) * 3
    before = logits.clone()
    after = sampler.process(logits, batch)
    assert torch.equal(after[1], before[1])
    for line, scale in ((0, 1.0), (2, 2.0)):
        x = before[line] / scale
        kept = naive.kept_tokens(x.numpy(), reqs[line].params)
        assert torch.isfinite(after[line]).nonzero().flatten().tolist() == sorted(kept)
        assert torch.equal(after[line, kept], x[kept])


def test_caches_follow_rows_and_parameters() -> None:
    sampler, batch = naive.build([Req(greedy(logit_bias={1: 1.0})), Req(greedy(logit_bias={2: 2.0}))], VOCAB)
    assert sampler.process(torch.zeros(2, VOCAB), batch).nonzero().tolist() == [[0, 1], [1, 2]]
    assert sampler.process(torch.zeros(2, VOCAB), batch).nonzero().tolist() == [[0, 1], [1, 2]]
    sampler.add_row(0, "new", greedy(logit_bias={7: 1.0}), [1], 1)
    assert sampler.process(torch.zeros(2, VOCAB), batch).nonzero().tolist() == [[0, 7], [1, 2]]
    swapped = SampleBatch(batch.rows_np[::-1].copy(), batch.rows.flip(0), batch.positions, batch.all_token_ids, batch.total_len)
    assert sampler.process(torch.zeros(2, VOCAB), swapped).nonzero().tolist() == [[0, 2], [1, 7]]


tokens = st.integers(0, VOCAB - 1)


@st.composite
def requests(draw: st.DrawFn) -> Req:
    maybe = lambda strategy: st.one_of(st.none(), strategy)  # noqa: E731
    p = greedy(
        allowed_token_ids=draw(maybe(st.lists(tokens, min_size=1, max_size=6, unique=True))),
        logit_bias=draw(maybe(st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 0.5, 100.0]), max_size=4))),
        min_tokens=draw(st.integers(0, 5)),
        max_tokens=20,
        eos_token_ids=draw(st.lists(tokens, max_size=2)),
        stop_token_ids=draw(maybe(st.lists(tokens, max_size=2))),
        repetition_penalty=draw(st.sampled_from([1.0, 1.2, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.3, -0.7])),
        bad_words_token_ids=draw(st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=4)),
    )
    lists = st.lists(tokens, max_size=5)
    return Req(p, prompt=draw(st.lists(tokens, min_size=1, max_size=5)), output=draw(lists), drafts=draw(st.lists(tokens, max_size=3)))


@settings(max_examples=60, deadline=None)
@given(st.lists(requests(), min_size=1, max_size=4))
def test_any_mixture_equals_the_naive_rules(reqs: list[Req]) -> None:
    check(reqs)


def test_new_output_is_counted_by_row_and_only_as_far_as_it_was_accepted() -> None:
    sampler = Sampler(4, 9, torch.device("cpu"), 0)
    sampler.record(np.array([0]), torch.tensor([0]), torch.tensor([[1]]), torch.tensor([1]), naive.nobody_asks)  # nobody counts yet
    sampler.add_row(3, "a", SamplingParams(presence_penalty=1.0), [5], 1)
    sampler.add_row(1, "b", SamplingParams(presence_penalty=1.0), [6], 1)
    sampler.record(np.array([3, 1]), torch.tensor([3, 1]), torch.tensor([[4, 5, 6], [2, 2, 3]]), torch.tensor([2, 3]), naive.nobody_asks)
    counts = sampler._penalties.token_counts
    assert counts is not None
    assert (counts & 0xFFFF)[3].tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0]
    assert (counts & 0xFFFF)[1].tolist() == [0, 0, 2, 1, 0, 0, 0, 0, 0]
    assert not counts[0].any() and not counts[2].any()
