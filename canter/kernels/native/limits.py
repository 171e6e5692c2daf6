"""What this machine can do at most, measured by the instructions that the kernels use (csrc/bench)."""

from __future__ import annotations

from canter._native import peak_operations, read_bandwidth

__all__ = ["peak_operations", "read_bandwidth"]
