"""How checkpoints of decoder-only families name their tensors, where families agree."""

from __future__ import annotations

from canter.models.weights import Rule

LAYER = "model.layers.{i}"

OUTER = (
    Rule("model.embed_tokens.weight", "embed.weight"),
    Rule("model.norm.weight", "norm.weight"),
    Rule("lm_head.weight", "head.weight", tied=True),
)
"""Embedding, last norm, output layer."""

OUTPUT = (
    Rule(f"{LAYER}.self_attn.o_proj.weight", "layers.{i}.attention.output.weight"),
    Rule(f"{LAYER}.self_attn.o_proj.bias", "layers.{i}.attention.output.bias"),
)
DOWN = (
    Rule(f"{LAYER}.mlp.down_proj.weight", "layers.{i}.mlp.down.weight"),
    Rule(f"{LAYER}.mlp.down_proj.bias", "layers.{i}.mlp.down.bias"),
)

SEPARATE_QKV = tuple(
    Rule(f"{LAYER}.self_attn.{part}_proj.{kind}", f"layers.{{i}}.attention.qkv.{kind}", part)
    for part in ("q", "k", "v")
    for kind in ("weight", "bias")
)
SEPARATE_GATE_UP = tuple(
    Rule(f"{LAYER}.mlp.{part}_proj.{kind}", f"layers.{{i}}.mlp.gate_up.{kind}", part)
    for part in ("gate", "up")
    for kind in ("weight", "bias")
)
QK_NORM = tuple(Rule(f"{LAYER}.self_attn.{part}_norm.weight", f"layers.{{i}}.attention.{part}_norm.weight") for part in ("q", "k"))

LLAMA_NORMS = (
    Rule(f"{LAYER}.input_layernorm.weight", "layers.{i}.attention_norm.weight"),
    Rule(f"{LAYER}.post_attention_layernorm.weight", "layers.{i}.mlp_norm.weight"),
)
BRANCH_NORMS = (
    Rule(f"{LAYER}.input_layernorm.weight", "layers.{i}.attention_norm.weight"),
    Rule(f"{LAYER}.post_attention_layernorm.weight", "layers.{i}.after_attention_norm.weight"),
    Rule(f"{LAYER}.pre_feedforward_layernorm.weight", "layers.{i}.mlp_norm.weight"),
    Rule(f"{LAYER}.post_feedforward_layernorm.weight", "layers.{i}.after_mlp_norm.weight"),
)
"""Of families that normalise what branches give, too."""
BODY_RENAMES = (("layers.", "model.layers."), ("embed_tokens.", "model.embed_tokens."), ("norm.", "model.norm."))
"""Checkpoints that were saved without their output layer name the body's tensors without `model.`"""

ROPE_BUFFERS = ("*.rotary_emb.inv_freq", "rope_freqs.weight")
"""Frequencies that older checkpoints store although the config gives them."""

MULTIMODAL_RENAMES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
"""The text part of a model that sees images too, in older and newer checkpoints."""
VISION = ("*vision_tower.*", "*vision_model.*", "*multi_modal_projector.*")
"""What such a model sees with."""
