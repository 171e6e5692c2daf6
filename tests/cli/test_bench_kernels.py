"""The kernels' benchmark: its cases are valid calls of every op, and its clock takes the best round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from canter.cli.bench import kernels, limits
from canter.cli.bench.limits import Machine
from canter.kernels.ops import OPS, implementations
from canter.layers.attention import AttentionArgs
from canter.layers.decoder import DecoderArgs
from canter.layers.norm import NormArgs
from canter.layers.rope import RopeArgs

MACHINE = Machine(1e9, {"float32": 1e9})


def tiny(softcap: float = 0.0, activation: str = "silu") -> DecoderArgs:
    attention = tuple(AttentionArgs(4, 2, 16, 0.25, RopeArgs("default", 16, 1e4), window=window) for window in (0, 8, 0))
    return DecoderArgs(64, 32, 48, attention, NormArgs(1e-6), True, activation, logit_softcap=softcap)


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MOST_COPIES", 2)
    monkeypatch.setattr(kernels, "SECONDS", 0.0)


def test_cases_cover_the_table_and_every_implementation_runs_them() -> None:
    seen = set()
    for args in (tiny(), tiny(30.0, "gelu")):
        for make in kernels.cases(args, torch.float32, [1, 70], 40, set(kernels.TIMED_OPS), kernels.FORMATS):
            case = make()
            seen.add(case.op)
            assert case.num_bytes > 0 and (case.operations > 0) == (
                case.op in ("linear", "head_linear", "paged_attention", "ssd_scan", "selective_scan", "gated_delta")
            )
            for impl in implementations(case.op):
                result = kernels.timing(case, impl, "-", MACHINE)
                assert result.seconds > 0 and result.of_limit > 0
    assert set(OPS) - seen == {"advance_step"} and seen <= set(OPS)


def test_matrices_are_those_that_layers_fuse() -> None:
    assert kernels.matrices(tiny()) == [("qkv", 128, 32), ("output", 32, 64), ("gate_up", 96, 32), ("down", 32, 48), ("head", 64, 32)]


def test_the_best_round_counts_and_arguments_take_turns() -> None:
    now, used = [0.0], []

    def fn(name: str) -> None:
        used.append(name)
        now[0] += 0.25 if len(used) > 6 else 0.5

    assert kernels.best_seconds(fn, [("a",), ("b",)], 4.0, lambda: now[0]) == pytest.approx(0.25)
    assert {"a", "b"} == set(used)
    assert kernels.best_seconds(fn, [("a",)], 0.1, lambda: now[0]) == pytest.approx(0.25)


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "measure_machine", lambda threads: MACHINE)
    monkeypatch.setattr(kernels, "read_model_config", lambda files: type("Config", (), {"architecture": "x", "hf": {}}))
    monkeypatch.setattr(kernels, "resolve", lambda name: None)
    args = type("Model", (), {"Args": type("Args", (), {"from_hf": staticmethod(lambda hf: tiny())})})
    monkeypatch.setattr(kernels, "get_model_class", lambda architecture: args)
    path = tmp_path / "kernels.json"
    words = ["--rows", "1", "--op", "linear", "rms_norm", "--provider", "native", "--isa", "all", "--json", str(path)]
    assert kernels.run(kernels.build_parser().parse(words)) == 0
    assert "gate_up 96x32" in capsys.readouterr().out
    rows = json.loads(path.read_text())["kernels"]
    assert {row["provider"] for row in rows} == {"native"} and {row["isa"] for row in rows} == set(kernels.isas())


def test_the_machine_is_measured() -> None:
    for kind in limits.PEAK_KINDS:
        assert limits._native_limits().peak_operations(kind, 1) >= 0
    with pytest.raises(ValueError, match="float32, bfloat16 or int8"):
        limits._native_limits().peak_operations("int3", 1)
    with pytest.raises(ValueError, match="at least 1"):
        limits._native_limits().read_bandwidth(2**20, 0, 1)
    assert limits._native_limits().read_bandwidth(2**20, 2, 1) > 0
