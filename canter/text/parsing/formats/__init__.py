"""One file for each family of output formats. A family counts once it stands in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Callable

from canter.text.parsing.format import Calls, Detection, Family, Thoughts
from canter.text.parsing.formats import (
    deepseek,
    dots,
    dsml,
    gemma4,
    glm,
    harmony,
    hermes,
    hunyuan3,
    inkling,
    json_calls,
    k2_horizon,
    kimi,
    kimi_k3,
    llama,
    minicpm,
    minimax_m2,
    minimax_m3,
    mistral,
    muse_glimmer,
    pythonic,
    qwen3,
    step,
    think,
)
from canter.text.tokenizer import Tokenizer

FAMILIES: tuple[Family, ...] = (
    think.FAMILY,
    hermes.FAMILY,
    qwen3.FAMILY,
    kimi.FAMILY,
    deepseek.FAMILY,
    llama.FAMILY,
    glm.FAMILY,
    minimax_m2.FAMILY,
    dsml.FAMILY,
    mistral.FAMILY,
    harmony.FAMILY,
    gemma4.FAMILY,
    pythonic.FAMILY,
    json_calls.FAMILY,
    hunyuan3.FAMILY,
    step.FAMILY,
    minicpm.FAMILY,
    minimax_m3.FAMILY,
    dots.FAMILY,
    kimi_k3.FAMILY,
    k2_horizon.FAMILY,
    inkling.FAMILY,
    muse_glimmer.FAMILY,
)

CALLS: dict[str, Calls | Callable[[Tokenizer], Calls]] = {
    name: calls for family in FAMILIES for name, calls in family.calls.items()
}  # fmt: skip
THOUGHTS: dict[str, Thoughts | Callable[[Tokenizer], Thoughts]] = {
    name: thoughts for family in FAMILIES for name, thoughts in family.thoughts.items()
}
DETECTIONS: tuple[Detection, ...] = tuple(detection for family in FAMILIES for detection in family.detect)
