from __future__ import annotations

from typing import Any

import pytest

from canter.core.config import DeviceFacts, EngineArgs, ModelFacts, parse_bytes, resolve
from canter.core.errors import ConfigError

MODEL = ModelFacts("LlamaForCausalLM", "bfloat16", 2048)
CPU = DeviceFacts("cpu", 2, 2**30)


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        EngineArgs.parse(max_model_length=5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "int3"), ("dtype", None), ("quantization", "fp8"),
        ("device", "tpu"), ("scheduling_policy", "lifo"), ("max_model_len", 0), ("block_size", 1.5),
        ("max_num_seqs", True),
        ("gpu_memory_utilization", 0), ("gpu_memory_utilization", 1.5), ("max_logprobs", -2), ("num_threads", 0),
        ("long_prefill_token_threshold", -1),
        ("max_prefill_slowdown", 1.0),
        ("max_prefill_slowdown", "4"),
    ],
)  # fmt: skip
def test_bad_values_name_their_argument(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineArgs.parse(**{field: value})


def test_automatic_choices_have_reasons() -> None:
    config, reasons = resolve(EngineArgs.parse(), MODEL, CPU)
    assert (config.dtype, config.kv_cache_dtype, config.max_model_len, config.device, config.num_threads) == (
        "bfloat16",
        "bfloat16",
        2048,
        "cpu",
        2,
    )
    assert any("dtype" in r for r in reasons) and any("max_model_len" in r for r in reasons)


def test_cache_types_have_one_name_each() -> None:
    names = ("auto", "float32", "fp8", "fp8_e4m3", "int8_per_token_head")
    found = [resolve(EngineArgs.parse(kv_cache_dtype=name), MODEL, CPU)[0].kv_cache_dtype for name in names]
    assert found == ["bfloat16", "float32", "fp8_e4m3", "fp8_e4m3", "int8_per_token_head"]


def test_float16_checkpoints_run_as_bfloat16_on_a_cpu() -> None:
    model = ModelFacts("LlamaForCausalLM", "float16", 2048)
    assert resolve(EngineArgs.parse(), model, CPU)[0].dtype == "bfloat16"
    assert resolve(EngineArgs.parse(dtype="float16"), model, CPU)[0].dtype == "float16"
    assert resolve(EngineArgs.parse(), model, DeviceFacts("cuda", 1, 2**30))[0].dtype == "float16"


def _held(method: str, dtype: str = "float32") -> ModelFacts:
    return ModelFacts("LlamaForCausalLM", dtype, 2048, method)


@pytest.mark.parametrize(
    ("asked", "held", "used"),
    [
        (None, "none", "none"), ("auto", "gguf", "gguf"), (None, "awq", "awq"), ("gptq", "gptq", "gptq"), ("none", "gguf", "none"),
        ("none", "compressed-tensors", "none"), ("none", "none", "none"), ("int8", "none", "int8"),
    ],
)  # fmt: skip
def test_weights_take_the_form_of_the_checkpoint(asked: str | None, held: str, used: str) -> None:
    assert resolve(EngineArgs.parse(quantization=asked), _held(held), CPU)[0].quantization == used


@pytest.mark.parametrize(
    ("asked", "held", "match"),
    [
        ("int8", "gguf", r"int8 rounds checkpoints of floats; this one is quantised already \(gguf\)"),
        ("awq", "none", "quantization awq does not fit: the checkpoint holds floats"),
        ("gguf", "gptq", "quantization gguf does not fit: the checkpoint is gptq"),
    ],
)
def test_a_form_that_the_checkpoint_does_not_have_is_refused(asked: str, held: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        resolve(EngineArgs.parse(quantization=asked), _held(held), CPU)


def test_the_cache_beside_gguf_blocks_is_float16() -> None:
    config, reasons = resolve(EngineArgs.parse(), _held("gguf"), CPU)
    assert (config.dtype, config.kv_cache_dtype) == ("float32", "float16") and any("kv_cache_dtype float16" in r for r in reasons)
    for changes in (dict(quantization="none"), dict(kv_cache_dtype="float32")):
        assert resolve(EngineArgs.parse(**changes), _held("gguf"), CPU)[0].kv_cache_dtype == "float32"
    assert resolve(EngineArgs.parse(), _held("gguf"), DeviceFacts("cuda", 1, 2**30))[0].kv_cache_dtype == "float32"
    assert resolve(EngineArgs.parse(), _held("none"), CPU)[0].kv_cache_dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(max_model_len=4096), "at most the model's context of 2048 tokens, got 4096"),
        (dict(enable_chunked_prefill=False, max_num_batched_tokens=1024), "chunked prefill"),
        (dict(max_num_seqs=300, max_num_batched_tokens=200), "starve"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        resolve(EngineArgs.parse(**changes), MODEL, CPU)


@pytest.mark.parametrize(
    ("text", "value"), [("512", 512), ("1k", 1024), ("2M", 2**21), ("1.5G", 3 * 2**29), ("1GiB", 2**30), ("3MB", 3 * 2**20)]
)
def test_bytes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "G", "-1", "one", "inf", "nan", "0"])
def test_bad_bytes(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)
