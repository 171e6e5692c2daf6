"""The CUDA device against a stand-in for `torch.cuda` that records what is asked of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from canter.device import cuda
from canter.device.cuda import CudaDevice


class FakeStream:
    def __init__(self, calls: list[tuple[Any, ...]], name: str) -> None:
        self._calls, self.name = calls, name

    def wait_stream(self, other: FakeStream) -> None:
        self._calls.append(("wait", self.name, other.name))


class FakeEvent:
    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self._calls = calls

    def record(self, stream: FakeStream) -> None:
        self._calls.append(("record", stream.name))

    def synchronize(self) -> None:
        self._calls.append(("event synchronize",))


class FakeCuda:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._names = iter(["compute", "copy"])

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self.calls, next(self._names))

    def Event(self, blocking: bool) -> FakeEvent:
        assert blocking, "a spinning wait would take a core from the frontend"
        return FakeEvent(self.calls)

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.calls.append(("enter", stream.name))
        yield
        self.calls.append(("leave", stream.name))

    def synchronize(self, device: torch.device) -> None:
        self.calls.append(("synchronize", str(device)))

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 1000, 4000

    def is_available(self) -> bool:
        return True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(cuda.torch, "cuda", fake)
    real_empty = torch.empty
    monkeypatch.setattr(cuda.torch, "empty", lambda *a, pin_memory=False, **k: real_empty(*a, **k))
    return fake


def test_work_is_queued_on_the_compute_stream(fake: FakeCuda) -> None:
    device = CudaDevice()
    pending = device.launch(lambda: fake.calls.append(("work",)) or 7)
    assert pending.done() and pending.result() == 7
    assert fake.calls == [("enter", "compute"), ("work",), ("leave", "compute")], "nothing waits for the GPU"


def test_without_async_every_launch_waits(fake: FakeCuda) -> None:
    CudaDevice(asynchronous=False).launch(lambda: None)
    assert fake.calls[-1] == ("synchronize", "cuda:0")


def test_host_copies_run_beside_compute_and_are_awaited_by_event(fake: FakeCuda) -> None:
    device = CudaDevice()
    source = torch.arange(4)
    copy = device.copy_to_host([source])
    assert fake.calls == [("wait", "copy", "compute"), ("enter", "copy"), ("record", "copy"), ("leave", "copy")]
    (result,) = copy.wait()
    assert fake.calls[-1] == ("event synchronize",)
    assert torch.equal(result, source) and result.data_ptr() != source.data_ptr()


def test_errors_wait_for_result(fake: FakeCuda) -> None:
    pending = CudaDevice().launch(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pending.result()


def test_memory(fake: FakeCuda) -> None:
    device = CudaDevice()
    assert device.free_bytes() == 1000
    assert device.default_utilization() == 0.92
