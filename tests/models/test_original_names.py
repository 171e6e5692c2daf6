"""Checkpoints under the names that they were published with, where transformers saves others."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.models.families import FAMILIES, oracle_logits, save_oracle, token_ids
from tests.models.harness import Harness
from tests.models.loading import load
from tests.models.published import PUBLISHED_MINIMAX, publish_minimax

BY_NAME = {family.name: family for family in FAMILIES}
SPELLINGS = {
    "mamba": [("backbone.embeddings.", "backbone.embedding.")],
    "mamba2": [("backbone.", "")],
    "lfm2": [("model.", "")],
    "nemotron-h": [("backbone.", "model."), ("model.", "backbone.")],
    "qwen3.5": [("model.", "model.language_model.")],
    "qwen3.5-multimodal": [("model.language_model.", "language_model.model.")],
    "falcon-h1": [("model.", "")],
    "zamba2": [("model.", "")],
    "bloom": [("transformer.", "")],
    "llama4-multimodal": [("lm_head.", "language_model.lm_head.")],
    "kimi-linear": [("model.layers.0.block_sparse_moe.", "model.layers.0.mlp.")],
}


@pytest.mark.parametrize(("name", "old", "new"), [(name, *pair) for name, pairs in SPELLINGS.items() for pair in pairs])
def test_another_spelling_gives_the_same_logits(name: str, old: str, new: str, tmp_path: Path) -> None:
    family = BY_NAME[name]
    path = save_oracle(family, tmp_path) / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    if not any(tensor.startswith(old) for tensor in tensors):
        pytest.skip(f"this transformers saves no names that begin with {old}")
    renamed = {new + tensor.removeprefix(old) if tensor.startswith(old) else tensor: value for tensor, value in tensors.items()}
    safetensors.torch.save_file(renamed, path, {"format": "pt"})
    logits = Harness(load(tmp_path, max_model_len=family.max_model_len), 4).run(token_ids()[0].tolist(), [9, 1, 13])
    torch.testing.assert_close(logits, oracle_logits(family)[0], atol=1e-4, rtol=0)


def test_blocks_stored_with_every_layer_that_uses_them(tmp_path: Path) -> None:
    """Published checkpoints of Zamba2 may hold them so; transformers saves each block once."""
    family = BY_NAME["zamba2-one-block"]
    path = save_oracle(family, tmp_path) / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    block = {name: value for name, value in tensors.items() if name.startswith("model.layers.0.shared_transformer.")}
    assert block and not any(name.startswith("model.layers.2.shared_transformer.") for name in tensors)
    tensors |= {name.replace("layers.0", "layers.2"): value.clone() for name, value in block.items()}
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    logits = Harness(load(tmp_path), 4).run(token_ids()[0].tolist(), [9, 1, 13])
    torch.testing.assert_close(logits, oracle_logits(family)[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", PUBLISHED_MINIMAX)
def test_minimax_as_it_was_published(tmp_path: Path, architecture: str) -> None:
    family = publish_minimax(tmp_path, architecture)
    logits = Harness(load(tmp_path), 4).run(token_ids()[0].tolist(), [9, 1, 13])
    torch.testing.assert_close(logits, oracle_logits(family)[0], atol=1e-4, rtol=0)
