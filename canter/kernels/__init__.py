"""Kernels: a table of ops, their references in torch and the implementations that serve them."""

from __future__ import annotations

from canter.kernels.dispatch import Binding, bind, bindings
from canter.kernels.native import default_num_threads, num_threads, set_num_threads

__all__ = ["Binding", "bind", "bindings", "default_num_threads", "num_threads", "set_num_threads"]
