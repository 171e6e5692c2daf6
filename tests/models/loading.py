"""Loads a saved checkpoint the way the engine does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from canter.checkpoint.model_config import read_model_config
from canter.checkpoint.resolve import resolve
from canter.checkpoint.tensors import open_tensors
from canter.models.loader import LoadedModel, load_model


def load(
    path: Path | str,
    dtype: str = "float32",
    max_model_len: int | None = None,
    quantization: str = "auto",
    cache_dtype: str | None = None,
    **overrides: Any,
) -> LoadedModel:
    """`path`: a directory, a GGUF file or the bundled model's name; `overrides` lie over its config."""
    files = resolve(str(path))
    with open_tensors(files) as source:
        config = read_model_config(files, overrides)
        return load_model(config, source, dtype, cache_dtype=cache_dtype, max_model_len=max_model_len, quantization=quantization)
