"""Tokenizers rebuilt from GGUF metadata: against what the vocabulary was trained with, and against a plain reading of the rules."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from canter.checkpoint.gguf_reader import Metadata
from canter.core.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from canter.text.gguf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, _Pairs, _Vocabulary, merges_from_scores
from canter.text.pre_tokenizers import PRE_TOKENIZERS
from tests.text.corpus import lines
from tests.text.vocabularies import SPECIAL, build, byte_level, byte_level_metadata, small_byte_level, small_spm, spm_metadata, spm_model

LINES = lines(2000)


def splits(name: str, text: str) -> list[str]:
    """The pieces of `text`, in plain spelling."""
    pieces = PRE_TOKENIZERS[name].build().pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in pieces]


def test_byte_level_equals_the_tokenizer_it_was_trained_with() -> None:
    ours, reference = small_byte_level(), byte_level()
    for text in LINES:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids, skip_special_tokens=False) == reference.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", sorted({value: name for name, value in PRE_TOKENIZERS.items()}.values()))
def test_every_pre_tokenizer_loses_nothing(name: str) -> None:
    pre = PRE_TOKENIZERS[name].build()
    for text in LINES[:400]:
        assert "".join(splits(name, text)) == text
    assert pre.pre_tokenize_str("") == []


@pytest.mark.parametrize(
    ("name", "original"),
    [
        ("gpt-2", pre_tokenizers.ByteLevel(add_prefix_space=False)),
        ("smollm", pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])),
    ],
)
def test_pre_tokenizers_cut_as_the_models_own_do(name: str, original: Any) -> None:
    ours = PRE_TOKENIZERS[name].build()
    for text in LINES:
        assert [piece for piece, _ in ours.pre_tokenize_str(text)] == [piece for piece, _ in original.pre_tokenize_str(text)], text


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "I'm 123 a  b", ["I", "'m", " 123", " a", " ", " b"]),
        ("smollm", "x  123", ["x", "  ", "1", "2", "3"]),
        ("llama-bpe", "I'M 12345\n\n x", ["I", "'M", " ", "123", "45", "\n\n", " x"]),
        ("qwen2", "I'M 123 x", ["I", "'M", " ", "1", "2", "3", " x"]),
        ("deepseek-coder", "a1 +\nb", ["a", "1", " +", "\n", "b"]),
        ("deepseek-llm", "Ab 你好 12", ["Ab", " ", "你好", " ", "12"]),
        ("deepseek-v3", "ab1234你好", ["ab", "123", "4", "你好"]),
        ("tekken", "HTTPServer fooBar/", ["HTTPServer", " foo", "Bar", "/"]),
        ("gpt-4o", "HELLOworld's 1234", ["HELLOworld's", " ", "123", "4"]),
        ("falcon", "a+1234`", ["a", "+", "123", "4", "`"]),
        ("default", "a$1234", ["a", "$", "123", "4"]),
        ("bloom", "ab, cd", ["ab", ",", " cd"]),
        ("starcoder", "a12", ["a", "1", "2"]),
    ],
)
def test_pieces(name: str, text: str, pieces: list[str]) -> None:
    assert splits(name, text) == pieces


def test_ignore_merges_takes_whole_words() -> None:
    tokens = ["a", "b", "c", "ab", "bc", "abc", *SPECIAL]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * 6 + [CONTROL] * 3,
        "tokenizer.ggml.merges": ["b c", "a b"],
    }
    ids = {pre: build({**metadata, "tokenizer.ggml.pre": pre}).encode("abc") for pre in ("gpt-2", "llama-bpe", "tekken")}
    assert ids == {"gpt-2": [0, 4], "llama-bpe": [5], "tekken": [5]}


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("byte_fallback", [True, False])
def test_spm_equals_sentencepiece(prefix: bool, byte_fallback: bool) -> None:
    """Texts without control tokens or tokens of several kinds next to each other: there SentencePiece itself has one answer."""
    model = spm_model(prefix, byte_fallback)
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    ours = build(spm_metadata(model))
    marks = [ours.id_to_token(i) for i in ours.special_token_ids]
    pieces = ("\n", "\u2581\u2581", "<h1>", "</h1>")
    checked = 0
    for text in LINES:
        # a space in front is put before every stretch of text between such tokens, as llama.cpp does; SentencePiece does so once
        if (
            "\x00" in text
            or any(mark in text for mark in marks if mark)
            or (prefix and any(piece in f" {text}".replace(" ", "\u2581") for piece in pieces))
        ):
            continue
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text), text
        if byte_fallback:
            assert ours.decode(ids) == reference.decode(ids) == text.replace("\u2581", " ")
        checked += 1
    assert checked > (600 if prefix else 1000)


def test_spm_user_defined_tokens_win_over_merges() -> None:
    tokenizer = small_spm(prefix=False)
    ids = tokenizer.encode("a     b<h1>\n\n", add_special_tokens=False)
    assert [tokenizer.decode([i]) for i in ids] == ["a", "     ", "b", "<h1>", "\n\n"]
    assert tokenizer.encode("\u2581\u2581", add_special_tokens=False) == tokenizer.encode("  ", add_special_tokens=False)


def test_spm_prefix_space_opens_every_stretch_of_text() -> None:
    tokenizer = small_spm()
    plain = tokenizer.encode("the", add_special_tokens=False)
    start = tokenizer.token_to_id("<|im_start|>")
    assert tokenizer.encode("the<|im_start|>the", add_special_tokens=False) == [*plain, start, *plain]
    assert tokenizer.decode(plain) == "the"


def naive_spm(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule to the letter: join the two neighbours whose union scores best, the leftmost of equals."""
    symbols = list(text)
    while True:
        joins = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not joins:
            return symbols
        at = -max(joins)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("abc", min_size=2, max_size=5), unique=True, max_size=14),
    text=st.text("abc", max_size=24),
    seed=st.randoms(use_true_random=False),
)
def test_merges_from_scores_join_as_sentencepiece_does(pieces: list[str], text: str, seed: Any) -> None:
    """Vocabularies that training can produce: every piece is the union of two pieces that score higher."""
    order, known = [], {"a", "b", "c"}
    seed.shuffle(pieces)
    while grown := [p for p in pieces if p not in known and any(p[:k] in known and p[k:] in known for k in range(1, len(p)))]:
        order.append(grown[0])
        known.add(grown[0])
    tokens = [*order, "a", "b", "c"]
    scores = [-float(i) for i in range(len(tokens))]
    merges = merges_from_scores(tokens, scores, [NORMAL] * len(tokens))
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    expected = naive_spm(text, dict(zip(order, scores, strict=False)))
    assert backend.encode(text).tokens == expected


def test_merges_are_ordered_by_score_and_leave_out_other_kinds() -> None:
    tokens = ["a", "b", "ab", "ba", "aba", "<x>", "<0x41>"]
    types = [NORMAL] * 5 + [USER_DEFINED, BYTE]
    assert merges_from_scores(tokens, [-9, -9, -2, -1, -3, 0, 0], types) == [("b", "a"), ("a", "b"), ("a", "ba"), ("ab", "a")]


def test_bytes_stand_for_unknown_characters() -> None:
    tokenizer = small_spm(prefix=False)
    ids = tokenizer.encode("\U0002a6a7", add_special_tokens=False)
    assert [tokenizer.id_to_token(i) for i in ids] == ["<0xF0>", "<0xAA>", "<0x9A>", "<0xA7>"]
    assert tokenizer.decode(ids) == "\U0002a6a7"
    assert tokenizer.decode(ids[:2]) == "\ufffd"


@pytest.mark.parametrize(
    ("more", "first", "last"),
    [
        ({}, False, False),
        ({"add_bos_token": True}, True, False),
        ({"add_bos_token": True, "add_eos_token": True}, True, True),
        ({"pre": "llama-bpe"}, True, False),
        ({"pre": "llama-bpe", "add_bos_token": False}, False, False),
    ],
)
def test_framing_of_byte_level_prompts(more: dict[str, Any], first: bool, last: bool) -> None:
    tokenizer = build(byte_level_metadata(byte_level(), **more))
    bare = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [1] * first + bare + [2] * last
    assert tokenizer.encode_batch(["hello", ""]) == [[1] * first + bare + [2] * last, [1] * first + [2] * last]


def test_framing_of_spm_prompts() -> None:
    metadata = spm_metadata(spm_model())
    assert build(metadata).encode("x")[0] == 1
    assert build({**metadata, "tokenizer.ggml.add_bos_token": False}).encode("x")[0] != 1
    for key in ("bos", "eos", "unknown"):
        del metadata[f"tokenizer.ggml.{key}_token_id"]
    tokenizer = build(metadata)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")


def test_a_bos_that_the_text_spells_is_not_doubled() -> None:
    tokenizer = build(byte_level_metadata(byte_level(), add_bos_token=True))
    assert tokenizer.encode("<|im_start|>hi") == tokenizer.encode("hi")
    assert tokenizer.encode("<|im_start|>hi", add_special_tokens=False) == tokenizer.encode("hi")
    assert tokenizer.encode("<|im_start|><|im_start|>hi")[:3].count(1) == 2


def test_special_tokens_and_what_ends_a_turn() -> None:
    tokenizer = small_byte_level()
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.all_special_tokens == list(SPECIAL)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_start|>", "<|im_end|>", 2)
    assert tokenizer.eos_token_ids == {0, 2}
    ids = tokenizer.encode("a<|im_end|>b")
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"
    assert tokenizer.vocab_size == 1500


def test_harmony_messages_end_without_ending_the_turn() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-4o",
        "tokenizer.ggml.tokens": ["a", "<|end|>", "<|return|>", "<|call|>"],
        "tokenizer.ggml.token_type": [NORMAL, CONTROL, CONTROL, CONTROL],
        "tokenizer.ggml.merges": ["a a"],
        "tokenizer.ggml.eos_token_id": 2,
    }
    metadata["tokenizer.ggml.tokens"].append("aa")
    metadata["tokenizer.ggml.token_type"].append(NORMAL)
    assert build(metadata).eos_token_ids == {2, 3}


def test_old_files_without_token_types_still_know_bos_and_eos() -> None:
    metadata = byte_level_metadata(byte_level())
    del metadata["tokenizer.ggml.token_type"]
    assert build(metadata).special_token_ids == {0, 1, 2}


def test_user_defined_tokens_stay_in_text() -> None:
    metadata = byte_level_metadata(byte_level())
    metadata["tokenizer.ggml.tokens"] += ["<tool_call>", "[PAD1501]"]
    metadata["tokenizer.ggml.token_type"] += [USER_DEFINED, 5]
    tokenizer = build(metadata)
    ids = tokenizer.encode("a<tool_call>b")
    assert 1500 in ids
    assert tokenizer.decode(ids) == "a<tool_call>b"
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.vocab_size == 1502


def test_chat_templates() -> None:
    metadata = byte_level_metadata(byte_level())
    metadata |= {"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B", "tokenizer.chat_templates": ["tool_use"]}
    tokenizer = build(metadata)
    assert tokenizer.chat_template == "A"
    assert tokenizer.chat_templates == {"default": "A", "tool_use": "B"}
    assert small_byte_level().chat_template is None


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"pre": "nonesuch"}, UnsupportedModelError, "tokenizer.ggml.pre is 'nonesuch'"),
        ({"model": "t5"}, UnsupportedModelError, "tokenizer.ggml.model is 't5'"),
        ({"model": None}, UnsupportedModelError, "tokenizer.ggml.model is None"),
        ({"tokens": None}, CheckpointError, "tokens must be a list of str, found None"),
        ({"tokens": []}, CheckpointError, "tokens must be a list of str, found \\[\\]"),
        ({"tokens": [1, 2]}, CheckpointError, "tokens must be a list of str, found a list of int"),
        ({"token_type": [0.5]}, CheckpointError, "token_type must be a list of int"),
        ({"tokens": ["a", "b", "a"]}, CheckpointError, "lists 'a' twice, as 2 and|twice, as 0 and 2"),
        ({"token_type": [1, 2]}, CheckpointError, "token_type must have 1500 elements"),
        ({"merges": None}, CheckpointError, "merges must be a list"),
        ({"merges": ["zz qq"]}, CheckpointError, "merges does not fit the vocabulary"),
        ({"merges": ["zz"]}, CheckpointError, "merges"),
    ],
)
def test_metadata_that_does_not_fit(change: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        build(byte_level_metadata(byte_level(), **change))


def test_spm_metadata_that_does_not_fit() -> None:
    with pytest.raises(CheckpointError, match="scores must have"):
        build(spm_metadata(spm_model(), scores=[0.0]))
    with pytest.raises(CheckpointError, match="scores must be a list"):
        build(spm_metadata(spm_model(), scores=None))


def test_ids_out_of_range_mean_absent() -> None:
    tokenizer = build(byte_level_metadata(byte_level(), bos_token_id=99999, padding_token_id=0))
    assert tokenizer.bos_token is None
    assert tokenizer.pad_token == "<|endoftext|>"


def test_text_that_is_not_unicode_is_refused() -> None:
    tokenizer = small_byte_level()
    with pytest.raises(InvalidRequestError, match=r"character 2 is a lone surrogate \(U\+D800\)"):
        tokenizer.encode("ab\ud800")
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        tokenizer.encode_batch(["fine", "\udfff"])
    with pytest.raises(InvalidRequestError, match="got int"):
        tokenizer.encode(3)  # type: ignore[arg-type]


def test_ids_outside_the_vocabulary_are_no_text() -> None:
    for tokenizer in (small_byte_level(), small_spm()):
        assert tokenizer.decode([10**6, -1]) == ""
        assert tokenizer.id_to_token(10**6) is None
        assert tokenizer.id_to_token(-1) is None
        assert tokenizer.token_to_id("no such token") is None


def test_unknown_characters_without_byte_tokens() -> None:
    tokenizer = build(spm_metadata(spm_model(byte_fallback=False)))
    ids = tokenizer.encode("\U0002a6a7\U0002a6a8", add_special_tokens=False)
    assert ids[-1] == tokenizer.unk_token_id
    assert UNKNOWN not in (CONTROL, USER_DEFINED)


def test_the_vocabulary_is_forgotten_before_the_first_merge_is_copied() -> None:
    vocabulary = _Vocabulary(Metadata({"tokenizer.ggml.tokens": ["a", "b", "ab"]}), "file")
    pairs = iter(_Pairs(["a b"], vocabulary.forget))
    assert vocabulary.ids == {"a": 0, "b": 1, "ab": 2}
    assert next(pairs) == ("a", "b")
    assert not vocabulary.ids and not vocabulary.tokens and not vocabulary.types
