"""A request that goes on in a new engine, behind the tokens that another has told, ends with the tokens it would have had."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from canter.core.errors import InvalidRequestError, QueueFullError
from canter.core.messages import AddRequest
from canter.core.sampling_params import RepetitionDetection, SamplingParams
from tests.engines import VOCAB_SIZE, Result, engine, mixed_requests, results, tiny_checkpoint

DERIVED = [
    dict(thinking_token_budget=4, thinking_start_ids=[9], thinking_end_ids=[8], logit_bias={9: 30.0}),
    dict(thinking_token_budget=6, thinking_start_ids=[9], thinking_end_ids=[7, 7, 8]),
    dict(repetition_detection=RepetitionDetection(max_pattern_size=2, min_count=4), allowed_token_ids=[20, 21]),
]
"""Options for which an engine keeps what it makes of the output so far."""


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), request.param, seed=4)


@pytest.fixture(scope="module")
def requests() -> list[AddRequest]:
    """Every sampling option, each with logprobs, half with logprobs of the prompt."""
    made = mixed_requests(60)
    for i, options in enumerate(DERIVED):
        params = SamplingParams(max_tokens=24, seed=50 + i, temperature=1.0, **options)
        made.append(AddRequest(f"derived{i}", [9, 30 + i, 40], params))
    for i, request in enumerate(made):
        request.sampling = request.sampling.clone(logprobs=2, prompt_logprobs=1 if i % 2 else None)
    return made


@pytest.fixture(scope="module")
def expected(model: Path, requests: list[AddRequest]) -> dict[str, Result]:
    core = engine(model)
    found = results(core, requests)
    core.shutdown()
    return found


def resumed(request: AddRequest, output: list[int]) -> AddRequest:
    return AddRequest(request.request_id, request.prompt_token_ids, request.sampling, output_token_ids=output)


@pytest.mark.parametrize("changes", [dict(), dict(async_scheduling=False, max_num_batched_tokens=48, max_num_seqs=7)], ids=str)
@pytest.mark.parametrize("when", ["before the first token", "after the first", "anywhere", "before the last"])
def test_the_rest_is_the_same(
    model: Path, requests: list[AddRequest], expected: dict[str, Result], when: str, changes: dict[str, object]
) -> None:
    cuts = {}
    for name, whole in expected.items():
        last = len(whole.token_ids) - 1
        anywhere = zlib.crc32(name.encode()) % (last + 1)
        cuts[name] = {"before the first token": 0, "after the first": min(1, last), "anywhere": anywhere, "before the last": last}[when]
    core = engine(model, **changes)
    found = results(core, [resumed(r, expected[r.request_id].token_ids[: cuts[r.request_id]]) for r in requests])
    for name, whole in expected.items():
        rest, cut = found[name], cuts[name]
        assert rest.token_ids == whole.token_ids[cut:], name
        assert rest.logprobs == whole.logprobs[cut:], name
        assert (rest.finish_reason, rest.stop_reason, rest.error) == (whole.finish_reason, whole.stop_reason, None)
        assert rest.prompt_logprobs == (None if cut else whole.prompt_logprobs), "what was told is not told again"
    stats = core.stats()
    assert stats.num_free_blocks == stats.num_blocks and stats.num_running == stats.num_waiting == 0
    core._scheduler.check_invariants()
    core.shutdown()


def test_it_finds_the_cache_of_its_prompt(model: Path) -> None:
    """Also where it asked for logprobs of its prompt, which the engine before has told. Usage counts no such hits."""
    core = engine(model)
    params = SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=1)
    [whole] = results(core, [AddRequest("a", list(range(3, 60)), params)]).values()
    before = core.stats()
    [rest] = results(core, [resumed(AddRequest("b", list(range(3, 60)), params), whole.token_ids[:3])]).values()
    assert rest.token_ids == whole.token_ids[3:] and rest.prompt_logprobs is None
    assert rest.num_cached_tokens == 0 and core.stats().prefix_hits == before.prefix_hits
    assert core.stats().num_scheduled_tokens - before.num_scheduled_tokens < 20, "57 and 3 tokens without the cache"
    core.shutdown()


def test_what_was_accepted_is_not_turned_away(model: Path) -> None:
    core = engine(model, max_num_queued_reqs=2)
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    for name, output in (("a", None), ("b", None), ("c", []), ("d", [5, 6])):
        core.add_request(AddRequest(name, [5], greedy, output_token_ids=output))
    with pytest.raises(QueueFullError):
        core.add_request(AddRequest("e", [5], greedy))
    core.shutdown()


def test_output_that_can_not_be_is_refused(model: Path) -> None:
    core = engine(model)
    greedy = SamplingParams(temperature=0.0, max_tokens=3)
    with pytest.raises(InvalidRequestError, match=f"output so far must hold token ids in .* got {VOCAB_SIZE}"):
        core.add_request(AddRequest("a", [5], greedy, output_token_ids=[VOCAB_SIZE]))
    with pytest.raises(InvalidRequestError, match="3 tokens of output so far leave none"):
        core.add_request(AddRequest("a", [5], greedy, output_token_ids=[5, 6, 7]))
    assert not core.has_work()
    core.shutdown()


def test_before_a_step_that_begins_requests_their_ids_are_told(model: Path) -> None:
    core = engine(model, max_num_seqs=2)
    told: list[list[str]] = []
    core.on_new_rows = told.append
    found = results(core, [AddRequest(f"r{i}", [5, 6], SamplingParams(temperature=0.0, max_tokens=i + 1)) for i in range(3)])
    assert len(found) == 3
    assert told == [["r0", "r1"], ["r1", "r2"]]
    core.shutdown()
