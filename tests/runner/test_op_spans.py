"""Recordings of a real engine: the ops of each forward lie within it, and add up to most of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from canter.core.messages import AddRequest
from canter.core.sampling_params import SamplingParams
from canter.core.timeline import Timeline
from canter.runner.op_spans import with_ops
from tests.engines import engine, run, tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("spans"), "llama")


def recorded(checkpoint: Path, path: Path, **changes: Any) -> list[dict[str, Any]]:
    core = engine(checkpoint, **changes)
    try:
        assert core.utility("start_profile", [str(path), 0, 0])
        run(core, [AddRequest("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))])
        assert core.utility("stop_profile", []) == str(path)
    finally:
        core.shutdown()
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def test_every_op_of_a_forward_is_a_span_within_it(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CANTER_KERNELS", raising=False)
    events = recorded(checkpoint, tmp_path / "t.json")
    spans = [event for event in events if event["ph"] == "X"]
    forwards = [event for event in spans if event["name"] == "forward"]
    assert len(forwards) >= 4

    def within(outer: dict[str, Any]) -> list[dict[str, Any]]:
        end = outer["ts"] + outer["dur"]
        return [
            e for e in spans if e["tid"] == outer["tid"] and e is not outer and outer["ts"] <= e["ts"] and e["ts"] + e["dur"] <= end + 1
        ]

    ops = [[span["name"] for span in within(forward)] for forward in forwards if within(forward)]
    assert len(ops) >= 4 and all(names == ops[0] for names in ops)
    assert {"rms_norm", "paged_attention"} < set(ops[0])
    products = [span for span in spans if "bytes" in span["args"]]
    assert products and all(span["args"]["bytes"] > 0 and " x " in span["args"]["weights"] for span in products)
    assert all(event["args"]["gb_a_second"] > 0 for event in events if event["name"] == "weights")
    assert sum(event["name"] == "weights" for event in events) >= 8  # of forwards and of logits


def test_eager_steps_have_no_ops(checkpoint: Path, tmp_path: Path) -> None:
    names = {event["name"] for event in recorded(checkpoint, tmp_path / "t.json", enforce_eager=True) if event["ph"] == "X"}
    assert names == {"schedule", "launch", "forward", "sample", "finish"}


def test_without_a_recording_work_is_left_alone() -> None:
    def work() -> int:
        return 1

    assert with_ops(Timeline(), work) is work
