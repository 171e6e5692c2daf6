"""What Gemma 3n and Gemma 4 share: layers that read others' keys, inputs of single layers, and names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from canter.core.errors import CheckpointError
from canter.layers.per_layer import PerLayerArgs
from canter.models import hf_config, names
from canter.models.weights import Rule

RULES = (
    *names.OUTER,
    Rule("model.embed_tokens_per_layer.weight", "per_layer.embed.weight"),
    Rule("model.per_layer_model_projection.weight", "per_layer.projection.weight"),
    Rule("model.per_layer_projection_norm.weight", "per_layer.norm.weight"),
    *names.BRANCH_NORMS,
    *(
        Rule(f"{names.LAYER}.self_attn.{part}_proj.{kind}", f"layers.{{i}}.attention.qkv.{kind}", part, tied=part != "q")
        for part in ("q", "k", "v")
        for kind in ("weight", "bias")
    ),
    *names.OUTPUT,
    Rule(f"{names.LAYER}.self_attn.q_norm.weight", "layers.{i}.attention.q_norm.weight"),
    Rule(f"{names.LAYER}.self_attn.k_norm.weight", "layers.{i}.attention.k_norm.weight", tied=True),
    *names.SEPARATE_GATE_UP,
    *names.DOWN,
    Rule(f"{names.LAYER}.per_layer_input_gate.weight", "layers.{i}.per_layer.gate.weight"),
    Rule(f"{names.LAYER}.per_layer_projection.weight", "layers.{i}.per_layer.out.weight"),
    Rule(f"{names.LAYER}.post_per_layer_input_norm.weight", "layers.{i}.per_layer.norm.weight"),
)
"""Keys and values of layers that read others' are passed over: published checkpoints hold some that nothing reads."""
TOWERS = (*names.VISION, "*audio_tower.*", "*embed_vision.*", "*embed_audio.*")


def shared_layers(text: Mapping[str, Any], types: list[str], default: int) -> list[int | None]:
    """For each layer the layer whose keys it reads, None for its own: the last ones read those of the last layer of their kind that
    has some."""
    count = text.get("num_kv_shared_layers", default)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count < len(types):
        raise CheckpointError(f"Config key 'num_kv_shared_layers': expected an integer from 0 to {len(types) - 1}, found {count!r:.80}.")
    first = len(types) - count
    owners = {kind: i for i, kind in enumerate(types[:first])}
    missing = set(types) - set(owners)
    if missing:
        raise CheckpointError(f"Config key 'num_kv_shared_layers': {count} leaves no layer of kind {missing.pop()!r} with keys of its own.")
    return [None if i < first else owners[kind] for i, kind in enumerate(types)]


def per_layer_args(text: Mapping[str, Any], vocab_size: int, activation: str) -> PerLayerArgs | None:
    """None for a model without inputs of single layers."""
    size = text.get("hidden_size_per_layer_input", 256)
    if not size:
        return None
    known = hf_config.positive_int(text, "vocab_size_per_layer_input", min(262144, vocab_size))
    return PerLayerArgs(hf_config.positive_int(text, "hidden_size_per_layer_input", 256), known, activation)
