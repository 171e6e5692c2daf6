"""xgrammar at arm's length: what it may be asked for, and a worker that hangs, ends, and is replaced."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from canter.core.errors import EngineError, InvalidRequestError
from canter.core.grammar import mask_width
from canter.core.structured_outputs import StructuredOutputsConfig, StructuredOutputsParams
from canter.structured import xgrammar_process
from canter.structured.constraint import Constraint
from canter.structured.xgrammar_backend import ENDED, TOO_SLOW, XGrammarBackend
from canter.structured.xgrammar_constraints import Job, job_of, takes
from canter.structured.xgrammar_messages import Compiled, Step, Visit, Visited
from canter.structured.xgrammar_process import WorkerLost, WorkerProcess
from tests.structured.test_grammars import ascii_vocabulary

FAKE = (sys.executable, "-m", "tests.structured.xgrammar_fake")
INTEGER = {"type": "integer"}


def constraint(**wanted: Any) -> Constraint:
    return Constraint.of(StructuredOutputsParams(**wanted), StructuredOutputsConfig())


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"not": INTEGER}, "#: not"),
        ({"type": "array", "uniqueItems": True}, "#: uniqueItems"),
        ({"type": "array", "contains": INTEGER}, "#: contains"),
        ({"if": INTEGER, "then": INTEGER}, "#: if"),
        ({"oneOf": [INTEGER]}, "#: oneOf"),
        ({"allOf": [INTEGER]}, "#: allOf"),
        ({"properties": {"a/b": {"type": "string", "pattern": "^a$"}}}, "#/properties/a~1b: pattern"),
        ({"properties": {"a": {"type": "string", "format": "date"}}}, "#/properties/a: format"),
        ({"type": "integer", "multipleOf": 3}, "#: multipleOf"),
        ({"type": "number", "minimum": 3}, "#: minimum"),
        ({"anyOf": [INTEGER], "type": "integer"}, "#: type"),
        ({"$ref": "#/$defs/a", "$defs": {"a": INTEGER}, "minimum": 2}, "#: minimum"),
        ({"$ref": "#/$defs/b", "$defs": {"a": INTEGER}}, "#/$defs/b"),
        ({"type": "object", "properties": {"a": INTEGER}, "required": ["b"]}, "#/required"),
        ({"type": "object", "properties": {"a": INTEGER}, "additionalProperties": INTEGER}, "#/additionalProperties"),
        ({"type": "object", "properties": {"a": False}}, "#/properties/a"),
        ({"enum": ["a"], "type": "integer"}, "#/enum"),
        ({"type": "array", "items": {"anyOf": [{"patternProperties": {}}]}}, "#/items/anyOf/0: patternProperties"),
    ],
)  # fmt: skip
def test_what_xgrammar_ignores_is_refused_with_its_place(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        job_of(constraint(json=schema))
    assert place in str(caught.value) and caught.value.param == "structured_outputs.json"


def test_what_is_written_of_a_schema() -> None:
    def written(schema: dict[str, Any]) -> Any:
        return json.loads(job_of(constraint(json=schema)).text)

    assert written({"enum": ["a", 1, True, 2.0], "type": "integer", "title": "x"}) == {"enum": [1, 2.0]}
    assert written({"type": ["string", "null"], "minLength": 2}) == {"anyOf": [{"type": "string", "minLength": 2}, {"type": "null"}]}
    assert written({"minimum": 5}) == {"type": "integer", "minimum": 5}
    assert written({"type": "string", "format": "binary"}) == {"type": "string"}
    closed = {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False}
    assert written({"properties": {"a": True}, "required": ["a"]}) == closed


def test_whose_constraint_it_is() -> None:
    assert takes(constraint(regex="a")) and takes(constraint(grammar='root ::= "a"'))
    assert not takes(constraint(grammar='start: "a"')) and not takes(constraint(structural_tag={"format": {"type": "any_text"}}))
    assert job_of(constraint(choice=['a "b"', "é\n"])).text == 'root ::= "a \\U00000022b\\U00000022" | "é\\U0000000a"'
    with pytest.raises(InvalidRequestError, match="whitespace_pattern"):
        job_of(constraint(json_object=True, whitespace_pattern=" "))


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerProcess]:
    monkeypatch.setattr(xgrammar_process, "VISIT_SECONDS", 0.3)
    monkeypatch.setattr(xgrammar_process, "COMPILE_SECONDS", 0.3)
    made = WorkerProcess(ascii_vocabulary(), FAKE)
    yield made
    made.shutdown()


def begin(matcher: int, text: str, taken: str = "", line: int = -1) -> Visit:
    return Visit(matcher, Job("regex", text), 0, [ord(char) for char in taken], line)


def test_steps_of_a_worker(process: WorkerProcess) -> None:
    worker = process.worker()
    assert worker is process.worker()
    assert worker.compile(Job("regex", "abc")) == Compiled() and worker.compile(Job("regex", "wrong")) == Compiled("it is wrong")
    done = worker.step(Step([begin(1, "abc", "ax", 0), begin(2, "a", "a"), begin(3, "wrong")], []))
    assert done == [Visited(1, False), Visited(1, True), Visited(0, False, "it is wrong")]
    assert np.flatnonzero(np.unpackbits(worker.masks[0].view(np.uint8), bitorder="little")).tolist() == [ord("b")]
    assert worker.step(Step([Visit(1, None, 1, [ord("a"), ord("b")], -1)], [2])) == [Visited(2, False)]
    assert worker.step(Step([Visit(2, None, 0, [], -1)], []))[0].error


@pytest.mark.parametrize(("text", "is_slow"), [("a!", True), ("a#", False)])
def test_a_worker_that_hangs_or_ends_names_the_culprit_and_is_replaced(process: WorkerProcess, text: str, is_slow: bool) -> None:
    lost = process.worker()
    with pytest.raises(WorkerLost) as caught:
        lost.step(Step([begin(1, "abc", "a", 0), begin(2, text, "a", 1), begin(3, "abc", "ab", 2)], []))
    assert caught.value.culprit == 2 and caught.value.is_slow == is_slow
    assert process.replace(lost) and not process.replace(lost)
    after = process.worker()
    assert after.number == lost.number + 1
    assert after.step(Step([begin(1, "abc", "a", 0), begin(3, "abc", "ab", 2)], [])) == [Visited(1, False), Visited(2, False)]


def test_a_compilation_that_hangs_holds_no_step_up(process: WorkerProcess) -> None:
    worker = process.worker()
    with pytest.raises(WorkerLost) as caught:
        worker.compile(Job("regex", "slow"))
    assert caught.value.is_slow
    assert worker.step(Step([begin(1, "abc", "a", 0)], [])) == [Visited(1, False)]


def test_a_worker_that_does_not_start_says_why(process: WorkerProcess) -> None:
    broken = WorkerProcess(ascii_vocabulary(1), FAKE)
    with pytest.raises(EngineError, match="there is nothing to load"):
        broken.worker()
    process.worker()
    process.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        process.worker()


def bits(mask: np.ndarray[Any, Any]) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def ids(text: str) -> list[int]:
    return [ord(char) for char in text]


def test_matchers_outlive_a_worker_and_the_culprit_fails_alone(process: WorkerProcess) -> None:
    backend = XGrammarBackend(process)
    grammars = [backend.compile(constraint(regex=text)) for text in ("abc", "a!", "abd", "a!")]
    good, bad, other, bad_too = [grammar.matcher() for grammar in grammars[:3] + grammars[1:2]]
    masks = np.full((3, mask_width(200)), -1, np.int32)
    backend.fill([(good, 0), (other, 1), (bad, 2)], masks)
    assert [bits(mask) for mask in masks] == [ids("a")] * 3
    assert [matcher.accept(ids("a")) for matcher in (good, other, bad)] == [1, 1, 1] and other.accept(ids("b")) == 1
    backend.fill([(bad, 2), (good, 0), (other, 1)], masks)
    assert [bits(mask) for mask in masks] == [ids("b"), ids("d"), []]
    assert good.error is None and other.error is None and bad.error == bad_too.error == TOO_SLOW
    assert bad_too.accept(ids("a")) == 0 or bad_too.error
    assert other.accept(ids("x")) == 0 and other.accept(ids("d")) == 1 and other.may_end


def test_a_matcher_goes_back(process: WorkerProcess) -> None:
    matcher = XGrammarBackend(process).compile(constraint(regex="abcd")).matcher()
    assert matcher.accept(ids("abx")) == 2
    mask = np.zeros(mask_width(200), np.int32)
    matcher.fill(mask)
    assert matcher.accept(ids("c")) == 1
    matcher.rollback(2)
    matcher.fill(mask)
    assert bits(mask) == ids("b") and matcher.accept(ids("bcd")) == 3 and matcher.may_end
    assert matcher.accept(ids("a")) == 0


def test_a_worker_that_ends_of_itself_is_blamed_on_whom_it_ends_over_twice(process: WorkerProcess) -> None:
    backend = XGrammarBackend(process)
    good, bad = [backend.compile(constraint(regex=text)).matcher() for text in ("abc", "a#")]
    assert bad.accept(ids("a")) == 1 and good.accept(ids("a")) == 1
    masks = np.full((2, mask_width(200)), -1, np.int32)
    backend.fill([(good, 0), (bad, 1)], masks)
    assert bits(masks[0]) == ids("b") and good.error is None and bad.error == ENDED


@pytest.mark.parametrize(("text", "message"), [("wrong", "it is wrong"), ("slow", TOO_SLOW), ("#", ENDED)])
def test_what_can_not_be_compiled_is_refused(process: WorkerProcess, text: str, message: str) -> None:
    backend = XGrammarBackend(process)
    with pytest.raises(InvalidRequestError, match=message):
        backend.compile(constraint(regex=text))
    assert backend.compile(constraint(regex="a")).matcher().accept(ids("a")) == 1
