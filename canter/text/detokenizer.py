"""Text of a growing sequence of tokens: whole characters only, each as soon as it is complete."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from canter.text.token_bytes import TokenBytes
from canter.text.tokenizer import Tokenizer

_MAX_UTF8_TAIL = 3
_WINDOW = 6
_MAX_HELD_TOKENS = 16
_REPLACEMENT = "\ufffd"


class _Stream(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class IncrementalDetokenizer:
    """Turns the tokens of one output into text, piece by piece.

    `text` is all text so far. However the ids are split over calls, the pieces with `flush()` make up the text that decoding
    prompt and output together adds to the prompt's; a character whose bytes are not all there is held back.

    `spaces_between_special_tokens` False: special tokens that follow each other are not set apart by spaces. Byte-level and
    SentencePiece vocabularies never put any there.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._pieces: list[str] = []
        self._stream: _Stream
        if tokenizer.token_bytes is not None:
            self._stream = _ByteStream(tokenizer, tokenizer.token_bytes, prompt_token_ids, skip_special_tokens)
        else:
            self._stream = _WindowStream(tokenizer, prompt_token_ids, skip_special_tokens, spaces_between_special_tokens)

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def append(self, ids: Sequence[int]) -> str:
        """Add tokens; returns the text that became complete, maybe none."""
        return self._keep(self._stream.push(ids))

    def flush(self) -> str:
        """The output has ended: returns what was held back, incomplete bytes as U+FFFD."""
        return self._keep(self._stream.finish())

    def _keep(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece


class _ByteStream:
    """Constant time a token: bytes go through an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer, table: TokenBytes, prompt: Sequence[int], skip_special: bool) -> None:
        self._bytes_of = table.bytes_of
        self._hidden = tokenizer.special_token_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = self._prompt_tail(prompt)
        self._at_start = table.strip_leading_space and not tail
        self._decoder.decode(_incomplete_end(tail))

    def _prompt_tail(self, prompt: Sequence[int]) -> bytes:
        """The last bytes of the prompt: enough to hold a character that its end has cut."""
        tail = b""
        for token_id in reversed(prompt):
            if token_id not in self._hidden:
                tail = self._bytes_of(token_id) + tail
            if len(tail) > _MAX_UTF8_TAIL:
                break
        return tail

    def push(self, ids: Sequence[int]) -> str:
        hidden, bytes_of = self._hidden, self._bytes_of
        return self._begin(self._decoder.decode(b"".join([bytes_of(i) for i in ids if i not in hidden])))

    def finish(self) -> str:
        return self._begin(self._decoder.decode(b"", final=True))

    def _begin(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


def _incomplete_end(data: bytes) -> bytes:
    """The bytes at the end that begin a character and don't complete it."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data)
    return decoder.getstate()[0]


class _WindowStream:
    """For decoders that look at neighbouring tokens: decodes a few tokens before each new one again, and emits the difference."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special: bool, spaces_between: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._joined = tokenizer.special_token_ids if not skip_special and not spaces_between else frozenset()
        self._window = list(tokenizer.visible(prompt[-4 * _WINDOW :], skip_special))[-_WINDOW:]
        self._num_read = len(self._window)

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._push_one(i) for i in self._tokenizer.visible(ids, self._skip_special)])

    def _push_one(self, token_id: int) -> str:
        if token_id in self._joined and self._window and self._window[-1] in self._joined:
            self._window, self._num_read = [token_id], 1
            return self._tokenizer.id_to_token(token_id) or ""
        self._window.append(token_id)
        return self._emit(final=len(self._window) - self._num_read > _MAX_HELD_TOKENS)

    def finish(self) -> str:
        return self._emit(final=True)

    def _emit(self, final: bool) -> str:
        decode = self._tokenizer.decode_with_backend
        before, after = decode(self._window[: self._num_read], False), decode(self._window, False)
        if len(after) <= len(before) or (after.endswith(_REPLACEMENT) and not final):
            return ""
        self._window = self._window[-max(_WINDOW, len(self._window) - self._num_read) :]
        self._num_read = len(self._window)
        return after[len(before) :]
