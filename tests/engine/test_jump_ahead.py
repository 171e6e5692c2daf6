"""Tokens that a grammar forces come together, and are the same that come one by one."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canter.core.grammar import Matcher, mask_width
from canter.core.messages import AddRequest
from canter.core.sampling_params import SamplingParams
from canter.core.structured_outputs import StructuredOutputsParams
from canter.engine.core import EngineCore
from canter.structured.compiler import GrammarCompiler
from canter.structured.guidance import GuidanceGrammar
from tests.engines import VOCAB_SIZE, LateDevice, Result, engine, mixed_requests, results, tiny_checkpoint
from tests.structured.test_grammars import EOS, ascii_vocabulary, encode
from tests.structured.test_real_outputs import cases

THINK, END = 130, 129
STEP_FOR_EACH = dict(structured_outputs_config={"disable_jump_forward": True})
LITERALS = ("the answer is ", "a", "yes, of course: ", "no", "0123456789abcdefghijklmnopqrstuvwxyz", '{"key":', "}", "--")


def random_regex(rng: random.Random, depth: int = 2) -> str:
    """Texts that are forced, with choices, classes and repeats between them."""
    parts = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(4 if depth else 2)
        if kind == 0:
            parts.append("".join(f"\\{c}" if not c.isalnum() else c for c in rng.choice(LITERALS)))
        elif kind == 1:
            parts.append(rng.choice(["[a-d]", "[0-9]{1,3}", "x?", "(y|yy)"]))
        elif kind == 2:
            parts.append(f"({random_regex(rng, depth - 1)}|{random_regex(rng, depth - 1)})")
        else:
            parts.append(f"({random_regex(rng, depth - 1)}){{1,2}}")
    return "".join(parts)


def constraints() -> list[StructuredOutputsParams]:
    rng = random.Random(11)
    tag = {"begin": "<f>", "content": {"type": "const_string", "value": "forced text"}, "end": "</f>"}
    own = [
        *(StructuredOutputsParams(regex=random_regex(rng)) for _ in range(40)),
        StructuredOutputsParams(regex="w" * 60),
        StructuredOutputsParams(choice=["only this one"]),
        StructuredOutputsParams(choice=["common beginning a", "common beginning b", "common beginning"]),
        StructuredOutputsParams(grammar='root ::= "begin " ("a" | "b") " middle " item{2} " end"\nitem ::= "<" [0-9] ">"'),
        StructuredOutputsParams(
            structural_tag={"format": {"type": "triggered_tags", "triggers": ["<f>"], "tags": [tag], "at_least_one": True}}
        ),
        StructuredOutputsParams(regex="ab forced c", thought_start_ids=[THINK], thought_end_ids=[END]),
    ]
    shared = [params for params, _ in cases() if str([params.json, params.regex, params.choice, params.grammar]).isascii()]
    compact = [StructuredOutputsParams(json=params.json, disable_any_whitespace=True) for params in shared if params.json]
    return [*own, *shared, *compact]


OTHERS: list[dict[str, Any]] = [
    dict(),
    dict(temperature=0.0),
    dict(logprobs=2),
    dict(repetition_penalty=1.4, presence_penalty=0.5),
    dict(min_tokens=15),
    dict(stop_token_ids=encode("e")),
    dict(bad_words_token_ids=[encode("er"), encode("1")]),
    dict(logit_bias=dict.fromkeys(encode("abcxy01"), 3.0)),
    dict(top_k=5, top_p=0.9),
    dict(ignore_eos=True, max_tokens=30),
]


def requests() -> list[AddRequest]:
    rng = random.Random(3)
    found = []
    for i, wanted in enumerate(constraints()):
        prompt = [7, 8, 9] if i % 3 else [rng.randrange(3, 128) for _ in range(20)]
        params = {**dict(temperature=1.0, seed=i, max_tokens=60, eos_token_ids=[EOS]), **OTHERS[i % len(OTHERS)]}
        if wanted.thought_end_ids:
            prompt, params["logit_bias"] = [7, THINK], {END: 6.0}
        found.append(AddRequest(f"{i}", prompt, SamplingParams(**params, structured_outputs=wanted)))
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "gemma3", seed=4)


@pytest.fixture(autouse=True)
def vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("canter.engine.grammars.load_vocabulary", lambda args, size: ascii_vocabulary(size))


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Result]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("canter.engine.grammars.load_vocabulary", lambda args, size: ascii_vocabulary(size))
        core = engine(model, async_scheduling=False, **STEP_FOR_EACH)
        found = results(core, requests())
        assert core.stats().num_accepted_drafts == 0
        core.shutdown()
    assert sum(len(result.token_ids) for result in found.values()) > 2000
    assert sum(result.error is not None for result in found.values()) < 10
    return found


def assert_same(found: dict[str, Result], expected: dict[str, Result]) -> None:
    for name, result in found.items():
        want = expected[name]
        assert result.error == want.error, name
        if want.error is not None:  # bad words and a grammar that leave nothing: what the failed step brought is lost either way
            continue
        assert result.token_ids == want.token_ids, name
        assert (result.finish_reason, result.stop_reason) == (want.finish_reason, want.stop_reason), name
        assert [(e.token_ids, e.rank) for e in result.logprobs] == [(e.token_ids, e.rank) for e in want.logprobs], name
        assert [e.logprobs for e in result.logprobs] == [pytest.approx(e.logprobs, abs=1e-5) for e in want.logprobs], name


def check_idle(core: EngineCore) -> None:
    stats = core.stats()
    assert stats.num_accepted_drafts > 200 and stats.num_free_blocks == stats.num_blocks
    core.shutdown()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_same_tokens_in_company(model: Path, expected: dict[str, Result], asynchronous: bool) -> None:
    core = engine(model, async_scheduling=asynchronous, max_num_batched_tokens=160)
    others = mixed_requests(10, longest=40)
    found = results(core, [*requests(), *others])
    assert_same({name: found[name] for name in expected}, expected)
    alone = results(core, others)
    assert {r.request_id: found[r.request_id].token_ids for r in others} == {name: r.token_ids for name, r in alone.items()}
    check_idle(core)


def test_the_same_tokens_after_preemptions_on_a_late_device(model: Path, expected: dict[str, Result]) -> None:
    core = engine(model, num_gpu_blocks_override=90, max_model_len=100, block_size=4, device=LateDevice(), max_num_batched_tokens=24)
    assert_same(results(core, requests()), expected)
    assert core.stats().num_preemptions > 0
    check_idle(core)


def test_the_same_tokens_after_a_restart(model: Path, expected: dict[str, Result]) -> None:
    core = engine(model)
    again = requests()
    for i, request in enumerate(again):
        # The last token of an output ends it, and none follows; at least one must have come.
        length = len(expected[request.request_id].token_ids)
        request.output_token_ids = expected[request.request_id].token_ids[: min(length - 1, i % 12)]
    found = results(core, again)
    for request in again:
        assert (request.output_token_ids or []) + found[request.request_id].token_ids == expected[request.request_id].token_ids
    check_idle(core)


@pytest.mark.parametrize(("asynchronous", "num_steps"), [(True, 6), (False, 4)])
def test_steps_are_saved(model: Path, asynchronous: bool, num_steps: int) -> None:
    params = SamplingParams(max_tokens=40, eos_token_ids=[EOS], structured_outputs=StructuredOutputsParams(regex="[ab]forced text[ab]"))
    request = AddRequest("a", [7, 8, 9], params)
    core = engine(model, async_scheduling=asynchronous)
    (result,) = results(core, [request]).values()
    assert len(result.token_ids) == 14 and result.finish_reason == "stop"
    # The prompt brings [ab]; with a step ahead in flight, that one brings the first forced token; the next all others and [ab]; then the
    # end, while the step ahead of it is in vain; and a plan that drops the row.
    assert (core.stats().num_steps, core.stats().num_accepted_drafts) == (num_steps, 10 if asynchronous else 11)
    core.shutdown()


def test_what_another_parameter_forbids_is_not_forced(model: Path) -> None:
    """The grammar leaves one token, another parameter none: the same error with and without."""
    wanted = StructuredOutputsParams(regex="[ab]xyz")
    a, x, y = encode("axy")
    errors = []
    for changes in (STEP_FOR_EACH, {}):
        core = engine(model, **changes)
        params = SamplingParams(max_tokens=9, eos_token_ids=[EOS], structured_outputs=wanted, allowed_token_ids=[a, x, EOS])
        (result,) = results(core, [AddRequest("a", [7], params)]).values()
        errors.append(result.error)
        assert y not in result.token_ids
        core.shutdown()
    assert errors[0] is not None and errors[0] == errors[1]


def test_forced_tokens_are_those_whose_masks_hold_no_other() -> None:
    """What `Matcher.forced` promises, over everything that the outputs above may run into."""
    rng = random.Random(5)
    compiler = GrammarCompiler(lambda: ascii_vocabulary(VOCAB_SIZE))
    mask = np.zeros(mask_width(VOCAB_SIZE), np.int32)
    num_forced = 0
    for wanted in constraints():
        matcher = compiler.get(wanted).matcher()
        for _ in range(40):
            forced = matcher.forced()
            for token in forced:
                matcher.fill(mask)
                assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [token]
                assert not matcher.may_end and matcher.accept([token]) == 1
            num_forced += len(forced)
            matcher.fill(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            allowed = [token for token in allowed if token != EOS]
            if not allowed or (matcher.may_end and rng.random() < 0.3):
                break
            assert matcher.accept([rng.choice(allowed)]) == 1
    compiler.shutdown()
    assert num_forced > 1000


class CountedMatcher:
    """A matcher that counts what it is asked for."""

    def __init__(self, inner: Matcher, counts: Counter[str]) -> None:
        self._inner, self._counts = inner, counts

    def __getattr__(self, name: str) -> Any:
        self._counts[name] += 1
        return getattr(self._inner, name)


def test_a_long_forced_text_is_looked_at_once(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """llguidance goes through all of it for each mask and each question."""
    counts: Counter[str] = Counter()
    matcher = GuidanceGrammar.matcher
    monkeypatch.setattr(GuidanceGrammar, "matcher", lambda grammar: CountedMatcher(matcher(grammar), counts))
    core = engine(model)
    wanted = StructuredOutputsParams(regex="a" * 120)
    (result,) = results(
        core, [AddRequest("a", [7], SamplingParams(max_tokens=150, eos_token_ids=[EOS], structured_outputs=wanted))]
    ).values()
    assert result.token_ids == [*encode("a" * 120), EOS]
    # By the masks and by what looks ahead: for the text, and behind it.
    assert counts["forced"] <= 4 and counts["fill"] == 1
    core.shutdown()
