"""Where a model runs. The only package that says `torch.cuda`."""

from __future__ import annotations

from canter.core.errors import ConfigError
from canter.device.base import Device, HostCopy, Pending
from canter.device.cpu import CpuDevice
from canter.device.cuda import CudaDevice

__all__ = ["CpuDevice", "CudaDevice", "Device", "HostCopy", "Pending", "open_device"]


def open_device(name: str, num_threads: int | None = None, asynchronous: bool = True) -> Device:
    """The device called `name`: "cpu", "cuda", or "auto" (the GPU where there is one).

    `asynchronous`: `launch` returns before its work is done. Raises `ConfigError` when "cuda" is asked for and absent.
    """
    if name == "auto":
        name = "cuda" if CudaDevice.is_available() else "cpu"
    if name == "cpu":
        return CpuDevice(num_threads, asynchronous)
    if name == "cuda":
        if not CudaDevice.is_available():
            raise ConfigError(
                "device cuda: this machine or this build of torch has no CUDA GPU. Use --device cpu, or install a CUDA build of torch."
            )
        return CudaDevice(asynchronous)
    raise ConfigError(f"device must be auto, cpu or cuda, got {name!r}.")
