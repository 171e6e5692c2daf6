"""What a grammar must know of a model's tokens: the bytes that each stands for, and which stand for none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`size` counts the model's logits. `token_bytes` may be shorter: ids beyond, and those without bytes, are never written.

    `markers` are the tokens that are no text, by how they are spelled (`<|im_end|>`): text never becomes one of them, and they
    never match as text. `encode` turns text into ids as the model is used to; what it makes of a marker's spelling doesn't matter.
    """

    size: int
    token_bytes: Sequence[bytes]
    markers: Mapping[str, int]
    eos_token_ids: Sequence[int]
    encode: Callable[[str], list[int]]
