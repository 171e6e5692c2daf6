"""The tokenizer of a model: text to ids, ids to text, and what its special tokens are.

The only module, with the builders beside it, that knows the tokenizers library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from canter.checkpoint.gguf_reader import GGUFFile
from canter.core.errors import InvalidRequestError
from canter.core.vocabulary import Vocabulary
from canter.text.gguf_tokenizer import BuiltTokenizer, build_gguf_tokenizer
from canter.text.hf_tokenizer import build_hf_tokenizer
from canter.text.token_bytes import find_token_bytes

if TYPE_CHECKING:
    from canter.checkpoint.resolve import CheckpointFiles


_MARKER = re.compile(r"[<\[\u25c1].*[>\]\u25b7]")
"""How tokens are spelled that mark parts of a conversation: in angle or square brackets."""


class Tokenizer:
    """Encodes and decodes; safe to use from several threads.

    `eos_token_ids`: every token that ends a turn as far as the tokenizer's files say (EOS, and for GGUF files the end-of-turn
    tokens beside it). `chat_templates`: by name, the usual one is "default".
    """

    def __init__(self, built: BuiltTokenizer) -> None:
        self._backend, self._prefix, self._suffix = built.backend, built.prefix, built.suffix
        self.bos_token_id, self.eos_token_id = built.bos_id, built.eos_id
        self.unk_token_id, self.pad_token_id = built.unk_id, built.pad_id
        self.eos_token_ids = built.eos_ids
        self.chat_templates = built.chat_templates
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        added = self._backend.get_added_tokens_decoder()
        self.added_token_ids = frozenset(added)
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.token_bytes = find_token_bytes(self._backend)

    @property
    def bos_token(self) -> str | None:
        return self.id_to_token(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        return self.id_to_token(self.eos_token_id)

    @property
    def unk_token(self) -> str | None:
        return self.id_to_token(self.unk_token_id)

    @property
    def pad_token(self) -> str | None:
        return self.id_to_token(self.pad_token_id)

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens as text, by id."""
        return [token for token in map(self.id_to_token, sorted(self.special_token_ids)) if token is not None]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens that the text spells become those tokens.

        `add_special_tokens` frames the ids as the model wants its prompts (BOS, EOS); a BOS that the text already begins with is
        not doubled. Raises `InvalidRequestError` for text that is not Unicode (lone surrogates).
        """
        framed = add_special_tokens and self._prefix is None
        try:
            ids = self._backend.encode(text, add_special_tokens=framed).ids
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequestError(f"The text can't be encoded: {_text_fault([text])}.") from None
        return self._frame(ids, add_special_tokens)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each text, on as many threads as the library takes; the interpreter stays free meanwhile."""
        framed = add_special_tokens and self._prefix is None
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=framed)
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequestError(f"The text can't be encoded: {_text_fault(texts)}.") from None
        return [self._frame(encoding.ids, add_special_tokens) for encoding in encodings]

    def _frame(self, ids: list[int], add_special_tokens: bool) -> list[int]:
        if not add_special_tokens:
            return ids
        if self._prefix is not None:
            ids = [*self._prefix, *ids, *self._suffix]
        if len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id:
            del ids[0]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a sequence. Bytes that are not UTF-8 read as U+FFFD; ids outside the vocabulary read as nothing."""
        if self.token_bytes is None:
            return self.decode_with_backend(ids, skip_special_tokens)
        bytes_of = self.token_bytes.bytes_of
        text = b"".join(bytes_of(i) for i in self.visible(ids, skip_special_tokens)).decode(errors="replace")
        return text[1:] if self.token_bytes.strip_leading_space and text.startswith(" ") else text

    def decode_with_backend(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The library's own decoding: for vocabularies whose tokens are not plain bytes."""
        return str(self._backend.decode([i for i in ids if i >= 0], skip_special_tokens=skip_special_tokens))

    def visible(self, ids: Iterable[int], skip_special_tokens: bool) -> Iterable[int]:
        """The ids that show in text."""
        return (i for i in ids if i not in self.special_token_ids) if skip_special_tokens else ids

    def vocabulary(self, size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
        """What a grammar must know of these tokens; `size` counts the model's logits. Takes a moment: every token is read.

        Added tokens that look like markers are none of the text's, whether the tokenizer calls them special or not: a thought's end
        must not stand in a JSON string. Raises `InvalidRequestError` where tokens are no bytes.
        """
        if self.token_bytes is None:
            raise InvalidRequestError(
                "structured_outputs need a tokenizer whose tokens stand for bytes; this model's (WordPiece or Unigram) do not.",
                "structured_outputs",
            )
        added = {i: self._backend.id_to_token(i) or "" for i in self.added_token_ids}
        markers = {text: i for i, text in added.items() if text and (i in self.special_token_ids or _MARKER.fullmatch(text))}
        bytes_of = self.token_bytes.bytes_of
        known = [bytes_of(i) for i in range(min(size, self.vocab_size))]
        return Vocabulary(size, known, markers, list(eos_token_ids), lambda text: self.encode(text, add_special_tokens=False))

    def id_to_token(self, token_id: int | None) -> str | None:
        """The token as the vocabulary spells it (not as text: see `decode`)."""
        if token_id is None or token_id < 0:
            return None
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        token_id: int | None = self._backend.token_to_id(token)
        return token_id


def _text_fault(texts: Sequence[str]) -> str:
    for text in texts:
        if not isinstance(text, str):
            return f"a string was expected, got {type(text).__name__}"
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return f"character {error.start} is a lone surrogate (U+{ord(text[error.start]):04X}), which is not text"
    return "it is not text"


def load_tokenizer(files: CheckpointFiles) -> Tokenizer:
    """The tokenizer of a checkpoint: from tokenizer.json of a Hugging Face directory, or from a GGUF file's metadata.

    Raises `CheckpointError` for missing or contradicting files, `UnsupportedModelError` for kinds that Canter does not build.
    """
    if files.kind == "gguf" and files.gguf is not None:
        return Tokenizer(build_gguf_tokenizer(GGUFFile(files.gguf).metadata, str(files.gguf)))
    return Tokenizer(build_hf_tokenizer(files.root))
