"""Small GGUF models of any block type."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests.checkpoint import samples

WIDE = 256
K_TYPES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "IQ4_XS": (0,)}
"""Types that the `gguf` package does not quantise to: bytes of a block that hold half floats."""


def gguf_blocks(type_name: str, rows: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """[rows, bytes] blocks of random weights."""
    kind = gguf.GGMLQuantizationType[type_name]
    if type_name not in K_TYPES:
        return gguf.quants.quantize((rng.standard_normal((rows, width)) * width**-0.5).astype(np.float32), kind)
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, width // elements, nbytes), dtype=np.uint8)
    for offset in K_TYPES[type_name]:
        scale = rng.uniform(0.5, 1.5, blocks.shape[:2]).astype(np.float16) * np.float16(5e-5 if type_name in ("Q6_K", "IQ4_XS") else 5e-4)
        blocks[:, :, offset : offset + 2] = scale.astype("<f2")[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def write_model(path: Path, type_name: str, tied: bool = True, mixed: str | None = None) -> Path:
    """A Llama of two layers whose matrices are all of one type (`mixed`: values and down projections of another)."""
    rng = np.random.default_rng(1)
    metadata = samples.llama_metadata() | samples.tokenizer_metadata()
    metadata |= {"llama.embedding_length": WIDE, "llama.feed_forward_length": 2 * WIDE, "llama.rope.dimension_count": WIDE // 4}
    vocab = [f"t{i}" for i in range(131)]
    metadata |= {"tokenizer.ggml.tokens": vocab, "tokenizer.ggml.token_type": [1] * 131}
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        samples._add(writer, key, value)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (131, WIDE), "output_norm": (WIDE,)} | ({} if tied else {"output": (131, WIDE)})
    for i in range(2):
        block = {"attn_q": (WIDE, WIDE), "attn_k": (WIDE // 2, WIDE), "attn_v": (WIDE // 2, WIDE), "attn_output": (WIDE, WIDE)}
        block |= {"ffn_gate": (2 * WIDE, WIDE), "ffn_up": (2 * WIDE, WIDE), "ffn_down": (WIDE, 2 * WIDE)}
        block |= {"attn_norm": (WIDE,), "ffn_norm": (WIDE,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", (1 + 0.2 * rng.standard_normal(shape)).astype(np.float32))
            continue
        kind = mixed if mixed and name.endswith(("attn_v", "ffn_down")) else type_name
        writer.add_tensor(f"{name}.weight", gguf_blocks(kind, *shape, rng), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
