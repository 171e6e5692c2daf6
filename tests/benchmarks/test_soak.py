"""The soak: a short run on a tiny model, and what it would not let pass."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.soak import Load, Process, Sample, judge_memory, slope
from benchmarks.soak_requests import KINDS, MALFORMED, Session, WrongAnswer, check_chunks, check_response_events, malformed

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "soak.py"


def session(handler: Any = None) -> Session:
    http = httpx.AsyncClient(base_url="http://test", transport=httpx.MockTransport(handler or (lambda request: httpx.Response(500))))
    return Session(http, "soak", 256, 131)


def samples(*megabytes: float) -> list[Sample]:
    """One a minute; the frontend's memory is given, the engine's stays."""
    return [Sample(60.0 * i, Process(mb, 20, 5), Process(500.0, 9, 7), 64) for i, mb in enumerate(megabytes)]


def chunk(finish: str | None, count: int, name: str = "a") -> tuple[str, Any]:
    return "", {"id": name, "choices": [{"index": 0, "finish_reason": finish, "token_ids": [5] * count}]}


USAGE = ("", {"id": "a", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}})
DONE = ("", "[DONE]")


@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    # Memory of a young server grows: its slope is judged above all in long runs.
    command = [sys.executable, str(SCRIPT), "--tiny", "--seconds", "8", "--concurrency", "8", "--noise", "1000", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    assert set(result["kinds"]) == {"malformed", *(kind.__name__ for kind in KINDS)}
    assert sum(kind["answered"] for kind in result["kinds"].values()) > 50
    assert sum(kind["hung_up"] for kind in result["kinds"].values()) > 0
    assert result["problems"] == [] and result["free_blocks"] == result["blocks"] > 0


def test_memory_that_grows_after_the_first_quarter_is_told() -> None:
    flat = samples(*[100.0, 300.0, 320.0], *[320.0, 321.0] * 8)
    figures, problems = judge_memory(flat, 40.0, 5.0)
    assert problems == [] and abs(figures["frontend"]["mb_an_hour"]) < 40 and figures["engine"]["mb_an_hour"] == 0
    figures, problems = judge_memory(samples(*[100.0 + 2 * i for i in range(20)]), 40.0, 5.0)
    assert problems == ["the frontend's memory grows by 120 MB an hour, 28.0 MB in 840 s"]
    assert judge_memory(samples(*[100.0 + 2 * i for i in range(20)]), 40.0, 30.0)[1] == []


def test_the_slope_does_not_heed_outliers() -> None:
    assert slope([(float(i), 7.0 + (500.0 if i == 6 else 0.0)) for i in range(12)]) == 0


@pytest.mark.parametrize(
    ("events", "wrong"),
    [
        ([chunk(None, 2), chunk("length", 1), chunk("length", 0), USAGE, DONE], "goes on after its end"),
        ([chunk(None, 2), chunk(None, 1), USAGE, DONE], "finishes"),
        ([chunk(None, 1), chunk("length", 1), USAGE, DONE], "finishes and tokens"),
        ([chunk(None, 2), chunk("length", 1), USAGE], "no end"),
        ([chunk(None, 2), chunk("length", 1, "b"), USAGE, DONE], "one id"),
        ([chunk(None, 2), chunk("stop", 1), USAGE, DONE], "finish_reason"),
    ],
)
def test_wrong_streams_are_found(events: list[tuple[str, Any]], wrong: str) -> None:
    with pytest.raises(WrongAnswer, match=wrong):
        check_chunks(session(), events, 1, 3)


def test_a_right_stream_passes_once() -> None:
    known = session()
    check_chunks(known, [chunk(None, 2), chunk("length", 1), USAGE, DONE], 1, 3, 3)
    with pytest.raises(WrongAnswer, match="an id came twice"):
        check_chunks(known, [chunk(None, 2), chunk("length", 1), USAGE, DONE], 1, 3, 3)


def test_a_gap_in_the_numbers_of_events_is_found() -> None:
    with pytest.raises(WrongAnswer, match="sequence numbers"):
        check_response_events([("response.created", {"type": "response.created", "sequence_number": 1})], 1)


def test_an_answer_that_differs_from_before_is_found() -> None:
    known = session()
    known.same("seed 1", [1, 2])
    with pytest.raises(WrongAnswer, match="another way"):
        known.same("seed 1", [1, 3])


def test_a_malformed_request_must_get_its_status() -> None:
    statuses = {status for *_, status in MALFORMED}
    assert statuses == {400, 404, 405}
    with pytest.raises(WrongAnswer, match="status 500"):
        asyncio.run(malformed(session(), random.Random(0)))


def test_requests_are_counted_one_by_one() -> None:
    """A server that only fails: every request is wrong or hung up, none is lost."""

    async def run() -> Load:
        load = Load(session(), 0.2, 4, 0)
        await load.run()
        return load

    tally = asyncio.run(run()).tally
    assert tally.sent.total() == tally.wrong.total() + tally.hung_up.total() > 0
    assert tally.answered.total() == 0 and tally.problems
