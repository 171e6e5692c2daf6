"""Recordings: what is in them, when they begin and end."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from canter.core import timeline as module
from canter.core.errors import EngineError
from canter.core.timeline import Timeline


def events(path: Path, kind: str = "X") -> list[dict]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == kind]


def test_without_a_recording_work_is_left_alone() -> None:
    def work() -> int:
        return 1

    assert Timeline().around("x", work) is work
    assert Timeline().stop() is None


def test_spans_of_all_threads(tmp_path: Path) -> None:
    timeline, path = Timeline(), tmp_path / "deep" / "t.json"
    assert timeline.start(str(path))
    assert not timeline.start(str(tmp_path / "other.json"))
    assert timeline.around("here", lambda: 7, step=3)() == 7
    thread = threading.Thread(target=timeline.around("there", lambda: None), name="worker")
    thread.start()
    thread.join()
    timeline.count("requests", running=2)
    with pytest.raises(ZeroDivisionError):
        timeline.around("fails", lambda: 1 // 0)()
    assert timeline.stop() == str(path)
    here, there, fails = events(path)
    assert (here["name"], here["args"], fails["name"]) == ("here", {"step": 3}, "fails")
    assert here["ts"] + here["dur"] <= there["ts"] and here["tid"] != there["tid"]
    assert {event["args"]["name"] for event in events(path, "M")} >= {"worker"}
    assert events(path, "C")[0]["args"] == {"running": 2}


def test_steps_before_and_after_are_left_out(tmp_path: Path) -> None:
    timeline, path = Timeline(), tmp_path / "t.json"
    timeline.start(str(path), skip_steps=2, max_steps=3)
    for step in range(8):
        timeline.next_step()
        timeline.around("step", lambda: None, step=step)()
    timeline.stop()
    assert [event["args"]["step"] for event in events(path)] == [2, 3, 4]


def test_a_forgotten_recording_is_bounded(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_EVENTS", 10)
    timeline, path = Timeline(), tmp_path / "t.json"
    timeline.start(str(path))
    for _ in range(50):
        timeline.around("x", lambda: None)()
    timeline.stop()
    assert len(events(path)) == 10


def test_parts_follow_one_another_and_end_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline, path = Timeline(), tmp_path / "t.json"
    parts = [("norm", {}), ("matmul", {"bytes": 7}), ("norm", {})]
    timeline.add_parts(parts, [1.0, 1.0, 1.0])
    timeline.start(str(path))
    began = time.perf_counter_ns() / 1000
    timeline.around("forward", lambda: (time.sleep(0.01), timeline.add_parts(parts, [0.001, 0.004, 0.002])))()
    monkeypatch.setattr(module, "MAX_EVENTS", 6)
    timeline.add_parts(parts, [1.0, 1.0, 1.0])
    timeline.stop()
    forward, *ops = events(path)
    assert [(op["name"], op["args"], round(op["dur"])) for op in ops] == [
        ("norm", {}, 1000), ("matmul", {"bytes": 7}, 4000), ("norm", {}, 2000),
    ]  # fmt: skip
    assert began <= forward["ts"] < ops[0]["ts"] and ops[-1]["ts"] + 2000 <= forward["ts"] + forward["dur"]
    assert ops[1]["ts"] == pytest.approx(ops[0]["ts"] + 1000) and {op["tid"] for op in ops} == {forward["tid"]}


def test_a_place_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    timeline = Timeline()
    with pytest.raises(EngineError, match="can't be written"):
        timeline.start(str(tmp_path / "file" / "t.json"))
    assert timeline.stop() is None
