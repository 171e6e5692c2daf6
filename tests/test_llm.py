"""`LLM` on an engine core that knows a table of next tokens instead of a model."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

import canter.llm
from canter.beam_search import BeamSearch, BeamSearchParams, BeamSearchSequence, score
from canter.core.config import EngineArgs
from canter.core.errors import ConfigError, EngineError, InvalidRequestError, QueueFullError
from canter.core.messages import AddRequest, EngineInfo, EngineStats, RequestDelta, RequestTimes
from canter.core.plan import TokenLogprobs
from canter.core.sampling_params import OutputKind, SamplingParams
from canter.llm import LLM
from canter.text import model_text
from canter.text.hf_tokenizer import build_hf_tokenizer
from canter.text.tokenizer import Tokenizer

VOCAB = 32
EOS = 1
MAX_MODEL_LEN = 24
Predict = Callable[[list[int]], list[float]]


def log_softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    total = top + math.log(sum(math.exp(value - top) for value in logits))
    return [value - total for value in logits]


def table_model(seed: int = 0, vocab: int = VOCAB) -> Predict:
    """Log-probabilities that depend on the last two tokens only, and are the same every time."""

    def predict(tokens: list[int]) -> list[float]:
        rng = random.Random(f"{seed} {tokens[-2:]}")
        return log_softmax([rng.gauss(0, 2) for _ in range(vocab)])

    return predict


TABLE = table_model()


class FakeCore:
    """An engine core of one token a step and request. With `fail_after` every request fails after as many tokens."""

    def __init__(self, args: EngineArgs, predict: Predict = TABLE, vocab: int = VOCAB, queue: int = 10**9) -> None:
        self.args = args
        self.predict = predict
        self.queue = queue
        self.info = EngineInfo("tiny", "Tiny", vocab, MAX_MODEL_LEN, "float32", "cpu", 4, 100, 400, 8, 64, True)
        self.live: dict[str, tuple[AddRequest, list[int]]] = {}
        self.seen: list[AddRequest] = []
        self.aborted: list[str] = []
        self.fail_after: int | None = None
        self.most_live = 0
        self.is_shut_down = False

    def add_request(self, request: AddRequest) -> None:
        if len(self.live) >= self.queue:
            raise QueueFullError("The queue is full.")
        self.seen.append(request)
        self.live[request.request_id] = (request, [])
        self.most_live = max(self.most_live, len(self.live))

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.aborted.append(request_id)
            self.live.pop(request_id, None)

    def step(self) -> list[RequestDelta]:
        # The last added goes first, so that results are not in order by luck.
        return [self._advance(*self.live[request_id]) for request_id in reversed(list(self.live))]

    def _advance(self, request: AddRequest, output: list[int]) -> RequestDelta:
        sampling = request.sampling
        if self.fail_after is not None and len(output) >= self.fail_after:
            self.live.pop(request.request_id)
            return RequestDelta(request.request_id, [], "error", error="broken step")
        logprobs = self.predict(request.prompt_token_ids + output)
        ranked = sorted(range(len(logprobs)), key=lambda i: -logprobs[i])
        token = ranked[0 if sampling.temperature == 0 else ((sampling.seed or 0) + len(output)) % len(ranked)]
        output.append(token)
        reason: str | None = None
        if token in sampling.all_stop_token_ids:
            reason = "stop"
        elif len(output) == sampling.max_tokens or len(request.prompt_token_ids) + len(output) == MAX_MODEL_LEN:
            reason = "length"
        if reason is not None:
            self.live.pop(request.request_id)
        told = None
        if sampling.logprobs is not None:
            ids = [token, *ranked[: sampling.logprobs]]
            told = [TokenLogprobs(ids, [logprobs[i] for i in ids], ranked.index(token) + 1)]
        return RequestDelta(request.request_id, [token], reason, logprobs=told, times=RequestTimes(1.0, 2.0, 3.0, 4.0))

    def has_unfinished(self) -> bool:
        return bool(self.live)

    def stats(self) -> EngineStats:
        return EngineStats(num_waiting=len(self.live), prefix_hits=3, num_steps=5)

    def utility(self, method: str, args: list[Any]) -> Any:
        return (method, args) == ("reset_prefix_cache", [])

    def shutdown(self) -> None:
        self.is_shut_down = True


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Words w0, w1, ... as tokens 2, 3, ...; joined by spaces."""
    root: Path = tmp_path_factory.mktemp("tokenizer")
    vocab = {"<unk>": 0, "</s>": EOS} | {f"w{i}": i + 2 for i in range(VOCAB - 2)}
    backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(root / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"
    config = {"eos_token": "</s>", "chat_template": template}
    (root / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(build_hf_tokenizer(root))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> Callable[..., LLM]:
    """Builds an `LLM` on a `FakeCore`; `core` options go to the latter."""

    def build(core: dict[str, Any] | None = None, generation: dict[str, Any] | None = None, **engine_args: Any) -> LLM:
        monkeypatch.setattr(model_text, "resolve", lambda model, revision: SimpleNamespace(name=model))
        monkeypatch.setattr(model_text, "load_tokenizer", lambda files: tokenizer)
        config = SimpleNamespace(generation=generation or {"eos_token_id": EOS})
        monkeypatch.setattr(model_text, "read_model_config", lambda files, overrides: config)
        monkeypatch.setattr(canter.llm, "build_engine", lambda args: FakeCore(args, **(core or {})))
        return LLM("tiny", **engine_args)

    return build


GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def core_of(llm: LLM) -> FakeCore:
    core = llm._core
    assert isinstance(core, FakeCore)
    return core


def greedy_tokens(prompt: list[int], count: int, predict: Predict = TABLE) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        logprobs = predict(tokens)
        tokens.append(max(range(len(logprobs)), key=lambda i: logprobs[i]))
    return tokens[len(prompt) :]


def test_every_form_of_prompt_and_results_in_order(make: Callable[..., LLM]) -> None:
    llm = make()
    prompts = ["w1 w2", {"prompt": "w3"}, {"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [7], "prompt": "text", "cache_salt": "s"}]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[3, 4], [5], [5, 6], [7]]
    assert [output.prompt for output in outputs] == ["w1 w2", "w3", None, "text"]
    for output in outputs:
        assert output.finished and output.outputs[0].finish_reason == "length"
        assert output.outputs[0].token_ids == greedy_tokens(output.prompt_token_ids, 4)
    assert [request.cache_salt for request in core_of(llm).seen] == [None, None, None, "s"]
    assert all(request.sampling.output_kind is OutputKind.FINAL_ONLY for request in core_of(llm).seen)


def test_one_prompt_alone_gives_a_list_of_one(make: Callable[..., LLM]) -> None:
    outputs = make().generate("w1", GREEDY, use_tqdm=False)
    assert len(outputs) == 1 and outputs[0].outputs[0].text.split() == [f"w{t - 2}" for t in outputs[0].outputs[0].token_ids]


def test_parameters_for_each_prompt(make: Callable[..., LLM]) -> None:
    llm = make()
    outputs = llm.generate(["w1", "w2"], [GREEDY, GREEDY.clone(max_tokens=2)], use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 2]
    with pytest.raises(InvalidRequestError, match="2 prompts and 1 sampling_params"):
        llm.generate(["w1", "w2"], [GREEDY], use_tqdm=False)


def test_default_parameters_come_from_the_generation_config(make: Callable[..., LLM]) -> None:
    llm = make(generation={"eos_token_id": EOS, "temperature": 0.5, "top_k": 7})
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_k) == (0.5, 7)
    llm.generate("w1", use_tqdm=False)
    assert core_of(llm).seen[0].sampling.top_k == 7
    assert make(generation={"temperature": 0.5}, generation_config="vllm").get_default_sampling_params().temperature == 1.0


def test_eos_ends_an_output_and_is_filled_in(make: Callable[..., LLM]) -> None:
    def straight_to_the_end(tokens: list[int]) -> list[float]:
        return log_softmax([5.0 if i == EOS else 0.0 for i in range(VOCAB)])

    llm = make(core={"predict": straight_to_the_end})
    output = llm.generate("w1", SamplingParams(temperature=0.0), use_tqdm=False)[0].outputs[0]
    assert (output.finish_reason, output.token_ids, output.text) == ("stop", [EOS], "")


def test_no_max_tokens_means_the_rest_of_the_context(make: Callable[..., LLM]) -> None:
    output = make().generate("w1 w2", GREEDY.clone(max_tokens=None), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == MAX_MODEL_LEN - 2


def test_several_answers_to_a_prompt(make: Callable[..., LLM]) -> None:
    llm = make()
    output = llm.generate("w1", SamplingParams(n=3, seed=10, temperature=1.0, max_tokens=2, ignore_eos=True), use_tqdm=False)[0]
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert [request.sampling.seed for request in core_of(llm).seen] == [10, 11, 12]
    assert len({tuple(choice.token_ids) for choice in output.outputs}) == 3


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 2], "Prompt 1 must be a string"),
        ({"text": "x"}, "unknown key 'text'"),
        ({"cache_salt": "x"}, "neither 'prompt' nor 'prompt_token_ids'"),
        ({"prompt": 5}, "'prompt' of prompt 1 must be a string, got 5"),
        ({"prompt_token_ids": "12"}, "must be a list of integers"),
        ({"prompt_token_ids": []}, "Prompt 1 is empty"),
        ("", "Prompt 1 is empty"),
        ({"prompt_token_ids": [VOCAB]}, rf"in \[0, {VOCAB}\), got {VOCAB}"),
        ({"prompt_token_ids": [3] * 30}, "Prompt 1 has 30 tokens; the model takes at most 24"),
    ],
)
def test_a_bad_prompt_fails_before_anything_runs(make: Callable[..., LLM], prompt: Any, message: str) -> None:
    llm = make()
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(["w1", prompt], GREEDY, use_tqdm=False)
    assert core_of(llm).seen == []


def test_bad_parameters_fail_before_anything_runs(make: Callable[..., LLM]) -> None:
    llm = make()
    with pytest.raises(InvalidRequestError, match="logprobs must be at most 20"):
        llm.generate(["w1", "w2"], [GREEDY, GREEDY.clone(logprobs=21)], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=r"stop_token_ids must hold token ids in \[0, 32\)"):
        llm.generate("w1", GREEDY.clone(stop_token_ids=[99]), use_tqdm=False)
    assert core_of(llm).seen == []


def test_truncation_keeps_the_end(make: Callable[..., LLM]) -> None:
    llm = make()
    output = llm.generate({"prompt_token_ids": list(range(2, 32))}, GREEDY.clone(truncate_prompt_tokens=3), use_tqdm=False)[0]
    assert output.prompt_token_ids == [29, 30, 31]
    output = llm.generate({"prompt_token_ids": list(range(2, 32))}, GREEDY.clone(truncate_prompt_tokens=-1), use_tqdm=False)[0]
    assert len(output.prompt_token_ids) == MAX_MODEL_LEN - 1


def test_priorities(make: Callable[..., LLM]) -> None:
    llm = make(scheduling_policy="priority")
    llm.generate(["w1", "w2"], GREEDY, use_tqdm=False, priority=[3, -1])
    assert [request.priority for request in core_of(llm).seen] == [3, -1]
    with pytest.raises(InvalidRequestError, match="2 prompts and 1 priorities"):
        llm.generate(["w1", "w2"], GREEDY, use_tqdm=False, priority=[1])
    with pytest.raises(InvalidRequestError, match='scheduling_policy="priority"'):
        make().generate("w1", GREEDY, use_tqdm=False, priority=[1])


def test_more_prompts_than_the_queue_holds(make: Callable[..., LLM]) -> None:
    llm = make(core={"queue": 3}, max_num_queued_reqs=3)
    outputs = llm.generate([f"w{i}" for i in range(10)], GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == [f"w{i}" for i in range(10)]
    assert core_of(llm).most_live <= 3
    with pytest.raises(QueueFullError):
        llm.generate("w1", SamplingParams(n=4), use_tqdm=False)
    assert core_of(llm).live == {}


def test_an_engine_error_is_raised_and_nothing_stays_behind(make: Callable[..., LLM]) -> None:
    llm = make()
    core_of(llm).fail_after = 2
    with pytest.raises(EngineError, match="broken step"):
        llm.generate(["w1", "w2", "w3"], GREEDY, use_tqdm=False)
    assert core_of(llm).live == {}
    core_of(llm).fail_after = None
    assert len(llm.generate(["w1", "w2"], GREEDY, use_tqdm=False)) == 2


def test_an_interrupt_drops_the_requests(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    core = core_of(llm)
    real = core.step

    def interrupted() -> list[RequestDelta]:
        if any(output for _, output in core.live.values()):
            raise KeyboardInterrupt
        return real()

    monkeypatch.setattr(core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["w1", "w2"], GREEDY, use_tqdm=False)
    assert core.live == {}


class Bar:
    """Stands in for tqdm."""

    made: list[Bar]

    def __init__(self, **options: Any) -> None:
        self.options, self.count, self.postfix, self.closed = options, 0, "", False
        Bar.made.append(self)

    def update(self, count: int) -> None:
        self.count += count

    def close(self) -> None:
        self.closed = True


def test_the_bar_counts_sequences_and_tells_the_speed(make: Callable[..., LLM]) -> None:
    Bar.made = []
    make().generate(["w1", "w2"], SamplingParams(n=3, max_tokens=2), use_tqdm=Bar)
    (bar,) = Bar.made
    assert (bar.options["total"], bar.options["desc"], bar.count, bar.closed) == (6, "Processed prompts", 6, True)
    assert bar.postfix.startswith("est. speed input: ") and "output: " in bar.postfix


def test_the_bar_can_be_shown_and_hidden(make: Callable[..., LLM], capsys: pytest.CaptureFixture[str]) -> None:
    llm = make()
    llm.generate("w1", GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate("w1", GREEDY)
    assert "Processed prompts: 100%" in capsys.readouterr().err


def test_chat_renders_the_template(make: Callable[..., LLM]) -> None:
    llm = make()
    one = [{"role": "w1", "content": "w2"}]
    (output,) = llm.chat(one, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == [3, 4, 11]
    outputs = llm.chat([one, [{"role": "w5", "content": "w6"}]], GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert [o.prompt_token_ids for o in outputs] == [[3, 4], [7, 8]]
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        llm.chat(one, GREEDY, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="messages must be a list"):
        llm.chat(["hello"], GREEDY)  # type: ignore[list-item]


def test_keywords(make: Callable[..., LLM]) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean max_num_seqs\?"):
        make(max_num_seq=3)
    with pytest.raises(ConfigError, match="Canter has no tensor_parallel_size, which is vLLM's: Canter runs a model on one device"):
        make(tensor_parallel_size=2)
    llm = make(max_num_seqs=3)
    assert llm.args.max_num_seqs == 3 and llm.args.disable_log_stats is True


def test_metrics_cache_and_shutdown(make: Callable[..., LLM], tokenizer: Tokenizer) -> None:
    with make() as llm:
        assert llm.get_tokenizer() is tokenizer
        assert llm.reset_prefix_cache() is True
        values = {metric.name: metric.value for metric in llm.get_metrics()}
        assert values["vllm:prefix_cache_hits"] == 3
        assert "Tiny" in repr(llm)
    assert core_of(llm).is_shut_down


# Beam search


def brute_force(predict: Predict, prompt: list[int], params: BeamSearchParams, eos: frozenset[int]) -> list[BeamSearchSequence]:
    """The definition, written as plainly as it goes: lists of (tokens, total), one step after the other."""
    eos = frozenset() if params.ignore_eos else eos

    def rank(found: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(found, key=lambda s: -score(s, eos, params.length_penalty))[: params.beam_width]

    alive, ended = [(prompt, 0.0)], []
    for _ in range(params.max_tokens):
        following = []
        for tokens, total in alive:
            logprobs = predict(tokens)
            for token in sorted(range(len(logprobs)), key=lambda i: -logprobs[i])[: 2 * params.beam_width]:
                if token in eos:
                    ended.append(BeamSearchSequence(tokens, total + logprobs[token]))
                else:
                    following.append(BeamSearchSequence([*tokens, token], total + logprobs[token]))
        alive = [(s.tokens, s.cum_logprob) for s in rank(following)]
    return rank(ended + [BeamSearchSequence(tokens, total) for tokens, total in alive])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 4),
    steps=st.integers(1, 5),
    penalty=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    ignore_eos=st.booleans(),
)
def test_beam_search_equals_the_definition(seed: int, width: int, steps: int, penalty: float, ignore_eos: bool) -> None:
    predict, eos, prompt = table_model(seed, 8), frozenset({EOS, 2}), [3, 4]
    params = BeamSearchParams(beam_width=width, max_tokens=steps, length_penalty=penalty, ignore_eos=ignore_eos)
    search = BeamSearch(prompt, params, eos)
    for _ in range(steps):
        options = []
        for beam in search.beams:
            logprobs = predict(beam.tokens)
            best = sorted(range(8), key=lambda i: -logprobs[i])[: 2 * width]
            options.append({token: logprobs[token] for token in best})
        search.advance(options)
    expected = brute_force(predict, prompt, params, eos)
    assert [(s.tokens, s.cum_logprob) for s in search.result()] == [(s.tokens, s.cum_logprob) for s in expected]


def test_a_wide_beam_finds_the_likeliest_sequence_there_is(make: Callable[..., LLM]) -> None:
    predict = table_model(3, 6)
    llm = make(core={"predict": predict, "vocab": 6})
    (output,) = llm.beam_search({"prompt_token_ids": [2]}, BeamSearchParams(beam_width=36, max_tokens=3, ignore_eos=True))

    def total(tokens: tuple[int, ...]) -> float:
        return sum(predict([2, *tokens[:i]])[token] for i, token in enumerate(tokens))

    best = max(itertools.product(range(6), repeat=3), key=total)
    assert output.sequences[0].tokens == [2, *best]
    assert output.sequences[0].cum_logprob == pytest.approx(total(best))


def test_beam_search_through_the_engine(make: Callable[..., LLM]) -> None:
    predict = table_model(11)
    llm = make(core={"predict": predict})
    params = BeamSearchParams(beam_width=3, max_tokens=5)
    prompts = [{"prompt_token_ids": [4, 5]}, "w7", {"prompt_token_ids": [9]}]
    outputs = llm.beam_search(prompts, params, concurrency_limit=2)
    for output, prompt in zip(outputs, [[4, 5], [9], [9]], strict=True):
        expected = brute_force(predict, prompt, params, frozenset({EOS}))
        assert [s.tokens for s in output.sequences] == [s.tokens for s in expected]
        assert all(s.finish_reason in ("stop", "length") for s in output.sequences)
    asked = core_of(llm).seen
    assert all(request.sampling.max_tokens == 1 and request.sampling.logprobs == 6 for request in asked)
    assert len(asked) <= 3 * (1 + 4 * 3)


def test_beam_search_ends_at_the_context(make: Callable[..., LLM]) -> None:
    llm = make()
    (output,) = llm.beam_search({"prompt_token_ids": [3] * 20}, BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True))
    assert all(len(s.tokens) == MAX_MODEL_LEN for s in output.sequences)


def test_eos_can_be_kept_in_the_tokens() -> None:
    def found(include: bool) -> BeamSearchSequence:
        params = BeamSearchParams(beam_width=1, max_tokens=1, include_stop_str_in_output=include)
        search = BeamSearch([5], params, frozenset({EOS}))
        search.advance([{EOS: -0.1, 7: -3.0}])
        return search.result()[0]

    assert found(False).tokens == [5] and found(True).tokens == [5, EOS]
    assert (found(True).finish_reason, found(True).stop_reason) == ("stop", EOS)


@pytest.mark.parametrize("options", [{"beam_width": 0, "max_tokens": 1}, {"beam_width": 1, "max_tokens": 0}])
def test_beam_search_parameters_are_checked(options: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError, match="must be an integer of at least 1"):
        BeamSearchParams(**options)


def test_beam_search_equals_transformers_num_beams(make: Callable[..., LLM]) -> None:
    """Without EOS both definitions agree: every candidate has the same length."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # far from uniform, so that beams differ by more than rounding

    def predict(tokens: list[int]) -> list[float]:
        with torch.no_grad():
            return list(torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1], -1).tolist())

    prompt = [3, 7, 11]
    expected = model.generate(
        torch.tensor([prompt]), num_beams=4, num_return_sequences=4, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    llm = make(core={"predict": predict})
    (output,) = llm.beam_search({"prompt_token_ids": prompt}, BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True))
    assert [s.tokens for s in output.sequences] == expected.tolist()
