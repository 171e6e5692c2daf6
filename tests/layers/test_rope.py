"""Ropes: frequencies against transformers', both spellings of a config, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from canter.core.errors import CheckpointError, UnsupportedModelError
from canter.layers.rope import inverse_frequencies, read_rope, rope_table

BASE: dict[str, Any] = {"max_position_embeddings": 4096, "hidden_size": 128, "num_attention_heads": 2, "head_dim": 64}
FACTORS = [1.0 + 0.1 * i for i in range(32)]
KINDS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 1024, "mscale": 0.7, "mscale_all_dim": 1.1},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 1.25},
    {"rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS[::-1], "original_max_position_embeddings": 1024},
    {"rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS, "factor": 2.0, "original_max_position_embeddings": 1024},
]


def _oracle(parameters: dict[str, Any], seq_len: int) -> tuple[torch.Tensor, float]:
    config = transformers.LlamaConfig(**BASE, rope_parameters={"rope_theta": 20000.0, **parameters})
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), seq_len=seq_len)


@pytest.mark.parametrize("max_model_len", [800, 4096, 6000])
@pytest.mark.parametrize("parameters", KINDS, ids=lambda p: p["rope_type"])
def test_frequencies_are_those_of_transformers(parameters: dict[str, Any], max_model_len: int) -> None:
    args = read_rope(BASE | {"rope_parameters": {"rope_theta": 20000.0, **parameters}}, 64)
    frequencies, attention_factor = _oracle(parameters, max_model_len)
    torch.testing.assert_close(inverse_frequencies(args, max_model_len), frequencies, rtol=2e-6, atol=0)
    assert args.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.parametrize("parameters", KINDS, ids=lambda p: p["rope_type"])
@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_old_and_new_spelling_mean_the_same(parameters: dict[str, Any], type_key: str) -> None:
    scaling = {type_key if key == "rope_type" else key: value for key, value in parameters.items()}
    old = BASE | {"rope_theta": 20000.0, "rope_scaling": scaling}
    new = BASE | {"rope_parameters": {"rope_theta": 20000.0, **parameters}}
    assert read_rope(old, 64) == read_rope(new, 64)


def test_parameters_nested_by_layer_type() -> None:
    nested = {"sliding_attention": {"rope_theta": 7.0}, "full_attention": {"rope_theta": 9.0, "rope_type": "linear", "factor": 2.0}}
    config = BASE | {"rope_parameters": nested}
    sliding, full = read_rope(config, 64, "sliding_attention"), read_rope(config, 64, "full_attention")
    assert (sliding.kind, sliding.theta) == ("default", 7.0)
    assert (full.kind, full.theta, full.factor) == ("linear", 9.0, 2.0)


def test_scaling_given_by_a_user_lies_over_the_parameters() -> None:
    config = BASE | {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    args = read_rope(config, 64)
    assert (args.kind, args.theta, args.factor) == ("linear", 7.0, 2.0)


@pytest.mark.parametrize("where", ["top", "parameters"])
def test_partial_rotary(where: str) -> None:
    part = {"partial_rotary_factor": 0.25}
    config = BASE | (part if where == "top" else {"rope_parameters": part})
    assert read_rope(config, 64).dim == 16


def test_defaults() -> None:
    args = read_rope({"rope_scaling": None}, 8)
    assert (args.kind, args.theta, args.dim) == ("default", 10000.0, 8)
    expected = torch.tensor([1.0, 0.1, 0.01, 0.001])
    torch.testing.assert_close(inverse_frequencies(args, 10), expected)


def test_explicit_factors_divide_the_frequencies() -> None:
    args = read_rope({"rope_theta": 10000.0, "rope_scaling": {"rope_type": "explicit_factors", "factors": [1.0, 2.0, 4.0, 8.0]}}, 8)
    torch.testing.assert_close(inverse_frequencies(args, 10), torch.tensor([1.0, 0.05, 0.0025, 0.000125]))


def test_longrope_is_chosen_by_the_length_that_is_served() -> None:
    given = {"rope_type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    args = read_rope({"max_position_embeddings": 64, "original_max_position_embeddings": 16, "rope_scaling": given}, 8)
    short, long = inverse_frequencies(args, 16), inverse_frequencies(args, 17)
    torch.testing.assert_close(short, 2 * long)


def test_table_holds_cosines_then_sines() -> None:
    args = read_rope({"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 3.0}, "max_position_embeddings": 64}, 8)
    table = rope_table(args, 5, torch.device("cpu"))
    assert table.shape == (5, 8) and table.dtype == torch.float32
    angles = 4 * inverse_frequencies(args, 5)
    torch.testing.assert_close(table[4], 3 * torch.cat((angles.cos(), angles.sin())))
    torch.testing.assert_close(table[0], torch.tensor([3.0] * 4 + [0.0] * 4))


def test_angles_keep_their_precision_at_a_million_tokens() -> None:
    args = read_rope({"rope_theta": 10000.0}, 8)
    table = rope_table(args, 1_000_001, torch.device("cpu"))
    exact = (1_000_000 * inverse_frequencies(args, 1).double()).cos()
    torch.testing.assert_close(table[-1, :4].double(), exact, atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"rope_scaling": {"rope_type": "spiral"}}, UnsupportedModelError, ["spiral", "llama3"]),
        ({"rope_scaling": {"type": "linear"}}, CheckpointError, ["linear", "factor", "None"]),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, CheckpointError, ["factor", "two"]),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, CheckpointError, ["short_factor", "4", "found 1"]),
        ({"rope_scaling": {"rope_type": "explicit_factors"}}, CheckpointError, ["factors", "None"]),
        ({"rope_scaling": "linear"}, CheckpointError, ["rope_scaling", "linear"]),
        ({"partial_rotary_factor": 0.1}, CheckpointError, ["even", "0.1"]),
    ],
)
def test_refusals_name_what_is_wrong(config: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        read_rope(config, 8)
    assert all(word in str(caught.value) for word in words), str(caught.value)
