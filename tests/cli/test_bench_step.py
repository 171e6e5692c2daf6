"""The benchmark of a step: what it says of timed runs, and the command on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from canter.cli.bench import step
from canter.cli.bench.limits import Machine
from canter.core.errors import ConfigError
from canter.kernels.native.packed import allocate_part
from canter.kernels.native.program import Described
from canter.kernels.packed import PackedMatrix
from tests.engines import add_tokenizer, tiny_checkpoint

MACHINE = Machine(1e6, {"float32": 1e6, "int8": 4e6})


def test_lines_of_timed_runs() -> None:
    matrix = PackedMatrix((allocate_part("f32", 16, 8), allocate_part("q8_0", 16, 32)))
    small = PackedMatrix((allocate_part("f32", 16, 8),))
    instructions = [Described("linear", 8, 16, small), Described("paged_attention", 8, 8, None), Described("linear", 8, 16, small)]
    observer = step.Observer()
    observer.forwards[4] = step.Runs(instructions, [[1.0, 1.0, 2.0], [2.0, 1.0, 3.0], [9.0, 1.0, 9.0]])
    observer.logits[1] = step.Runs([Described("linear", 8, 32, matrix)], [[4.0]])
    (lines,) = step.steps(observer, MACHINE).values()
    assert [(line.op, line.calls, line.seconds, line.share) for line in lines] == [
        ("linear", 2, 5.0, 0.5),
        ("linear", 1, 4.0, 0.4),
        ("paged_attention", 1, 1.0, 0.1),
    ]
    layers, head, attention = lines
    assert (layers.shape, layers.weights, head.weights, attention.shape) == ("16x8", "f32", "f32+q8_0", "8")
    # Four rows: 2 * 4 * 16 * 8 operations against 512 bytes, twice.
    assert layers.of_limit == pytest.approx(2 * 1024 / 1e6 / 5.0) and layers.gb_s == pytest.approx(2 * 512 / 5e9)
    assert head.of_limit == pytest.approx(matrix.nbytes / 1e6 / 4.0) and attention.of_limit == 0
    assert "16x8" in step.shown(lines)


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_the_command_prints_and_writes(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CANTER_KERNELS", raising=False)
    ops = {"llama": ("paged_attention", "silu_and_mul"), "mamba2": ("causal_conv", "ssd_scan")}[family]
    monkeypatch.setattr(step, "measure_machine", lambda threads: MACHINE)
    path, model = tmp_path / "step.json", str(add_tokenizer(tiny_checkpoint(tmp_path, family)))
    words = [model, "--input-len", "9", "--output-len", "4", "--batch-size", "2", "--num-iters", "1"]
    words += ["--kv-cache-memory-bytes", "4MiB", "--json", str(path)]
    assert step.run(step.build_parser().parse(words)) == 0
    assert "18 tokens a step" in capsys.readouterr().out
    written = {found["rows"]: found["lines"] for found in json.loads(path.read_text())["steps"]}
    assert set(written) == {18, 2}
    for lines in written.values():
        assert {"linear", "gather", *ops} <= {line["op"] for line in lines}
        assert sum(line["share"] for line in lines) == pytest.approx(1)
    with pytest.raises(ConfigError, match="enforce-eager"):
        step.run(step.build_parser().parse([*words, "--enforce-eager"]))
