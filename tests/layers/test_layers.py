"""Layers by themselves: parameters, fused parts, what is shared."""

from __future__ import annotations

import pytest
import torch

from canter.core.errors import UnsupportedModelError
from canter.layers.build import Build, Matrix
from canter.layers.embedding import Embedding, OutputHead
from canter.layers.linear import Linear, gate_up_linear
from canter.layers.mlp import GatedMLP
from canter.layers.norm import NormArgs, RMSNorm
from canter.layers.rope import QueryGrowth, RopeArgs


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Build:
    monkeypatch.setenv("CANTER_KERNELS", "reference")
    return Build("cpu", torch.float32, 32)


def randomise(build: Build) -> None:
    rng = torch.Generator().manual_seed(3)
    for parameter in build.parameters.values():
        values = torch.randn(parameter.shape, generator=rng).to(build.dtype)
        if isinstance(parameter, Matrix):
            parameter.value = values
        else:
            parameter.tensor.copy_(values)


def test_parameters_have_dotted_names(build: Build) -> None:
    Linear(build.at("layers.0").at("out"), 4, 6, bias=True)
    assert {name: p.shape for name, p in build.parameters.items()} == {
        "layers.0.out.weight": (6, 4),
        "layers.0.out.bias": (6,),
    }


def test_linear(build: Build) -> None:
    layer = Linear(build, 4, 6, bias=True)
    randomise(build)
    x = torch.randn(5, 4)
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_fused_parts_are_outputs_side_by_side(build: Build) -> None:
    qkv = Linear(build.at("qkv"), 8, 20, bias=True, parts={"q": 12, "k": 4, "v": 4})
    gate_up = gate_up_linear(build.at("gate_up"), 8, 5, bias=False)
    randomise(build)
    x = torch.randn(2, 8)
    weight, bias = build.parameters["qkv.weight"], build.parameters["qkv.bias"]
    assert weight.parts == bias.parts == {"q": (0, 12), "k": (12, 16), "v": (16, 20)}
    for part, (first, end) in weight.parts.items():
        torch.testing.assert_close(qkv(x)[:, first:end], x @ weight.value[first:end].T + bias.part(part))
    assert build.parameters["gate_up.weight"].parts == {"gate": (0, 5), "up": (5, 10)}
    assert gate_up(x).shape == (2, 10)
    assert weight.part_shape(None) == (20, 8) and weight.part_shape("k") == (*bias.part_shape("k"), 8)


def test_mlp(build: Build) -> None:
    layers = {name: GatedMLP(build.at(name), 8, 5, name, bias=True) for name in ("silu", "gelu_pytorch_tanh")}
    randomise(build)
    x = torch.randn(3, 8)
    functions = {"silu": torch.nn.functional.silu, "gelu_pytorch_tanh": lambda v: torch.nn.functional.gelu(v, approximate="tanh")}
    for name, layer in layers.items():
        fused = torch.nn.functional.linear(
            x, build.parameters[f"{name}.gate_up.weight"].value, build.parameters[f"{name}.gate_up.bias"].tensor
        )
        inner = functions[name](fused[:, :5]) * fused[:, 5:]
        expected = torch.nn.functional.linear(
            inner, build.parameters[f"{name}.down.weight"].value, build.parameters[f"{name}.down.bias"].tensor
        )
        torch.testing.assert_close(layer(x), expected)


def test_unknown_activation_is_refused(build: Build) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'relu' is not supported.*silu"):
        GatedMLP(build, 8, 5, "relu")


@pytest.mark.parametrize("plus_one", [False, True])
def test_norm_after_addition(build: Build, plus_one: bool) -> None:
    norm = RMSNorm(build, 6, NormArgs(1e-6, plus_one, cast_first=not plus_one))
    randomise(build)
    x, residual = torch.randn(4, 6), torch.randn(4, 6)
    normed, total = norm.add(x, residual)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, norm(total))
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (norm.weight + plus_one)
    torch.testing.assert_close(normed, expected)


def test_tied_head_has_no_weights_of_its_own(build: Build) -> None:
    embed = Embedding(build.at("embed"), 11, 6, scale=2.0)
    tied = OutputHead(build.at("head"), 11, 6, embed)
    assert list(build.parameters) == ["embed.weight"]
    randomise(build)
    hidden = torch.randn(2, 6)
    torch.testing.assert_close(tied(hidden), hidden @ embed.weight.T)
    torch.testing.assert_close(embed(torch.tensor([3, 0])), 2 * embed.weight[[3, 0]])


def test_logits_are_float32_and_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANTER_KERNELS", "reference")
    build = Build("cpu", torch.bfloat16, 8)
    head = OutputHead(build.at("head"), 11, 6, None, softcap=3.0)
    randomise(build)
    hidden = torch.randn(2, 6, dtype=torch.bfloat16) * 10
    logits = head(hidden)
    assert logits.dtype == torch.float32 and logits.abs().max() <= 3.0
    torch.testing.assert_close(logits, 3 * torch.tanh((hidden @ head.weight.T).float() / 3))


def test_equal_ropes_share_a_table(build: Build) -> None:
    first = build.at("a").rope(RopeArgs("default", 8, 100.0))
    assert build.at("b").rope(RopeArgs("default", 8, 100.0)) is first
    assert build.rope(RopeArgs("default", 8, 200.0)) is not first
    assert first.shape == (32, 8)


def test_layers_whose_queries_grow_alike_share_a_table(build: Build) -> None:
    first = build.at("a").growth(QueryGrowth(0.1, 8.0), 6)
    assert build.at("b").growth(QueryGrowth(0.1, 8.0), 6) is first
    assert build.growth(QueryGrowth(0.2, 8.0), 6) is not first
    assert build.growth(QueryGrowth(0.1, 8.0), 8).shape == (32, 8)
