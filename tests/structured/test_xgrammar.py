"""xgrammar at arm's length: what it may be asked for, and a worker that hangs, ends, and is replaced."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canter.core.errors import EngineError, InvalidRequestError
from canter.core.grammar import mask_width
from canter.core.structured_outputs import StructuredOutputsConfig, StructuredOutputsParams
from canter.structured import xgrammar_backend, xgrammar_process
from canter.structured.constraint import Constraint
from canter.structured.xgrammar_backend import ENDED, TOO_SLOW, Failed, XGrammarBackend
from canter.structured.xgrammar_constraints import Job, NotTaken, job_of
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
        ({"type": "string", "maxLength": 3}, "#: maxLength"),
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
def test_what_xgrammar_ignores_is_not_taken_and_the_place_is_known(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(NotTaken) as caught:
        job_of(constraint(json=schema))
    assert place in str(caught.value)


def test_what_is_written_of_a_schema() -> None:
    def written(schema: dict[str, Any]) -> Any:
        return json.loads(job_of(constraint(json=schema)).text)

    assert written({"enum": ["a", 1, True, 2.0], "type": "integer", "title": "x"}) == {"enum": [1, 2.0]}
    assert written({"type": ["array", "null"], "minItems": 2}) == {
        "anyOf": [{"type": "array", "minItems": 2, "items": {}}, {"type": "null"}]
    }
    assert written({"minimum": 5}) == {"type": "integer", "minimum": 5}
    assert written({"type": "string", "format": "binary"}) == {"type": "string"}
    closed = {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False}
    assert written({"properties": {"a": True}, "required": ["a"]}) == closed


def test_whose_constraint_it_is() -> None:
    assert job_of(constraint(choice=['a "b"', "é\n"])).text == 'root ::= "a \\U00000022b\\U00000022" | "é\\U0000000a"'
    for wanted, reason in (
        (dict(grammar='start: "a"'), "Lark"),
        (dict(structural_tag={"format": {"type": "any_text"}}), "structural_tag"),
        (dict(json_object=True, whitespace_pattern=" "), "whitespace_pattern"),
    ):
        with pytest.raises(NotTaken, match=reason):
            job_of(constraint(**wanted))


def test_a_grammar_is_written_in_one_way_only() -> None:
    text = job_of(constraint(grammar='root ::= x-1 [^a-c\n] | "\\x41" x-1{2,3}  # end\nx-1 ::= . ""? [b-da]')).text
    first, second = text.split("\n")
    ends = r"\U0000d7ff\U0000e000-\U0010ffff]"
    but_some = r"[\U00000000-\U00000009\U0000000b-\U00000060\U00000064-" + ends
    assert first == f'root ::= ((r1 {but_some}) | ("\\U00000041" (r1){{2,3}}))'
    assert second == f'r1 ::= ([\\U00000000-{ends} ("")? [\\U00000061-\\U00000064])'


@pytest.mark.parametrize(
    "text", [r"\d{3}-\d{4}", "(?:yes|no)+?", r"^[a-z\d\]_-]{2,}$", "é\n*", r"a\.b\x41\u00e9", "[.$|^]", "(a|)(b)", "[a-]"]
)
def test_regexes_that_xgrammar_reads_alike(text: str) -> None:
    assert job_of(constraint(regex=text)).text == text


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a^b", 2), ("a$b", 2), ("(?i)a", 1), ("(?<x>a)", 1), (r"ab\W", 3), (r"[^\d]", 1), ("[a-z&&[^b]]", 1), ("[a--b]", 1),
        ("[[:alpha:]]", 1), (r"\bab", 1), (r"\x{41}", 1), (r"\x80", 1), (r"\p{L}", 1), ("a*+", 2), ("a{,3}", 2), ("a{2}{3}", 2),
        (r"\<a", 1), ("[]a]", 1), (r"\é", 1),
    ],
)  # fmt: skip
def test_regexes_that_xgrammar_may_read_otherwise(text: str, place: int) -> None:
    with pytest.raises(NotTaken, match=f"character {place} otherwise"):
        job_of(constraint(regex=text))


def test_what_a_dot_a_negation_and_an_anchor_mean() -> None:
    """xgrammar's own would write a line's end for a dot, and halves of surrogate pairs."""
    rest = r"\u{d7ff}\u{e000}-\u{10ffff}]"
    assert job_of(constraint(regex=r"^.[.]\.$")).text == rf"^[\u{{0}}-\u{{9}}\u{{b}}-{rest}[.]\.$"
    but_some = r"[\u{0}-\u{9}\u{b}-\u{2c}\u{2f}-\u{5c}\u{5e}-\u{60}\u{7b}-\u{e8}\u{ea}-"
    assert job_of(constraint(regex=r"[^a-z\n\]\-.\u00e9]")).text == but_some + rest
    with pytest.raises(NotTaken, match=r"\^ or \$"):
        job_of(constraint(regex="^a|b$"))


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerProcess]:
    monkeypatch.setattr(xgrammar_process, "VISIT_SECONDS", 0.3)
    monkeypatch.setattr(xgrammar_process, "COMPILE_SECONDS", 0.3)
    made = WorkerProcess(ascii_vocabulary(), FAKE)
    made.worker()
    yield made
    made.shutdown()


def begin(matcher: int, text: str, taken: str = "", line: int = -1) -> Visit:
    return Visit(matcher, Job("regex", text), 0, [ord(char) for char in taken], line)


def visited(found: list[Visited]) -> list[tuple[int, bool, str]]:
    return [(one.taken, one.may_end, one.error) for one in found]


def test_steps_of_a_worker(process: WorkerProcess) -> None:
    worker = process.worker()
    assert worker is process.worker()
    assert worker.compile(Job("regex", "abc")) == Compiled() and worker.compile(Job("regex", "wrong")) == Compiled("it is wrong")
    done = worker.step(Step([begin(1, "abc", "ax", 0), begin(2, "a", "a"), begin(3, "wrong")], []))
    assert visited(done) == [(1, False, ""), (1, True, ""), (0, False, "it is wrong")]
    assert np.flatnonzero(np.unpackbits(worker.masks[0].view(np.uint8), bitorder="little")).tolist() == [ord("b")]
    assert visited(worker.step(Step([Visit(1, None, 1, [ord("a"), ord("b")], -1)], [2]))) == [(2, False, "")]
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
    again = after.step(Step([begin(1, "abc", "a", 0), begin(3, "abc", "ab", 2)], []))
    assert visited(again) == [(1, False, ""), (2, False, "")]


def test_a_compilation_that_hangs_holds_no_step_up(process: WorkerProcess) -> None:
    worker = process.worker()
    with pytest.raises(WorkerLost) as caught:
        worker.compile(Job("regex", "slow"))
    assert caught.value.is_slow
    assert visited(worker.step(Step([begin(1, "abc", "a", 0)], []))) == [(1, False, "")]


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
    assert bad_too.accept(ids("a")) == 0
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


@pytest.mark.parametrize(("text", "message"), [("slow", TOO_SLOW), ("#", ENDED)])
def test_what_costs_a_worker_to_compile_is_not_taken_nor_tried_again(process: WorkerProcess, text: str, message: str) -> None:
    backend = XGrammarBackend(process)
    with pytest.raises(NotTaken, match=message):
        backend.compile(constraint(regex=text))
    number = process.worker().number
    with pytest.raises(NotTaken, match=message):
        backend.compile(constraint(regex=text))
    assert process.worker().number == number > 1
    assert backend.compile(constraint(regex="a")).matcher().accept(ids("a")) == 1


def test_what_xgrammar_refuses_is_not_taken(process: WorkerProcess) -> None:
    with pytest.raises(NotTaken, match="it is wrong"):
        XGrammarBackend(process).compile(constraint(regex="wrong"))


def test_a_grammar_that_is_slow_all_the_time_fails_and_is_not_tried_again(process: WorkerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its visits is within the deadline."""
    backend = XGrammarBackend(process)
    slow, other = [backend.compile(constraint(regex=text)) for text in ("a~~~", "abcd")]
    monkeypatch.setattr(xgrammar_backend, "BUDGET_SECONDS", 0.02)
    masks = np.full((2, mask_width(200)), -1, np.int32)
    bad, good = slow.matcher(), other.matcher()
    for place in range(4):
        backend.fill([(bad, 0), (good, 1)], masks)
        assert good.error is None and bits(masks[1]) == ids("abcd"[place])
        good.accept(ids("abcd"[place]))
        if bad.error is None:
            bad.accept(ids("a~~~"[place]))
    assert bad.error == slow.error == TOO_SLOW and not bits(masks[0]) and process.worker().number == 1
    with pytest.raises(InvalidRequestError, match=TOO_SLOW):
        backend.compile(constraint(regex="a~~~"))


def test_visits_that_take_little_are_not_counted(process: WorkerProcess) -> None:
    grammar = XGrammarBackend(process).compile(constraint(regex="a"))
    for _ in range(1000):
        grammar.spend(0.024)
    grammar.spend(0.9)
    assert grammar.error is None
    for _ in range(10):
        grammar.spend(0.001)
    grammar.spend(0.9)
    assert grammar.error == TOO_SLOW


def test_failed_grammars_are_forgotten_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xgrammar_backend, "MAX_FAILED", 2)
    failed = Failed()
    jobs = [Job("regex", text) for text in "abc"]
    for job in jobs:
        failed.add(job, TOO_SLOW)
    assert [failed.get(job) for job in jobs] == [None, TOO_SLOW, TOO_SLOW]


def test_an_end_of_the_process_that_forks_is_survived_too(process: WorkerProcess) -> None:
    matcher = XGrammarBackend(process).compile(constraint(regex="abc")).matcher()
    assert matcher.accept(ids("a")) == 1
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    mask = np.zeros(mask_width(200), np.int32)
    matcher.fill(mask)
    assert bits(mask) == ids("b") and matcher.error is None


OWNER = """
import sys, time
from canter.structured.xgrammar_process import WorkerProcess
from tests.structured.test_xgrammar import FAKE
from tests.structured.test_grammars import ascii_vocabulary
process = WorkerProcess(ascii_vocabulary(), FAKE)
process.worker()
print(process._process.pid, flush=True)
time.sleep(1000)
"""


def test_no_process_outlives_a_killed_engine() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        forking = int(owner.stdout.readline())
        deadline = time.monotonic() + 20
        while not (children := Path(f"/proc/{forking}/task/{forking}/children").read_text().split()) and time.monotonic() < deadline:
            time.sleep(0.01)
        owner.kill()
    pids = [forking, *map(int, children)]
    assert len(pids) == 2
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_alive, pids))


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended may still be waited for by whoever takes orphans."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
