"""Published weights: our logits against transformers' own reading of the same GGUF file."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import gguf
import pytest
import torch
import transformers

from canter.checkpoint.resolve import resolve
from canter.core.config import DEFAULT_MODEL
from canter.core.errors import CheckpointError
from tests.models.harness import Harness
from tests.models.loading import load

WEIGHTS_VARIABLE = "CANTER_TEST_WEIGHTS"


def _compare(path: Path) -> None:
    ids = torch.randint(10, 30000, (20,), generator=torch.Generator().manual_seed(1))
    with pytest.MonkeyPatch.context() as patch:
        # transformers opens the file twice, for the config and for the tensors, and most of that is reading the vocabulary.
        patch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
        oracle = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    with torch.inference_mode():
        expected = oracle(input_ids=ids[None]).logits[0]
    del oracle
    logits = Harness(load(path, max_model_len=64, quantization="none"), 16, num_blocks=20).run(ids.tolist(), [13, 1, 6])
    torch.testing.assert_close(logits, expected, atol=1e-4 * float(expected.std()), rtol=0)


@pytest.mark.real
@pytest.mark.slow
def test_bundled_model() -> None:
    try:
        files = resolve(DEFAULT_MODEL)
    except CheckpointError as error:
        pytest.skip(str(error))
    assert files.gguf is not None
    _compare(files.gguf)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3-270m", "qwen2.5-coder-0.5b"])
def test_published_model(name: str) -> None:
    path = Path(os.environ.get(WEIGHTS_VARIABLE, "")) / f"{name}.gguf"
    if WEIGHTS_VARIABLE not in os.environ or not path.exists():
        pytest.skip(f"{WEIGHTS_VARIABLE} names no directory with {name}.gguf")
    _compare(path)
