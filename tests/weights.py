"""Real weights for tests: the bundled model, and files in the directory that CANTER_TEST_WEIGHTS names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from canter.checkpoint.resolve import resolve
from canter.core.config import DEFAULT_MODEL
from canter.core.errors import CheckpointError

PROMPTS = [line.encode().decode("unicode_escape") for line in (Path(__file__).parent / "data" / "prompts.txt").read_text().splitlines()]


def gguf_file(name: str) -> Path:
    """The GGUF file called `name`; skips the test where it is not to be had."""
    folder = os.environ.get("CANTER_TEST_WEIGHTS")
    if folder and (Path(folder) / name).exists():
        return Path(folder) / name
    if name == "smollm2-135m.gguf":
        try:
            bundled = resolve(DEFAULT_MODEL).gguf
        except CheckpointError:
            bundled = None
        if bundled is not None:
            return bundled
    pytest.skip(f"{name} is not here: set CANTER_TEST_WEIGHTS to a directory that holds it")
