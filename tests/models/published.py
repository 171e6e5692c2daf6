"""Checkpoints as they were published, where that is more than other names of tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tests.models.families import FAMILIES, Family, save_oracle

PUBLISHED_MINIMAX = ("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM")


def publish_minimax(folder: Path, architecture: str) -> Family:
    """Save a tiny MiniMax as it was published: the names in the config differ from transformers', those of tensors don't."""
    (minimax,) = (family for family in FAMILIES if family.name == "minimax")
    family = replace(minimax, name="minimax-published", settings={**minimax.settings, "num_attention_heads": 4})
    path = save_oracle(family, folder) / "config.json"
    config = json.loads(path.read_text())
    for part, published in (("linear_attn", "linear_attention"), ("full_attn", "full_attention"), ("mlp", "mlp")):
        for greek in ("alpha", "beta"):
            config[f"layernorm_{published}_{greek}"] = config.pop(f"{part}_{greek}_factor")
    config["attn_type_list"] = [int(kind == "full_attention") for kind in config.pop("layer_types")]
    config |= {"postnorm": True, "rotary_dim": config["head_dim"], "rope_theta": config.pop("rope_parameters")["rope_theta"]}
    path.write_text(json.dumps(config | {"architectures": [architecture], "model_type": "minimax_published"}))
    return family
