"""A CUDA GPU as a device: work is queued on one compute stream, host copies run on another and are awaited by event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from canter.device.base import Done, HostCopy, Pending

T = TypeVar("T")


class _EventCopy:
    """Copies into pinned memory, and the event that ends them. Holds the sources until then."""

    def __init__(self, copies: list[torch.Tensor], sources: list[torch.Tensor], event: Any) -> None:
        self._copies, self._sources, self._event = copies, sources, event

    def wait(self) -> list[torch.Tensor]:
        self._event.synchronize()
        self._sources = []
        return self._copies


class CudaDevice:
    """`launch` runs its function at once: the kernels that it queues are the asynchronous part.

    With `asynchronous` off, every launch waits for the GPU, which places errors where they happen.
    """

    kind = "cuda"

    def __init__(self, asynchronous: bool = True, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self.num_threads = 1
        self._asynchronous = asynchronous
        self._compute = torch.cuda.Stream(self.torch_device)
        self._copy = torch.cuda.Stream(self.torch_device)

    @staticmethod
    def is_available() -> bool:
        return torch.cuda.is_available()

    def launch(self, work: Callable[[], T]) -> Pending[T]:
        def on_stream() -> T:
            with torch.inference_mode(), torch.cuda.stream(self._compute):
                return work()

        pending = cast(Pending[T], Done(on_stream))
        if not self._asynchronous:
            self.synchronize()
        return pending

    def copy_to_host(self, tensors: list[torch.Tensor]) -> HostCopy:
        event = torch.cuda.Event(blocking=True)
        self._copy.wait_stream(self._compute)
        with torch.cuda.stream(self._copy):
            copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
            event.record(self._copy)
        return _EventCopy(copies, tensors, event)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        # A fresh pinned buffer for each upload: the copy of the step before may still be reading its own.
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return int(free)

    def default_cache_bytes(self) -> int:
        return self.free_bytes()

    def default_utilization(self) -> float:
        return 0.92

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def shutdown(self) -> None:
        self.synchronize()
