"""Tiny checkpoints for the tests, written by other libraries than the one under test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, VOCAB = 64, 96, 2, 4, 2, 20
TOKENS = [f"t{index}" for index in range(VOCAB - 2)] + ["<|im_end|>", "<|endoftext|>"]


def llama_metadata(arch: str = "llama") -> dict[str, Any]:
    """The keys that a converter writes for a small Llama, without the tokenizer's."""
    return {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": INTERMEDIATE,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 50000.0,
        f"{arch}.rope.dimension_count": HIDDEN // HEADS,
    }


def tokenizer_metadata() -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * (VOCAB - 2) + [3, 3],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 3,
    }


def llama_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 tensors of a small Llama by GGUF name; the output layer is tied."""
    rng = np.random.default_rng(seed)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (INTERMEDIATE, HIDDEN),
            "ffn_up": (INTERMEDIATE, HIDDEN),
            "ffn_down": (HIDDEN, INTERMEDIATE),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    arch: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Write a GGUF file with the `gguf` package. `types` names the tensors that are stored quantised."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, values in tensors.items():
        kind = (types or {}).get(name, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_llama(path: Path, extra: Mapping[str, Any] | None = None, tensors: Mapping[str, np.ndarray] | None = None) -> Path:
    """A complete small Llama; `extra` keys are added or replace, None takes a key away."""
    metadata = llama_metadata() | tokenizer_metadata() | dict(extra or {})
    metadata = {key: value for key, value in metadata.items() if value is not None}
    quantised = {"blk.0.attn_v.weight": gguf.GGMLQuantizationType.Q8_0, "blk.1.ffn_down.weight": gguf.GGMLQuantizationType.Q4_0}
    tensors = llama_tensors() if tensors is None else tensors
    return write_gguf(path, "llama", metadata, tensors, {name: kind for name, kind in quantised.items() if name in tensors})
