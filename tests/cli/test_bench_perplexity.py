"""Perplexity: its arithmetic on a stand-in engine, and each quantised path beside the dequantised weights on real ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from canter.cli.bench import perplexity
from canter.client.outputs import Logprob, RequestOutput
from canter.core.errors import ConfigError


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


@pytest.mark.real
@pytest.mark.slow
def test_blocks_predict_as_well_as_dequantised_weights() -> None:
    text = perplexity.read_text(None)
    blocks, count = perplexity.measure({}, text, 2048)
    plain, _ = perplexity.measure({"quantization": "none", "dtype": "float32"}, text, 2048)
    assert count > 1500
    assert abs(blocks / plain - 1) < 0.005
