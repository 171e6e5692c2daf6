"""Tiny checkpoints in the layouts of published quantisers, written by their formulas word by word.

Each has a twin: the same model with the dequantised weights in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

HIDDEN, INTERMEDIATE, VOCAB, LAYERS = 64, 128, 131, 2
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
Stored = dict[str, Tensor]


@dataclass(frozen=True)
class Quantized:
    """One way of storing a matrix: `store(module, weight)` gives its tensors by name and what they mean."""

    name: str
    config: dict[str, Any]
    store: Callable[[str, Tensor], tuple[Stored, Tensor]]


def pack_words(codes: Tensor, columns: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[..., 8 W] codes to int32 [..., W]: field i of a word holds its column `columns[i]`."""
    grouped = codes.long().unflatten(-1, (-1, 8))
    words = sum(grouped[..., column] << (4 * i) for i, column in enumerate(columns))
    assert isinstance(words, Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).contiguous()


def four_bits(weight: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [N, K], scales [N, G], zeros [N, G])."""
    runs = weight.unflatten(1, (-1, group))
    if symmetric:
        scales = runs.abs().amax(-1) / 7.5
        zeros = torch.full_like(scales, 8)
    else:
        low, high = runs.amin(-1).clamp(max=0), runs.amax(-1).clamp(min=0)
        scales = (high - low) / 15
        zeros = (-low / scales).round()
    scales = scales.half().float()
    codes = (runs / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    return codes.flatten(1), scales, zeros


def meant(codes: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor) -> Tensor:
    return (codes - zeros[:, group_of]) * scales[:, group_of]


def awq(module: str, weight: Tensor, group: int = 32) -> tuple[Stored, Tensor]:
    codes, scales, zeros = four_bits(weight, group, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        f"{module}.qweight": pack_words(codes.t(), order),
        f"{module}.qzeros": pack_words(zeros.t(), order),
        f"{module}.scales": scales.t().half().contiguous(),
    }
    return tensors, meant(codes, scales, zeros, torch.arange(weight.shape[1]) // group)


def gptq(module: str, weight: Tensor, stored_less: int = 1, symmetric: bool = True, act_order: bool = False) -> tuple[Stored, Tensor]:
    group, width = 32, weight.shape[1]
    group_of = torch.arange(width) // group
    if act_order:
        group_of = group_of[torch.randperm(width, generator=torch.Generator().manual_seed(width))]
    by_group = torch.argsort(group_of, stable=True)
    sorted_codes, scales, zeros = four_bits(weight[:, by_group], group, symmetric)
    codes = torch.empty_like(sorted_codes)
    codes[:, by_group] = sorted_codes
    tensors = {
        f"{module}.qweight": pack_words(codes).t().contiguous(),
        f"{module}.qzeros": pack_words((zeros.t() - stored_less) % 16),
        f"{module}.scales": scales.t().half().contiguous(),
        f"{module}.g_idx": group_of.int(),
        f"{module}.bias": torch.zeros(weight.shape[0], dtype=torch.float16),
    }
    return tensors, meant(codes, scales, zeros, group_of)


def w4a16(module: str, weight: Tensor, group: int = 32, symmetric: bool = True) -> tuple[Stored, Tensor]:
    group = group if group > 0 else weight.shape[1]
    codes, scales, zeros = four_bits(weight, group, symmetric)
    tensors = {
        f"{module}.weight_packed": pack_words(codes),
        f"{module}.weight_scale": scales.half(),
        f"{module}.weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors[f"{module}.weight_zero_point"] = pack_words(zeros.t()).t().contiguous()
    return tensors, meant(codes, scales, zeros, torch.arange(weight.shape[1]) // group)


def w8a8(module: str, weight: Tensor) -> tuple[Stored, Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scales.float()).round().clamp(-127, 127)
    return {f"{module}.weight": codes.to(torch.int8), f"{module}.weight_scale": scales}, codes * scales.float()


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
SCHEMES = [
    Quantized("awq", {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, awq),
    Quantized("gptq", _GPTQ, gptq),
    Quantized("gptq-v2", _GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}, lambda m, w: gptq(m, w, stored_less=0, symmetric=False)),
    Quantized("gptq-act-order", _GPTQ | {"desc_act": True}, lambda m, w: gptq(m, w, act_order=True)),
    Quantized("w4a16", _compressed("pack-quantized", num_bits=4, strategy="group", group_size=32), w4a16),
    Quantized(
        "w4a16-asymmetric",
        _compressed("pack-quantized", num_bits=4, strategy="group", group_size=64, symmetric=False),
        lambda m, w: w4a16(m, w, 64, symmetric=False),
    ),
    Quantized("w4a16-channel", _compressed("pack-quantized", num_bits=4, strategy="channel"), lambda m, w: w4a16(m, w, -1)),
    Quantized("w8a8", _compressed("int-quantized", num_bits=8, strategy="channel"), w8a8),
]


def weights(seed: int = 3) -> Stored:
    """The model's tensors in float32, by their names in a checkpoint."""
    rng = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.input_layernorm": (HIDDEN,), f"{layer}.post_attention_layernorm": (HIDDEN,)}
        shapes |= {f"{layer}.self_attn.{part}_proj": (HIDDEN if part in "qo" else HIDDEN // 2, HIDDEN) for part in "qkvo"}
        shapes |= {f"{layer}.mlp.{part}_proj": (INTERMEDIATE, HIDDEN) for part in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj"] = (HIDDEN, INTERMEDIATE)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=rng)
        tensors[f"{name}.weight"] = 1 + 0.2 * noise if len(shape) == 1 else noise * (1.5 * shape[1] ** -0.5)
    return tensors


def save(directory: Path, tensors: Stored, config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(tensors, directory / "model.safetensors")
    return directory


def save_pair(scheme: Quantized, directory: Path, **changes: Any) -> tuple[Path, Path]:
    """(the quantised checkpoint, its dequantised twin)."""
    stored, dense = {}, {}
    for name, weight in weights().items():
        if "_proj." in name:
            tensors, dense[name] = scheme.store(name.removesuffix(".weight"), weight)
            stored |= tensors
        else:
            stored[name] = dense[name] = weight
    quantized = save(directory / "quantized", stored, CONFIG | {"quantization_config": scheme.config} | changes)
    return quantized, save(directory / "dense", dense, CONFIG)
