"""Implementations on the CPU by the compiled module `canter._native`. Importing this package registers them."""

from __future__ import annotations

from canter._native import default_num_threads, isa, isas, num_threads, set_isa, set_num_threads
from canter.kernels.native.register import register

register()

__all__ = ["default_num_threads", "isa", "isas", "num_threads", "set_isa", "set_num_threads"]
