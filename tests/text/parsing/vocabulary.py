"""Tiny tokenizers that have the markers of output formats as tokens."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from canter.text.gguf_tokenizer import BuiltTokenizer
from canter.text.tokenizer import Tokenizer as CanterTokenizer

MERGED = ("the", "tool", "call", "name", "arg", "ument", "para", "meter", "func", "tion", "think", "</", '":', "\n\n", "  ", "},", "json")
"""Tokens of several bytes, so that markers' texts and other texts have tokens that begin or end within them."""


@cache
def tiny_tokenizer(tokens: tuple[str, ...] = (), special: tuple[str, ...] = ("<|end|>",), byte_level: bool = True) -> CanterTokenizer:
    """Every byte is a token, some words are, and `tokens` (added) and `special` (added, and special).

    Not `byte_level`: a decoder that Canter has no table of bytes for, so that tokens have to be searched for in text.
    """
    vocabulary = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for word in MERGED:
        spelled = word.replace(" ", "\u0120").replace("\n", "\u010a")
        for size in range(2, len(spelled) + 1):
            pair = (spelled[: size - 1], spelled[size - 1])
            if spelled[:size] not in vocabulary:
                vocabulary[spelled[:size]] = len(vocabulary)
                merges.append(pair)
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel() if byte_level else decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in tokens])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return CanterTokenizer(BuiltTokenizer(backend, None, None, None, None, frozenset(), {}, None, []))


def encode_plain(tokenizer: CanterTokenizer, text: str) -> list[int]:
    """Ids of ordinary tokens for a text, also where it spells an added token."""
    return [i for char in text for i in tokenizer.encode(char, add_special_tokens=False)]
