from __future__ import annotations

import pytest

from canter.client.inprocess import InProcessClient
from canter.core.errors import InvalidRequestError, QueueFullError
from canter.core.sampling_params import OutputKind, SamplingParams
from tests.fake_core import FakeCore, say
from tests.fakes import fake_tokenizer


def run(client: InProcessClient) -> dict[str, object]:
    finished = {}
    while client.has_unfinished():
        finished.update((output.request_id, output) for output in client.step() if output.finished)
    return finished


def params(**values) -> SamplingParams:
    return SamplingParams(output_kind=OutputKind.FINAL_ONLY, **values)


def test_requests_run_to_their_end() -> None:
    client = InProcessClient(FakeCore(), fake_tokenizer())
    client.add("a", list(b"xyz"), params(max_tokens=4), prompt="xyz")
    client.add("b", list(b"q"), params(max_tokens=2, n=3))
    outputs = run(client)
    assert outputs["a"].outputs[0].text == "xyzx"
    assert outputs["a"].prompt == "xyz"
    assert [choice.text for choice in outputs["b"].outputs] == ["qq", "qq", "qq"]


def test_a_stop_string_aborts_in_the_engine() -> None:
    core = FakeCore(say("one. two."))
    client = InProcessClient(core, fake_tokenizer())
    client.add("a", [1], params(max_tokens=50, stop=["."]))
    assert run(client)["a"].outputs[0].text == "one"
    assert core.aborted == ["a"]


def test_abort_forgets_the_request() -> None:
    core = FakeCore()
    client = InProcessClient(core, fake_tokenizer())
    client.add("a", [1], params(max_tokens=50, n=2))
    client.abort(["a", "unknown"])
    assert not client.has_unfinished()
    assert core.aborted == ["0_a", "1_a"]
    assert client.step() == []


def test_an_id_can_be_used_again_only_after_the_end() -> None:
    client = InProcessClient(FakeCore(), fake_tokenizer())
    client.add("a", [1], params(max_tokens=1))
    with pytest.raises(InvalidRequestError, match="'a' is already running"):
        client.add("a", [1], params(max_tokens=1))
    run(client)
    client.add("a", [1], params(max_tokens=1))


def test_what_the_engine_refuses_leaves_nothing_behind() -> None:
    core = FakeCore()
    core.refuse = QueueFullError("full")
    client = InProcessClient(core, fake_tokenizer())
    with pytest.raises(QueueFullError):
        client.add("a", [1], params())
    assert not client.has_unfinished()
