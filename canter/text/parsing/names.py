"""The names by which users ask for formats."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from canter.core.errors import ConfigError

TOOL_NAMES = (
    "apertus", "cohere_command3", "cohere_command4", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "deepseek_v41", "dots",
    "ernie45", "functiongemma", "gemma4", "gigachat3", "glm45", "glm47", "granite", "granite-20b-fc", "granite4", "hermes", "hf",
    "hunyuan_a13b", "hy_v3", "hy_v4", "inkling", "internlm", "jamba", "k2_horizon", "kimi_k2", "kimi_k3", "lfm2", "ling3", "llama3_json",
    "llama4_json", "llama4_pythonic", "longcat", "mimo", "minicpm5", "minimax", "minimax_m2", "minimax_m3", "mistral", "muse_glimmer",
    "olmo3", "openai", "phi4_mini_json", "poolside_v1", "pythonic", "qwen3_coder", "qwen3_json", "qwen3_xml", "seed_oss", "step3",
    "step3p5", "xlam",
)  # fmt: skip
"""What vLLM's --tool-call-parser takes."""

REASONING_NAMES = (
    "cohere_command3", "cohere_command4", "deepseek_r1", "deepseek_v3", "deepseek_v4", "deepseek_v41", "ernie45", "gemma4", "glm45",
    "glm47", "granite", "hf", "holo2", "hunyuan_a13b", "hy_v3", "hy_v4", "inkling", "k2_horizon", "kimi_k2", "kimi_k3", "ling3", "mimo",
    "minimax_m2", "minimax_m2_append_think", "minimax_m3", "mistral", "muse_glimmer", "nemotron_v3", "olmo3", "openai_gptoss",
    "poolside_v1", "qwen3", "seed_oss", "step3", "step3p5",
)  # fmt: skip
"""What vLLM's --reasoning-parser takes."""


def check_name(name: str, flag: str, built: Collection[str], known: Collection[str]) -> None:
    """Raises `ConfigError` for a name that no format answers to, also when it is one that vLLM has a format for."""
    if name in built:
        return
    if name in known:
        raise ConfigError(f"{flag} {name}: Canter can't read this format. It reads: {', '.join(sorted(built))}.")
    near = difflib.get_close_matches(name, sorted({*built, *known}), 3, 0.5)
    hint = f" Did you mean {' or '.join(near)}?" if near else f" There is: {', '.join(sorted(built))}."
    raise ConfigError(f"{flag} {name}: there is no such format.{hint}")
