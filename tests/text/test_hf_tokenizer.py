"""Tokenizers from Hugging Face directories, against transformers reading the same directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from canter.checkpoint.resolve import CheckpointFiles
from canter.core.errors import CheckpointError
from canter.text.hf_tokenizer import read_chat_templates
from canter.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.corpus import lines
from tests.text.vocabularies import byte_level

BASE: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def write(root: Path, config: dict[str, Any] | None, **files: Any) -> Path:
    """A directory with tokenizer.json, tokenizer_config.json and further JSON or text files."""
    byte_level().save(str(root / "tokenizer.json"))
    if config is not None:
        files["tokenizer_config.json"] = config
    for name, value in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return root


def load(root: Path) -> Tokenizer:
    return load_tokenizer(CheckpointFiles("test", root, "hf", ()))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False, "add_eos_token": True},
        {
            "pad_token": {"content": "<|pad|>", "lstrip": False, "rstrip": True, "normalized": False, "__type": "AddedToken"},
            "unk_token": None,
        },
        {"extra_special_tokens": ["<tool>", "</tool>"]},
        {
            "added_tokens_decoder": {
                "1501": {"content": "</think>", "special": False, "normalized": False},
                "1500": {"content": "<think>", "special": False, "normalized": False},
                "2": {"content": "<|im_end|>", "special": True},
            }
        },
    ],
    ids=["plain", "bos", "bos and eos", "eos", "pad", "extra", "added"],
)
def test_equals_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    root = write(tmp_path, BASE | config)
    ours, reference = load(root), transformers.AutoTokenizer.from_pretrained(root)
    assert ours.vocab_size == len(reference)
    assert set(reference.all_special_tokens) <= set(ours.all_special_tokens)
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert getattr(ours, role) == getattr(reference, role), role
    for text in [*lines(600), "<think>x</think><|pad|>  <tool>y</tool>"]:
        if text.startswith("<|im_start|>"):
            continue
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == reference.encode(text, add_special_tokens=special), text
        for skip in (True, False):
            assert ours.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip), text


def test_framing_flags_of_llama_tokenizers(tmp_path: Path) -> None:
    config = {**BASE, "tokenizer_class": "LlamaTokenizerFast"}
    bare = byte_level().encode("hello").ids
    for flags, expected in (({}, [1, *bare]), ({"add_bos_token": False, "add_eos_token": True}, [*bare, 2])):
        tokenizer = load(write(tmp_path, config | flags))
        assert tokenizer.encode("hello") == expected
        assert tokenizer.encode("hello", add_special_tokens=False) == bare


def test_a_template_of_tokenizer_json_frames_prompts(tmp_path: Path) -> None:
    write(tmp_path, {**BASE, "tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False})
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        "<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    bare = byte_level().encode("hello").ids
    assert tokenizer.encode("hello") == tokenizer.encode("<|im_start|>hello") == [1, *bare, 2]


def test_special_tokens_map_fills_in(tmp_path: Path) -> None:
    tokenizer = load(
        write(tmp_path, None, **{"special_tokens_map.json": {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>"}})
    )
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_ids) == ("<|im_start|>", "<|im_end|>", {2})


def test_truncation_and_padding_of_the_file_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, BASE)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load(tmp_path).encode("one two three four five six") == byte_level().encode("one two three four five six").ids


def test_added_tokens_json(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path, BASE, **{"added_tokens.json": {"<x>": 1500}}))
    assert tokenizer.encode("a<x>") == [*tokenizer.encode("a"), 1500]


def test_a_chat_template_file_wins_over_the_config(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}, {"name": "broken"}]
    assert read_chat_templates(write(tmp_path, None), {"chat_template": "one"}) == {"default": "one"}
    assert read_chat_templates(tmp_path, {"chat_template": named}) == {"default": "D", "tool_use": "T"}
    write(tmp_path, None, **{"chat_template.json": {"chat_template": "legacy"}, "additional_chat_templates/rag.jinja": "R"})
    assert read_chat_templates(tmp_path, {}) == {"default": "legacy", "rag": "R"}
    write(tmp_path, None, **{"chat_template.jinja": "J"})
    assert read_chat_templates(tmp_path, {"chat_template": named})["default"] == "J"
    assert load(tmp_path).chat_template == "J"


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"tokenizer.json": "{}"}, "not a tokenizer"),
        ({"tokenizer_config.json": "{"}, "expected JSON"),
        ({"tokenizer_config.json": "[]"}, "expected"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"x": {"content": "y"}}}}, "added_tokens_decoder must map ids"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"7000": {"content": "<x>"}}}}, "should have id 7000"),
    ],
)
def test_directories_that_are_damaged(tmp_path: Path, files: dict[str, Any], match: str) -> None:
    write(tmp_path, None, **files)
    if "tokenizer.json" in files:
        (tmp_path / "tokenizer.json").write_text(files["tokenizer.json"])
    with pytest.raises(CheckpointError, match=match):
        load(tmp_path)


def test_a_directory_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json"):
        load(tmp_path)
