"""What bounds a speed: the bytes that must be read over the memory's bandwidth, or the operations over the processor's peak.

A decoding step reads all weights once, so memory bandwidth over weight bytes is the most steps a second; a prompt uses
each weight for many tokens, so there the peak of the products counts. Bandwidth and peak are measured when they are
needed, because machines are shared: a fraction counts only beside a speed of the same run.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from canter.checkpoint.model_config import read_model_config
from canter.checkpoint.resolve import CheckpointFiles, resolve
from canter.checkpoint.tensors import open_tensors
from canter.core.state_specs import DTYPE_BYTES

ARRAY_BYTES = 512 * 2**20
"""Larger than any cache, so that memory is what is read."""

PASSES = 5
PEAK_KINDS = ("float32", "bfloat16", "int8")
FACTORS = {"f32": "float32", "bf16": "bfloat16", "float32": "float32", "float16": "float32", "bfloat16": "bfloat16"}
"""Form of weights -> type of the factors of their products. All others multiply int8."""


def kind_of(form: str) -> str:
    """The type of the factors when weights of a form are multiplied: a packed format, or a type."""
    return FACTORS.get(form, "int8")


@dataclass(frozen=True)
class Machine:
    """This machine at its best, all threads together."""

    read_bandwidth: float
    """Bytes a second from memory."""
    peaks: Mapping[str, float]
    """Operations a second by the type of the factors; types without an instruction of their own are left out."""

    def peak_for(self, kind: str) -> float:
        """Operations a second for weights of a type: without an instruction for it, they are widened to float32."""
        return self.peaks.get(kind, self.peaks["float32"])

    def best_with(self, other: Machine) -> Machine:
        """The better of two measurements in everything."""
        peaks = {kind: max(peak, other.peaks.get(kind, 0.0)) for kind, peak in self.peaks.items()}
        return Machine(max(self.read_bandwidth, other.read_bandwidth), peaks)


@dataclass(frozen=True)
class Work:
    """Requests of equal size: prompt tokens that all begin with, further ones of each, and tokens generated for each."""

    requests: int
    shared: int
    own: int
    out: int


@dataclass(frozen=True)
class ModelCost:
    """What a model's arithmetic takes, whoever computes it. A multiplication and an addition are two operations."""

    step_bytes: int
    """Bytes of weights that a decoding step reads."""
    token_operations: int
    """Products with the matrices of the layers, a token."""
    output_operations: int
    """Products with the output matrix, a token that is to be followed by another."""
    pair_operations: Mapping[int, int] = field(default_factory=dict)
    """Window (0: everything before) -> attention of a token to one token, in all layers of that window."""
    pair_bytes: Mapping[int, int] = field(default_factory=dict)
    """Window -> bytes of keys and values of a token, in all layers of that window."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """Type of the factors -> products with the matrices of the layers, a token."""

    def peak_of(self, machine: Machine) -> float:
        """Operations a second with the matrices of the layers at most: their formats may have different peaks."""
        return self.token_operations / sum(operations / machine.peak_for(kind) for kind, operations in self.kinds.items())

    def attention(self, begin: int, count: int) -> int:
        """Operations of the attention of `count` tokens that follow `begin` others."""
        return sum(cost * _pairs(begin, count, window) for window, cost in self.pair_operations.items())

    def prefill_operations(self, work: Work) -> int:
        """Of all prompts up to the first token of each; what they share is computed once."""
        tokens = work.shared + work.requests * work.own
        pairs = self.attention(0, work.shared) + work.requests * self.attention(work.shared, work.own)
        return tokens * self.token_operations + pairs + work.requests * self.output_operations

    def decode_bytes(self, work: Work) -> int:
        """Read by all steps after the first token; keys and values that are shared are read once a step."""
        steps, total = work.out - 1, 0
        for window, size in self.pair_bytes.items():
            reach = window or math.inf
            for step in range(steps):
                own = work.own + step + 1
                alone = min(own, reach)
                total += size * int(work.requests * alone + min(work.shared, max(0, reach - own)))
        return steps * self.step_bytes + total

    def decode_operations(self, work: Work) -> int:
        steps = work.out - 1
        pairs = self.attention(work.shared + work.own, steps)
        return work.requests * (steps * (self.token_operations + self.output_operations) + pairs)


@dataclass(frozen=True)
class Limit:
    """The bounds of this machine for one model."""

    read_bandwidth: float
    """Bytes a second that all threads together read from memory."""
    step_bytes: int
    """Bytes of weights that a decoding step must read."""
    peak: float = 0.0
    """Operations a second for weights of the model's formats; 0: not measured."""
    cost: ModelCost | None = None

    @property
    def steps_per_second(self) -> float:
        return self.read_bandwidth / self.step_bytes

    def fraction(self, steps_per_second: float) -> float:
        """Of the machine's limit, how much a measured rate of steps reaches."""
        return steps_per_second / self.steps_per_second

    def prefill_seconds(self, work: Work) -> float:
        """The least time from the submission of all requests to the first token of each."""
        if self.cost is None or not self.peak:
            return self.step_bytes / self.read_bandwidth
        return max(self.cost.prefill_operations(work) / self.peak, self.step_bytes / self.read_bandwidth)

    def decode_seconds(self, work: Work) -> float:
        """The least time of all steps after the first token."""
        if self.cost is None or not self.peak:
            return (work.out - 1) * self.step_bytes / self.read_bandwidth
        return max(self.cost.decode_operations(work) / self.peak, self.cost.decode_bytes(work) / self.read_bandwidth)

    def as_json(self) -> dict[str, float]:
        figures: dict[str, float] = {
            "read_bandwidth_gb_s": self.read_bandwidth / 1e9,
            "decode_step_bytes": self.step_bytes,
            "limit_steps_s": self.steps_per_second,
        }
        if self.cost is not None and self.peak:
            figures |= {"peak_gop_s": self.peak / 1e9, "prompt_token_operations": self.cost.token_operations}
        return figures


def _pairs(begin: int, count: int, window: int) -> int:
    """(query, key) pairs of `count` tokens after `begin` others: each sees itself and what is before it, within the window."""
    if not window:
        return count * begin + count * (count + 1) // 2
    growing = min(max(window - begin, 0), count)  # tokens that see fewer than a whole window
    return growing * begin + growing * (growing + 1) // 2 + (count - growing) * window


def num_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_bandwidth(num_bytes: int = ARRAY_BYTES, num_threads: int | None = None) -> float:
    """Bytes a second read from memory: the best of several passes, each thread reading its share of a large array."""
    return float(_native_limits().read_bandwidth(num_bytes, num_threads or num_processors(), PASSES))


def measure_machine(num_threads: int | None = None) -> Machine:
    """Bandwidth and peaks of this machine now; takes about a second."""
    threads = num_threads or num_processors()
    found = {kind: _native_limits().peak_operations(kind, threads) for kind in PEAK_KINDS}
    return Machine(read_bandwidth(num_threads=threads), {kind: peak for kind, peak in found.items() if peak > 0})


def _native_limits() -> Any:
    """The compiled measurements. Late, because they come with torch, which load generators do without."""
    from canter.kernels.native import limits  # noqa: PLC0415

    return limits


def _loader() -> Any:
    """What plans how weights are held. Late, as it comes with torch."""
    from canter.models import loader  # noqa: PLC0415

    return loader


def decode_step_bytes(model: str, dtype: str, revision: str | None = None, quantization: str | None = None) -> int:
    """Bytes of weights that one decoding step reads when they are loaded in `dtype` with this `quantization`.

    Those of the matrices in the form in which they are computed, and of the small parameters. Of an embedding table that the
    output matrix does not share, one row a request is read; it is left out.
    """
    return int(_step_cost(resolve(model, revision), dtype, quantization).num_bytes)


def _step_cost(files: CheckpointFiles, dtype: str, quantization: str | None) -> Any:
    """`models.loader.StepCost` of a checkpoint."""
    with open_tensors(files) as source:
        return _loader().step_cost(read_model_config(files), source, dtype, quantization or "auto")


def model_cost(
    model: str, dtype: str, revision: str | None = None, cache_dtype: str | None = None, quantization: str | None = None
) -> ModelCost:
    """What the model of a checkpoint takes. Raises `CheckpointError` when its files can't be read."""
    files = resolve(model, revision)
    step = _step_cost(files, dtype, quantization)
    operations, sizes = _attention_costs(files, DTYPE_BYTES[cache_dtype or dtype])
    kinds: Counter[str] = Counter()
    for form, count in step.layers.items():
        kinds[kind_of(form)] += 2 * count
    return ModelCost(step.num_bytes, kinds.total(), 2 * sum(step.output.values()), operations, sizes, kinds)


def _attention_costs(files: CheckpointFiles, cache_bytes: int) -> tuple[dict[int, int], dict[int, int]]:
    """Window -> operations, and bytes, of one (query, key) pair in all layers of that window. Empty when the config tells too little."""
    hf = read_model_config(files).hf
    layers, heads, hidden = (hf.get(key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if not (layers and heads and hidden):
        return {}, {}
    head_dim = hf.get("head_dim") or hidden // heads
    kv_heads = hf.get("num_key_value_heads") or heads
    types = hf.get("layer_types") or ["full_attention"] * layers
    operations: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for kind in types[:layers]:
        window = (hf.get("sliding_window") or 0) if kind == "sliding_attention" else 0
        operations[window] = operations.get(window, 0) + 4 * heads * head_dim
        sizes[window] = sizes.get(window, 0) + 2 * kv_heads * head_dim * cache_bytes
    return operations, sizes


def limit_of(model: str, dtype: str, revision: str | None = None, quantization: str | None = None) -> Limit:
    """Measure this machine for a model. Raises `CheckpointError` when the model's files can't be read."""
    cost = model_cost(model, dtype, revision, quantization=quantization)
    machine = measure_machine()
    return Limit(machine.read_bandwidth, cost.step_bytes, cost.peak_of(machine), cost)
