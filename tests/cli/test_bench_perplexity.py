"""Perplexity: its arithmetic on a stand-in engine, and each quantised path beside the dequantised weights on real ones."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from canter.checkpoint.model_config import read_model_config
from canter.checkpoint.resolve import resolve
from canter.checkpoint.tensors import open_tensors
from canter.cli.bench import perplexity
from canter.client.outputs import Logprob, RequestOutput
from canter.core.errors import ConfigError
from canter.layers.quant.weights import read_tensor
from tests.models.quantized import SCHEMES, Quantized
from tests.weights import gguf_file


@dataclass
class HalvingLLM:
    """Every token has probability 1/2, the first of a prompt has none."""

    info: Any = None

    def generate(self, prompts: list[dict[str, list[int]]], sampling: Any) -> list[RequestOutput]:
        assert (sampling.prompt_logprobs, sampling.max_tokens) == (0, 1)
        outputs = []
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            positions: list[Any] = [None, *({token: Logprob(math.log(0.5), 1, None)} for token in ids[1:])]
            outputs.append(RequestOutput("0", None, ids, positions, [], True))
        return outputs


def test_perplexity_is_e_to_the_mean_surprise() -> None:
    found, count = perplexity.perplexity(HalvingLLM(), [5, 6, 7, 8, 9], 2)  # type: ignore[arg-type]
    assert found == pytest.approx(2.0) and count == 2  # [5, 6], [7, 8] and a last piece that predicts nothing
    with pytest.raises(ConfigError):
        perplexity.perplexity(HalvingLLM(), [5], 2)  # type: ignore[arg-type]


def test_the_text_comes_along_and_others_are_read() -> None:
    assert len(perplexity.read_text(None)) > 8000
    with pytest.raises(ConfigError, match="can't be read"):
        perplexity.read_text("/no/such/text")


def test_two_settings_are_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[dict[str, Any]] = []

    def measured(arguments: dict[str, Any], text: str, context_len: int) -> tuple[float, int]:
        seen.append(arguments)
        return (10.1 if len(seen) == 1 else 10.0), 99

    monkeypatch.setattr(perplexity, "measure", measured)
    namespace = perplexity.build_parser().parse(["some.gguf", "--against", '{"dtype": "float32"}', "--max-num-seqs", "3"])
    assert perplexity.run(namespace) == 0
    given = {"model": "some.gguf", "max_num_seqs": 3}
    assert seen == [given, given | {"dtype": "float32"}]
    assert "difference" in capsys.readouterr().out


ALLOWED = 0.005
"""How far the perplexity of quantised weights may be from that of the same weights in float32."""


@pytest.fixture(scope="module")
def text() -> str:
    """About 14,000 tokens: README, ARCHITECTURE and guides as they once stood."""
    return (Path(__file__).parent.parent / "data" / "perplexity.txt").read_text(encoding="utf-8")


def off(quantised: dict[str, Any], plain: dict[str, Any], text: str) -> float:
    """By how much the perplexity of an engine differs from that of another, which takes its weights as float32."""
    found, count = perplexity.measure(quantised, text, 2048)
    expected, _ = perplexity.measure(plain | {"quantization": "none", "dtype": "float32"}, text, 2048)
    assert count > 10000
    print(f"{quantised}: {found:.4f}, with float32 {expected:.4f}, {(found / expected - 1) * 100:+.3f} % of {count} tokens")
    return abs(found / expected - 1)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m.gguf", "smollm2-135m-q8_0.gguf", "qwen2.5-coder-0.5b.gguf", "gemma3-270m.gguf"])
def test_blocks_predict_as_well_as_dequantised_weights(name: str, text: str) -> None:
    model = {"model": str(gguf_file(name))}
    assert off(model, model, text) < ALLOWED


@pytest.mark.real
@pytest.mark.slow
def test_int8_predicts_as_well_as_the_floats_it_is_made_of(text: str, tmp_path: Path) -> None:
    model = {"model": str(save_floats(gguf_file("smollm2-135m.gguf"), tmp_path)), "tokenizer": str(gguf_file("smollm2-135m.gguf"))}
    assert off(model | {"quantization": "int8"}, model, text) < ALLOWED


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.name in ("awq", "gptq", "w4a16-asymmetric", "w8a8")], ids=lambda s: s.name)
def test_codes_predict_as_well_as_what_they_stand_for(scheme: Quantized, text: str, tmp_path: Path) -> None:
    model = {
        "model": str(save_floats(gguf_file("smollm2-135m.gguf"), tmp_path, scheme)),
        "tokenizer": str(gguf_file("smollm2-135m.gguf")),
    }
    assert off(model, model, text) < ALLOWED


def save_floats(path: Path, folder: Path, scheme: Quantized | None = None) -> Path:
    """The weights of a GGUF file as a checkpoint in bfloat16, the layers' matrices as a scheme stores them."""
    checkpoint = resolve(str(path))
    config = read_model_config(checkpoint).hf | {"torch_dtype": "bfloat16"}
    tensors = {}
    with open_tensors(checkpoint) as source:
        for name in source.names():
            weight = read_tensor(source.get(name))
            if scheme is not None and ".layers." in name and weight.dim() == 2:
                tensors |= scheme.store(name.removesuffix(".weight"), weight)[0]
            else:
                tensors[name] = weight.bfloat16()
    if scheme is not None:
        config["quantization_config"] = scheme.config
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
