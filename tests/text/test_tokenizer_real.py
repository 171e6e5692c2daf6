"""Tokenizers of real GGUF files, against transformers reading the same file.

Where the two differ, the file and the reference implementation decide (see `_reference`).
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import pytest
import transformers
from tokenizers import pre_tokenizers

from canter.checkpoint.gguf_reader import GGUFFile
from canter.checkpoint.resolve import resolve
from canter.text.chat_template import load_chat_template
from canter.text.detokenizer import IncrementalDetokenizer
from canter.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.corpus import lines
from tests.weights import gguf_file

LINES = lines(2200)
FILES = ("smollm2-135m.gguf", "qwen2.5-coder-0.5b.gguf", "gemma3-270m.gguf")

pytestmark = pytest.mark.real


@cache
def _ours(name: str) -> Tokenizer:
    return load_tokenizer(resolve(str(gguf_file(name))))


@cache
def _reference(name: str) -> Any:
    """transformers' tokenizer of the file, with its known fault mended.

    It does not know the pre-tokenizer "smollm" and splits as GPT-2 does. SmolLM2 sets digits apart first: its own tokenizer.json
    says so, llama.cpp does so, and the file shows it (`test_smollm_merges_have_no_digits`).
    """
    path = gguf_file(name)
    reference = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if name.startswith("smollm"):
        reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return reference


def _has_long_run(text: str) -> bool:
    """More than 31 spaces in a row, Gemma's longest token of them.

    transformers builds longer runs by merging (16 + 16). SentencePiece, which Gemma was trained with, takes user-defined tokens
    from the left, the longest first (31 + 1), as llama.cpp does and as transformers itself does for runs of newlines.
    """
    return " " * 32 in text.replace("\u2581", " ")


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_equals_transformers(name: str) -> None:
    ours, reference = _ours(name), _reference(name)
    assert ours.vocab_size == len(reference)
    assert (ours.bos_token, ours.eos_token) == (reference.bos_token, reference.eos_token)
    checked = 0
    for text in LINES:
        if name.startswith("gemma") and _has_long_run(text):
            continue
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text, add_special_tokens=False), text
        adds_bos = name.startswith("gemma") and ids[:1] != [ours.bos_token_id]
        assert ours.encode(text) == [ours.bos_token_id] * adds_bos + ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip), text
        checked += 1
    assert checked > 2100


def test_smollm_merges_have_no_digits() -> None:
    """What shows that digits were set apart when SmolLM2's vocabulary was trained."""
    metadata = GGUFFile(gguf_file(FILES[0])).metadata
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    assert not [merge for merge in metadata["tokenizer.ggml.merges"] if set(merge) & set("0123456789")]


def test_gemma_takes_runs_of_spaces_as_sentencepiece_does() -> None:
    tokenizer = _ours(FILES[2])
    for count, expected in ((2, [2]), (31, [31]), (33, [31, 2]), (70, [31, 31, 8])):
        ids = tokenizer.encode("a" + " " * count + "!", add_special_tokens=False)[1:-1]
        assert [len(tokenizer.decode([i])) for i in ids] == expected
    assert tokenizer.encode("a", add_special_tokens=True)[0] == tokenizer.bos_token_id == 2
    assert tokenizer.encode("<bos>a") == tokenizer.encode("a")


@pytest.mark.parametrize("name", FILES)
def test_text_token_by_token(name: str) -> None:
    tokenizer = _ours(name)
    for text in LINES[::4]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        detokenizer = IncrementalDetokenizer(tokenizer, (), skip_special_tokens=False)
        pieces = [detokenizer.append([i]) for i in ids] + [detokenizer.flush()]
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
        assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


@pytest.mark.parametrize(("name", "seconds"), [(FILES[0], 1.5), (FILES[1], 5), (FILES[2], 12)])
def test_time_to_load(name: str, seconds: float) -> None:
    """Processor time, with room for a loaded machine; idle it is 0.25, 0.9 and 3 seconds (50k, 150k and 260k tokens)."""
    files = resolve(str(gguf_file(name)))
    start = time.process_time()
    load_tokenizer(files)
    assert time.process_time() - start < seconds


def test_chat_of_the_bundled_model() -> None:
    tokenizer = _ours(FILES[0])
    template = load_chat_template(tokenizer)
    assert template.content_format == "string"
    prompt = template.render([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])
    assert prompt.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode(prompt, add_special_tokens=False)[-4:] == tokenizer.encode("<|im_start|>assistant\n")
    assert tokenizer.eos_token_ids >= {2}
