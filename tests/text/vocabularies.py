"""Small vocabularies trained on the spot, as the metadata of a GGUF file and as what they were trained with."""

from __future__ import annotations

import io
import json
from functools import cache
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from canter.checkpoint.gguf_reader import Metadata
from canter.text.gguf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, build_gguf_tokenizer
from canter.text.tokenizer import Tokenizer as CanterTokenizer
from tests.text.corpus import lines

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@cache
def byte_level(pattern: str | None = None, size: int = 1500) -> Tokenizer:
    """A byte-level BPE tokenizer of the tokenizers library; `pattern` None splits as GPT-2 does."""
    tokenizer = Tokenizer(models.BPE())
    split: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern is not None:
        parts = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        split = pre_tokenizers.Sequence(parts)
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(lines(1200, seed=1), trainer)
    return tokenizer


def byte_level_metadata(tokenizer: Tokenizer, pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
    """What a GGUF file of that tokenizer would say. `more` are further keys of tokenizer.ggml."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if token in SPECIAL else NORMAL for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


@cache
def spm_model(prefix: bool = True, byte_fallback: bool = True) -> bytes:
    """A serialized SentencePiece BPE model with user-defined runs of spaces and tags, as Gemma has."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in lines(1200, seed=2) if "\x00" not in line]),
        model_writer=out,
        vocab_size=1200,
        model_type="bpe",
        character_coverage=0.98,
        byte_fallback=byte_fallback,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["\n", "\n\n", "\u2581\u2581", "\u2581\u2581\u2581", "\u2581" * 5, "<h1>", "</h1>"],
        control_symbols=["<|im_start|>", "<|im_end|>"],
        max_sentence_length=100000,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return out.getvalue()


def spm_metadata(model: bytes, **more: Any) -> dict[str, Any]:
    """What a GGUF file of that model would say: user-defined tokens hold real spaces, as llama.cpp's converter writes them."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    kinds = {1: NORMAL, 2: UNKNOWN, 3: CONTROL, 4: USER_DEFINED, 5: UNUSED, 6: BYTE}
    types = [kinds[piece.type] for piece in proto.pieces]
    tokens = [
        piece.piece.replace("\u2581", " ") if kind == USER_DEFINED else piece.piece for piece, kind in zip(proto.pieces, types, strict=True)
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [piece.score for piece in proto.pieces],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": proto.normalizer_spec.add_dummy_prefix,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def build(metadata: dict[str, Any]) -> CanterTokenizer:
    return CanterTokenizer(build_gguf_tokenizer(Metadata(metadata), "test.gguf"))


@cache
def small_byte_level() -> CanterTokenizer:
    return build(byte_level_metadata(byte_level()))


@cache
def small_spm(prefix: bool = True) -> CanterTokenizer:
    return build(spm_metadata(spm_model(prefix)))
