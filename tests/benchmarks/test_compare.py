"""The comparison with other engines: its rows, arithmetic and processes, on stand-ins for the engines."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent.parent / "benchmarks"
sys.path.insert(0, str(FOLDER))

import compare  # noqa: E402
from peers import driver, engines  # noqa: E402
from peers.processes import EngineFailed, EngineProcess  # noqa: E402

from canter.cli.bench.limits import Limit, ModelCost  # noqa: E402
from tests.models import quantized  # noqa: E402

FAKE = """
import sys
sys.path.insert(0, {folder!r})
import driver
def generate(prompts, count):
    print("noise")
    return [[len(prompt)] * count for prompt in prompts]
driver.obey(generate, {{"check": lambda order: {{"tokens": [[128] * 128]}}}})
"""


def test_bytes_of_a_row(tmp_path: Path) -> None:
    """What the files of the row's format hold of the matrices that a step multiplies with; a table that is looked up is not read."""
    tensors = quantized.weights()
    weights = sum(tensor.numel() for name, tensor in tensors.items() if tensor.dim() == 2 and "embed" not in name)
    small = sum(tensor.numel() for tensor in tensors.values() if tensor.dim() == 1)
    path = quantized.save(tmp_path, {name: tensor.bfloat16() for name, tensor in tensors.items()}, quantized.CONFIG)
    rows = [compare.Row("batch", "some", format, "vllm-cpu") for format in ("bf16", "int8")]
    assert [compare.row_cost(row, str(path)).step_bytes for row in rows] == [2 * (weights + small), weights * 34 // 32]


@pytest.fixture
def fake_driver(tmp_path: Path) -> list[str]:
    path = tmp_path / "fake.py"
    path.write_text(FAKE.format(folder=str(FOLDER / "peers")))
    return [sys.executable, str(path)]


def test_prompts_have_the_sizes_of_the_work_and_follow_from_the_seed() -> None:
    for work in driver.WORKS.values():
        prompts = driver.make_prompts(work, 3)
        assert [len(prompt) for prompt in prompts] == [work.shared + work.own] * work.requests
        assert len({tuple(prompt[: work.shared]) for prompt in prompts}) == 1
    assert driver.make_prompts(driver.WORKS["single"], 1) == driver.make_prompts(driver.WORKS["single"], 1)
    assert driver.make_prompts(driver.WORKS["single"], 1) != driver.make_prompts(driver.WORKS["single"], 2)


def test_figures() -> None:
    assert driver.figure("single", 2.27, 1.0) == pytest.approx(100)
    assert driver.figure("prefill", 2.0) == 512
    assert driver.figure("batch", 2.0) == 2048


def test_less_work_than_asked_for_is_no_result() -> None:
    with pytest.raises(RuntimeError, match="asked for 3 tokens each"):
        driver.timed(lambda prompts, count: [[1] * (count - 1) for _ in prompts], [[5]], 3)


def test_a_driver_is_measured_paused_checked_and_closed(fake_driver: list[str]) -> None:
    engine = engines.Driven(fake_driver)
    with contextlib.closing(engine):
        measured = engine.measure("single", 4)
        assert measured.tokens == [[128] * 128] and engine.measure("prefill", 4).tok_s[""] > 0
        assert engine.peak_bytes() > 2**20
        assert compare.check_tokens(engine, "single", 4, measured.tokens, 1) == 1
        with pytest.raises(EngineFailed, match="differs from the same prompt alone at token 2: 7, 128"):
            compare.check_tokens(engine, "single", 4, [[128, 128, 7] + [128] * 125], 1)
    assert engine.process.has_ended


def test_an_engine_that_ends_tells_its_last_words() -> None:
    process = EngineProcess([sys.executable, "-c", "import sys; sys.exit('no such model')"], orders=True)
    with pytest.raises(EngineFailed, match="status 1") as caught:
        process.ask(None)
    assert "no such model" in str(caught.value)
    process.close()


def test_rows_by_pattern_and_in_full() -> None:
    assert {row.work for row in compare.chosen_rows(["prefill/*"])} == {"prefill"}
    assert compare.chosen_rows(["long/gemma3-270m/q8_0/ik_llama.cpp"]) == [compare.Row("long", "gemma3-270m", "q8_0", "ik_llama.cpp")]
    assert compare.chosen_rows([]) == compare.USUAL and len(set(compare.USUAL)) == len(compare.USUAL)
    with pytest.raises(ValueError, match="a row is work/model/format/rival"):
        compare.chosen_rows(["fast/gemma/q8_0/llama.cpp"])


def test_ratios_are_of_one_turn_and_against_the_better_setting() -> None:
    turns = compare.Turns(canter=[10.0, 20.0, 30.0], rival={"plain": [5.0, 5.0, 5.0], "repacked": [5.0, 10.0, 10.0]})
    assert turns.best_variant == "repacked" and turns.ratios == [2.0, 2.0, 3.0]
    found = turns.as_json(compare.USUAL[0])
    assert (found["ratio"], found["ratio_least"], found["ratio_most"]) == (2.0, 2.0, 3.0)
    starts = compare.Turns(canter=[2.0], rival={"": [8.0]}, less_is_better=True)
    assert starts.ratios == [4.0]
    json.dumps(found)
    assert "2.00–3.00" in compare.show([found, compare.USUAL[1]._asdict() | {"error": "gone"}])


def test_the_limit_of_a_workload() -> None:
    limit = Limit(1e9, 10**6, 1e9, ModelCost(10**6, 10**5, 0))
    assert compare.limit_speed("single", limit) == pytest.approx(1000)  # memory: a thousand steps a second
    assert compare.limit_speed("prefill", limit) == pytest.approx(1e4)  # arithmetic: ten thousand tokens a second
    decode = 127 * 32 * 10**5 / 1e9
    assert compare.limit_speed("batch", limit) == pytest.approx(4096 / (0.4096 + decode))


TABLE = """
main: n_kv_max = 8192
|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   128 |    128 |   32 |   8192 |    4.000 |  1024.00 |    6.000 |   682.67 |   10.000 |   819.20 |
"""


def test_the_table_of_the_batched_tool_is_read() -> None:
    assert engines.batched_seconds(TABLE) == 10.0
    with pytest.raises(EngineFailed):
        engines.batched_seconds("main: failed")
