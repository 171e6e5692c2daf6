from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest
import torch

from canter.core.errors import ConfigError
from canter.device import CpuDevice, open_device
from canter.device.cpu import available_memory, usable_cpus


def test_work_runs_in_order_on_one_other_thread() -> None:
    device = CpuDevice(1)
    gate = threading.Event()
    seen: list[int] = []

    def work(i: int) -> tuple[int, int]:
        gate.wait(10)
        seen.append(i)
        return i, threading.get_ident()

    pending = [device.launch(lambda i=i: work(i)) for i in range(20)]
    assert not any(p.done() for p in pending), "launch must return before the work is done"
    gate.set()
    results = [p.result() for p in pending]
    assert seen == [i for i, _ in results] == list(range(20))
    assert {thread for _, thread in results} != {threading.get_ident()} and len({thread for _, thread in results}) == 1
    device.shutdown()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_error_reaches_the_waiter_and_the_stream_goes_on(asynchronous: bool) -> None:
    device = CpuDevice(1, asynchronous)
    broken = device.launch(lambda: 1 / 0)
    after = device.launch(lambda: 5)
    with pytest.raises(ZeroDivisionError):
        broken.result()
    assert after.result() == 5
    device.shutdown()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_work_runs_in_inference_mode(asynchronous: bool) -> None:
    device = CpuDevice(1, asynchronous)
    assert device.launch(torch.is_inference_mode_enabled).result()
    device.shutdown()


def test_synchronize_waits_for_what_was_launched() -> None:
    device = CpuDevice(1)
    pending = device.launch(lambda: 3)
    device.synchronize()
    assert pending.done()
    device.shutdown()


def test_torch_is_held_to_one_thread() -> None:
    device = CpuDevice(2)
    assert torch.get_num_threads() == 1
    assert device.launch(torch.get_num_threads).result() == 1
    assert device.num_threads == 2
    device.shutdown()


def test_facts_of_the_machine() -> None:
    assert usable_cpus() >= 1
    assert available_memory() > 2**20


def test_unknown_and_absent_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="auto, cpu or cuda"):
        open_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA GPU"):
            open_device("cuda")


def test_a_device_that_nobody_holds_ends_its_thread() -> None:
    gc.collect()
    before = {thread for thread in threading.enumerate() if thread.name == "canter-device"}
    device = CpuDevice(1)
    (thread,) = {thread for thread in threading.enumerate() if thread.name == "canter-device"} - before
    pending = device.launch(lambda: 7)
    del device
    gc.collect()
    thread.join(30)
    assert not thread.is_alive() and pending.result() == 7


def test_an_exit_in_the_middle_of_work_waits_for_it() -> None:
    """Work that holds no lock of Python's when the interpreter ends: the process must not be killed."""
    script = """
import torch
from canter.device import CpuDevice
from canter.kernels.inputs import packed_floats
from canter.kernels.native.dense import linear
device = CpuDevice(1)
x, w = torch.ones(512, 2048), packed_floats("f32", torch.ones(2048, 2048))
device.launch(lambda: [linear(x, w, None) for _ in range(5)] and print("done", flush=True))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
