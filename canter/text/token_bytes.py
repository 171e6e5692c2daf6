"""The bytes that each token stands for, where a vocabulary has such bytes: byte-level BPE and SentencePiece BPE.

Text is then the concatenation of bytes, read as UTF-8, so that it can be decoded token by token in constant time.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


@dataclass(slots=True)
class TokenBytes:
    """`bytes_of(id)` for every id. `strip_leading_space`: the first space of a text is the one that encoding put there."""

    backend: Tokenizer
    byte_level: bool
    strip_leading_space: bool
    _known: dict[int, bytes] = field(default_factory=dict)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id outside the vocabulary."""
        found = self._known.get(token_id)
        if found is None:
            token = self.backend.id_to_token(token_id) if token_id >= 0 else None
            found = self._known[token_id] = b"" if token is None else self._read(token)
        return found

    def _read(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes([_ALPHABET[char] for char in token])
            except KeyError:  # an added token, written as it reads
                return token.encode()
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token.replace("\u2581", " ").encode()


def find_token_bytes(backend: Tokenizer) -> TokenBytes | None:
    """How this tokenizer's decoder reads tokens as bytes, or None when it does something else (WordPiece, Unigram, ...)."""
    if backend.decoder is None:
        return None
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    if decoder["type"] == "ByteLevel":
        return TokenBytes(backend, True, False)
    steps = decoder.get("decoders", [])
    types = [step["type"] for step in steps]
    if types[:3] != ["Replace", "ByteFallback", "Fuse"] or not _reads_space(steps[0]):
        return None
    if types[3:] == []:
        return TokenBytes(backend, False, False)
    if types[3:] == ["Strip"] and (steps[3]["content"], steps[3]["start"], steps[3]["stop"]) == (" ", 1, 0):
        return TokenBytes(backend, False, True)
    return None


def _reads_space(step: dict[str, Any]) -> bool:
    return bool(step["pattern"] == {"String": "\u2581"} and step["content"] == " ")
