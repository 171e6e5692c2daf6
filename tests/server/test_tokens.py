from __future__ import annotations

import pytest

from tests.server.helpers import Harness, error_of, with_harness


def post(path: str, **body):
    return with_harness(lambda h: h.http.post(path, json=body))


def test_tokenize_a_text() -> None:
    assert post("/tokenize", prompt="hé").json() == {"count": 3, "max_model_len": 512, "tokens": [104, 195, 169], "token_strs": None}
    assert post("/tokenize", prompt="hi", return_token_strs=True).json()["token_strs"] == ["h", "i"]


def test_tokenize_a_conversation() -> None:
    tokens = post("/tokenize", messages=[{"role": "user", "content": "x"}]).json()["tokens"]
    assert bytes(tokens) == b"[user]x\n[assistant]"
    tokens = post("/tokenize", messages=[{"role": "user", "content": "x"}], add_generation_prompt=False).json()["tokens"]
    assert bytes(tokens) == b"[user]x\n"


@pytest.mark.parametrize("text", ["", "plain", "grüße 🙂\n", "x" * 20_000])
def test_detokenize_gives_back_what_tokenize_took(text: str) -> None:
    async def body(h: Harness) -> None:
        tokens = (await h.http.post("/tokenize", json={"prompt": text})).json()["tokens"]
        assert (await h.http.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": text}

    with_harness(body)


def test_detokenize_shows_special_tokens() -> None:
    assert post("/detokenize", tokens=[97, 256]).json() == {"prompt": "a<eos>"}


@pytest.mark.parametrize("tokens", [[-1], [260], [2**70], ["a"], "a", [1.5], None])
def test_detokenize_refuses_ids_outside_the_vocabulary(tokens) -> None:
    assert "tokens" in error_of(post("/detokenize", tokens=tokens), 400)["message"]


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, {"prompt": 5}])
def test_tokenize_takes_one_of_text_and_conversation(body: dict) -> None:
    assert "prompt" in error_of(post("/tokenize", **body), 400)["message"]


def test_models_are_checked() -> None:
    error_of(post("/tokenize", prompt="a", model="other"), 404)
    error_of(post("/detokenize", tokens=[1], model="other"), 404)
