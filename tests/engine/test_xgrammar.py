"""xgrammar itself behind an engine: what it serves, whom a slow grammar or an end of its process harms, and that nothing of it remains."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canter.core.errors import InvalidRequestError
from canter.core.grammar import mask_width
from canter.core.messages import AddRequest
from canter.core.sampling_params import SamplingParams
from canter.core.structured_outputs import StructuredOutputsParams
from canter.engine.core import EngineCore
from canter.structured.backends import XGrammarFirst
from canter.structured.compiler import GrammarCompiler
from canter.structured.guidance import GuidanceGrammar
from canter.structured.xgrammar_backend import TOO_SLOW, XGrammarGrammar
from tests.engines import VOCAB_SIZE, Result, engine, mixed_requests, results, tiny_checkpoint
from tests.structured.test_grammars import EOS, ascii_vocabulary, encode

pytestmark = pytest.mark.skipif(find_spec("xgrammar") is None, reason="needs the extra xgrammar")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", 'B"ob']}, "age": {"type": "integer", "minimum": 3, "maximum": 40}, "ok": {"type": "boolean"}},
    "required": ["name", "age", "ok"],
}
TAG = {"format": {"type": "sequence", "elements": [{"type": "const_string", "value": "x="}, {"type": "regex", "pattern": "[0-9]{3}"}]}}
SLOW = "root ::= root root root | root root | [a-z ]+"
WANTED: dict[str, dict[str, Any]] = {
    "schema": dict(json=SCHEMA),
    "regex": dict(regex="(ab|cd){3,8}"),
    "choice": dict(choice=["red", "green", 'a "b"\n']),
    "ebnf": dict(grammar='root ::= pair ("," pair){0,2}\npair ::= [a-z]{1,4} "=" ("(" [0-9] ")" | [0-9]{2})'),
    "tag": dict(structural_tag=TAG),
    "multiple": dict(json={"type": "integer", "multipleOf": 7, "minimum": 100, "maximum": 900}),
}
BY_LLGUIDANCE = {"tag", "multiple"}


def holds(name: str, text: str) -> bool:
    if name == "schema":
        value = json.loads(text)
        return set(value) == set(SCHEMA["properties"]) and value["name"] in ("Ann", 'B"ob') and 3 <= value["age"] <= 40  # type: ignore[arg-type]
    if name == "choice":
        return text in WANTED["choice"]["choice"]
    if name == "multiple":
        return int(text) % 7 == 0
    pair = r"[a-z]{1,4}=(\([0-9]\)|[0-9]{2})"
    return re.fullmatch({"regex": "(ab|cd){3,8}", "ebnf": f"{pair}(,{pair}){{0,2}}", "tag": "x=[0-9]{3}"}[name], text) is not None


def request(name: str, seed: int = 5, wanted: dict[str, Any] | None = None, **changes: Any) -> AddRequest:
    constraint = StructuredOutputsParams(**(wanted or WANTED[name]))
    params = dict(temperature=1.0, seed=seed, max_tokens=150, eos_token_ids=[EOS], structured_outputs=constraint)
    return AddRequest(f"{name}-{seed}", [7, 8, 9], SamplingParams(**{**params, **changes}))


def requests() -> list[AddRequest]:
    return [request(name, seed) for name in WANTED for seed in range(3)]


def text(token_ids: list[int]) -> str:
    return "".join(chr(i - 3) for i in token_ids if i >= 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", seed=2)


def start(model: Path) -> EngineCore:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("canter.engine.grammars.load_vocabulary", lambda args, size: ascii_vocabulary(size))
        return engine(model, structured_outputs_config={"backend": "xgrammar"})


@pytest.fixture(scope="module")
def core(model: Path) -> Iterator[EngineCore]:
    made = start(model)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def expected(core: EngineCore) -> dict[str, Result]:
    """What each request comes to alone."""
    return {r.request_id: results(core, [r])[r.request_id] for r in requests()}


def grammars(core: EngineCore) -> GrammarCompiler:
    assert isinstance(core._grammars, GrammarCompiler)
    return core._grammars


def processes(core: EngineCore) -> list[int]:
    """The process that forks, and the worker."""
    backend = grammars(core).backend
    assert isinstance(backend, XGrammarFirst)
    forking = backend._xgrammar._process._process
    assert forking is not None
    children = Path(f"/proc/{forking.pid}/task/{forking.pid}/children").read_text().split()
    return [forking.pid, *map(int, children)]


def same(found: dict[str, Result], expected: dict[str, Result]) -> None:
    assert {name: (found[name].token_ids, found[name].error) for name in expected} == {
        name: (result.token_ids, None) for name, result in expected.items()
    }


def test_every_output_obeys(core: EngineCore, expected: dict[str, Result]) -> None:
    for name, result in expected.items():
        assert result.error is None and result.finish_reason == "stop" and result.token_ids[-1] == EOS, (name, result)
        assert holds(name.split("-")[0], text(result.token_ids)), text(result.token_ids)
    for name, wanted in WANTED.items():
        kind = GuidanceGrammar if name in BY_LLGUIDANCE else XGrammarGrammar
        assert isinstance(grammars(core).get(StructuredOutputsParams(**wanted)), kind), name


def test_company_changes_nothing(core: EngineCore, expected: dict[str, Result]) -> None:
    same(results(core, [*requests(), *mixed_requests(6, longest=40)]), expected)


def test_a_matcher_goes_back(core: EngineCore) -> None:
    matcher = grammars(core).get(StructuredOutputsParams(regex="[a-z]{300}")).matcher()
    mask = np.zeros(mask_width(VOCAB_SIZE), np.int32)
    assert matcher.accept(encode("ab" * 140 + "1")) == 280
    matcher.fill(mask)
    before = mask.copy()
    assert matcher.accept(encode("c" * 20)) == 20 and matcher.may_end
    matcher.rollback(200)
    matcher.fill(mask)
    assert (mask == before).all() and not matcher.may_end
    assert matcher.accept(encode("d" * 201)) == 200 and matcher.may_end and matcher.error is None


def test_any_object(core: EngineCore) -> None:
    result = results(core, [request("any", wanted=dict(json_object=True), max_tokens=40)])["any-5"]
    assert result.error is None and text(result.token_ids).startswith("{")
    assert result.finish_reason == "length" or isinstance(json.loads(text(result.token_ids)), dict)


def test_a_slow_grammar_ends_alone_and_once_and_is_not_tried_again(core: EngineCore, expected: dict[str, Result]) -> None:
    """Its masks take longer and longer, until its budget is spent or a deadline passes."""
    slow = request("slow", wanted=dict(grammar=SLOW), logit_bias={EOS: -100.0}, max_tokens=240)
    found = results(core, [slow, *requests()])
    assert found["slow-5"].finish_reason == "error" and TOO_SLOW in (found["slow-5"].error or "")
    assert len(found["slow-5"].token_ids) > 1
    same(found, expected)
    with pytest.raises(InvalidRequestError, match=TOO_SLOW):
        core.check_params(slow.sampling)
    again = grammars(core).get(StructuredOutputsParams(grammar=SLOW))
    assert TOO_SLOW in (again.error or "")


def test_an_end_of_the_worker_changes_no_output(core: EngineCore, expected: dict[str, Result]) -> None:
    found = {r.request_id: Result() for r in requests()}
    for r in requests():
        core.add_request(r)
    steps, killed = 0, 0
    while core.has_work():
        for delta in core.step():
            found[delta.request_id].take(delta)
        steps += any(result.token_ids for result in found.values())
        if steps in (3, 8):
            os.kill(processes(core)[1], signal.SIGKILL)
            killed += 1
            steps += 1
    assert killed == 2
    same(found, expected)


def test_nothing_remains_behind_a_shutdown(model: Path, core: EngineCore) -> None:
    other = start(model)
    assert text(results(other, [request("choice")])["choice-5"].token_ids) in WANTED["choice"]["choice"]
    pids = processes(other)
    assert len(pids) == 2
    other.shutdown()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    with pytest.raises(Exception, match="shut down"):
        other.add_request(request("choice"))
