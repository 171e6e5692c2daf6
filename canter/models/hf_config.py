"""Reading a config.json: the keys that all decoder-only families share, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from canter.core.errors import CheckpointError, UnsupportedModelError
from canter.layers.attention import AttentionArgs
from canter.layers.norm import NormArgs
from canter.layers.rope import read_rope

SLIDING = "sliding_attention"
FULL = "full_attention"


def positive_int(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """An integer above 0; a missing or null key gives the default, or raises `CheckpointError` where there is none."""
    value = hf.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"Config key {key!r}: expected an integer of at least 1, found {value!r:.80}.")
    return value


def number(hf: Mapping[str, Any], key: str, default: float) -> float:
    """A finite number of at least 0; a missing or null key gives the default."""
    value = hf.get(key)
    if value is None:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise CheckpointError(f"Config key {key!r}: expected a finite number of at least 0, found {value!r:.80}.")
    return float(value)


def flag(hf: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """A boolean; a missing or null key gives the default."""
    value = hf.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"Config key {key!r}: expected true or false, found {value!r:.80}.")
    return value


def factor(hf: Mapping[str, Any], key: str) -> float:
    """A number that multiplies something: 1 where it is missing or null."""
    return number(hf, key, 1.0)


def positive(hf: Mapping[str, Any], key: str) -> float:
    """A number above 0 that divides something: 1 where it is missing or null."""
    value = factor(hf, key)
    if value == 0:
        raise CheckpointError(f"Config key {key!r}: expected a number above 0, found {value}.")
    return value


def limits(hf: Mapping[str, Any], key: str) -> tuple[float, float]:
    """(least, most), by default 0 and infinity, which JSON may spell as a text, as a huge number, or as a name of its own."""
    values = hf.get(key)
    if values is None:
        return 0.0, float("inf")
    try:
        least, most = (float(value["__float__"]) if isinstance(value, Mapping) else float(value) for value in values)
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"Config key {key!r}: expected two numbers, found {values!r:.80}.") from None
    return least, most


def kinds(hf: Mapping[str, Any], key: str, num_layers: int, known: Mapping[Any, str], default: list[str]) -> list[str]:
    """The kind of each layer, under names of our own: `known` has those that configs use. The default where the config has none."""
    values = hf.get(key)
    if values is None:
        return default
    if not isinstance(values, (list, tuple)) or len(values) < num_layers or any(value not in known for value in values):
        raise CheckpointError(f"Config key {key!r}: expected {num_layers} of {', '.join(map(repr, known))}, found {values!r:.120}.")
    return [known[value] for value in values[:num_layers]]


def expect_activation(hf: Mapping[str, Any], key: str, *names: str) -> None:
    """Raise `UnsupportedModelError` for an activation that a layer doesn't have. A missing key is the family's own, which it has."""
    value = hf.get(key)
    if value is not None and value not in names:
        raise UnsupportedModelError(f"Config key {key!r}: {value!r:.80} is not supported, only {' or '.join(map(repr, names))} is.")


def layer_types(hf: Mapping[str, Any], num_layers: int, default: list[str]) -> list[str]:
    """`layer_types`, one a layer, or the default where the config has none."""
    values = hf.get("layer_types")
    if values is None:
        return default
    known = isinstance(values, (list, tuple)) and all(value in (SLIDING, FULL) for value in values)
    if not known or len(values) < num_layers:
        raise CheckpointError(f"Config key 'layer_types': expected {num_layers} of {SLIDING!r} and {FULL!r}, found {values!r:.120}.")
    return list(values[:num_layers])


def head_counts(hf: Mapping[str, Any], heads: int | None = None, kv_heads: int | None = None) -> tuple[int, int]:
    """(query heads, key heads), checked to divide. A missing number of key heads is the default, or all query heads."""
    num_heads = positive_int(hf, "num_attention_heads", heads)
    num_kv_heads = positive_int(hf, "num_key_value_heads", kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"Config key 'num_key_value_heads': expected a divisor of num_attention_heads ({num_heads}), found {num_kv_heads}."
        )
    return num_heads, num_kv_heads


def text_config(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text part of a multimodal config; a config of text alone is that already."""
    text = hf.get("text_config")
    if text is None:
        return hf
    if not isinstance(text, Mapping):
        raise CheckpointError(f"Config key 'text_config': expected an object, found {text!r:.80}.")
    return {"tie_word_embeddings": hf.get("tie_word_embeddings"), **text}


def windows(types: list[str], window: int) -> list[int]:
    """The window of each layer: `window` where it slides, 0 elsewhere."""
    return [window if kind == SLIDING else 0 for kind in types]


def llama_shape(
    hf: Mapping[str, Any],
    *,
    default_eps: float = 1e-6,
    default_theta: float = 10000.0,
    default_tied: bool = False,
    default_head_dim: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
    types: list[str] | None = None,
    window: int = 0,
    rotated: list[bool] | None = None,
) -> dict[str, Any]:
    """The fields of `DecoderArgs` for a family of Llama's build.

    `types`: kind of each layer (default: all full); `window` is that of the sliding ones. `rotated`: which layers have
    a rope (default: all).
    """
    hidden_size, num_layers = positive_int(hf, "hidden_size"), positive_int(hf, "num_hidden_layers")
    num_heads, num_kv_heads = head_counts(hf)
    head_dim = positive_int(hf, "head_dim", default_head_dim or hidden_size // num_heads)
    norm = NormArgs(number(hf, "rms_norm_eps", default_eps))
    types = types or [FULL] * num_layers
    rotated = rotated or [True] * num_layers
    attention = tuple(
        AttentionArgs(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=read_rope(hf, head_dim, kind, default_theta) if has_rope else None,
            window=width,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            qk_norm=norm if qk_norm else None,
        )
        for kind, width, has_rope in zip(types, windows(types, window), rotated, strict=True)
    )
    return {
        "vocab_size": positive_int(hf, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": positive_int(hf, "intermediate_size"),
        "attention": attention,
        "norm": norm,
        "tied_output": flag(hf, "tie_word_embeddings", default_tied),
        "activation": str(hf.get("hidden_act") or "silu"),
    }
