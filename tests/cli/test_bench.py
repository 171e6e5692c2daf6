"""The benchmarks' arithmetic."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path
from types import ModuleType

import pytest

from canter.cli.bench import latency, limits, prefix, startup, structured
from canter.cli.bench.limits import Limit, read_bandwidth
from canter.cli.bench.prompts import random_prompts
from canter.cli.bench.report import Report, number, summary
from canter.cli.table import table
from canter.client.outputs import CompletionOutput, RequestMetrics, RequestOutput
from canter.client.remote import RemoteClient
from canter.core.config import EngineArgs
from canter.core.messages import EngineStats, LoadPhase
from tests.models import quantized

LIMIT = Limit(read_bandwidth=10e9, step_bytes=10**8)


def test_prompts_are_exact_and_follow_from_the_seed() -> None:
    prompts = random_prompts(4, 10, seed=1, shared=5)
    assert prompts == random_prompts(4, 10, seed=1, shared=5) != random_prompts(4, 10, seed=2, shared=5)
    assert {len(prompt) for prompt in prompts} == {15}
    assert len({tuple(prompt[:5]) for prompt in prompts}) == 1 and len({tuple(prompt[5:]) for prompt in prompts}) == 4
    assert all(50 <= token < 100 for prompt in random_prompts(3, 20, seed=0, vocab_size=100) for token in prompt)


def test_the_limit_is_bandwidth_over_bytes() -> None:
    assert LIMIT.steps_per_second == 100
    assert LIMIT.fraction(40) == pytest.approx(0.4)
    assert read_bandwidth(num_bytes=2**22, num_threads=1) > 1e8


def test_bytes_of_a_decode_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices in the form in which they are computed; a table of which only rows are looked up is not read."""
    monkeypatch.setenv("CANTER_KERNELS", "native")
    tensors = quantized.weights()
    tied = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    small = sum(tensor.numel() for tensor in tensors.values() if tensor.dim() == 1)
    matrices = sum(tensor.numel() for name, tensor in tensors.items() if tensor.dim() == 2) - 2 * 131 * 64
    table = 144 * 64  # in whole panels
    for tie, stored in ((False, tensors), (True, tied)):
        path = quantized.save(tmp_path / str(tie), stored, quantized.CONFIG | {"tie_word_embeddings": tie})
        assert limits.decode_step_bytes(str(path), "bfloat16") == 2 * (small + matrices + table)
        assert limits.decode_step_bytes(str(path), "float32") == 4 * (small + matrices + table)
        assert limits.decode_step_bytes(str(path), "bfloat16", quantization="int8") < 1.3 * (matrices + table)
    monkeypatch.setenv("CANTER_KERNELS", "reference")
    assert limits.decode_step_bytes(str(path), "float32") == 4 * (small + matrices + 131 * 64)


def test_operations_follow_the_forms_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a checkpoint names and stores its matrices; the peak is that of the factors that are multiplied."""
    monkeypatch.setenv("CANTER_KERNELS", "native")
    dense = quantized.save(tmp_path / "dense", quantized.weights(), quantized.CONFIG)
    expected = limits.model_cost(str(dense), "float32")
    matrices = sum(tensor.numel() for name, tensor in quantized.weights().items() if tensor.dim() == 2) - 2 * 131 * 64
    assert (expected.token_operations, expected.output_operations) == (2 * matrices, 2 * 131 * 64)
    assert expected.kinds == {"float32": 2 * matrices}
    machine = limits.Machine(1.0, {"float32": 10.0, "int8": 40.0})
    assert expected.peak_of(machine) == pytest.approx(10)
    for scheme in quantized.SCHEMES:
        stored, _ = quantized.save_pair(scheme, tmp_path / scheme.name)
        cost = limits.model_cost(str(stored), "float32")
        assert (cost.token_operations, cost.output_operations) == (expected.token_operations, expected.output_operations)
        assert cost.peak_of(machine) == pytest.approx(10 if scheme.name == "gptq-act-order" else 40)
        assert cost.step_bytes < expected.step_bytes or scheme.name == "gptq-act-order"
    mixed = limits.ModelCost(1, 30, 0, kinds={"float32": 10, "int8": 20})
    assert mixed.peak_of(machine) == pytest.approx(30 / (10 / 10 + 20 / 40))
    served = limits.model_cost(str(dense), "bfloat16", quantization="int8")
    assert served.kinds == {"int8": 2 * matrices} and served.output_operations == expected.output_operations


def test_report_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("latency", {"batch_size": 2})
    report.add("decode, each request", 40.0, "tokens/s", "decode", LIMIT.fraction(40))
    report.add_limit(LIMIT)
    report.finish(str(tmp_path / "out.json"))
    shown = capsys.readouterr().out
    assert "decode, each request  40.0   tokens/s  40% of the limit" in shown and "100 MB a step at 10.0 GB/s read" in shown
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["decode"], written["decode_of_limit"], written["limit"]["limit_steps_s"]) == (40.0, 0.4, 100.0)


def test_numbers_and_summaries() -> None:
    assert [number(value) for value in (1234.5, 100.0, 12.34, 1.234, 0.01234)] == ["1,234", "100", "12.3", "1.23", "0.0123"]
    assert summary([1.0, 2.0, 3.0], (50,)) == {"mean": 2.0, "p50": 2.0}
    assert summary([], (99,)) == {"mean": 0.0, "p99": 0.0}
    assert table(["a", "bb"], [["ccc", "d"]]) == "a    bb\n---  --\nccc  d"


def test_counts_are_shown_whole() -> None:
    assert [number(value) for value in (0, 64, 1234)] == ["0", "64", "1,234"]


@pytest.mark.parametrize(
    ("module", "words", "message"),
    [
        (latency, ["--batch-size", "0"], "--batch-size: expected a whole number of at least 1, got '0'"),
        (latency, ["--num-iters", "1.5"], "--num-iters: expected a whole number of at least 1, got '1.5'"),
        (structured, ["--batch-sizes", "1,x"], "--batch-sizes: expected whole numbers of at least 1, parted by commas, got '1,x'"),
        (prefix, ["--shared-prefix-len", "-1"], "--shared-prefix-len: expected a whole number of at least 0, got '-1'"),
    ],
)
def test_wrong_values_are_refused_before_anything_runs(
    module: ModuleType, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        module.build_parser().parse(words)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def output(first: float, tokens: int, cached: int = 0) -> RequestOutput:
    metrics = RequestMetrics(first_token_latency=first)
    return RequestOutput("0", None, [1] * 10, None, [CompletionOutput(0, "", [1] * tokens)], True, metrics, cached)


def test_latency_report_sets_decoding_beside_the_limit() -> None:
    namespace = latency.build_parser().parse(["--batch-size", "2", "--input-len", "10", "--output-len", "41"])
    report = latency.make_report(namespace, [1.5, 1.5], [[output(0.4, 41), output(0.5, 41)]] * 2, LIMIT)
    assert report.data["decode_tokens_s_each"] == pytest.approx(40)
    assert report.data["decode_tokens_s_each_of_limit"] == pytest.approx(0.4)
    assert report.data["prefill_tokens_s"] == pytest.approx(40)


def test_structured_report_sets_schemas_beside_what_is_free() -> None:
    report = Report("structured")
    structured.report_gaps({"alone": [0.01] * 100, "free": [0.02] * 100, "bound": [0.03] * 100}, report)
    assert (report.data["gap_p99_to_alone"], report.data["gap_p99_to_free"]) == (pytest.approx(3), pytest.approx(1.5))
    assert report.data["gap_bound_p100_ms"] == pytest.approx(30)


def test_schemas_of_the_benchmark_differ_and_take_their_least_length() -> None:
    assert len({json.dumps(structured.schema(i)) for i in range(50)}) == 50
    assert structured.schema(3, 7)["minItems"] == 7
    assert structured.sizes("") == () and structured.sizes("1, 32") == (1, 32)


def test_prefix_measurement() -> None:
    result = prefix.measured(2.0, [output(0.1, 4, 5), output(0.3, 4, 0)], EngineStats(num_steps=3), EngineStats(num_steps=13))
    assert (result.num_output, result.num_steps, result.num_cached, result.hit_rate) == (8, 10, 5, 0.25)
    assert result.ttft == pytest.approx(0.2)


def test_phases_are_read_from_the_log() -> None:
    log = "12:00:00 D engine: import took 1.25 s\n12:00:01 D engine: warm-up took 0.50 s\n12:00:01 I engine: weights: 9.00 s\n"
    assert startup.phases(log) == {"import": 1.25, "warm-up": 0.5}


def test_the_client_logs_phases_in_the_form_that_is_read(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("canter"), "propagate", True)

    async def told() -> None:
        RemoteClient(EngineArgs()).host.handle(LoadPhase("weights", 1.5))

    with caplog.at_level(logging.DEBUG, "canter"):
        asyncio.run(told())
    assert startup.phases("\n".join(caplog.messages)) == {"weights": 1.5}


def test_eviction_asks_for_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"x" * 5000)
    assert startup.evict([path, path]) == (10000 if hasattr(os, "posix_fadvise") else 0)


@pytest.mark.parametrize(("begin", "count", "window"), [(0, 5, 0), (3, 5, 4), (10, 3, 4), (0, 9, 4), (2, 0, 0)])
def test_pairs_of_attention(begin: int, count: int, window: int) -> None:
    assert limits._pairs(begin, count, window) == sum(min(begin + i + 1, window or begin + i + 1) for i in range(count))


def test_least_times_follow_from_operations_and_bytes() -> None:
    cost = limits.ModelCost(step_bytes=1000, token_operations=100, output_operations=10, pair_operations={0: 1}, pair_bytes={0: 2, 4: 1})
    work = limits.Work(requests=2, shared=3, own=2, out=3)
    pairs = 6 + 2 * (4 + 5)
    assert cost.prefill_operations(work) == 7 * 100 + pairs + 2 * 10
    assert cost.decode_operations(work) == 2 * (2 * 110 + 6 + 7)
    # Two steps, of 3 and 4 own tokens: all of them and the shared ones; in the window of 4, one and none of the shared ones.
    assert cost.decode_bytes(work) == 2 * 1000 + 2 * (2 * 3 + 3 + 2 * 4 + 3) + (2 * 3 + 1 + 2 * 4)
    limit = Limit(read_bandwidth=1000, step_bytes=1000, peak=100, cost=cost)
    assert limit.prefill_seconds(work) == pytest.approx(cost.prefill_operations(work) / 100)
    assert limit.decode_seconds(work) == pytest.approx(cost.decode_operations(work) / 100)
    assert LIMIT.decode_seconds(work) == pytest.approx(0.02) and LIMIT.prefill_seconds(work) == pytest.approx(0.01)
    machine = limits.Machine(1.0, {"float32": 5.0, "int8": 9.0})
    assert machine.best_with(limits.Machine(2.0, {"float32": 6.0, "int8": 8.0})) == limits.Machine(2.0, {"float32": 6.0, "int8": 9.0})
    assert machine.peak_for("int8") == 9.0 and machine.peak_for("bfloat16") == 5.0
