"""Grammars that take too long or end their process, behind an engine: with a library that obeys, in place of xgrammar."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from canter.core.errors import InvalidRequestError
from canter.core.messages import AddRequest
from canter.core.sampling_params import SamplingParams
from canter.core.structured_outputs import StructuredOutputsParams
from canter.core.vocabulary import Vocabulary
from canter.engine.core import EngineCore
from canter.structured import xgrammar_process
from canter.structured.backends import XGrammarFirst
from canter.structured.guidance import GuidanceBackend
from canter.structured.refused import RefusedGrammar
from canter.structured.xgrammar_backend import ENDED, TOO_SLOW, XGrammarBackend
from canter.structured.xgrammar_process import WorkerProcess
from tests.engines import Result, engine, results, tiny_checkpoint
from tests.structured.test_grammars import EOS, ascii_vocabulary
from tests.structured.test_xgrammar import FAKE


def load_fake(vocabulary: Vocabulary, num_threads: int, uses_xgrammar: bool) -> XGrammarFirst:
    assert uses_xgrammar
    return XGrammarFirst(XGrammarBackend(WorkerProcess(vocabulary, FAKE)), GuidanceBackend(vocabulary, num_threads))


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineCore]:
    monkeypatch.setattr("canter.core.structured_outputs.find_spec", lambda name: object())
    monkeypatch.setattr("canter.engine.grammars.load_vocabulary", lambda args, size: ascii_vocabulary(size))
    monkeypatch.setattr("canter.structured.compiler.load_backend", load_fake)
    monkeypatch.setattr(xgrammar_process, "VISIT_SECONDS", 0.4)
    monkeypatch.setattr(xgrammar_process, "COMPILE_SECONDS", 0.4)
    made = engine(tiny_checkpoint(tmp_path, "llama", seed=2), structured_outputs_config={"backend": "xgrammar"})
    yield made
    made.shutdown()


def request(name: str, pattern: str, **changes: Any) -> AddRequest:
    params = dict(temperature=1.0, seed=5, max_tokens=40, eos_token_ids=[EOS], structured_outputs=StructuredOutputsParams(regex=pattern))
    return AddRequest(name, [7, 8, 9], SamplingParams(**{**params, **changes}))


def text(result: Result) -> str:
    """The library's tokens are the codes of their characters."""
    return "".join(map(chr, result.token_ids[:-1]))


@pytest.mark.parametrize(("pattern", "message"), [("abcdef!x", TOO_SLOW), ("abcdef#x", ENDED)])
def test_a_grammar_that_costs_a_worker_ends_its_own_requests_once(core: EngineCore, pattern: str, message: str) -> None:
    long = "abcdefghijklmnop"
    bad = [request(name, pattern) for name in ("bad", "bad too")]
    found = results(core, [request("good", long), *bad, request("other", "xyz")])
    assert text(found["good"]) == long and text(found["other"]) == "xyz"
    for name in ("bad", "bad too"):
        assert found[name].finish_reason == "error" and message in (found[name].error or ""), found[name]
        assert "".join(map(chr, found[name].token_ids)) == "abcdef"
    with pytest.raises(InvalidRequestError, match=message):
        core.check_params(bad[0].sampling)
    compiler: Any = core._grammars
    assert isinstance(compiler.get(StructuredOutputsParams(regex=pattern)), RefusedGrammar)
    assert [constraint.text for constraint in compiler._cache] == [long, "xyz"]
    assert text(results(core, [request("good", long)])["good"]) == long


def test_a_grammar_that_fails_before_its_request_begins_is_no_failed_step(core: EngineCore) -> None:
    """The grammar is cached when its request is let in; by the step that begins with it another request's masks have cost it."""
    bad = request("bad", "a!")
    core.check_params(bad.sampling)
    compiler: Any = core._grammars
    compiler.get(bad.sampling.structured_outputs).fail(TOO_SLOW)
    core._scheduler.add(bad, 0.0, True)
    found = {"bad": Result(), "good": Result()}
    core.add_request(request("good", "abc"))
    while core.has_work():
        for delta in core.step():
            found[delta.request_id].take(delta)
    assert text(found["good"]) == "abc"
    assert found["bad"].finish_reason == "error" and TOO_SLOW in (found["bad"].error or "") and not found["bad"].token_ids


def test_what_does_not_compile_in_time_is_served_by_llguidance(core: EngineCore) -> None:
    found = results(core, [request("good", "abc"), request("slow", "slow")])
    assert text(found["good"]) == "abc" and found["slow"].error is None
    assert [token_id - 3 for token_id in found["slow"].token_ids[:-1]] == list(b"slow")
