"""The benchmarks' arithmetic, and the load generator on canned answers."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from canter.cli.bench import latency, limits, prefix, serve, startup
from canter.cli.bench.limits import Limit, read_bandwidth
from canter.cli.bench.prompts import random_prompts
from canter.cli.bench.report import Report, number, percentile_table, summary
from canter.cli.table import table
from canter.client.outputs import CompletionOutput, RequestMetrics, RequestOutput
from canter.client.remote import RemoteClient
from canter.core.config import EngineArgs
from canter.core.errors import CheckpointError
from canter.core.messages import EngineStats, LoadPhase
from tests.cli.fake_api import FakeApi, completion_chunks
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
    assert percentile_table({"TTFT": [0.001, 0.003]}, (50,)).splitlines()[-1].split() == ["TTFT", "2", "2"]
    assert table(["a", "bb"], [["ccc", "d"]]) == "a    bb\n---  --\nccc  d"


def test_counts_are_shown_whole() -> None:
    assert [number(value) for value in (0, 64, 1234)] == ["0", "64", "1,234"]


@pytest.mark.parametrize(
    ("module", "words", "message"),
    [
        (latency, ["--batch-size", "0"], "--batch-size: expected a whole number of at least 1, got '0'"),
        (latency, ["--num-iters", "1.5"], "--num-iters: expected a whole number of at least 1, got '1.5'"),
        (prefix, ["--shared-prefix-len", "-1"], "--shared-prefix-len: expected a whole number of at least 0, got '-1'"),
        (serve, ["--request-rate", "0"], "--request-rate: expected a number of at least 0.001, got '0'"),
        (serve, ["--request-rate", "nan"], "--request-rate: expected a number of at least 0.001, got 'nan'"),
        (serve, ["--max-concurrency", "0"], "--max-concurrency: expected a whole number of at least 1, got '0'"),
        (serve, ["--metric-percentiles", "50,x"], "--metric-percentiles: expected numbers from 0 to 100 such as 50,90,99, got '50,x'"),
        (serve, ["--json", "no-such-folder/a.json"], "there is no directory 'no-such-folder' to write 'a.json' to"),
        (serve, ["--json", "."], "expected a file, got the directory '.'"),
    ],
)
def test_wrong_values_are_refused_before_anything_runs(
    module: ModuleType, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        module.build_parser().parse(words)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_weights_that_are_not_here_are_told_of_before_the_load() -> None:
    with pytest.raises(CheckpointError, match="neither a directory"):
        serve.run(serve.build_parser().parse(["--url", "http://localhost:1", "--weights", "nope"]))


def test_arrivals() -> None:
    assert serve.arrivals(3, float("inf"), 0) == [0.0, 0.0, 0.0]
    times = serve.arrivals(2000, 4.0, 1)
    assert times == sorted(times) and times[0] == 0.0
    assert times[-1] == pytest.approx(500, rel=0.1)


def drive(api: FakeApi, *flags: str) -> tuple[list[serve.Result], list[dict[str, object]]]:
    namespace = serve.build_parser().parse(["--url", "http://localhost:1", "--num-warmups", "1", *flags])
    target = serve.make_target(namespace, "tiny")
    results, seconds = asyncio.run(serve.drive(namespace, target, httpx.MockTransport(api)))
    assert seconds > 0
    return results, api.bodies


def test_every_request_is_sent_and_timed(capsys: pytest.CaptureFixture[str]) -> None:
    results, bodies = drive(
        FakeApi(completion=completion_chunks("a", "b", "c", usage=(7, 3))), "--num-prompts", "5", "--random-input-len", "7"
    )
    assert len(results) == 5 and len(bodies) == 6
    for result in results:
        assert result.error is None and (result.num_prompt, result.num_output) == (7, 3)
        assert 0 < result.ttft <= result.latency and len(result.gaps) == 2
    assert all(len(body["prompt"]) == 7 for body in bodies)  # type: ignore[arg-type]
    assert bodies[0]["ignore_eos"] is True and bodies[0]["max_tokens"] == 128


def test_chat_requests_and_plain_servers() -> None:
    _, bodies = drive(FakeApi(), "--num-prompts", "2", "--backend", "openai-chat", "--no-ignore-eos", "--random-input-len", "4")
    assert "ignore_eos" not in bodies[0]
    (message,) = bodies[1]["messages"]  # type: ignore[misc]
    assert len(message["content"].split()) == 4


def test_closed_loop_never_exceeds_its_concurrency() -> None:
    running = most = 0

    class Counting(httpx.AsyncByteStream):
        async def __aiter__(self):  # type: ignore[no-untyped-def]
            nonlocal running
            for line in completion_chunks("a", "b").encode().splitlines(keepends=True):
                await asyncio.sleep(0)
                yield line
            running -= 1

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        return httpx.Response(200, stream=Counting())

    namespace = serve.build_parser().parse(["--num-prompts", "9", "--max-concurrency", "3", "--num-warmups", "0"])
    results, _ = asyncio.run(serve.drive(namespace, serve.make_target(namespace, "tiny"), httpx.MockTransport(answer)))
    assert len(results) == 9 and most == 3


def test_failures_are_counted_not_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.json"
    results, _ = drive(FakeApi(status=503), "--num-warmups", "0", "--num-prompts", "3", "--json", str(path))
    assert all("503" in (result.error or "") for result in results)
    namespace = serve.build_parser().parse(["--json", str(path), "--num-prompts", "3"])
    good = serve.Result(0.0, ttft=0.1, latency=1.1, gaps=[0.5, 0.5], num_prompt=10, num_output=3)
    serve.report(namespace, "tiny", [good, *results], 2.0)
    written = json.loads(path.read_text())
    assert (written["completed"], written["failed"], written["output_throughput"]) == (1, 3, 1.5)
    assert written["median_ttft_ms"] == pytest.approx(100) and written["p99_tpot_ms"] == pytest.approx(500)
    assert written["mean_e2el_ms"] == pytest.approx(1100)
    shown = capsys.readouterr().out
    assert "TPOT" in shown and "! The server answered 503" in shown


def output(first: float, tokens: int, cached: int = 0) -> RequestOutput:
    metrics = RequestMetrics(first_token_latency=first)
    return RequestOutput("0", None, [1] * 10, None, [CompletionOutput(0, "", [1] * tokens)], True, metrics, cached)


def test_latency_report_sets_decoding_beside_the_limit() -> None:
    namespace = latency.build_parser().parse(["--batch-size", "2", "--input-len", "10", "--output-len", "41"])
    report = latency.make_report(namespace, [1.5, 1.5], [[output(0.4, 41), output(0.5, 41)]] * 2, LIMIT)
    assert report.data["decode_tokens_s_each"] == pytest.approx(40)
    assert report.data["decode_tokens_s_each_of_limit"] == pytest.approx(0.4)
    assert report.data["prefill_tokens_s"] == pytest.approx(40)


def test_prefix_measurement() -> None:
    result = prefix.measured(2.0, [output(0.1, 4, 5), output(0.3, 4, 0)], EngineStats(num_steps=3), EngineStats(num_steps=13))
    assert (result.num_output, result.num_steps, result.hit_rate) == (8, 10, 0.25)
    assert result.ttft == pytest.approx(0.2)


def test_phases_are_read_from_the_log() -> None:
    log = "12:00:00 D engine: import took 1.25 s\n12:00:01 D engine: warm-up took 0.50 s\n12:00:01 I engine: weights: 9.00 s\n"
    assert startup.phases(log) == {"import": 1.25, "warm-up": 0.5}


def test_the_client_logs_phases_in_the_form_that_is_read(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("canter"), "propagate", True)

    async def told() -> None:
        RemoteClient(EngineArgs())._handle(LoadPhase("weights", 1.5))

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
