"""Which markers a model's thoughts have."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from canter.checkpoint.resolve import resolve
from canter.core.errors import ConfigError, InvalidRequestError
from canter.core.sampling_params import SamplingParams
from canter.text.prepare import finish_params
from canter.text.thinking import ThinkingMarkers, find_markers
from canter.text.tokenizer import Tokenizer, load_tokenizer
from tests.fakes import fake_tokenizer, model_folder
from tests.text.parsing.vocabulary import tiny_tokenizer


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("thinker")
    backend = Backend(models.WordLevel({"<unk>": 0, "time": 1, "up": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_tokens(["<think>", "</think>"])
    backend.save(str(folder / "tokenizer.json"))
    for file in ("config.json", "model.safetensors"):
        (folder / file).write_bytes((model_folder() / file).read_bytes())
    (folder / "tokenizer_config.json").write_text('{"unk_token": "<unk>"}')
    return load_tokenizer(resolve(str(folder)))


def test_known_markers_are_found(thinker: Tokenizer) -> None:
    assert find_markers(thinker, {}) == ThinkingMarkers([3], [4])
    assert find_markers(fake_tokenizer(), {}) is None
    suffixed = tiny_tokenizer(("</think:x>", "<think:x>", "<think:y>"))
    start, end = suffixed.token_to_id("<think:x>"), suffixed.token_to_id("</think:x>")
    assert find_markers(suffixed, {}) == ThinkingMarkers([start], [end])


def test_models_with_several_markers_or_markers_of_several_tokens() -> None:
    horizon = tiny_tokenizer(("<ifm|think>", "</ifm|think>", "<ifm|think_fast>", "</ifm|think_fast>"))
    ids = [horizon.token_to_id(f"<{slash}ifm|think{kind}>") for kind in ("", "_fast") for slash in ("", "/")]
    assert find_markers(horizon, {}) == ThinkingMarkers([ids[0]], [ids[1]], (([ids[2]], [ids[3]]),))
    inkling = tiny_tokenizer((), ("<|content_thinking|>", "<|end_message|>"))
    start, end = (inkling.token_to_id(marker) for marker in ("<|content_thinking|>", "<|end_message|>"))
    assert find_markers(inkling, {}) == ThinkingMarkers([start], [end])
    k3 = tiny_tokenizer(("<|open|>", "<|close|>", "<|sep|>"))
    found = find_markers(k3, {})
    assert found is not None and not found.others
    assert [k3.decode(ids, skip_special_tokens=False) for ids in (found.start, found.end)] == [
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
    ]
    assert find_markers(tiny_tokenizer(("<|open|>", "<|close|>")), {}) is None


def test_named_markers(thinker: Tokenizer) -> None:
    config = {"reasoning_start_str": "<think>", "reasoning_end_str": "time up </think>"}
    assert find_markers(thinker, config) == ThinkingMarkers([3], [1, 2, 4])
    assert find_markers(fake_tokenizer(), {"reasoning_start_str": "<a>", "reasoning_end_str": "x<b>"}) == ThinkingMarkers([258], [120, 259])


@pytest.mark.parametrize(
    "config",
    [
        {"reasoning_start_str": "<think>"},
        {"reasoning_start_str": "<think>", "reasoning_end_str": ""},
        {"reasoning_start_str": 5, "reasoning_end_str": "</think>"},
        {"reasoning_start_str": "<think>", "reasoning_end_str": "<think>"},
        {"reasoning_start_str": "<think>", "reasoning_end_str": "nothing-like-it"},
        {"reasoning_start_str": "<think>", "reasoning_end_str": "up " * 33},
        {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>", "reasoning_parser": "qwen3"},
    ],
    ids=str,
)
def test_configurations_that_name_no_markers(thinker: Tokenizer, config: dict) -> None:
    with pytest.raises(ConfigError, match="reasoning_config"):
        find_markers(thinker, config)


def test_parameters_get_the_ids_only_with_a_budget(thinker: Tokenizer) -> None:
    markers = ThinkingMarkers([3], [4])
    done = finish_params(SamplingParams(thinking_token_budget=5), thinker, {}, 5, markers)
    assert (done.thinking_start_ids, done.thinking_end_ids) == ([3], [4])
    assert finish_params(SamplingParams(), thinker, {}, 5, markers).thinking_end_ids == []
    for vocab_size, found in ((5, None), (4, markers)):
        with pytest.raises(InvalidRequestError, match="thinking_token_budget"):
            finish_params(SamplingParams(thinking_token_budget=5), thinker, {}, vocab_size, found)


def test_a_budget_needs_one_kind_of_thought() -> None:
    """K2 Horizon's efforts: a thought of another kind than the one that is counted would go on without end, and nobody would know."""
    horizon = tiny_tokenizer(("<ifm|think>", "</ifm|think>", "<ifm|think_fast>", "</ifm|think_fast>"))
    vocab_size = 1 + max(horizon.added_token_ids)
    with pytest.raises(InvalidRequestError, match="and this model has 2,") as caught:
        finish_params(SamplingParams(thinking_token_budget=5), horizon, {}, vocab_size, find_markers(horizon, {}))
    assert caught.value.param == "thinking_token_budget"
    assert finish_params(SamplingParams(), horizon, {}, vocab_size, find_markers(horizon, {})).thinking_end_ids == []
    named = find_markers(horizon, {"reasoning_start_str": "<ifm|think_fast>", "reasoning_end_str": "</ifm|think_fast>"})
    counted = finish_params(SamplingParams(thinking_token_budget=5), horizon, {}, vocab_size, named)
    assert counted.thinking_end_ids == [horizon.token_to_id("</ifm|think_fast>")]


def test_a_budget_with_markers_of_several_tokens() -> None:
    k3 = tiny_tokenizer(("<|open|>", "<|close|>", "<|sep|>"))
    counted = finish_params(SamplingParams(thinking_token_budget=5), k3, {}, 10**6, find_markers(k3, {}))
    assert k3.decode(counted.thinking_end_ids, skip_special_tokens=False) == "<|close|>think<|sep|>"
