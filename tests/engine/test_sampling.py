"""Every sampling parameter through the whole engine: scheduler, runner, model and sampler, against plain loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canter.core.messages import AddRequest
from canter.core.sampling_params import SamplingParams
from tests.engines import VOCAB_SIZE, Oracle, engine, model_runner, results, run, tiny_checkpoint
from tests.runner.sampling.naive import Req, draw

EOS = 2
KINDS: list[dict[str, Any]] = [
    dict(temperature=0.0, repetition_penalty=1.8),
    dict(temperature=0.0, repetition_penalty=0.6, presence_penalty=0.4),
    dict(temperature=0.0, presence_penalty=1.5),
    dict(temperature=0.0, frequency_penalty=-0.7),
    dict(temperature=0.9, frequency_penalty=0.9, presence_penalty=-0.3, repetition_penalty=1.1),
    dict(temperature=1.0, min_tokens=9, stop_token_ids=[*range(5, 100)]),
    dict(temperature=1.0, stop_token_ids=[*range(5, 40)]),
    dict(temperature=1.0, logit_bias={EOS: 5.0}),
    dict(temperature=1.0, logit_bias={EOS: 5.0}, ignore_eos=True),
    dict(temperature=1.0, logit_bias={EOS: 50.0, 7: 45.0}, min_tokens=4),
    dict(temperature=0.8, bad_words_token_ids=[[i] for i in range(3, 90)] + [[100, 101], [102, 103, 104]]),
    dict(temperature=1.0, allowed_token_ids=[100, 101, 102, 103], bad_words_token_ids=[[100, 101], [101, 102, 103], [103]]),
    dict(temperature=0.0, logit_bias={50: 100.0, 51: 99.0}, bad_words_token_ids=[[50, 50, 50], [51, 51]]),
    dict(temperature=1.7, top_k=4),
    dict(temperature=1.4, top_p=0.6),
    dict(temperature=1.9, min_p=0.2),
    dict(temperature=1.3, top_k=30, top_p=0.9, min_p=0.02, presence_penalty=0.5),
    dict(temperature=0.6, allowed_token_ids=[EOS, 60], min_tokens=5),
]


def make_requests(seed: int = 0) -> list[AddRequest]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, VOCAB_SIZE, 35).tolist()
    requests = []
    for i, kind in enumerate(KINDS):
        prompt = shared[: int(rng.integers(0, 35))] + rng.integers(3, VOCAB_SIZE, int(rng.integers(1, 30))).tolist()
        params = SamplingParams(**{"seed": 40 + i, "max_tokens": 18, "eos_token_ids": [EOS], **kind})
        requests.append(AddRequest(f"r{i}", prompt, params))
    return requests


def plain_loop(oracle: Oracle, request: AddRequest) -> tuple[list[int], str, int | None]:
    """Output, finish reason and stop reason, one token after the other from whole forward passes."""
    params, state = request.sampling, Req(request.sampling, request.prompt_token_ids)
    while True:
        token_id = draw(oracle.logits(state.tokens)[-1].numpy(), state)
        state.output.append(token_id)
        if token_id in params.all_stop_token_ids and len(state.output) >= params.min_tokens:
            is_eos = token_id in params.eos_token_ids and not params.ignore_eos
            return state.output, "stop", None if is_eos else token_id
        if len(state.output) == params.max_tokens:
            return state.output, "length", None


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), request.param, seed=4)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, tuple[list[int], str, int | None]]:
    oracle = Oracle(model)
    found = {request.request_id: plain_loop(oracle, request) for request in make_requests()}
    assert {finish for _, finish, _ in found.values()} == {"stop", "length"}
    return found


SMALL = dict(max_model_len=90, max_num_batched_tokens=64)


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(async_scheduling=False),
        dict(max_num_batched_tokens=20, max_num_seqs=7, long_prefill_token_threshold=5),
        dict(SMALL, num_gpu_blocks_override="few"),
        dict(SMALL, num_gpu_blocks_override="few", async_scheduling=False, block_size=4),
    ],
    ids=str,
)
def test_tokens_equal_plain_loops(model: Path, expected: dict[str, Any], changes: dict[str, Any]) -> None:
    few = changes.get("num_gpu_blocks_override") == "few"
    if few:
        sixteen, four = (10, 30) if "llama" in model.name else (30, 64)
        changes = {**changes, "num_gpu_blocks_override": four if "block_size" in changes else sixteen}
    core = engine(model, **changes)
    found = results(core, make_requests())
    assert {name: (r.token_ids, r.finish_reason, r.stop_reason) for name, r in found.items()} == expected
    assert not few or core.stats().num_preemptions > 0
    assert core.stats().num_free_blocks == core.stats().num_blocks
    core.shutdown()


def test_requests_without_a_seed_differ_and_a_restart_repeats_them(model: Path) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12)
    requests = [AddRequest(f"r{i}", [5, 6, 7], params) for i in range(8)]

    def outputs(seed: int) -> list[list[int]]:
        core = engine(model, seed=seed)
        found = run(core, requests)
        again = run(core, requests)
        core.shutdown()
        return [*found.values(), *again.values()]

    first = outputs(0)
    assert len({tuple(tokens) for tokens in first}) == 16
    assert outputs(0) == first
    assert not {tuple(t) for t in outputs(1)} & {tuple(t) for t in first}


def test_requests_without_a_seed_go_on_after_preemption_as_if_nothing_had_been(model: Path) -> None:
    """The seed made for a request lasts for its life, and no longer."""
    requests = [AddRequest(f"r{i}", [5, 6, 7 + i], SamplingParams(temperature=1.5, max_tokens=60)) for i in range(8)]
    roomy = engine(model, max_model_len=90)
    expected = run(roomy, requests)
    roomy.shutdown()
    tight = engine(model, max_model_len=90, num_gpu_blocks_override=10 if "llama" in model.name else 30)
    assert run(tight, requests) == expected
    assert tight.stats().num_preemptions > 0
    assert not model_runner(tight)._sampler._made_seeds  # type: ignore[attr-defined]
    tight.shutdown()
