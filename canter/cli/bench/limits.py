"""What bounds decoding: every step reads the weights once, so memory bandwidth over weight bytes is the most steps a second."""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from canter.checkpoint.model_config import read_model_config
from canter.checkpoint.resolve import resolve
from canter.checkpoint.tensors import open_tensors
from canter.models import loader

ARRAY_BYTES = 512 * 2**20
"""Larger than any cache, so that memory is what is read."""

ROUNDS = 6


@dataclass(frozen=True)
class Limit:
    """The bound on decoding steps of this machine for one model."""

    read_bandwidth: float
    """Bytes a second that all threads together read from memory."""
    step_bytes: int
    """Bytes of weights that a decoding step must read."""

    @property
    def steps_per_second(self) -> float:
        return self.read_bandwidth / self.step_bytes

    def fraction(self, steps_per_second: float) -> float:
        """Of the machine's limit, how much a measured rate of steps reaches."""
        return steps_per_second / self.steps_per_second

    def as_json(self) -> dict[str, float]:
        return {
            "read_bandwidth_gb_s": self.read_bandwidth / 1e9,
            "decode_step_bytes": self.step_bytes,
            "limit_steps_s": self.steps_per_second,
        }


def num_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_bandwidth(num_bytes: int = ARRAY_BYTES, num_threads: int | None = None) -> float:
    """Bytes a second read from memory: the best of several rounds, each thread reducing its share of a large array.

    A maximum reads faster than a sum, whose additions wait for each other. On a shared machine the figure varies
    from minute to minute, so a fraction counts only beside a speed of the same run.
    """
    threads = num_threads or num_processors()
    array = np.ones(num_bytes // 8, dtype=np.int64)
    shares = np.array_split(array, threads)
    best = math.inf
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(ROUNDS):
            start = time.perf_counter()
            list(pool.map(np.max, shares))
            best = min(best, time.perf_counter() - start)
    return array.nbytes / best


def decode_step_bytes(model: str, dtype: str, revision: str | None = None, quantization: str | None = None) -> int:
    """Bytes of weights that one decoding step reads when they are loaded in `dtype` with this `quantization`.

    Those of the packed matrices, in the formats that they are computed in, and of the small parameters. Of an embedding table
    that the output matrix does not share, one row a request is read; it is left out.
    """
    files = resolve(model, revision)
    with open_tensors(files) as source:
        return loader.decode_step_bytes(read_model_config(files), source, dtype, quantization or "auto")


def limit_of(model: str, dtype: str, revision: str | None = None, quantization: str | None = None) -> Limit:
    """Measure this machine for a model. Raises `CheckpointError` when the model's files can't be read."""
    return Limit(read_bandwidth(), decode_step_bytes(model, dtype, revision, quantization))
