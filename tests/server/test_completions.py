from __future__ import annotations

import pytest

from canter.core.errors import EngineError
from tests.fake_core import EOS_ID, FakeCore, say
from tests.server.helpers import Harness, error_of, events, with_harness


def complete(core: FakeCore | None = None, **fields):
    return with_harness(lambda h: h.complete(**fields), core)


def test_an_answer_has_every_field() -> None:
    body = complete(prompt="abc", max_tokens=4, model="m").json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 0
    assert body == {
        "object": "text_completion",
        "model": "m",
        "choices": [
            {"index": 0, "text": "abca", "logprobs": None, "finish_reason": "length", "stop_reason": None, "prompt_logprobs": None}
        ],
        "usage": {"prompt_tokens": 3, "total_tokens": 7, "completion_tokens": 4, "prompt_tokens_details": None},
        "system_fingerprint": None,
    }


@pytest.mark.parametrize("value", [{}, {"max_tokens": None}])
def test_sixteen_tokens_are_the_default(value: dict) -> None:
    assert complete(**value).json()["usage"]["completion_tokens"] == 16


def test_the_default_gives_way_to_the_context() -> None:
    assert complete(prompt="x" * 510).json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["aba"]),
        (["ab", "c"], ["aba", "ccc"]),
        ([97, 98], ["aba"]),
        ([[97, 98], [99]], ["aba", "ccc"]),
        (["ab"], ["aba"]),
        ([[97]], ["aaa"]),
    ],
)
def test_prompts_come_in_four_forms(prompt, texts: list[str]) -> None:
    body = complete(prompt=prompt, max_tokens=3).json()
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))


def test_indices_count_prompts_times_choices() -> None:
    body = complete(prompt=["a", "b"], n=2, temperature=1, max_tokens=1).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    chunks = events(complete(prompt=["a", "b"], n=2, temperature=1, max_tokens=2, stream=True))
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "aa", 1: "aa", 2: "bb", 3: "bb"}
    assert sum(choice["finish_reason"] is not None for chunk in chunks for choice in chunk["choices"]) == 4


def test_a_thousand_prompts_are_served_and_more_refused() -> None:
    async def body(h: Harness) -> None:
        h.engine.hub.max_live = None
        answer = await h.complete([[97, i % 256] for i in range(1024)], max_tokens=1)
        assert len(answer.json()["choices"]) == 1024
        assert answer.json()["usage"]["completion_tokens"] == 1024
        assert error_of(await h.complete(["a"] * 1025), 400)["param"] == "prompt"

    with_harness(body)


def test_stream_chunks_concatenate_to_the_answer() -> None:
    chunks = events(complete(FakeCore(say("grüße")), max_tokens=30, stream=True, stream_options={"include_usage": True}))
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == "grüße"
    assert all(c["choices"][0]["text"] for c in chunks[:-2])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 8
    assert {c["object"] for c in chunks} == {"text_completion"}


def test_logprobs_zero_still_name_the_actual_token() -> None:
    logprobs = complete(prompt="a", max_tokens=2, logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -0.5],
        "tokens": ["a", "a"],
        "top_logprobs": [{"a": -0.5}, {"a": -0.5}],
    }


def test_echo_with_logprobs_covers_prompt_and_answer() -> None:
    """What lm-eval reads: ids in, one token out, and from the arrays whether each token was the greedy choice."""
    choice = complete(prompt=[97, 98, 99], max_tokens=1, logprobs=2, echo=True, temperature=0).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "abca"
    assert logprobs["tokens"] == ["a", "b", "c", "a"]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"b": -0.5, "c": -1.5}
    for value, top in zip(logprobs["token_logprobs"][1:-1], logprobs["top_logprobs"][1:-1], strict=True):
        assert value == max(top.values())


@pytest.mark.parametrize("logprobs", [None, 1])
def test_echo_streams_the_prompt_first_and_once(logprobs: int | None) -> None:
    chunks = events(complete(FakeCore(say("xy")), prompt="abc", echo=True, logprobs=logprobs, n=2, temperature=1, stream=True))
    for index in (0, 1):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert own[0]["text"].startswith("abc")
        assert "".join(c["text"] for c in own) == "abcxy"
        if logprobs:
            offsets = [offset for c in own if c["logprobs"] for offset in c["logprobs"]["text_offset"]]
            assert offsets == [0, 1, 2, 3, 4, 5]
            assert own[0]["logprobs"]["token_logprobs"][:2] == [None, -0.5]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_gives_the_prompt_back(stream: bool) -> None:
    response = complete(prompt=[97, 98], max_tokens=0, echo=True, logprobs=1, stream=stream)
    choices = [c for chunk in events(response) for c in chunk["choices"]] if stream else response.json()["choices"]
    assert "".join(c["text"] for c in choices) == "ab"
    assert choices[-1]["finish_reason"] == "length"
    assert [t for c in choices if c["logprobs"] for t in c["logprobs"]["tokens"]] == ["a", "b"]
    if not stream:
        assert response.json()["usage"]["completion_tokens"] == 0


def test_echo_of_a_truncated_prompt_shows_what_was_run() -> None:
    assert complete(prompt="abcdef", truncate_prompt_tokens=2, max_tokens=1, echo=True).json()["choices"][0]["text"] == "efe"


def test_token_ids_are_returned_when_asked_for() -> None:
    [choice] = complete(FakeCore(say("x")), prompt="ab", return_token_ids=True).json()["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([97, 98], [120, EOS_ID])


def test_prompt_logprobs() -> None:
    [choice] = complete(prompt="ab", prompt_logprobs=1, max_tokens=1).json()["choices"]
    assert choice["prompt_logprobs"] == [None, {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}]


def test_tokens_as_ids() -> None:
    [choice] = complete(prompt="a", max_tokens=1, logprobs=1, return_tokens_as_token_ids=True).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:97"]
    assert choice["logprobs"]["top_logprobs"] == [{"token_id:97": -0.5}]


@pytest.mark.parametrize("prompt", [[], [[]], [1.5], {"a": 1}, 5, ["a", 1], [[1], "a"], [-1], [260], [[260]], [2**70]])
def test_prompts_that_are_none_are_refused(prompt) -> None:
    error = error_of(complete(prompt=prompt), 400)
    assert "prompt" in error["message"].lower()


def test_an_empty_text_is_an_empty_prompt_without_bos() -> None:
    assert "empty" in error_of(complete(prompt=""), 400)["message"]


def test_lengths_are_named_when_the_context_is_too_short() -> None:
    too_long = error_of(complete(prompt="x" * 600), 400)
    assert "600" in too_long["message"] and "512" in too_long["message"] and too_long["param"] == "prompt"
    together = error_of(complete(prompt="x" * 500, max_tokens=20), 400)
    assert all(number in together["message"] for number in ("500", "20", "520", "512", "12"))
    assert together["param"] == "max_tokens"
    in_chat = with_harness(lambda h: h.chat(max_completion_tokens=5000))
    assert error_of(in_chat, 400)["param"] == "max_completion_tokens"


def test_one_bad_prompt_of_many_refuses_all() -> None:
    async def body(h: Harness) -> None:
        assert error_of(await h.complete(["a", "x" * 600]), 400)["param"] == "prompt"
        assert h.engine.core.seen == []

    with_harness(body)


def test_a_failing_prompt_ends_the_others() -> None:
    class Core(FakeCore):
        def add_request(self, request) -> None:
            if request.prompt_token_ids == [98]:
                raise EngineError("not this one")
            super().add_request(request)

    async def body(h: Harness) -> None:
        assert "not this one" in error_of(await h.complete(["a", "b", "c"], max_tokens=500), 500)["message"]
        assert h.engine.hub.num_live == 0
        assert not h.engine.core.requests

    with_harness(body, Core())
