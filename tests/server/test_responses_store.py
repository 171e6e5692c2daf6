"""The store of responses by itself: its bounds, its reckoning, and the fitting of conversations."""

from __future__ import annotations

import asyncio

import pytest

from canter.client.outputs import CompletionOutput, RequestOutput
from canter.core.errors import InvalidRequestError, NotFoundError, QueueFullError
from canter.server.generation import Prompt
from canter.server.responses_encoder import ResponsesEncoder
from canter.server.responses_input import fit
from canter.server.responses_store import ENTRY_BYTES, RECORD_BYTES, ResponseStore, StoredResponse
from canter.server.schemas.responses import ResponsesAnswer


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def output(text: str, finish: str | None = None) -> RequestOutput:
    return RequestOutput("r", None, [1], None, [CompletionOutput(0, text, [1] * len(text), finish_reason=finish)], finish is not None)


def record(name: str, *, background: bool = False, keep_events: bool = False, conversation: list[bytes] | None = None) -> StoredResponse:
    encoder = ResponsesEncoder(ResponsesAnswer(id=name, created_at=0, model="m", status="queued" if background else "in_progress"), 1)
    return StoredResponse(name, encoder, conversation or [], background, keep_events)


def store(size: int = 100, num_bytes: int = 10**9, seconds: float = 60.0, clock: Clock | None = None) -> ResponseStore:
    return ResponseStore(size, num_bytes, seconds, clock or Clock())


def has(kept: ResponseStore, name: str) -> bool:
    try:
        return kept.get(name).id == name
    except NotFoundError:
        return False


def test_the_size_is_the_sum_of_what_is_kept() -> None:
    kept = store()
    first = record("a", conversation=[b"x" * 100, b"y" * 50])
    kept.finish(first)
    assert kept.size == RECORD_BYTES + 150 + 2 * ENTRY_BYTES + len(first.body())
    running = record("b", background=True, keep_events=True)
    kept.add_running(running)
    before = kept.size
    kept.add_events(running, [b"1" * 10, b"2" * 20])
    assert kept.size == before + 30 + 2 * ENTRY_BYTES
    kept.finish(running)
    assert kept.size == first.size + running.size
    kept.delete(first)
    kept.delete(running)
    assert kept.size == 0 and len(kept) == 0


def test_age_counts_from_the_end() -> None:
    clock = Clock()
    kept = store(seconds=60, clock=clock)
    running = record("running", background=True)
    kept.add_running(running)
    kept.finish(record("first"))
    clock.now += 50
    kept.finish(record("second"))
    kept.finish(running)
    clock.now += 20
    assert [has(kept, name) for name in ("first", "second", "running")] == [False, True, True]
    clock.now += 41
    assert not has(kept, "second") and not has(kept, "running") and kept.size == 0


def test_a_running_one_does_not_age() -> None:
    clock = Clock()
    kept = store(seconds=60, clock=clock)
    kept.add_running(record("running", background=True))
    clock.now += 1000
    kept.finish(record("other"))
    assert has(kept, "running")


def test_bytes_make_the_oldest_leave() -> None:
    kept = store(num_bytes=4 * (RECORD_BYTES + 2000))
    for name in "abcdef":
        kept.finish(record(name, conversation=[b"x" * 1000]))
    assert not has(kept, "a") and has(kept, "f")
    assert kept.size <= 4 * (RECORD_BYTES + 2000)


def test_running_ones_are_never_thrown_out() -> None:
    kept = store(size=2)
    kept.add_running(record("a", background=True))
    kept.finish(record("old"))
    kept.add_running(record("b", background=True))
    assert [has(kept, name) for name in ("a", "old", "b")] == [True, False, True]
    with pytest.raises(QueueFullError):
        kept.add_running(record("c", background=True))
    kept.finish(record("d"))
    assert not has(kept, "d") and len(kept) == 2


def test_events_that_outgrow_the_store_are_given_up_and_the_response_goes_on() -> None:
    async def main() -> None:
        kept = store(num_bytes=RECORD_BYTES + 1000)
        running = record("a", background=True, keep_events=True)
        kept.add_running(running)
        watcher = running.events_after(-1)
        assert await anext(watcher) == b""
        kept.add_events(running, [b"x" * 500])
        assert await anext(watcher) == b"x" * 500
        kept.add_events(running, [b"x" * 500])
        assert running.events is None and kept.size == running.size == RECORD_BYTES
        with pytest.raises(QueueFullError, match="outgrown"):
            await anext(watcher)
        kept.add_events(running, [b"y" * 5000])
        assert has(kept, "a") and kept.size == RECORD_BYTES

    asyncio.run(main())


def test_too_large_a_conversation_is_told_before() -> None:
    kept = store(num_bytes=RECORD_BYTES + 100)
    kept.check_fits([b"x" * 36])
    with pytest.raises(InvalidRequestError, match="responses-store-bytes"):
        kept.check_fits([b"x" * 37])


def test_an_id_is_free_again_when_its_response_is_gone() -> None:
    kept = store()
    encoders = [ResponsesEncoder(ResponsesAnswer(id="a", created_at=0, model="m", status="in_progress"), 1) for _ in range(2)]
    assert kept.claim("a", encoders[0])
    assert not kept.claim("a", encoders[1])
    encoders[0] = encoders[1]
    assert kept.claim("a", encoders[1])
    kept.finish(record("b"))
    assert not kept.claim("b", encoders[1])


def test_a_finished_response_keeps_bytes_only() -> None:
    made = record("a")
    encoder = made._encoder
    assert encoder is not None
    encoder.feed(output("hel"))
    assert b'"text":"hel"' in made.body()
    encoder.feed(output("lo", "stop"))
    running = made.body()
    made.finish(1.0)
    assert made._encoder is None and made.body() == running
    [item] = made.whole_conversation()
    assert b'"hello"' in item and b'"assistant"' in item


@pytest.mark.parametrize("limit", range(1, 60, 7))
@pytest.mark.parametrize("instructions", [True, False])
def test_fitting_cuts_as_little_as_it_must(limit: int, instructions: bool) -> None:
    messages = [{"role": "system", "content": "s"}] if instructions else []
    messages += [{"role": role, "content": f"{i:04d}"} for i in range(6) for role in ("user", "assistant")][:-1]

    async def encode(some: list[dict]) -> Prompt:
        return Prompt("".join(m["content"] for m in some), [0] * sum(len(m["content"]) for m in some))

    prompt = asyncio.run(fit(messages, limit, encode))
    text = "".join(m["content"] for m in messages)
    head = "s" if instructions else ""
    possible = [head + text[len(head) + 8 * cut :] for cut in range(6)]
    expected = next((candidate for candidate in possible if len(candidate) <= limit), possible[-1])
    assert prompt.text == expected
