"""Random prompts of exact length. Same seed, same prompts."""

from __future__ import annotations

import random

LOWEST_ID = 1000
"""Below it lie the special and single-byte tokens of the usual vocabularies."""

HIGHEST_ID = 30000


def random_prompts(count: int, length: int, seed: int, shared: int = 0, vocab_size: int = HIGHEST_ID) -> list[list[int]]:
    """`count` prompts of `shared + length` token ids; the first `shared` are the same in all of them."""
    rng = random.Random(seed)
    low = LOWEST_ID if vocab_size > 2 * LOWEST_ID else vocab_size // 2
    high = min(vocab_size, HIGHEST_ID)
    head = [rng.randrange(low, high) for _ in range(shared)]
    return [head + [rng.randrange(low, high) for _ in range(length)] for _ in range(count)]
