"""How checkpoints of decoder-only families name their tensors, where families agree."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

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


def negative_exponential(x: Tensor) -> Tensor:
    """What `A_log` stands for: how fast a state decays."""
    return -x.exp()


def transposed_decay(x: Tensor) -> Tensor:
    """`A_log` [I, N] as [N, I]: channels lie side by side."""
    return negative_exponential(x).t().contiguous()


def taps_first(x: Tensor) -> Tensor:
    """The weights of a depthwise convolution, [C, 1, K], as [K, C]."""
    return x.squeeze(1).t().contiguous()


def moved(rules: Iterable[tuple[str, str]], source: str, target: str) -> tuple[Rule, ...]:
    """Rules for tensors of a place `source` in the checkpoint and a place `target` in the model."""
    return tuple(Rule(f"{source}.{name}", f"{target}.{own}") for name, own in rules)


def mamba2(source: str, target: str) -> tuple[Rule, ...]:
    """A Mamba-2 mixer."""
    same = (
        ("in_proj.weight", "input.weight"),
        ("in_proj.bias", "input.bias"),
        ("conv1d.bias", "conv.bias"),
        ("dt_bias", "step_bias"),
        ("D", "d"),
        ("norm.weight", "norm.weight"),
        ("out_proj.weight", "output.weight"),
        ("out_proj.bias", "output.bias"),
    )
    return (
        *moved(same, source, target),
        Rule(f"{source}.conv1d.weight", f"{target}.conv.weight", transform=taps_first),
        Rule(f"{source}.A_log", f"{target}.a", transform=negative_exponential),
    )


def mamba1(source: str, target: str) -> tuple[Rule, ...]:
    """A Mamba mixer; norms as Jamba names them."""
    same = (
        ("in_proj.weight", "input.weight"),
        ("in_proj.bias", "input.bias"),
        ("conv1d.bias", "conv.bias"),
        ("x_proj.weight", "select.weight"),
        ("dt_proj.weight", "step.weight"),
        ("dt_proj.bias", "step_bias"),
        ("dt_layernorm.weight", "step_norm.weight"),
        ("b_layernorm.weight", "b_norm.weight"),
        ("c_layernorm.weight", "c_norm.weight"),
        ("D", "d"),
        ("out_proj.weight", "output.weight"),
        ("out_proj.bias", "output.bias"),
    )
    return (
        *moved(same, source, target),
        Rule(f"{source}.conv1d.weight", f"{target}.conv.weight", transform=taps_first),
        Rule(f"{source}.A_log", f"{target}.a", transform=transposed_decay),
    )


def attention(source: str, target: str = "layers.{i}.attention", output: str = "o_proj") -> tuple[Rule, ...]:
    """Self-attention with separate projections."""
    qkv = (Rule(f"{source}.{p}_proj.{kind}", f"{target}.qkv.{kind}", p) for p in ("q", "k", "v") for kind in ("weight", "bias"))
    return (*qkv, *(Rule(f"{source}.{output}.{kind}", f"{target}.output.{kind}") for kind in ("weight", "bias")))


def gated_mlp(
    source: str, target: str = "layers.{i}.mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Rule, ...]:
    """A gated feed-forward with separate projections."""
    kinds = ("weight", "bias")
    pair = (
        Rule(f"{source}.{name}.{kind}", f"{target}.gate_up.{kind}", part) for name, part in ((gate, "gate"), (up, "up")) for kind in kinds
    )
    return (*pair, *(Rule(f"{source}.{down}.{kind}", f"{target}.down.{kind}") for kind in kinds))
