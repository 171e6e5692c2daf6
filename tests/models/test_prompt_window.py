"""Unlimited-OCR's language model against Llama's with the mask written out: the whole prompt, and the last few tokens."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from canter.core.errors import UnsupportedModelError
from tests.models.families import FAMILIES, NUM_TOKENS, build_oracle, save_oracle, token_ids
from tests.models.harness import Harness, Request
from tests.models.loading import load

PROMPT, WINDOW = 9, 6
(LLAMA,) = (family for family in FAMILIES if family.name == "llama")


@cache
def expected(prompt: int) -> Tensor:
    """[NUM_SEQUENCES, NUM_TOKENS, V]: the query at i sees the key at j where j <= i and (j < prompt or i - j < WINDOW)."""
    i, j = torch.arange(NUM_TOKENS)[:, None], torch.arange(NUM_TOKENS)
    seen = (j <= i) & ((j < prompt) | (i - j < WINDOW))
    mask = torch.zeros(NUM_TOKENS, NUM_TOKENS).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        ids = token_ids()
        return build_oracle(LLAMA)(input_ids=ids, attention_mask=mask.expand(len(ids), 1, -1, -1), use_cache=False).logits.float()


def save(directory: Path, original: bool, **changes: Any) -> Path:
    """Llama's weights under a config of this family, as its authors write it or as transformers does."""
    save_oracle(LLAMA, directory)
    text = json.loads((directory / "config.json").read_text())
    for key in ("architectures", "model_type", "layer_types", "sliding_window"):
        text.pop(key, None)
    text |= {"first_k_dense_replace": text["num_hidden_layers"]} | changes
    if original:
        config = {
            "architectures": ["UnlimitedOCRForCausalLM"],
            "model_type": "unlimited-ocr",
            "language_config": text,
            "sliding_window": WINDOW,
        }
    else:
        text["sliding_window"] = WINDOW
        config = {"architectures": ["UnlimitedOcrForConditionalGeneration"], "model_type": "unlimited_ocr", "text_config": text}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(params=["reference", "native"], autouse=True)
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CANTER_KERNELS", request.param)
    return request.param


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("block_size", [4, 16])
def test_any_chunking_keeps_the_prompt_in_sight(tmp_path: Path, original: bool, block_size: int) -> None:
    loaded = load(save(tmp_path, original), max_model_len=64)
    for chunks in ([NUM_TOKENS], [PROMPT, 1], [4, 3, 2, 1], [5, 7, 1]):
        harness = Harness(loaded, block_size)
        request = harness.request(token_ids()[0].tolist(), PROMPT)
        run(harness, request, list(chunks))
        torch.testing.assert_close(torch.cat(request.logits), expected(PROMPT)[0], atol=1e-4, rtol=0)


def run(harness: Harness, request: Request, chunks: list[int]) -> None:
    while request.num_computed < NUM_TOKENS:
        n = chunks.pop(0) if len(chunks) > 1 else chunks[0]
        harness.step([(request, min(n, NUM_TOKENS - request.num_computed))])


def test_a_request_that_starts_over_keeps_its_prompt(tmp_path: Path) -> None:
    """After a preemption the generated tokens are computed together with the prompt, and are no part of it."""
    harness = Harness(load(save(tmp_path, True), max_model_len=64), 4)
    again = harness.request(token_ids()[0].tolist(), PROMPT)
    other = harness.request(token_ids()[1].tolist(), 3)
    harness.step([(again, 19), (other, 5)])
    harness.step([(other, 11), (again, 4)])
    torch.testing.assert_close(torch.cat(again.logits), expected(PROMPT)[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.cat(other.logits), expected(3)[1, :16], atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("provider", ["native"], indirect=True)
def test_logits_are_the_same_bits_alone_and_in_company(tmp_path: Path, provider: str, dtype: str, recorded: bool) -> None:
    loaded, ids = load(save(tmp_path, True), dtype, max_model_len=64), token_ids().tolist()
    harness = Harness(loaded, 4, seed=1)
    alone = harness.request(ids[0], PROMPT)
    run(harness, alone, [1])
    harness = Harness(loaded, 4, seed=2, recorded=recorded)
    a, b = harness.request(ids[0], PROMPT), harness.request(ids[1], 3)
    for n, m in ((1, 4), (6, 1), (2, 9), (14, 1)):
        harness.step([(b, m), (a, n)])
    assert torch.equal(torch.cat(a.logits), torch.cat(alone.logits))


def test_what_lies_between_prompt_and_window_is_given_away(tmp_path: Path) -> None:
    harness = Harness(load(save(tmp_path, True), max_model_len=64), 4)
    request = harness.request(token_ids()[0].tolist(), PROMPT)
    run(harness, request, [1])
    (table,) = request.cache.tables
    assert [bool(block) for block in table.blocks] == [True] * 3 + [False] + [True] * 2  # 9 of the prompt, 12 to 15, 17 to 22


def test_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="experts are not supported yet"):
        load(save(tmp_path, True, first_k_dense_replace=1))
