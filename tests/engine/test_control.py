"""Pausing and profiling a whole engine: neither changes what requests get."""

from __future__ import annotations

import json
from pathlib import Path

from tests.engines import engine, mixed_requests, run, tiny_checkpoint


def test_a_pause_and_a_profile_change_no_token(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "llama", seed=6)
    core = engine(model)
    expected = run(core, mixed_requests(6))
    trace = tmp_path / "t.json"
    assert core.utility("start_profile", [str(trace), 1, 0])
    requests = mixed_requests(6)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        core.add_request(request)
    steps = 0
    while core.has_unfinished() or core.has_work():
        if not core.has_work():
            core.utility("resume", [])
        for delta in core.step():
            tokens[delta.request_id].extend(delta.new_token_ids)
        steps += 1
        if steps % 5 == 0:
            core.utility("pause", [])
    assert tokens == expected
    core.utility("stop_profile", [])
    core.shutdown()
    events = json.loads(trace.read_text())["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    places = {(event["name"], threads[event["tid"]]) for event in events if event["ph"] == "X"}
    assert {("forward", "canter-device"), ("sample", "canter-device"), ("schedule", "MainThread"), ("finish", "MainThread")} <= places
    forwards = [event for event in events if event["name"] == "forward"]
    assert all(event["args"]["requests"] >= 0 and event["dur"] > 0 for event in forwards)
    assert sum(event["args"]["tokens"] for event in forwards) > 6
