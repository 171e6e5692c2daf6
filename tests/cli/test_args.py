"""Flags from dataclasses: names, values, errors with the nearest match, and the way back from values to flags."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canter.cli.args import Parser, add_engine_flags, add_flags, canonical, engine_args, flag_words, fold_dotted
from canter.cli.args import given as given_fields
from canter.core.config import EngineArgs
from canter.core.errors import ConfigError
from canter.core.vllm_names import VLLM_ONLY, explain_unknown
from canter.server.args import ServerArgs


def parser() -> Parser:
    made = Parser("canter test", "A test.")
    add_engine_flags(made)
    add_flags(made, ServerArgs)
    return made


def parse(*words: str) -> EngineArgs:
    return engine_args(parser().parse(words))


def test_every_field_has_a_flag_and_defaults_stay_the_dataclass_own() -> None:
    flags = parser()._option_string_actions
    for arguments in (EngineArgs, ServerArgs):
        for field in dataclasses.fields(arguments):
            assert f"--{field.name.replace('_', '-')}" in flags
    namespace = parser().parse([])
    assert given_fields(namespace, EngineArgs) == {}
    assert parse() == EngineArgs()


def test_values_of_every_kind() -> None:
    args = parse(
        "some/model", "--max-model-len", "32k", "--kv-cache-memory-bytes", "512M", "--gpu-memory-utilization", "0.5",
        "--no-enable-prefix-caching", "--disable-log-stats", "--dtype", "bfloat16", "--hf-overrides", '{"a": {"b": 1}}',
    )  # fmt: skip
    assert args.model == "some/model"
    assert args.max_model_len == 32_000
    assert args.kv_cache_memory_bytes == 512 * 2**20
    assert args.gpu_memory_utilization == 0.5
    assert args.enable_prefix_caching is False
    assert args.disable_log_stats is True
    assert args.dtype == "bfloat16"
    assert args.hf_overrides == {"a": {"b": 1}}


def test_counts_take_both_suffixes() -> None:
    assert parse("--max-model-len", "4K").max_model_len == 4096
    assert parse("--max-model-len", "1.5k").max_model_len == 1500


def test_underscores_and_equals_are_understood() -> None:
    assert parse("--max_num_seqs=7").max_num_seqs == 7
    assert canonical("--max_num_seqs=a_b") == "--max-num-seqs=a_b"
    assert canonical("a_file") == "a_file"


def test_dotted_flags_become_one_object() -> None:
    args = parse("--hf-overrides.rope_theta", "1e6", "--hf-overrides.rope_scaling.rope_type=linear")
    assert args.hf_overrides == {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear"}}
    assert fold_dotted(["x.y", "--flag", "1.5"]) == ["x.y", "--flag", "1.5"]


def test_lists_take_several_values() -> None:
    namespace = parser().parse(["--served-model-name", "a", "b"])
    assert given_fields(namespace, ServerArgs) == {"served_model_name": ["a", "b"]}


def test_model_position_and_flag() -> None:
    assert parse("--model", "m").model == "m"
    assert parse("m", "--model", "m").model == "m"
    with pytest.raises(ConfigError, match="named twice: 'a' and --model 'b'"):
        parse("a", "--model", "b")


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        parser().parse(words)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_unknown_flags_name_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean --max-num-seqs?" in error_of(capsys, "--max-num-seq", "3")
    assert "Did you mean --gpu-memory-utilization?" in error_of(capsys, "--gpu-memory-utilisation=0.5")
    assert "Try 'canter test --help'" in error_of(capsys, "--zzz")


def test_flags_of_vllm_that_are_lacking_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(capsys, "--tensor-parallel-size", "2")
    assert "Canter has no --tensor-parallel-size, which is vLLM's: Canter runs a model on one device." in message


def test_bad_values_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "512M or 2G, got 'lots'" in error_of(capsys, "--kv-cache-memory-bytes", "lots")
    assert "expected a JSON object" in error_of(capsys, "--hf-overrides", "[1]")
    assert "invalid choice: 'int3'" in error_of(capsys, "--dtype", "int3")
    assert "'--max-num-seqs'" not in error_of(capsys, "--max-num-seqs", "many")
    with pytest.raises(ConfigError, match="max_num_seqs must be an integer of at least 1, got 0"):
        parse("--max-num-seqs", "0")


def test_no_name_is_both_known_and_lacking() -> None:
    known = {field.name for arguments in (EngineArgs, ServerArgs) for field in dataclasses.fields(arguments)}
    assert not known & set(VLLM_ONLY)
    assert explain_unknown("max_num_seq", known) == "Unknown argument max_num_seq. Did you mean max_num_seqs?"


ARGUMENTS = st.builds(
    EngineArgs,
    model=st.text(st.characters(whitelist_categories=["L", "N"]), min_size=1),
    max_model_len=st.none() | st.integers(1, 10**6),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(["auto", "float32", "bfloat16"]),
    kv_cache_memory_bytes=st.none() | st.integers(1, 2**40),
    enable_prefix_caching=st.booleans(),
    disable_log_stats=st.booleans(),
    gpu_memory_utilization=st.none() | st.floats(0.01, 1),
    hf_overrides=st.dictionaries(st.text(), st.integers() | st.text()),
)


@settings(max_examples=25, deadline=None)
@given(ARGUMENTS)
def test_flag_words_say_what_the_arguments_say(arguments: EngineArgs) -> None:
    assert parse(*flag_words(arguments)) == arguments


def test_help_shows_documentation_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(EngineArgs):
        assert " ".join(field.metadata["doc"].split())[:40] in shown
    assert "Most requests that run at once. Default: 128." in shown


def test_list_flags_add_up_and_take_json() -> None:
    words = ["--api-key", "a", "b", "--api-key", "c", "--allowed-origins", '["http://x.test", "http://y.test"]']
    args = given_fields(parser().parse(words), ServerArgs)
    assert args["api_key"] == ["a", "b", "c"]
    assert args["allowed_origins"] == ["http://x.test", "http://y.test"]


@pytest.mark.parametrize("text", ["[1]", "[", "[null]"])
def test_a_list_that_is_no_list_of_names_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse(["--api-key", text])
    assert "JSON list of strings" in capsys.readouterr().err
