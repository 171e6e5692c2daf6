"""A tokenizer from the metadata of a GGUF file: the vocabulary, merges or scores, and which tokens are special.

Two kinds are built: byte-level BPE (`tokenizer.ggml.model` = gpt2), which lists its merges, and SentencePiece BPE (llama),
which merges the neighbours whose union has the highest score. The meaning of each key is llama.cpp's (src/llama-vocab.cpp).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from canter.checkpoint.gguf_reader import Metadata
from canter.core.errors import CheckpointError, UnsupportedModelError
from canter.text.pre_tokenizers import find_pre_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"
"""What SentencePiece writes for a space."""

# Tokens that end a turn. Files often name only one of them as EOS; llama.cpp finds the others by these spellings.
_END_OF_TURN = frozenset(
    (
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "[EOT]",
        "<\uff5cend\u2581of\u2581sentence\uff5c>", "<end_of_utterance>", "<turn|>", "<|return|>", "<|call|>",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BuiltTokenizer:
    """A tokenizer backend and what is known of its special tokens. `prefix` and `suffix` frame an encoded prompt.

    `prefix` None: the backend frames prompts itself.
    """

    backend: Tokenizer
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    pad_id: int | None
    eos_ids: frozenset[int]
    chat_templates: dict[str, str]
    prefix: list[int] | None
    suffix: list[int]


class _Vocabulary:
    """The lists of `tokenizer.ggml.*`, checked against each other."""

    def __init__(self, metadata: Metadata, origin: str) -> None:
        self.metadata, self.origin = metadata, origin
        tokens = self.array("tokens", str)
        self.tokens: list[str] = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            index, token = next((i, t) for i, t in enumerate(self.tokens) if self.ids[t] != i)
            raise CheckpointError(f"{origin}: tokenizer.ggml.tokens lists {token!r} twice, as {index} and {self.ids[token]}.")
        typed = "tokenizer.ggml.token_type" in metadata
        self.types: list[int] = self.array("token_type", int, len(self.tokens)) if typed else [NORMAL] * len(self.tokens)

    def array(self, name: str, kind: type | tuple[type, ...], length: int | None = None) -> list[Any]:
        """A list of the metadata. Raises `CheckpointError` when it is absent, empty, of another kind (files hold lists of one kind
        only), or not as long as it should be.
        """
        key = f"tokenizer.ggml.{name}"
        value = list(self.walked(name, kind))
        if length is not None and len(value) != length:
            raise CheckpointError(f"{self.origin}: {key} must have {length} elements, one for each token, found {len(value)}.")
        return value

    def walked(self, name: str, kind: type | tuple[type, ...]) -> Collection[Any]:
        """The same list, its strings decoded only as it is walked."""
        key = f"tokenizer.ggml.{name}"
        value = self.metadata.walk(key)
        elements: Collection[Any] = value if isinstance(value, Collection) and not isinstance(value, str) else ()
        first = next(iter(elements), None)
        if not isinstance(first, kind):
            names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            found = f"a list of {type(first).__name__}" if elements else repr(value)[:40]
            raise CheckpointError(f"{self.origin}: {key} must be a list of {names}, found {found}.")
        return elements

    def special_id(self, name: str, default: int | None = None) -> int | None:
        """The id under `tokenizer.ggml.<name>_token_id`; ids outside the vocabulary count as absent, as in llama.cpp."""
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id", default)
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            return None
        return value

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.metadata.get(f"tokenizer.ggml.{name}", default))

    def forget(self) -> None:
        """Empty the lists, which the library has copied.

        Where a server answers while it loads, what its answers left in cycles lies between the strings, and would keep their memory.
        """
        self.tokens.clear()
        self.ids.clear()
        self.types.clear()
        if gc.get_freeze_count():  # a server's modules are left out: it takes milliseconds
            gc.collect()


class _Pairs(Sequence[tuple[str, str]]):
    """What each merge joins, cut from its text as it is walked; `first` is called before.

    The library takes one pair after the other and keeps copies. Hundreds of thousands of pairs beside them would be the most
    memory that a server's frontend ever takes.
    """

    def __init__(self, merges: Collection[str], first: Callable[[], None]) -> None:
        self._merges, self._first = merges, first

    def __len__(self) -> int:
        return len(self._merges)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        self._first()
        for merge in self._merges:
            first, _, second = merge.partition(" ")
            yield first, second

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


def build_gguf_tokenizer(metadata: Metadata, origin: str) -> BuiltTokenizer:
    """Build from the keys of a GGUF file. `origin` names the file in errors.

    Raises `UnsupportedModelError` for a kind or pre-tokenizer that is not known, `CheckpointError` for lists that contradict each other.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"{origin}: tokenizer.ggml.model is {kind!r}; Canter builds 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE). "
            "Take the tokenizer from the model's original directory instead (--tokenizer)."
        )
    vocabulary = _Vocabulary(metadata, origin)
    spm = kind == "llama"
    bos = vocabulary.special_id("bos", 1 if spm else None)
    eos = vocabulary.special_id("eos", 2 if spm else None)
    unk = vocabulary.special_id("unknown", 0 if spm else None)
    pad = vocabulary.special_id("padding")
    separator = vocabulary.special_id("seperator", vocabulary.special_id("separator"))
    ends = _end_of_turn_ids(vocabulary, eos)
    # The normaliser that puts a space in front would do so to the tokens themselves.
    normalized = spm and not vocabulary.flag("add_space_prefix", True)
    control, plain = _special_tokens(vocabulary, ends | {i for i in (bos,) if i is not None}, normalized)
    backend, add_bos = _sentencepiece(vocabulary) if spm else _byte_level(vocabulary)  # from here the lists are empty
    backend.add_special_tokens(control)
    backend.add_tokens(plain)
    prefix = [bos] if bos is not None and vocabulary.flag("add_bos_token", add_bos) else []
    suffix = [eos] if eos is not None and vocabulary.flag("add_eos_token", False) else []
    if not suffix and separator is not None and vocabulary.flag("add_sep_token", False):
        suffix = [separator]
    return BuiltTokenizer(backend, bos, eos, unk, pad, frozenset(ends), _chat_templates(metadata), prefix, suffix)


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether prompts begin with BOS when the file does not say.

    The library has copied the vocabulary when it begins with the merges. What it was copied from is forgotten then: its tens of megabytes
    are back before the copies of the merges take as many.
    """
    pre = find_pre_tokenizer(vocabulary.metadata.get("tokenizer.ggml.pre") or "default")
    merges: Any = _Pairs(vocabulary.walked("merges", str), vocabulary.forget)
    try:
        model = models.BPE(vocabulary.ids, merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{vocabulary.origin}: tokenizer.ggml.merges does not fit the vocabulary: {error}.") from None
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """SentencePiece BPE: bytes stand for characters that are not in the vocabulary."""
    unk = vocabulary.special_id("unknown", 0)
    scores = vocabulary.array("scores", (float, int), len(vocabulary.tokens))
    merges = merges_from_scores(vocabulary.tokens, scores, vocabulary.types)
    unk_token = None if unk is None else vocabulary.tokens[unk]
    model = models.BPE(vocabulary.ids, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=BYTE in vocabulary.types)
    vocabulary.forget()
    backend = Tokenizer(model)
    prefix = vocabulary.flag("add_space_prefix", True)
    escape = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), escape]) if prefix else escape
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend, True


def merges_from_scores(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """The merges that a SentencePiece BPE vocabulary implies, best first.

    SentencePiece joins the two neighbours whose union is the piece of the highest score; every way to cut a piece in two
    pieces is therefore a merge of that piece's rank. Only normal pieces take part: the others never come out of merging.
    """
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    order = sorted((i for i, kind in enumerate(types) if kind == NORMAL), key=lambda i: -scores[i])
    merges: list[tuple[str, str]] = []
    for piece in (tokens[i] for i in order):
        merges += [(piece[:k], piece[k:]) for k in range(1, len(piece)) if piece[:k] in normal and piece[k:] in normal]
    return merges


def _end_of_turn_ids(vocabulary: _Vocabulary, eos: int | None) -> set[int]:
    named = {vocabulary.special_id("eot"), vocabulary.special_id("eom"), eos}
    spellings = _END_OF_TURN
    if "<|return|>" in vocabulary.ids:  # the harmony format: <|end|> closes a message there, and the turn goes on
        spellings = spellings - {"<|end|>"}
    spelled = {vocabulary.ids[token] for token in spellings if token in vocabulary.ids}
    return {token_id for token_id in named | spelled if token_id is not None}


def _special_tokens(vocabulary: _Vocabulary, special: set[int], normalized: bool) -> tuple[list[AddedToken], list[AddedToken]]:
    """Control tokens, which are found in text and can be left out of output, and user-defined ones, which are found in text and stay.

    `normalized`: user-defined tokens are looked for after spaces have become U+2581, as SentencePiece does.
    """
    control, plain = [], []
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in (CONTROL, UNKNOWN) or index in special:
            control.append(AddedToken(token, normalized=False, special=True))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(token, normalized=normalized, special=False))
    return control, plain


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Name -> template; the unnamed one is "default"."""
    head = "tokenizer.chat_template"
    found = {key: metadata[key] for key in metadata if key == head or key.startswith(head + ".")}
    return {key[len(head) + 1 :] or "default": value for key, value in found.items() if isinstance(value, str)}
