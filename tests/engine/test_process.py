"""What the engine process makes of messages that it can't use."""

from __future__ import annotations

import msgspec
import pytest

from canter.core import messages
from canter.core.errors import InvalidRequestError
from canter.core.messages import AddRequest, EngineStats, Outputs, RequestDelta, Utility, UtilityResult
from canter.core.sampling_params import SamplingParams
from canter.engine.process import EngineProcess


class _Socket:
    def __init__(self) -> None:
        self.sent: list[messages.EngineMessage] = []

    def send(self, data: bytes) -> None:
        self.sent.append(messages.decode_engine(data))


class _Core:
    """Refuses everything with one error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def add_request(self, request: AddRequest) -> None:
        raise self.error

    def utility(self, method: str, args: list[object]) -> None:
        raise self.error

    def stats(self) -> EngineStats:
        return EngineStats()


def _answers(data: bytes, error: Exception) -> list[messages.EngineMessage]:
    socket = _Socket()
    EngineProcess(_Core(error), socket)._read(data)  # type: ignore[arg-type]
    return socket.sent


def _only_delta(answers: list[messages.EngineMessage]) -> RequestDelta:
    [outputs] = answers
    assert isinstance(outputs, Outputs)
    [delta] = outputs.deltas
    assert delta.request_id == "r" and delta.finish_reason == "error"
    return delta


@pytest.mark.parametrize(
    ("error", "kind"), [(InvalidRequestError("no"), "InvalidRequestError"), (KeyError("at 0xdeadbeef"), "EngineError")]
)
def test_a_request_that_can_not_be_added_ends_alone(error: Exception, kind: str) -> None:
    delta = _only_delta(_answers(messages.encode(AddRequest("r", [1], SamplingParams())), error))
    assert delta.error_type == kind and "deadbeef" not in (delta.error or "")


def test_a_request_that_can_not_be_read_is_answered() -> None:
    data = msgspec.msgpack.encode(["AddRequest", "r", ["no ids"], {}])
    assert _only_delta(_answers(data, KeyError())).error_type == "EngineError"
    assert _answers(msgspec.msgpack.encode(["Nothing", 1]), KeyError()) == []


def test_a_method_that_fails_is_told_to_its_caller() -> None:
    [answer] = _answers(messages.encode(Utility(7, "reset_prefix_cache", [1, 2])), TypeError("too many"))
    assert answer == UtilityResult(7, error="reset_prefix_cache failed: TypeError.")
