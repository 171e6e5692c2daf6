"""The CPU as a device: a worker thread is its stream, so that the engine schedules while a step computes."""

from __future__ import annotations

import atexit
import math
import mmap
import os
import queue
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch

from canter.device.base import Done, HostCopy, Pending

T = TypeVar("T")

_HUGE_PAGE = 2 << 20

DEFAULT_CACHE_BYTES = 4 * 2**30
"""A machine that serves is often a machine that somebody works on: more is asked for, not taken."""


class _HostTensors:
    """A host copy that is no copy: CPU tensors are on the host already."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> list[torch.Tensor]:
        return self._tensors


class CpuDevice:
    """`num_threads` is for native kernels; torch itself is held to one, since its own split of a reduction over
    threads would make results depend on the number of rows."""

    kind = "cpu"

    def __init__(self, num_threads: int | None = None, asynchronous: bool = True) -> None:
        self.torch_device = torch.device("cpu")
        self.num_threads = num_threads or usable_cpus()
        torch.set_num_threads(1)
        self._stream = _WorkerStream() if asynchronous else None
        if self._stream is not None:
            weakref.finalize(self, self._stream.end)

    def launch(self, work: Callable[[], T]) -> Pending[T]:
        if self._stream is None:
            with torch.inference_mode():
                return cast(Pending[T], Done(work))
        return self._stream.submit(work)

    def copy_to_host(self, tensors: list[torch.Tensor]) -> HostCopy:
        return _HostTensors(tensors)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # The system's zeroed pages exist only once they are touched; torch would write them all. Large ones, where the system
        # grants them, save look-ups when a long context is read.
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
        memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        room = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
        begin = -room.data_ptr() % _HUGE_PAGE
        return room[begin : begin + num_bytes].view(dtype).view(shape)

    def free_bytes(self) -> int:
        return available_memory()

    def default_cache_bytes(self) -> int:
        return DEFAULT_CACHE_BYTES

    def default_utilization(self) -> float:
        return 0.5  # the machine has other work too, and its page cache holds the model file

    def synchronize(self) -> None:
        self.launch(lambda: None).result()

    def shutdown(self) -> None:
        if self._stream is not None:
            self._stream.close()


class _Launched(Generic[T]):
    """Work given to the worker. Lighter than `concurrent.futures.Future`: one lock, held until the work is done."""

    __slots__ = ("_done", "_error", "_lock", "_value", "_work")

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._value: T | None = None
        self._error: BaseException | None = None
        self._done = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def run(self) -> None:
        work, self._work = self._work, None
        try:
            self._value = cast(Callable[[], T], work)()
        except BaseException as error:  # handed to whoever waits
            self._error = error
        self._done = True
        self._lock.release()

    def result(self) -> T:
        if not self._done:
            with self._lock:
                pass
        if self._error is not None:
            raise self._error
        return cast(T, self._value)

    def done(self) -> bool:
        return self._done


class _WorkerStream:
    """One daemon thread that runs submitted functions in order.

    At the interpreter's exit it is waited for: a thread that is cut off inside native code takes the process down.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Launched[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="canter-device", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        launched = _Launched(work)
        self._queue.put(launched)
        return launched

    def end(self) -> None:
        """Let the thread end once it has run what was submitted. Doesn't wait."""
        self._queue.put(None)

    def close(self) -> None:
        """Wait for what was submitted, and end the thread."""
        atexit.unregister(self.close)
        self.end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        with torch.inference_mode():
            while (launched := self._queue.get()) is not None:
                launched.run()
                del launched  # a finished step's tensors must not outlive it here


def usable_cpus() -> int:
    """Processors that this process may use: its affinity mask, cut by the cgroup's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_value("cpu.max")
    if quota is not None:
        limit, _, period = quota.partition(" ")
        if limit != "max" and period:
            count = min(count, max(1, int(limit) // int(period)))
    return count


def available_memory() -> int:
    """Bytes that can be allocated without swapping: the system's estimate, cut by the cgroup's limit."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    limit, used = _cgroup_value("memory.max"), _cgroup_value("memory.current")
    if limit is not None and used is not None and limit != "max":
        available = min(available, max(0, int(limit) - int(used)))
    return available


def _cgroup_value(name: str) -> str | None:
    """A file of this process's cgroup (version 2), or None where there is none."""
    membership = Path("/proc/self/cgroup")
    if not membership.exists():
        return None
    for line in membership.read_text().splitlines():
        if line.startswith("0::"):
            path = Path("/sys/fs/cgroup") / line[3:].lstrip("/") / name
            if path.exists():
                return path.read_text().strip()
    return None
