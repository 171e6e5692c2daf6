"""Beam search over HTTP: the search of `canter.beam_search`, its refusals, and its end with the client's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from canter.beam_search import BeamSearch, BeamSearchParams, BeamSearchSequence
from canter.core.messages import AddRequest
from tests.fake_core import EOS_ID, FakeCore, fake_logprobs
from tests.server.helpers import Harness, error_of, with_harness


def likeliest(request: AddRequest) -> list[int]:
    """A token that depends on the whole sequence, so that beams differ; now and then one beside EOS."""
    total = sum((i + 1) * t for i, t in enumerate(request.prompt_token_ids))
    return [EOS_ID - 1 if total % 3 == 0 else 97 + total % 26]


def expected(prompt: bytes, params: BeamSearchParams) -> list[BeamSearchSequence]:
    search = BeamSearch(list(prompt), params, frozenset([EOS_ID]))
    for _ in range(params.max_tokens):
        options = []
        for beam in search.beams:
            position = fake_logprobs(likeliest(AddRequest("", beam.tokens, None))[0], 2 * params.beam_width)
            options.append(dict(zip(position.token_ids[1:], position.logprobs[1:], strict=True)))
        search.advance(options)
    return search.result()


@pytest.mark.parametrize(
    "fields",
    [
        dict(n=3, max_tokens=4),
        dict(n=4, max_tokens=6, length_penalty=-2.0, ignore_eos=True),
        dict(n=1, max_tokens=2),
        dict(n=5, max_tokens=5),
    ],
    ids=str,
)
def test_the_sequences_are_those_of_the_search(fields: dict[str, Any]) -> None:
    params = BeamSearchParams(
        beam_width=fields["n"],
        max_tokens=fields["max_tokens"],
        length_penalty=fields.get("length_penalty", 1.0),
        ignore_eos=fields.get("ignore_eos", False),
    )

    async def body(h: Harness) -> None:
        response = await h.complete(["abc", "de"], use_beam_search=True, return_token_ids=True, temperature=0, **fields)
        assert response.status_code == 200, response.text
        choices = response.json()["choices"]
        assert [c["index"] for c in choices] == list(range(2 * params.beam_width))
        sequences = [(len(p), s) for p in (b"abc", b"de") for s in expected(p, params)]
        assert [c["token_ids"] for c in choices] == [s.tokens[length:] for length, s in sequences]
        assert [c["finish_reason"] for c in choices] == [s.finish_reason for _, s in sequences]
        assert response.json()["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in choices)
        assert not h.engine.core.requests

    with_harness(body, FakeCore(likeliest))


def test_some_sequences_end_by_eos_and_some_by_length() -> None:
    reasons = {s.finish_reason for s in expected(b"abc", BeamSearchParams(beam_width=5, max_tokens=5))}
    assert reasons == {"stop", "length"}, "or the test above shows little"


def test_chat_echo_and_the_servers_scheduling() -> None:
    async def body(h: Harness) -> None:
        answer = (await h.chat("hi", use_beam_search=True, n=2, max_tokens=2, cache_salt="s")).json()
        assert [c["message"]["role"] for c in answer["choices"]] == ["assistant"] * 2
        assert {request.cache_salt for request in h.engine.core.seen} == {"s"}
        echoed = (await h.complete("abc", use_beam_search=True, n=2, max_tokens=2, echo=True)).json()
        assert all(c["text"].startswith("abc") and len(c["text"]) > 3 for c in echoed["choices"])

    with_harness(body, FakeCore(likeliest))


def test_a_search_ends_at_the_context() -> None:
    async def body(h: Harness) -> None:
        answer = (await h.complete([5] * 508, use_beam_search=True, n=2, max_tokens=4, ignore_eos=True, return_token_ids=True)).json()
        assert [len(c["token_ids"]) for c in answer["choices"]] == [4, 4]

    with_harness(body, FakeCore(likeliest))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"stream": True}, "stream"),
        ({"n": 65}, "n"),
        ({"n": 0}, "n"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"stop": "x"}, "stop"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"length_penalty": -1e300}, "length_penalty"),
        ({"max_tokens": 513}, "max_tokens"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], name: str) -> None:
    async def body(h: Harness) -> None:
        for ask in (h.complete, h.chat):
            error = error_of(await ask(use_beam_search=True, **fields), 400)
            assert name in error["message"] and error["param"] == name
        assert not h.engine.core.seen

    with_harness(body)


def test_logprobs_are_refused() -> None:
    async def body(h: Harness) -> None:
        error_of(await h.complete(use_beam_search=True, logprobs=1), 400)
        error_of(await h.chat(use_beam_search=True, logprobs=True), 400)

    with_harness(body)


def test_a_client_that_goes_away_ends_every_beam() -> None:
    async def body(h: Harness) -> None:
        h.engine.paused = True
        task = asyncio.create_task(h.complete(["abc", "de"], use_beam_search=True, n=3, max_tokens=9))
        while len(h.engine.core.requests) < 2:
            await asyncio.sleep(0)
        h.engine.paused = False
        h.engine.resume()
        while len(h.engine.core.requests) < 6:
            await asyncio.sleep(0)
        h.engine.paused = True
        live = set(h.engine.core.requests)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert h.engine.hub.num_live == 0
        assert live <= set(h.engine.core.aborted) and not h.engine.core.requests

    with_harness(body, FakeCore(likeliest))


def paused_search(h: Harness, **fields: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(h.complete("abc", use_beam_search=True, n=3, max_tokens=9, **fields))


def test_an_abort_gives_what_the_search_has_found() -> None:
    async def body(h: Harness) -> None:
        task = paused_search(h, return_token_ids=True)
        while len(h.engine.core.requests) < 3:
            await asyncio.sleep(0)
        h.engine.paused = True
        [name] = {request.request_id.partition("#")[0] for request in h.engine.core.seen}
        assert (await h.http.post("/abort_requests", json={"request_ids": [name]})).json() == {"aborted": 1}
        choices = (await task).json()["choices"]
        assert {c["finish_reason"] for c in choices} <= {"abort", "stop"} and choices[0]["finish_reason"] == "abort"
        assert all(0 < len(c["token_ids"]) < 9 for c in choices if c["finish_reason"] == "abort")
        assert h.engine.hub.num_live == 0 and not h.engine.core.requests

    with_harness(body, FakeCore(likeliest), enable_dev_mode=True)


def test_a_pause_that_aborts_ends_searches() -> None:
    async def body(h: Harness) -> None:
        task = paused_search(h)
        while len(h.engine.core.requests) < 3:
            await asyncio.sleep(0)
        assert (await h.http.post("/pause")).json() == {"status": "paused"}
        assert "abort" in {c["finish_reason"] for c in (await task).json()["choices"]}
        seen = len(h.engine.core.seen)
        assert (await h.http.post("/resume")).json() == {"status": "resumed"}
        await asyncio.sleep(0.01)
        assert len(h.engine.core.seen) == seen and h.engine.hub.num_live == 0

    with_harness(body, FakeCore(likeliest), enable_dev_mode=True)


def test_a_refusal_of_the_engine_ends_the_search() -> None:
    async def body(h: Harness) -> None:
        h.engine.core.refuse = ValueError("no")
        error_of(await h.complete(use_beam_search=True, n=2), 500)
        assert h.engine.hub.num_live == 0

    with_harness(body)
