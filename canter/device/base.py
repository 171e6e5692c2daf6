"""The device protocol: one ordered stream of work, host copies that can be awaited, and facts about memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """Launched work. `result` waits for the launched function and returns its value, or raises what it raised."""

    def result(self) -> T_co: ...

    def done(self) -> bool: ...


class HostCopy(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> list[torch.Tensor]:
        """The tensors in host memory, in the order given, once they are there."""
        ...


class Device(Protocol):
    """A place that runs work in the order in which it was launched.

    That order is the only synchronisation between steps: what step N writes, step N+1 reads. `launch` may run the
    function at once (its kernels are queued) or on a thread of its own; either way one function runs at a time.
    """

    kind: str
    torch_device: torch.device
    num_threads: int

    def launch(self, work: Callable[[], T]) -> Pending[T]: ...

    def copy_to_host(self, tensors: list[torch.Tensor]) -> HostCopy: ...

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a host tensor, without waiting for the device."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros for long-lived storage; where the system allows it, memory is taken only as it is written."""
        ...

    def free_bytes(self) -> int:
        """Memory that could still be allocated."""
        ...

    def default_cache_bytes(self) -> int:
        """Bytes that the cache may take when the user says nothing, beyond what one request needs."""
        ...

    def default_utilization(self) -> float:
        """Share of `free_bytes` that the cache may take at most when the user says nothing."""
        ...

    def synchronize(self) -> None: ...

    def shutdown(self) -> None: ...


class Done:
    """Work that ran when it was launched."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._error: BaseException | None = None
        self._value: object = None
        try:
            self._value = work()
        except Exception as error:
            # Kept for `result`, so that a caller sees the same behaviour from every device.
            self._error = error

    def result(self) -> object:
        if self._error is not None:
            raise self._error
        return self._value

    def done(self) -> bool:
        return True
