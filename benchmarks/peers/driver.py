"""What the drivers share: the workloads and the loop that takes orders. Standard library only, so that any rival's Python runs it.

A driver loads its model, prints `RESULT {"ready": true}`, and then answers each line of its input, a JSON object, with a
line `RESULT {...}`. Libraries may print what they like in between.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

PREFIX = "RESULT "

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""Prompts and the number of tokens to generate for each, greedily and past any end token -> the tokens of each. All at once."""


class Work(NamedTuple):
    """Requests of equal size: prompt tokens that all begin with, further ones of each, and tokens generated for each."""

    requests: int
    shared: int
    own: int
    out: int


WORKS = {
    "single": Work(1, 0, 128, 128),
    "prefill": Work(1, 0, 1024, 1),
    "batch": Work(32, 0, 128, 128),
    "shared": Work(32, 1024, 16, 32),
    "long": Work(1, 0, 8192, 128),
}
"""single and long: speed of decoding; prefill: of the prompt; batch and shared: of all generated tokens, over the whole time."""

DECODING = ("single", "long")


def make_prompts(work: Work, seed: int) -> list[list[int]]:
    """Random ids that are plain tokens in every vocabulary in use, so that no tokenizer decides how much work there is."""
    rng = random.Random(seed)
    head = [rng.randrange(1000, 30000) for _ in range(work.shared)]
    return [head + [rng.randrange(1000, 30000) for _ in range(work.own)] for _ in range(work.requests)]


def figure(name: str, seconds: float, first: float = 0.0) -> float:
    """Tokens a second of a workload that took `seconds` in all, and `first` to its first token."""
    work = WORKS[name]
    if name in DECODING:
        return (work.out - 1) / (seconds - first)
    return (work.own if name == "prefill" else work.requests * work.out) / seconds


def timed(generate: Generate, prompts: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
    """Seconds and tokens. Raises `RuntimeError` when other than `count` tokens came for any prompt."""
    start = time.perf_counter()
    tokens = generate(prompts, count)
    seconds = time.perf_counter() - start
    if [len(one) for one in tokens] != [count] * len(prompts):
        raise RuntimeError(f"asked for {count} tokens each, got {sorted({len(one) for one in tokens})}")
    return seconds, tokens


def measure(generate: Generate, name: str, seed: int) -> dict[str, Any]:
    """One run of a workload. The time to the first token is taken from another prompt, so that no cache shortens the whole."""
    work = WORKS[name]
    first = timed(generate, make_prompts(work, seed + 500_000), 1)[0] if name in DECODING else 0.0
    seconds, tokens = timed(generate, make_prompts(work, seed), work.out)
    return {"tok_s": figure(name, seconds, first), "seconds": seconds, "tokens": tokens}


def answer(result: dict[str, Any]) -> None:
    print(PREFIX + json.dumps(result), flush=True)


def obey(generate: Generate, others: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] | None = None) -> None:
    """Warm up, say that all is ready, and carry out orders until the input ends."""
    generate(make_prompts(Work(2, 0, 16, 8), 99), 8)
    answer({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "measure":
            answer(measure(generate, order["work"], order["seed"]))
        else:
            answer((others or {})[order["do"]](order))
