"""llama.cpp's `/completion`, `/slots` and `/props` over an engine that echoes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from canter.core.structured_outputs import StructuredOutputsParams
from tests.fake_core import CONTEXT, INFO, FakeCore, say
from tests.server.helpers import Harness, error_of, with_harness


async def complete(h: Harness, prompt: Any = "hi", path: str = "/completion", **fields: Any) -> httpx.Response:
    return await h.http.post(path, json={"prompt": prompt, **fields})


def completed(core: FakeCore | None = None, **fields: Any) -> httpx.Response:
    return with_harness(lambda h: complete(h, **fields), core)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream: it ends with the event that says stop, not with [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n")[:-1]]


def check_timings(timings: dict[str, Any], cached: int, prompt: int, predicted: int) -> None:
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (cached, prompt, predicted)
    assert all(timings[name] >= 0 for name in ("prompt_ms", "predicted_ms", "prompt_per_second", "predicted_per_second"))


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_an_answer(path: str) -> None:
    answer = with_harness(lambda h: complete(h, "x" * 20, path), FakeCore(say("hel\nlo"))).json()
    check_timings(answer.pop("timings"), 16, 4, 7)
    settings = answer.pop("generation_settings")
    assert settings["n_predict"] == CONTEXT - 20 and settings["temperature"] == 1.0 and settings["seed"] == -1
    assert answer == {
        "content": "hel\nlo",
        "tokens": [],
        "stop": True,
        "tokens_predicted": 7,
        "tokens_evaluated": 20,
        "index": 0,
        "id_slot": -1,
        "model": "m",
        "prompt": "x" * 20,
        "has_new_line": True,
        "truncated": False,
        "stop_type": "eos",
        "stopping_word": "",
        "tokens_cached": 27,
    }


@pytest.mark.parametrize(
    ("fields", "kind", "word", "text"),
    [
        ({}, "eos", "", "hello"),
        ({"n_predict": 2}, "limit", "", "he"),
        ({"max_tokens": 2}, "limit", "", "he"),
        ({"stop": ["l"]}, "word", "l", "he"),
    ],
)
def test_why_it_ended(fields: dict, kind: str, word: str, text: str) -> None:
    answer = completed(FakeCore(say("hello")), **fields).json()
    *parts, last = events_of(completed(FakeCore(say("hello")), stream=True, **fields))
    for end in (answer, last):
        assert (end["stop"], end["stop_type"], end["stopping_word"]) == (True, kind, word)
    assert answer["content"] == text == "".join(part["content"] for part in parts) and last["content"] == ""
    assert not any(part["stop"] for part in parts) and "timings" not in parts[0]
    assert last["tokens_predicted"] == answer["tokens_predicted"] and last["timings"]["predicted_n"] == answer["tokens_predicted"]


def test_tokens_and_timings_in_a_stream() -> None:
    *parts, _ = events_of(completed(FakeCore(say("hello")), stream=True, timings_per_token=True))
    assert [token for part in parts for token in part["tokens"]] == [*b"hello", 256]
    assert [part["timings"]["predicted_n"] for part in parts] == [1, 2, 3, 4, 5, 6]
    assert completed(FakeCore(say("hello")), return_tokens=True).json()["tokens"] == [*b"hello", 256]


def test_probabilities() -> None:
    answer = completed(FakeCore(say("ab")), n_probs=2, n_predict=2).json()
    [first, _] = answer["completion_probabilities"]
    assert (first["id"], first["token"], first["bytes"], first["logprob"]) == (97, "a", [97], -0.5)
    assert [entry["id"] for entry in first["top_logprobs"]] == [97, 98]
    assert "top_logprobs" not in first["top_logprobs"][0]
    assert "completion_probabilities" not in completed(n_probs=0, n_predict=1).json()
    *parts, _ = events_of(completed(FakeCore(say("ab")), n_probs=2, n_predict=2, stream=True))
    assert [part["completion_probabilities"][0] for part in parts] == answer["completion_probabilities"]


@pytest.mark.parametrize(("prompt", "ids"), [("hi", [*b"hi"]), ([104, 105], [104, 105]), (["h", 105, "yo"], [*b"hiyo"])])
def test_prompts(prompt: Any, ids: list[int]) -> None:
    async def body(h: Harness) -> None:
        answer = (await complete(h, prompt, n_predict=1)).json()
        assert h.engine.core.seen[0].prompt_token_ids == ids
        assert answer["prompt"] == bytes(ids).decode()

    with_harness(body)


def test_sampling_reaches_the_engine() -> None:
    fields = {
        "n_predict": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125, "seed": 7, "stop": ["x"], "repeat_penalty": 1.5,
        "repeat_last_n": -1, "presence_penalty": 1, "frequency_penalty": 0.5, "ignore_eos": True, "logit_bias": [[5, 1.5], [6, False]],
        "cache_prompt": True, "id_slot": -1, "n_keep": 5, "typical_p": 1.0, "dynatemp_range": 0, "mirostat": 0, "grammar": "", "n": 1,
    }  # fmt: skip

    async def body(h: Harness) -> None:
        assert (await complete(h, **fields)).status_code == 200
        params = h.engine.core.seen[0].sampling
        assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (5, 0.5, 3, 0.25, 0.125, 7)
        assert (params.stop, params.repetition_penalty, params.ignore_eos, params.logit_bias) == (["x"], 1.5, True, {5: 1.5, 6: -100.0})
        assert (await complete(h, logit_bias={"5": 1}, repeat_last_n=0, repeat_penalty=1.5)).status_code == 200
        assert h.engine.core.seen[1].sampling.logit_bias == {5: 1.0} and h.engine.core.seen[1].sampling.repetition_penalty == 1.0

    with_harness(body)


GBNF = """# a list
root ::= "[" ws ( item ( "," ws item )* )? "]"
item ::= [0-9]{1,3} | "\\"" [^"\\\\\\n]* "\\"" |
         root
ws ::= [ \\t\\n]?
"""


def test_grammars_reach_the_engine() -> None:
    async def body(h: Harness) -> None:
        for fields in ({"grammar": GBNF}, {"json_schema": {"type": "array"}}, {"json_schema": {}}, {"grammar": ""}):
            assert (await complete(h, n_predict=4, **fields)).status_code == 200
        assert [request.sampling.structured_outputs for request in h.engine.core.seen] == [
            StructuredOutputsParams(grammar=GBNF),
            StructuredOutputsParams(json={"type": "array"}),
            StructuredOutputsParams(json={}),
            None,
        ]
        error = error_of(await complete(h, grammar=GBNF, json_schema={}), 400)
        assert error["param"] == "json_schema" and "exclude" in error["message"]
        message = error_of(await complete(h, grammar='root ::= "a"\nb ::= c'), 400)["message"]
        assert message.startswith("grammar, line 2, column 7")

    with_harness(body)


BIG = 2**63
BAD: dict[str, list[Any]] = {
    "prompt": ["", 5, [], {}, True, {"prompt_string": "x"}, ["a", [5]], [260], [-1], [BIG], [1.5], [1] * 600, ["a"] * 2000, ["a", 260]],
    "model": [5, True],
    "n_predict": [0, 600, BIG, 10**30, 1.5, "x", True],
    "max_tokens": [0, 600, "x", True],
    "temperature": [-1, 3, "x", True, [], 10**400],
    "top_k": [-2, 1.5, "x", True],
    "top_p": [0, 2, "x", True],
    "min_p": [-1, 2, "x"],
    "seed": [BIG, 1.5, "x", True],
    "stop": [5, [5], [""], ["a"] * 65],
    "repeat_penalty": [0, -1, "x"],
    "repeat_last_n": ["x", 1.5, True],
    "presence_penalty": [3, "x"],
    "frequency_penalty": [-3, "x"],
    "ignore_eos": ["x", 1],
    "logit_bias": ["x", 5, [[5]], [["word", 1]], {"word": 1}, [[5, True]], [[5, "x"]], [[-1, 1]], {"260": 1}],
    "n_probs": [-2, 21, BIG, 1.5, "x", True],
    "stream": ["x", 1],
    "return_tokens": ["x", 1],
    "timings_per_token": ["x", 1],
    "grammar": [
        "root ::= x",  # no such rule
        "start: /a+/",  # Lark
        "other ::= [a-z]+",
        'root ::= "a" <[1000]>',  # a token
        'root ::= !"a"',
        'root ::= ("a"',
        "root ::= [",
        "root ::= [a-z]{1,99999}",
        "x" * 2**18,
        5,
    ],
    "json_schema": [{"type": "wrong"}, "x", 5, []],
    "grammar_lazy": [True],
    "grammar_triggers": [[{"type": 0, "value": "x"}]],
    "dynatemp_range": [0.5],
    "typical_p": [0.5],
    "xtc_probability": [0.5],
    "dry_multiplier": [0.5],
    "mirostat": [1, 2],
    "top_n_sigma": [1],
    "n_indent": [2],
    "t_max_predict_ms": [5],
    "image_data": [[{"data": "AA", "id": 1}]],
    "lora": [[{"id": 0, "scale": 1}]],
    "post_sampling_probs": [True],
    "response_fields": [["content"]],
    "return_progress": [True],
    "samplers": [["top_k"]],
    "n": [2],
    "n_cmpl": [2],
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_values_are_refused_by_name(name: str) -> None:
    async def body(h: Harness) -> None:
        for value in BAD[name]:
            message = error_of(await complete(h, **{name: value}), 400)["message"]
            assert name in message.replace("The prompt", "prompt").replace("n_predict", "n_predict max_tokens"), value
        assert not h.engine.core.seen

    with_harness(body)


def test_nulls_mean_the_default() -> None:
    assert completed(**dict.fromkeys(name for name in BAD if name != "prompt")).status_code == 200
    assert error_of(completed(prompt=None), 400)["param"] == "prompt"
    assert error_of(completed(n_predict=5, max_tokens=6), 400)["param"] == "max_tokens"
    assert error_of(completed(repeat_last_n=64, repeat_penalty=1.1), 400)["param"] == "repeat_last_n"
    assert completed(repeat_last_n=64, n_predict=1).status_code == 200


def test_slots_and_props() -> None:
    async def body(h: Harness) -> None:
        slots = (await h.http.get("/slots")).json()
        assert len(slots) == INFO.max_num_seqs
        assert slots[0] == {"id": 0, "n_ctx": CONTEXT, "is_processing": False, "speculative": False}
        h.engine.hub.stats.num_running = 3
        assert [slot["is_processing"] for slot in (await h.http.get("/slots")).json()] == [True] * 3 + [False] * 5
        assert (await h.http.get("/slots?fail_on_no_slot=1")).status_code == 200
        h.engine.hub.stats.num_running = 8
        response = await h.http.get("/slots?fail_on_no_slot=1")
        error_of(response, 503)
        assert int(response.headers["retry-after"]) >= 1
        props = (await h.http.get("/props")).json()
        assert props["total_slots"] == 8 and props["default_generation_settings"]["n_ctx"] == CONTEXT
        assert props["default_generation_settings"]["params"]["temperature"] == 0.5
        assert props["eos_token"] == "<eos>" and "[{{ m.role }}]" in props["chat_template"] and props["model_alias"] == "m"
        assert (await h.http.post("/props", json={})).status_code == 405

    with_harness(body, defaults={"temperature": 0.5})


def test_the_openai_route_keeps_its_own_shape() -> None:
    async def body(h: Harness) -> None:
        assert (await h.complete("hi", max_tokens=1)).json()["object"] == "text_completion"

    with_harness(body)
