"""`LLM` on real engines: every architecture, every kind of checkpoint, and what happens when something goes wrong."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from canter import LLM, SamplingParams
from canter.beam_search import BeamSearchParams
from canter.core.errors import CheckpointError, ConfigError, EngineDeadError, InvalidRequestError, UnsupportedModelError
from canter.models.registry import list_models
from tests.engines import CONTEXT, VOCAB_SIZE, Oracle, add_tokenizer, model_runner, tiny_checkpoint
from tests.models.families import FAMILIES, Family, build_oracle, save_oracle
from tests.models.published import PUBLISHED_MINIMAX, publish_minimax

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = "w5 w6 w7 w8 w9 w10 w11 w12 w13 w14"
PROMPT_IDS = list(range(5, 15))
NEAR_TIE = 1e-3


def open_llm(path: Path | str, **changes: Any) -> LLM:
    return LLM(str(path), **{"num_gpu_blocks_override": 100, "num_threads": 1, **changes})


def is_idle(llm: LLM) -> bool:
    """Whether nothing is left of any request, once the steps in flight are done."""
    while llm._core.has_work():
        llm._core.step()
    stats = llm.stats()
    return not llm._core.has_unfinished() and stats.num_free_blocks == stats.num_blocks and not llm._client.has_unfinished()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama"))


@pytest.fixture(scope="module")
def llm(llama: Path) -> Iterator[LLM]:
    with open_llm(llama) as opened:
        yield opened


def greedy(path: Path, **changes: Any) -> list[int]:
    with open_llm(path, **changes) as opened:
        return opened.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def words(token_ids: list[int]) -> list[str]:
    """The text of tokens, word by word; special tokens have none."""
    return ["<unk>" if token_id == 0 else f"w{token_id}" for token_id in token_ids if token_id not in (1, 2)]


def copy_of(path: Path, to: Path, store: torch.dtype | None = None, **config: Any) -> Path:
    """A copy of a checkpoint with another config, and weights in another type."""
    to.mkdir()
    for file in path.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    content = json.loads((to / "config.json").read_text())
    content.update(config)
    (to / "config.json").write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    if store is not None:
        tensors = {name: tensor.to(store) for name, tensor in load_file(to / "model.safetensors").items()}
        save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


# Architectures and checkpoints

ARCHITECTURES = {family.architecture: family for family in reversed(FAMILIES)}


def test_every_architecture_is_tried() -> None:
    assert {*ARCHITECTURES, *PUBLISHED_MINIMAX} == {row.architecture for row in list_models()}


@pytest.mark.parametrize("family", ARCHITECTURES.values(), ids=lambda family: family.name)
def test_an_architecture_from_text_to_text(tmp_path: Path, family: Family) -> None:
    answers_as_its_oracle(add_tokenizer(save_oracle(family, tmp_path)), family, family.architecture)


@pytest.mark.parametrize("architecture", PUBLISHED_MINIMAX)
def test_a_published_architecture_from_text_to_text(tmp_path: Path, architecture: str) -> None:
    family = publish_minimax(tmp_path, architecture)
    answers_as_its_oracle(add_tokenizer(tmp_path), family, architecture)


def answers_as_its_oracle(path: Path, family: Family, architecture: str) -> None:
    with open_llm(path, max_model_len=family.max_model_len, block_size=4) as opened:
        assert opened.info.architecture == architecture
        outputs = opened.generate([PROMPT, "w90 w91"], GREEDY, use_tqdm=False)
    for output in outputs:
        (choice,) = output.outputs
        assert choice.text.split() == words(choice.token_ids)
        with torch.inference_mode():
            tokens = torch.tensor([output.prompt_token_ids + choice.token_ids])
            logits = build_oracle(family)(input_ids=tokens, use_cache=False).logits[0, len(output.prompt_token_ids) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(choice.token_ids).unsqueeze(1)).squeeze(1)
        assert (logits.amax(-1) - chosen).max() < NEAR_TIE


def test_shards_and_types(llama: Path, tmp_path: Path) -> None:
    expected = greedy(llama)
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert greedy(add_tokenizer(tmp_path / "shards")) == expected
    half = copy_of(llama, tmp_path / "half", torch.float16, dtype="float16")
    with open_llm(half) as opened:
        assert opened.info.dtype == "bfloat16"
    for dtype in ("float16", "float32"):
        with open_llm(half, dtype=dtype) as opened:
            assert opened.info.dtype == dtype
            tokens = opened.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        logits = Oracle(half).logits(PROMPT_IDS + tokens)[len(PROMPT_IDS) - 1 : -1]
        assert (logits.amax(-1) - logits[torch.arange(len(tokens)), tokens]).max() < (0.05 if dtype == "float16" else NEAR_TIE)
    old_name = copy_of(half, tmp_path / "old", dtype=None, torch_dtype="float16")
    with open_llm(old_name) as opened:
        assert opened.info.dtype == "bfloat16"


def test_a_tied_output_layer_may_be_stored_or_not(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    embeddings = tensors["model.embed_tokens.weight"]
    stored = copy_of(llama, tmp_path / "stored", tie_word_embeddings=True)
    save_file(tensors | {"lm_head.weight": embeddings.clone()}, stored / "model.safetensors", {"format": "pt"})
    absent = copy_of(stored, tmp_path / "absent")
    save_file({k: v for k, v in tensors.items() if k != "lm_head.weight"}, absent / "model.safetensors", {"format": "pt"})
    assert greedy(stored) == greedy(absent) != greedy(llama)


def test_both_spellings_of_ropes(llama: Path, tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
    new = copy_of(llama, tmp_path / "new", rope_parameters={**scaling, "rope_theta": 50.0}, rope_theta=None, rope_scaling=None)
    old = copy_of(llama, tmp_path / "old", rope_parameters=None, rope_theta=50.0, rope_scaling=scaling)
    older = copy_of(old, tmp_path / "older", rope_scaling={"type" if k == "rope_type" else k: v for k, v in scaling.items()})
    assert greedy(new) == greedy(old) == greedy(older) != greedy(llama)


def test_ends_of_a_turn(llama: Path, tmp_path: Path) -> None:
    first, second = greedy(llama)[:2]

    def output(path: Path, **changes: Any) -> Any:
        with open_llm(path, **changes) as opened:
            return opened.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)[0].outputs[0]

    listed = copy_of(llama, tmp_path / "listed")
    (listed / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, second]}))
    assert (output(listed).token_ids, output(listed).finish_reason, output(listed).stop_reason) == ([first, second], "stop", None)
    in_config = copy_of(llama, tmp_path / "in_config", eos_token_id=first)
    (in_config / "generation_config.json").unlink(missing_ok=True)
    assert output(in_config).token_ids == [first]


def test_a_generation_config_of_another_directory(llama: Path, tmp_path: Path) -> None:
    first, second = greedy(llama)[:2]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [second], "temperature": 0.25, "max_new_tokens": 5}))
    with open_llm(llama, generation_config=str(tmp_path)) as opened:
        defaults = opened.get_default_sampling_params()
        assert (defaults.temperature, defaults.max_tokens) == (0.25, 5)
        output = opened.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)[0].outputs[0]
        assert output.token_ids == [first, second]
    with pytest.raises(ConfigError, match="auto, vllm or a directory"):
        open_llm(llama, generation_config=str(tmp_path / "nowhere"))


def test_a_tokenizer_of_another_directory(llama: Path, tmp_path: Path) -> None:
    bare = copy_of(llama, tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    (tmp_path / "words").mkdir()
    words = add_tokenizer(tmp_path / "words")
    assert greedy(bare, tokenizer=str(words)) == greedy(llama)
    with pytest.raises(CheckpointError, match="tokenizer"):
        open_llm(bare)


def test_checkpoints_that_can_not_be_served(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="XLNetLMHeadModel"):
        open_llm(copy_of(llama, tmp_path / "kind", architectures=["XLNetLMHeadModel"]))
    cut = copy_of(llama, tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_llm(cut)
    with pytest.raises(CheckpointError, match="shape"):
        open_llm(copy_of(llama, tmp_path / "shape", intermediate_size=96))
    with pytest.raises(CheckpointError, match="lacks"):
        open_llm(copy_of(llama, tmp_path / "layers", num_hidden_layers=4))


def test_sizes_that_do_not_fit(llama: Path) -> None:
    with pytest.raises(ConfigError, match="num_gpu_blocks_override must be at least 17"):
        open_llm(llama, num_gpu_blocks_override=16)
    with pytest.raises(ConfigError, match="cache needs"):
        open_llm(llama, num_gpu_blocks_override=None, kv_cache_memory_bytes=20_000, max_model_len=CONTEXT)
    with pytest.raises(ConfigError, match="at most the model's context"):
        open_llm(llama, max_model_len=CONTEXT + 1)
    with open_llm(llama, num_gpu_blocks_override=None, kv_cache_memory_bytes=60_000) as opened:
        assert 0 < opened.info.max_model_len < CONTEXT, "the context was meant to be cut to what fits"


@pytest.mark.parametrize("max_model_len", [2, 3, 9])
def test_very_short_contexts(llama: Path, max_model_len: int) -> None:
    with open_llm(llama, max_model_len=max_model_len) as opened:
        prompt = PROMPT_IDS[: max_model_len - 1]
        (output,) = opened.generate({"prompt_token_ids": prompt}, GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1 and output.outputs[0].finish_reason == "length"
    expected = Oracle(llama).logits(prompt)[-1].argmax()
    assert output.outputs[0].token_ids == [int(expected)]


# Requests


def test_prompts_in_every_form_and_cached_tokens(llm: LLM) -> None:
    llm.reset_prefix_cache()
    long = list(range(3, 60))
    forms = [PROMPT, {"prompt": PROMPT}, {"prompt_token_ids": PROMPT_IDS}, {"prompt_token_ids": long, "cache_salt": "a"}]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids == outputs[2].outputs[0].token_ids
    again = llm.generate([{"prompt_token_ids": long, "cache_salt": salt} for salt in ("a", "b")], GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in again] == [48, 0]
    assert outputs[3].outputs == again[0].outputs == again[1].outputs


def test_metrics_are_filled(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    metrics = output.metrics
    assert metrics is not None and metrics.num_generation_tokens == 8
    assert 0 < metrics.arrival_time <= metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts <= metrics.last_token_ts
    assert metrics.first_token_latency == metrics.first_token_ts - metrics.arrival_time


def test_several_choices_with_logprobs(llm: LLM, llama: Path) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    oracle = Oracle(llama)
    assert [choice.index for choice in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in output.outputs}) == 4
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(PROMPT_IDS) and output.prompt_logprobs[0] is None
    for choice in output.outputs:
        expected = torch.log_softmax(oracle.logits(PROMPT_IDS + choice.token_ids), -1)
        assert choice.logprobs is not None and choice.cumulative_logprob is not None
        total = 0.0
        for i, (token_id, position) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True)):
            for candidate, entry in position.items():
                assert entry.logprob == pytest.approx(float(expected[len(PROMPT_IDS) - 1 + i, candidate]), abs=1e-4)
            assert position[token_id].decoded_token is not None
            total += position[token_id].logprob
        assert choice.cumulative_logprob == pytest.approx(total)
    for position_before, token_id in enumerate(PROMPT_IDS[1:]):
        entry = output.prompt_logprobs[position_before + 1]
        assert entry is not None
        assert entry[token_id].logprob == pytest.approx(float(expected[position_before, token_id]), abs=1e-4)
    single = [llm.generate(PROMPT, params.clone(n=1, seed=3 + i), use_tqdm=False)[0].outputs[0].token_ids for i in range(4)]
    assert [choice.token_ids for choice in output.outputs] == single


def test_stop_strings_and_bad_words(llm: LLM) -> None:
    tokens = greedy_of(llm, PROMPT)
    stop = next(i for i, token_id in enumerate(tokens) if i and token_id > 2)
    (output,) = llm.generate(PROMPT, GREEDY.clone(stop=[f"w{tokens[stop]}"]), use_tqdm=False)
    assert (output.outputs[0].text.split(), output.outputs[0].stop_reason) == (words(tokens[:stop]), f"w{tokens[stop]}")
    (output,) = llm.generate(PROMPT, GREEDY.clone(bad_words=[f"w{tokens[stop]}"]), use_tqdm=False)
    assert output.outputs[0].token_ids[:stop] == tokens[:stop] and tokens[stop] not in output.outputs[0].token_ids
    assert is_idle(llm)


def greedy_of(llm: LLM, prompt: str) -> list[int]:
    return llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "w5 w6"}]
    outputs = llm.chat([conversation, conversation], GREEDY, use_tqdm=False)
    assert outputs[0].prompt_token_ids == [5, 6, 9]
    assert outputs[0].outputs == outputs[1].outputs
    (other,) = llm.chat(conversation, GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }} w7")
    assert other.prompt_token_ids == [5, 6, 7]
    assert llm.chat([], GREEDY, use_tqdm=False) == [] == llm.generate([], GREEDY, use_tqdm=False)


def test_a_chat_template_of_the_callers(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("w3 {{ messages[0].content }}")
    with open_llm(llama, chat_template=str(tmp_path / "t.jinja")) as opened:
        (output,) = opened.chat([{"role": "user", "content": "w5"}], GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == [3, 5]
    with pytest.raises(ConfigError, match="chat-template"):
        open_llm(llama, chat_template="nowhere.jinja")


def test_beam_search_finds_what_the_logits_say(llm: LLM, llama: Path) -> None:
    oracle = Oracle(llama)
    (output,) = llm.beam_search(PROMPT, BeamSearchParams(beam_width=4, max_tokens=3, ignore_eos=True))
    alive = [(PROMPT_IDS, 0.0)]
    for _ in range(3):
        following = []
        for tokens, total in alive:
            logprobs = torch.log_softmax(oracle.logits(tokens)[-1], -1)
            following += [([*tokens, t], total + float(logprobs[t])) for t in logprobs.topk(8).indices.tolist()]
        alive = sorted(following, key=lambda item: -item[1])[:4]
    assert [sequence.tokens for sequence in output.sequences] == [tokens for tokens, _ in alive]
    assert [sequence.cum_logprob for sequence in output.sequences] == pytest.approx([total for _, total in alive], abs=1e-3)
    assert output.sequences[0].text.split() == words(output.sequences[0].tokens[len(PROMPT_IDS) :])
    (wide,) = llm.beam_search(PROMPT, BeamSearchParams(beam_width=VOCAB_SIZE, max_tokens=1, ignore_eos=True))
    assert len(wide.sequences) == VOCAB_SIZE
    assert is_idle(llm)


def test_what_is_refused_runs_nothing(llm: LLM) -> None:
    steps = llm.stats().num_steps
    for prompt, match in [
        ({"prompt_token_ids": [VOCAB_SIZE]}, "got 131"),
        ({"prompt_token_ids": [-1]}, "got -1"),
        ({"prompt_token_ids": [5] * CONTEXT}, "at most 256"),
    ]:
        with pytest.raises(InvalidRequestError, match=match):
            llm.generate([PROMPT, prompt], GREEDY, use_tqdm=False)
    assert llm.stats().num_steps == steps and is_idle(llm)


def test_a_request_that_may_say_nothing_fails_and_leaves_nothing(llm: LLM) -> None:
    banned = SamplingParams(allowed_token_ids=[7], bad_words=["w7"], max_tokens=4)
    with pytest.raises(InvalidRequestError, match="No token may follow"):
        llm.generate([PROMPT] * 3, [GREEDY.clone(max_tokens=100), banned, GREEDY], use_tqdm=False)
    assert is_idle(llm)
    assert len(greedy_of(llm, PROMPT)) == 8


def test_a_progress_bar_that_fails_leaves_nothing(llm: LLM) -> None:
    class Broken:
        postfix = ""

        def __init__(self, **options: Any) -> None:
            self.is_open = True

        def update(self, count: int) -> None:
            raise OSError("no terminal")

        def close(self) -> None:
            self.is_open = False

    with pytest.raises(OSError, match="no terminal"):
        llm.generate([PROMPT] * 3, [GREEDY, GREEDY.clone(max_tokens=50), GREEDY.clone(max_tokens=60)], use_tqdm=Broken)
    assert is_idle(llm)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("place", ["planning", "computing", "waiting"])
def test_an_interrupt_at_any_moment_leaves_an_engine_that_works(
    llama: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, place: str
) -> None:
    with open_llm(llama, async_scheduling=asynchronous) as opened:
        expected = greedy_of(opened, PROMPT)
        calls = iter(range(10**6))
        core = opened._core
        owner, name = {
            "planning": (core._scheduler, "schedule"),
            "computing": (model_runner(core), "_forward"),
            "waiting": (core, "_finish_step"),
        }[place]
        real = getattr(owner, name)

        def interrupted(*args: Any) -> Any:
            result = real(*args)
            if next(calls) == 5:
                os.kill(os.getpid(), signal.SIGINT)
            return result

        monkeypatch.setattr(owner, name, interrupted)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
        try:
            with pytest.raises(KeyboardInterrupt):
                opened.generate([PROMPT] * 4, GREEDY.clone(max_tokens=100), use_tqdm=False)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        finally:
            signal.signal(signal.SIGINT, before)
        assert is_idle(opened)
        assert greedy_of(opened, PROMPT) == expected


def test_a_wait_that_is_cut_off_loses_no_step(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a second Ctrl-C does, or one where signal handlers are not ours."""
    with open_llm(llama) as opened:
        expected = greedy_of(opened, PROMPT)
        core, real, calls = opened._core, opened._core._finish_step, iter(range(10**6))

        def cut(*args: Any) -> Any:
            if next(calls) == 3:
                raise KeyboardInterrupt
            return real(*args)

        monkeypatch.setattr(core, "_finish_step", cut)
        with pytest.raises(KeyboardInterrupt):
            opened.generate([PROMPT] * 4, GREEDY.clone(max_tokens=100), use_tqdm=False)
        assert is_idle(opened)
        assert greedy_of(opened, PROMPT) == expected


def test_two_engines_in_one_process(llama: Path, tmp_path: Path) -> None:
    gemma = add_tokenizer(tiny_checkpoint(tmp_path, "gemma3"))
    alone = greedy(llama), greedy(gemma, num_threads=2)
    with open_llm(llama) as first, open_llm(gemma, num_threads=2) as second:
        assert (greedy_of(first, PROMPT), greedy_of(second, PROMPT)) == alone
        assert (greedy_of(first, PROMPT), greedy_of(second, PROMPT)) == alone
        assert "Llama" in repr(first) and "Gemma3" in repr(second)


def test_after_the_end(llama: Path) -> None:
    with open_llm(llama) as opened:
        greedy_of(opened, PROMPT)
    opened.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        opened.generate(PROMPT, GREEDY, use_tqdm=False)
