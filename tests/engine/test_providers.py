"""Right tokens with the torch references, and with native code for machines without vector instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from canter.core.messages import AddRequest
from canter.core.sampling_params import SamplingParams
from tests.engines import VOCAB_SIZE, Oracle, engine, results, tiny_checkpoint

NEAR_TIE = 1e-3


def some_requests() -> list[AddRequest]:
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    prompts = [[(7 * i + 3 * j) % 120 + 3 for j in range(1 + 9 * i)] for i in range(8)]
    return [AddRequest(f"r{i}", prompt, greedy) for i, prompt in enumerate(prompts)]


def greedy_tokens(model: Path | str) -> dict[str, list[int]]:
    core = engine(model, max_num_batched_tokens=64)
    found = {name: result.token_ids for name, result in results(core, some_requests()).items()}
    core.shutdown()
    return found


def assert_right(model: Path, found: dict[str, list[int]]) -> None:
    oracle = Oracle(model)
    for request in some_requests():
        tokens = found[request.request_id]
        logits = oracle.logits(request.prompt_token_ids + tokens)[len(request.prompt_token_ids) - 1 : -1]
        assert logits.shape == (len(tokens), VOCAB_SIZE)
        assert (logits.amax(-1) - logits[range(len(tokens)), tokens]).max() < NEAR_TIE


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_references(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str) -> None:
    model = tiny_checkpoint(tmp_path, family)
    monkeypatch.setenv("CANTER_KERNELS", "reference")
    assert_right(model, greedy_tokens(model))


def test_scalar_code(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "gemma3")
    script = "import json, sys; from tests.engine.test_providers import greedy_tokens; print(json.dumps(greedy_tokens(sys.argv[1])))"
    environment = {**os.environ, "CANTER_ISA": "scalar"}
    done = subprocess.run([sys.executable, "-c", script, str(model)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert_right(model, json.loads(done.stdout))
