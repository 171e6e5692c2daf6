"""Names to classes, and arguments to refusals."""

from __future__ import annotations

import importlib.metadata

import pytest

from canter.core.errors import ConfigError, InvalidRequestError
from canter.core.sampling_params import SamplingParams
from canter.logits_processors import loading
from canter.logits_processors.loading import check_arguments, load_class, load_classes
from canter.logits_processors.ngram_ban import NGramBan
from tests.plugins import Broken, Force, Shift


def test_names() -> None:
    assert load_classes(["tests.plugins:Force", "ngram-ban", "tests.plugins:Shift"]) == [Force, NGramBan, Shift]


def test_installed_ones_are_found_by_their_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        importlib.metadata.EntryPoint("mine", "tests.plugins:Force", "canter.logits_processors"),
        importlib.metadata.EntryPoint("gone", "tests.plugins:Nothing", "canter.logits_processors"),
    ]
    monkeypatch.setattr(loading, "entry_points", lambda group: points if group == "canter.logits_processors" else [])
    assert load_class("mine") is Force
    with pytest.raises(ConfigError, match=r"'gone' can't be loaded: AttributeError"):
        load_class("gone")
    with pytest.raises(ConfigError, match="ngram-ban"):
        load_class("other")


@pytest.mark.parametrize(
    "name", ["tests.plugins:Nothing", "tests.no_module:Force", "tests.plugins:NoProcessor", "tests.plugins:torch", "no-such-name", "", ":"]
)
def test_names_that_lead_nowhere(name: str) -> None:
    with pytest.raises(ConfigError, match="logits_processors"):
        load_class(name)


def test_two_may_not_read_the_same_argument() -> None:
    with pytest.raises(ConfigError, match="both read force"):
        load_classes(["tests.plugins:Force", "tests.plugins:Force"])


def test_arguments_that_nobody_reads_are_refused_by_name() -> None:
    check_arguments([Force, Broken], SamplingParams(extra_args={"force": 5, "nan": 1}))
    check_arguments([], SamplingParams())
    with pytest.raises(InvalidRequestError, match=r"vllm_xargs.other .* force, force_from"):
        check_arguments([Force], SamplingParams(extra_args={"force": 5, "other": 1}))
    with pytest.raises(InvalidRequestError, match=r"vllm_xargs.force .*--logits-processors"):
        check_arguments([], SamplingParams(extra_args={"force": 5}))
    with pytest.raises(InvalidRequestError, match=r"vllm_xargs: force must be a token id"):
        check_arguments([Force], SamplingParams(extra_args={"force": "x"}))


@pytest.mark.parametrize(
    "args",
    [
        {"a": None},
        {"a": {"b": 1}},
        {"a": [[1]]},
        {"a": float("nan")},
        {"a": float("inf")},
        {"a": 2**63},
        {"a": -(2**63) - 1},
        {"a": "x" * 4097},
        {"a": [1] * 1025},
        {"": 1},
        {"x" * 129: 1},
        {str(i): 1 for i in range(65)},
    ],
    ids=lambda args: str(args)[:30],
)
def test_what_an_argument_may_be(args: dict) -> None:
    with pytest.raises(InvalidRequestError, match="vllm_xargs"):
        SamplingParams(extra_args=args)
    SamplingParams(extra_args={"a": 1, "b": -0.5, "c": "x", "d": [1, "x", 2.5], "e": True, "f": 2**63 - 1})
