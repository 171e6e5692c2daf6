"""Grammars through scheduler, runner and sampler: the same tokens whatever the company, and never one that the grammar forbids."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import canter.engine.build
from canter.core.errors import InvalidRequestError
from canter.core.grammar import mask_width
from canter.core.messages import AddRequest
from canter.core.sampling_params import SamplingParams
from canter.core.structured_outputs import StructuredOutputsParams
from canter.runner.sampling.bound_output import BoundOutput, BoundOutputs
from canter.scheduler.scheduler import Scheduler
from canter.structured.compiler import GrammarCompiler
from tests.engine.test_drafts import NUM_DRAFTS, DraftingRunner
from tests.engines import VOCAB_SIZE, LateDevice, Result, engine, mixed_requests, results, tiny_checkpoint
from tests.structured.test_grammars import EOS, ascii_vocabulary, encode

PATTERNS = ("(ab|cd){3,8}", "[a-f]{10,20}", "x[0-9]+y", '\\{"k":(true|false)\\}', "foo|bar", "(a|aa|aaa){1,9}b")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", seed=2)


@pytest.fixture(autouse=True)
def vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("canter.engine.grammars.load_vocabulary", lambda args, size: ascii_vocabulary(size))


def request(name: str, pattern: str, prompt: list[int] | None = None, **changes: Any) -> AddRequest:
    wanted = changes.pop("wanted", {})
    params = dict(
        temperature=1.0, seed=5, max_tokens=40, eos_token_ids=[EOS], structured_outputs=StructuredOutputsParams(regex=pattern, **wanted)
    )
    return AddRequest(name, prompt or [7, 8, 9], SamplingParams(**{**params, **changes}))


def requests() -> list[AddRequest]:
    return [request(f"{i}-{seed}", pattern, seed=seed) for i, pattern in enumerate(PATTERNS) for seed in range(4)]


def text(token_ids: list[int]) -> str:
    return "".join(chr(i - 3) for i in token_ids if i >= 3)


def check(found: dict[str, Result]) -> None:
    for name, result in found.items():
        pattern = PATTERNS[int(name.split("-")[0])]
        assert result.error is None
        if result.finish_reason == "stop":
            assert result.token_ids[-1] == EOS and re.fullmatch(pattern, text(result.token_ids)), text(result.token_ids)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Result]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("canter.engine.grammars.load_vocabulary", lambda args, size: ascii_vocabulary(size))
        core = engine(model, async_scheduling=False)
        found = {r.request_id: results(core, [r])[r.request_id] for r in requests()}
        core.shutdown()
    return found


def same(found: dict[str, Result], expected: dict[str, Result]) -> None:
    assert {name: result.token_ids for name, result in found.items()} == {name: expected[name].token_ids for name in found}


def test_every_output_matches(expected: dict[str, Result]) -> None:
    check(expected)
    assert sum(result.finish_reason == "stop" for result in expected.values()) > len(expected) // 2


@pytest.mark.parametrize("asynchronous", [True, False])
def test_company_changes_nothing(model: Path, expected: dict[str, Result], asynchronous: bool) -> None:
    core = engine(model, async_scheduling=asynchronous)
    others = mixed_requests(12, longest=40)
    found = results(core, [*requests(), *others])
    same({r.request_id: found[r.request_id] for r in requests()}, expected)
    alone = results(core, others)
    assert {r.request_id: found[r.request_id].token_ids for r in others} == {name: r.token_ids for name, r in alone.items()}
    core.shutdown()


def test_preemption_and_a_late_device(model: Path, expected: dict[str, Result]) -> None:
    core = engine(model, num_gpu_blocks_override=34, max_model_len=130, block_size=4, device=LateDevice())
    same(results(core, requests()), expected)
    assert core.stats().num_preemptions > 0
    core.shutdown()


@pytest.mark.parametrize("accuracy", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_drafts(monkeypatch: pytest.MonkeyPatch, model: Path, expected: dict[str, Result], accuracy: float, asynchronous: bool) -> None:
    runner = type("Runner", (DraftingRunner,), dict(accuracy=accuracy, brings_drafts=not asynchronous, expected=expected))
    monkeypatch.setattr(canter.engine.build, "ModelRunner", functools.partial(runner, num_draft_tokens=NUM_DRAFTS))
    monkeypatch.setattr(canter.engine.build, "Scheduler", functools.partial(Scheduler, num_draft_tokens=NUM_DRAFTS))
    core = engine(model, async_scheduling=asynchronous)
    same(results(core, requests()), expected)
    core.shutdown()


def test_resume_behind_what_was_told(model: Path, expected: dict[str, Result]) -> None:
    core = engine(model)
    again = requests()
    for r in again:
        r.output_token_ids = expected[r.request_id].token_ids[:2]
    found = results(core, again)
    for r in again:
        assert (r.output_token_ids or []) + found[r.request_id].token_ids == expected[r.request_id].token_ids
    core.shutdown()


THINK, END = 130, 129
"""Tokens that open and close a thought."""


@pytest.mark.parametrize(
    ("prompt", "wanted", "is_free"),
    [
        ([7, THINK], dict(thought_start_ids=[THINK], thought_end_ids=[END]), True),
        ([7, THINK, 8, END, 9], dict(thought_start_ids=[THINK], thought_end_ids=[END]), False),
        ([7], dict(thought_end_ids=[END]), True),
        ([7, THINK], dict(), False),
        ([7], dict(thought_start_ids=[THINK], thought_end_ids=[END], in_thought=True), True),
    ],
)
def test_a_thought_is_free_and_the_answer_bound(model: Path, prompt: list[int], wanted: dict[str, Any], is_free: bool) -> None:
    core = engine(model)
    found = results(core, [request(str(i), "[ab]{4}", prompt, seed=i, wanted=wanted, logit_bias={END: 6.0}) for i in range(8)])
    thoughts = 0
    for result in found.values():
        tokens = result.token_ids
        if is_free:
            assert END in tokens
            thoughts += tokens.index(END)
            tokens = tokens[tokens.index(END) + 1 :]
        assert re.fullmatch("[ab]{4}", text(tokens)) and tokens[-1] == EOS
    assert not is_free or thoughts
    core.shutdown()


def test_an_output_may_begin_with_a_thought(model: Path) -> None:
    core = engine(model)
    wanted = dict(thought_start_ids=[THINK], thought_end_ids=[END])
    both = [
        request("no", "[ab]{4}", wanted=wanted, logit_bias={THINK: -100.0}),
        request("yes", "[ab]{4}", wanted=wanted, logit_bias={THINK: 50.0, END: 80.0}),
    ]
    found = results(core, both)
    assert re.fullmatch("[ab]{4}", text(found["no"].token_ids))
    tokens = found["yes"].token_ids
    assert tokens[0] == THINK and re.fullmatch("[ab]{4}", text(tokens[tokens.index(END) + 1 :]))
    core.shutdown()


A, B = encode("ab")


def open_output(prompt: list[int]) -> BoundOutput:
    """One of `a[ab]{2}`, with two kinds of thoughts: the first one's marker begins like an output of the grammar."""
    outputs = BoundOutputs(GrammarCompiler(lambda: ascii_vocabulary(VOCAB_SIZE)), VOCAB_SIZE)
    markers = dict(thought_start_ids=[A, THINK], thought_end_ids=[END, A], other_thoughts=[([THINK], [END, B])])
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a[ab]{2}", **markers), eos_token_ids=[EOS])
    return outputs.add("x", params, prompt, len(prompt))


def may_follow(output: BoundOutput) -> set[int]:
    mask = np.zeros(mask_width(VOCAB_SIZE), np.int32)
    if not output.fill_within_marker(mask):
        output.matcher.fill(mask)
        output.finish_mask(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_a_thought_may_begin_with_several_tokens_and_in_several_ways() -> None:
    output = open_output([7])
    assert may_follow(output) == {A, THINK}
    output.take([A])
    assert may_follow(output) == {A, B, THINK}
    output.take([B, B])
    assert may_follow(output) == {EOS}
    for start, end, other in (([A, THINK], [END, A], [END, B]), ([THINK], [END, B], [END, A])):
        output = open_output([7])
        output.take([*start, 9, *other])
        assert not output.is_bound
        output.take(end)
        assert output.is_bound and may_follow(output) == {A}


def test_a_prompt_opens_or_closes_a_thought_of_any_kind() -> None:
    output = open_output([7, THINK, 9])
    assert not output.is_bound
    output.take([END, A])
    assert not output.is_bound
    output.take([END, B])
    assert may_follow(output) == {A}
    assert may_follow(open_output([7, THINK, END, B])) == {A}


def test_min_tokens_and_stop_tokens(model: Path) -> None:
    core = engine(model)
    found = results(
        core,
        [
            request("long", "[ab]{1,30}", min_tokens=12),
            request("short", "ab", min_tokens=12),
            request("other", "[ab]{2,30}", stop_token_ids=[0], logit_bias={0: 50.0}),
        ],
    )
    assert len(found["long"].token_ids) > 12 and found["long"].finish_reason == "stop"
    assert (text(found["short"].token_ids), found["short"].finish_reason) == ("ab", "stop")
    assert (len(found["other"].token_ids), found["other"].stop_reason) == (3, 0)
    core.shutdown()


def test_other_constraints_hold_beside_it(model: Path) -> None:
    core = engine(model)
    a, b = encode("ab")
    found = results(
        core,
        [
            request("allowed", "[ab]{4}", allowed_token_ids=[a, EOS]),
            request("words", "[ab]{4}", bad_words_token_ids=[[b]]),
            request("bias", "[ab]{4}", logit_bias={b: 90.0}, logprobs=1),
            request("penalty", "[ab]{4}", repetition_penalty=1.5),
            request("none", "[ab]{4}", allowed_token_ids=[50]),
        ],
    )
    assert text(found["allowed"].token_ids) == text(found["words"].token_ids) == "aaaa"
    assert text(found["bias"].token_ids) == "bbbb" and len(found["bias"].logprobs) == 5
    assert re.fullmatch("[ab]{4}", text(found["penalty"].token_ids))
    assert found["none"].error is not None and "structured_outputs" in found["none"].error
    core.shutdown()


def test_what_cannot_be_compiled_ends_its_own_request(model: Path) -> None:
    core = engine(model)
    try:
        core.add_request(request("bad", "a(b"))
    except InvalidRequestError as error:  # found out at once
        assert "unclosed group" in str(error)
        found = results(core, [request("good", "ab"), *mixed_requests(3)])
    else:
        while core.has_unfinished() and (ended := [delta for delta in core.step() if delta.finish_reason]) == []:
            continue
        assert [delta.finish_reason for delta in ended] == ["error"] and "unclosed group" in (ended[0].error or "")
        found = results(core, [request("good", "ab"), *mixed_requests(3)])
    assert text(found["good"].token_ids) == "ab"
    assert VOCAB_SIZE == 131 and not core.has_unfinished()
    core.shutdown()


def test_a_request_is_aborted_while_it_is_held(model: Path) -> None:
    core = engine(model)
    core.add_request(request("a", "[a-z]{5}"))
    core.abort(["a"])
    assert [delta.finish_reason for delta in core.step()] == ["abort"]
    assert not core.has_unfinished() and core.stats().num_waiting == 0
    core.shutdown()
