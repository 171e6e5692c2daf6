"""Text that grows token by token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from canter.text.detokenizer import IncrementalDetokenizer
from canter.text.gguf_tokenizer import BuiltTokenizer
from canter.text.tokenizer import Tokenizer
from tests.text.corpus import lines
from tests.text.vocabularies import small_byte_level, small_spm

TOKENIZERS = {"byte level": small_byte_level, "spm": small_spm, "spm without prefix": lambda: small_spm(False)}


def word_piece() -> Tokenizer:
    """A vocabulary whose tokens are not bytes: decoding puts spaces between words."""
    words = ["[UNK]", "[SEP]", "hel", "##lo", "wor", "##ld", "a", "b"]
    backend = Backend(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[SEP]"])
    return Tokenizer(BuiltTokenizer(backend, None, 1, 0, None, frozenset({1}), {}, None, []))


def run(tokenizer: Tokenizer, ids: list[int], sizes: list[int], prompt: list[int], skip: bool) -> list[str]:
    """The pieces of text, `ids` given in calls of `sizes` tokens."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    pieces, at = [], 0
    for size in [*sizes, len(ids)]:
        pieces.append(detokenizer.append(ids[at : at + size]))
        at += size
    pieces.append(detokenizer.flush())
    assert detokenizer.text == "".join(pieces)
    return pieces


@settings(max_examples=200, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(TOKENIZERS)), skip=st.booleans())
def test_any_split_gives_the_text_of_the_whole(data: st.DataObject, name: str, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=20))
    assert "".join(run(tokenizer, ids, sizes, [], skip)) == tokenizer.decode(ids, skip)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(TOKENIZERS)), text=st.sampled_from(lines(1500, seed=5)))
def test_real_text_never_shows_a_replacement_character(data: st.DataObject, name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(text, add_special_tokens=False)
    cut = data.draw(st.integers(0, len(ids)))
    sizes = data.draw(st.lists(st.integers(0, 3), max_size=30))
    pieces = run(tokenizer, ids[cut:], sizes, ids[:cut], False)
    assert ("\ufffd" in "".join(pieces)) <= ("\ufffd" in text)
    head = tokenizer.decode(ids[:cut], False)
    if "\ufffd" not in head:
        assert head + "".join(pieces) == tokenizer.decode(ids, False)


def test_a_character_is_held_until_its_last_byte() -> None:
    tokenizer = small_byte_level()
    ids = [tokenizer.token_to_id(char) for char in "ðŁĻĤ"]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.append([i]) for i in ids if i is not None] == ["", "", "", "🙂"]
    assert detokenizer.flush() == ""


def test_a_character_that_the_prompt_begins_is_completed() -> None:
    tokenizer = small_byte_level()
    ids = [i for char in "ðŁĻĤ" if (i := tokenizer.token_to_id(char)) is not None]
    detokenizer = IncrementalDetokenizer(tokenizer, [*tokenizer.encode("hello"), *ids[:3]])
    assert detokenizer.append(ids[3:]) == "🙂"


def test_bytes_that_never_complete_are_shown_at_the_end() -> None:
    tokenizer = small_byte_level()
    lead = tokenizer.token_to_id("ð")
    assert lead is not None
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.append([lead]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.text == "\ufffd"


def test_leading_space_of_sentencepiece() -> None:
    tokenizer = small_spm()
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    assert IncrementalDetokenizer(tokenizer).append(ids) == "the fox"
    assert IncrementalDetokenizer(tokenizer, tokenizer.encode("quick")).append(ids) == " the fox"
    # BOS shows nothing, so the output begins the text
    assert IncrementalDetokenizer(tokenizer, [1]).append(ids) == "the fox"
    assert IncrementalDetokenizer(tokenizer, [1], skip_special_tokens=False).append(ids) == " the fox"


def test_special_tokens() -> None:
    tokenizer = small_byte_level()
    ids = tokenizer.encode("a<|im_end|><|im_end|>b")
    assert IncrementalDetokenizer(tokenizer).append(ids) == "ab"
    shown = IncrementalDetokenizer(tokenizer, (), skip_special_tokens=False, spaces_between_special_tokens=False)
    assert shown.append(ids) == "a<|im_end|><|im_end|>b"


@pytest.mark.parametrize("size", [1, 2, 100])
def test_vocabularies_that_are_not_bytes(size: int) -> None:
    tokenizer = word_piece()
    ids = [2, 3, 4, 5, 1, 6, 7] * 5
    for skip in (True, False):
        pieces = run(tokenizer, ids, [size] * 100, [], skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip)
    detokenizer = IncrementalDetokenizer(tokenizer, [6, 2], True)
    assert detokenizer.append([3, 4]) == "lo wor"


def test_special_tokens_without_spaces_between_them() -> None:
    tokenizer = word_piece()
    spaced = IncrementalDetokenizer(tokenizer, (), False, True)
    tight = IncrementalDetokenizer(tokenizer, (), False, False)
    assert spaced.append([6, 1, 1, 7]) == "a [SEP] [SEP] b"
    assert tight.append([6, 1, 1, 7]) == "a [SEP][SEP] b"
