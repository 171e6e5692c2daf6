"""Greedy output on real weights against transformers reading the same file, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from canter.checkpoint.resolve import resolve
from canter.core.messages import AddRequest
from canter.core.sampling_params import SamplingParams
from canter.text.tokenizer import load_tokenizer
from tests.engines import engine, run
from tests.weights import PROMPTS, gguf_file

NEAR_TIE = 1e-3
NEW_TOKENS = 64


def reference(path: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m.gguf", "gemma3-270m.gguf"])
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    """Every token is the reference's own choice after the same tokens, or within a near-tie of it."""
    path = gguf_file(name)
    tokenizer = load_tokenizer(resolve(str(path)))
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    core = engine(path, num_gpu_blocks_override=2000, max_model_len=512, num_threads=None, dtype="float32", quantization="none")
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = run(core, [AddRequest(str(i), prompt, params) for i, prompt in enumerate(prompts)])
    core.shutdown()
    model = reference(path)
    torch.set_num_threads(2)
    differences = []
    for i, prompt in enumerate(prompts):
        tokens = outputs[str(i)]
        assert len(tokens) == NEW_TOKENS
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        choice = logits.argmax(-1)
        for position in (choice != torch.tensor(tokens)).nonzero().flatten().tolist():
            margin = float(logits[position].max() - logits[position, tokens[position]])
            differences.append((i, position, margin))
    print(f"{name}: {len(prompts)} prompts x {NEW_TOKENS} tokens, {len(differences)} differences {differences}")
    assert all(margin < NEAR_TIE for _, _, margin in differences), differences
