"""Rotary position embeddings: what a config says of them, and the table of cosines and sines that the rotary op reads.

Everything is settled when the model is built. Kinds whose frequencies depend on how long a sequence may get (dynamic,
longrope) take the length that is served (`max_model_len`), not the length that happens to be reached: a token's keys
are then the same whatever comes after it, so they can be cached and shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from canter.core.errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class RopeArgs:
    """One rope, as a config gives it. `dim` is the number of leading dimensions of a head that are rotated.

    Pairs are element i and i + dim / 2, or where `interleaved` elements 2 i and 2 i + 1.
    `original_length` is the context of pre-training, before any stretching. `short_factors`, `long_factors` (longrope)
    and `factors` (explicit_factors) hold `dim / 2` divisors of the frequencies each. `num_turned` (proportional): the pairs that turn
    at all, whose frequencies are those of whole heads.
    """

    kind: str
    dim: int
    theta: float
    factor: float = 1.0
    max_position: int = 0
    original_length: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    num_turned: int = 0
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries at position p are multiplied by 1 + `factor` * ln(1 + floor((p + 1) / `interval`)), so that attention over long
    contexts stays sharp (arXiv 2501.19399)."""

    factor: float
    interval: float


def read_rope(hf: Mapping[str, Any], head_dim: int, layer_type: str | None = None, default_theta: float = 10000.0) -> RopeArgs:
    """The rope of a config, of one layer type where the config tells them apart.

    Reads both spellings: `rope_theta` and `rope_scaling`, or `rope_parameters`, flat or nested by layer type. Raises
    `CheckpointError` for a value that is missing or malformed, `UnsupportedModelError` for a kind that is not known.
    """
    given = _parameters(hf, layer_type)
    kind = str(given.get("rope_type") or given.get("type") or "default")
    kind = _ALIASES.get(kind, kind)
    if kind not in _FREQUENCIES:
        raise UnsupportedModelError(f"rope_type {kind!r} is not supported. Supported: {', '.join(sorted(_FREQUENCIES))}.")
    partial = given.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    dim = int(head_dim * float(partial) + 1e-6)  # a factor may have been computed as dim / head_dim
    if kind == "proportional":
        dim = head_dim
    if dim < 2 or dim % 2:
        raise CheckpointError(f"Rotary dimensions must be an even number of at least 2, found {dim} (head_dim {head_dim}, part {partial}).")
    theta = float(given.get("rope_theta") or hf.get("rope_theta") or default_theta)
    max_position = int(hf.get("max_position_embeddings") or 0)
    original = int(hf.get("original_max_position_embeddings") or given.get("original_max_position_embeddings") or max_position)
    reader = _READERS.get(kind)
    special = reader(given, dim, max_position, original) if reader else {}
    return RopeArgs(kind=kind, dim=dim, theta=theta, max_position=max_position, original_length=original, **special)


def inverse_frequencies(args: RopeArgs, max_model_len: int) -> Tensor:
    """Radians per position of each rotated pair: [dim / 2] float32. `max_model_len`: tokens that a request may reach."""
    return _FREQUENCIES[args.kind](args, max_model_len)


def rope_table(args: RopeArgs, max_model_len: int, device: torch.device) -> Tensor:
    """[max_model_len, dim] float32: dim / 2 cosines, then dim / 2 sines, both times the attention factor.

    Angles are float64, since a float32 product loses 1/100 of a radian at a million tokens.
    """
    positions = torch.arange(max_model_len, dtype=torch.float64)
    angles = torch.outer(positions, inverse_frequencies(args, max_model_len).double())
    table = torch.cat((angles.cos(), angles.sin()), dim=1) * args.attention_factor
    return table.to(torch.float32).to(device)


def growth_table(args: QueryGrowth, head_dim: int, max_model_len: int, device: torch.device) -> Tensor:
    """[max_model_len, head_dim] float32: as a rotary table it turns nothing, but multiplies by what queries grow by."""
    positions = torch.arange(max_model_len, dtype=torch.float32)
    growth = torch.log1p(torch.floor((positions + 1) / args.interval)) * args.factor + 1
    table = torch.zeros(max_model_len, head_dim)
    table[:, : head_dim // 2] = growth[:, None]
    return table.to(device)


def _parameters(hf: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    """The dictionary that describes a rope. `rope_scaling`, where given, overrides: it is what users write."""
    found: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        values = hf.get(key) or {}
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{key} must be an object, found {values!r:.80}.")
        nested = values.get(layer_type) if layer_type is not None else None
        found.update(nested if isinstance(nested, Mapping) else values)
    return found


def _number(given: Mapping[str, Any], key: str, kind: str) -> float:
    value = given.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(f"rope_type {kind!r} needs {key}, a number above 0; found {value!r:.80}.")
    return float(value)


def _divisors(given: Mapping[str, Any], key: str, dim: int, kind: str) -> tuple[float, ...]:
    values = given.get(key)
    if not isinstance(values, (list, tuple)) or len(values) != dim // 2:
        found = f"{len(values)}" if isinstance(values, (list, tuple)) else repr(values)[:80]
        raise CheckpointError(f"rope_type {kind!r} needs {key} with {dim // 2} numbers (half the rotary dimensions), found {found}.")
    return tuple(float(value) for value in values)


def _read_factor(given: Mapping[str, Any], dim: int, max_position: int, original: int) -> dict[str, Any]:
    return {"factor": _number(given, "factor", str(given.get("rope_type") or given.get("type")))}


def _read_llama3(given: Mapping[str, Any], dim: int, max_position: int, original: int) -> dict[str, Any]:
    return {name: _number(given, name, "llama3") for name in ("factor", "low_freq_factor", "high_freq_factor")}


def _read_yarn(given: Mapping[str, Any], dim: int, max_position: int, original: int) -> dict[str, Any]:
    factor = float(given.get("factor") or max_position / max(original, 1))
    return {
        "factor": factor,
        "attention_factor": _yarn_attention_factor(given, factor),
        "beta_fast": float(given.get("beta_fast") or 32.0),
        "beta_slow": float(given.get("beta_slow") or 1.0),
        "truncate": bool(given.get("truncate", True)),
    }


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """YaRN (arXiv 2309.00071, section 3.4): 0.1 ln(factor) + 1, with DeepSeek's two multipliers of the logarithm."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])

    def mscale(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return mscale(float(given["mscale"])) / mscale(float(given["mscale_all_dim"]))
    return mscale(1.0)


def _read_longrope(given: Mapping[str, Any], dim: int, max_position: int, original: int) -> dict[str, Any]:
    """LongRoPE (arXiv 2402.13753): the attention factor follows from how far the context was stretched, whatever is served."""
    factor = float(given.get("factor") or max_position / max(original, 1))
    attention = given.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "factor": factor,
        "attention_factor": float(attention),
        "short_factors": _divisors(given, "short_factor", dim, "longrope"),
        "long_factors": _divisors(given, "long_factor", dim, "longrope"),
    }


def _read_explicit(given: Mapping[str, Any], dim: int, max_position: int, original: int) -> dict[str, Any]:
    attention = given.get("attention_factor")
    return {
        "factors": _divisors(given, "factors", dim, "explicit_factors"),
        "attention_factor": 1.0 if attention is None else float(attention),
    }


def _read_proportional(given: Mapping[str, Any], dim: int, max_position: int, original: int) -> dict[str, Any]:
    part = given.get("partial_rotary_factor")
    part = 1.0 if part is None else _number(given, "partial_rotary_factor", "proportional")
    return {"factor": float(given.get("factor") or 1.0), "num_turned": min(int(part * dim // 2), dim // 2)}


def _default(args: RopeArgs, max_model_len: int) -> Tensor:
    return 1.0 / _periods(args.theta, args.dim)


def _periods(theta: float, dim: int) -> Tensor:
    """theta^(2 i / dim), in float32 as models are trained with."""
    return torch.tensor(theta, dtype=torch.float32) ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _linear(args: RopeArgs, max_model_len: int) -> Tensor:
    return _default(args, max_model_len) / args.factor


def _dynamic(args: RopeArgs, max_model_len: int) -> Tensor:
    """NTK-aware scaling: theta grows with the part of the served length that exceeds the trained one."""
    trained = args.max_position or max_model_len
    length = max(max_model_len, trained)
    growth = args.factor * length / trained - (args.factor - 1)
    return 1.0 / _periods(args.theta * growth ** (args.dim / (args.dim - 2)), args.dim)


def _llama3(args: RopeArgs, max_model_len: int) -> Tensor:
    """Llama 3.1: slow frequencies divided by `factor`, fast ones kept, a linear blend between the two wavelengths."""
    base = _default(args, max_model_len)
    turns = args.original_length * base / (2 * math.pi)
    blend = ((turns - args.low_freq_factor) / (args.high_freq_factor - args.low_freq_factor)).clamp(0, 1)
    return (1 - blend) * base / args.factor + blend * base


def _yarn(args: RopeArgs, max_model_len: int) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): dimensions that turn often keep their frequency, slow ones are interpolated."""

    def dimension_of(turns: float) -> float:
        return args.dim * math.log(args.original_length / (turns * 2 * math.pi)) / (2 * math.log(args.theta))

    low, high = dimension_of(args.beta_fast), dimension_of(args.beta_slow)
    if args.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, args.dim - 1)
    ramp = ((torch.arange(args.dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    base = _default(args, max_model_len)
    return base / args.factor * ramp + base * (1 - ramp)


def _longrope(args: RopeArgs, max_model_len: int) -> Tensor:
    chosen = args.long_factors if max_model_len > args.original_length else args.short_factors
    return 1.0 / (torch.tensor(chosen, dtype=torch.float32) * _periods(args.theta, args.dim))


def _proportional(args: RopeArgs, max_model_len: int) -> Tensor:
    turned = torch.arange(args.dim // 2) < args.num_turned
    return torch.where(turned, _default(args, max_model_len) / args.factor, 0)


def _explicit(args: RopeArgs, max_model_len: int) -> Tensor:
    return _default(args, max_model_len) / torch.tensor(args.factors, dtype=torch.float32)


_ALIASES = {"su": "longrope"}
_FREQUENCIES: dict[str, Callable[[RopeArgs, int], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "explicit_factors": _explicit,
    "proportional": _proportional,
}
_READERS: dict[str, Callable[[Mapping[str, Any], int, int, int], dict[str, Any]]] = {
    "linear": _read_factor,
    "dynamic": _read_factor,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
    "explicit_factors": _read_explicit,
    "proportional": _read_proportional,
}
