"""What a decode step costs besides the model: `python benchmarks/step_overhead.py [--json FILE] [--quick]`.

Runs the real engine core, runner and in-process client around a model that computes nothing: it hands out constant
hidden states, and copies of constant logits whose making is not counted. Columns, in microseconds a step, medians:

schedule, gather (table and input batch), sample (logits to tokens), accept (drafts, table, records), output (lists by
request), update (scheduler), client (deltas to outputs), rest (whatever lies between) and total, all of them with every
step awaited on one thread; pipelined: a whole step as it is served, one step ahead, with the device's worker thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from canter.client.inprocess import InProcessClient
from canter.core.messages import EngineInfo
from canter.core.sampling_params import OutputKind, SamplingParams
from canter.core.state_specs import attention_spec, plan_layout
from canter.device import CpuDevice
from canter.engine.core import EngineCore
from canter.kernels import set_num_threads
from canter.layers.context import StepContext
from canter.runner import model_runner
from canter.runner.model_runner import ModelRunner
from canter.scheduler.scheduler import Scheduler

VOCABULARIES = (49152, 151936)
BATCHES = (1, 8, 32, 64)
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": dict(temperature=0.0),
    "sampled": dict(temperature=0.8, top_p=0.95, top_k=40),
    "free": dict(temperature=1.0),
    "top-p": dict(temperature=1.0, top_p=0.95),
}
PARTS = ("schedule", "gather", "sample", "accept", "output", "update", "client")
MAX_LEN = 4096
WARM_UP = 5


class Clock:
    """Seconds by part of the step under way; nested parts count for the inner one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Replace `owner.name` by itself, timed."""
        inner = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            start = time.perf_counter()
            self._open.append(part)
            try:
                return inner(*args, **named)
            finally:
                self._open.pop()
                spent = time.perf_counter() - start
                self.seconds[part] += spent
                if self._open:
                    self.seconds[self._open[-1]] -= spent

        setattr(owner, name, timed)


class Model:
    """Constant hidden states, and fresh copies of constant logits."""

    def __init__(self, vocab_size: int, batch: int) -> None:
        self._hidden = torch.zeros(MAX_LEN * 2, 4)
        self._logits = torch.randn(batch, vocab_size, generator=torch.Generator().manual_seed(batch)) * 3
        self._out = [torch.empty_like(self._logits) for _ in range(3)]
        self._turn = 0
        self.seconds = 0.0

    def forward(self, token_ids: Tensor, ctx: StepContext) -> Tensor:
        return self._hidden[: token_ids.shape[0]]

    def logits(self, hidden: Tensor) -> Tensor:
        start = time.perf_counter()
        self._turn = (self._turn + 1) % len(self._out)
        rows = hidden.shape[0]
        out = self._out[self._turn][:rows].copy_(self._logits[:rows])
        self.seconds += time.perf_counter() - start
        return out


class Bench:
    def __init__(self, vocab_size: int, batch: int, params: dict[str, Any], asynchronous: bool) -> None:
        layout = plan_layout({i: attention_spec(1, 4, "float32", 16) for i in range(2)})
        blocks = [batch * (MAX_LEN // 16 + 2)]
        limits: dict[str, Any] = dict(max_model_len=MAX_LEN, max_num_seqs=batch, max_num_batched_tokens=2 * MAX_LEN)
        self.model = Model(vocab_size, batch)
        self.device = CpuDevice(asynchronous=asynchronous)
        set_num_threads(self.device.num_threads)
        names = dict(model="none", architecture="none", dtype="float32", device="cpu", block_size=16, num_blocks=blocks[0])
        info = EngineInfo(**names, vocab_size=vocab_size, cache_tokens=16 * blocks[0], prefix_caching=True, **limits)  # type: ignore[arg-type]
        self.scheduler = Scheduler(layout, blocks, **limits)
        self.runner = ModelRunner(self.model, layout, blocks, self.device, vocab_size=vocab_size, max_num_rows=batch, max_model_len=MAX_LEN)
        self.core = EngineCore(self.scheduler, self.runner, info, 2 if asynchronous else 1)
        self.client = InProcessClient(self.core, None)
        for i in range(batch):
            sampling = SamplingParams(max_tokens=3000, seed=i, output_kind=OutputKind.FINAL_ONLY, **params)
            self.client.add(f"r{i}", [1 + (7 * i + j) % 1000 for j in range(50 + i % 16)], sampling)

    def measure(self, steps: int, read: Callable[[], dict[str, float]]) -> list[dict[str, float]]:
        for _ in range(WARM_UP):
            self.client.step()
        found = []
        for _ in range(steps):
            read()
            before, start = self.model.seconds, time.perf_counter()
            self.client.step()
            total = time.perf_counter() - start
            found.append({**read(), "total": total, "model": self.model.seconds - before})
        self.core.shutdown()
        return found


def step_parts(vocab_size: int, batch: int, params: dict[str, Any], steps: int) -> dict[str, float]:
    """Medians of the parts of a step, everything on one thread."""
    bench, clock = Bench(vocab_size, batch, params, asynchronous=False), Clock()
    undo = [(owner, name, getattr(owner, name)) for owner, name in _module_functions()]
    clock.wrap(bench.client, "step", "client")
    clock.wrap(bench.core, "step", "rest")
    clock.wrap(bench.scheduler, "schedule", "schedule")
    clock.wrap(bench.scheduler, "update", "update")
    clock.wrap(bench.runner, "_update_rows", "gather")
    clock.wrap(bench.runner, "_sample_batch", "gather")
    clock.wrap(bench.runner._sampler, "sample", "sample")
    clock.wrap(bench.runner._sampler, "record", "accept")
    clock.wrap(bench.model, "logits", "model")
    clock.wrap(model_runner, "build_input_batch", "gather")
    clock.wrap(model_runner, "accept_drafts", "accept")
    clock.wrap(model_runner, "_to_host", "output")

    def read() -> dict[str, float]:
        seconds, clock.seconds = dict(clock.seconds), defaultdict(float)
        return {part: seconds.get(part, 0.0) for part in (*PARTS, "rest")}

    try:
        found = bench.measure(steps, read)
    finally:
        for owner, name, function in undo:
            setattr(owner, name, function)
    for step in found:
        step["total"] -= step["model"]
    return {part: statistics.median(step[part] for step in found) for part in (*PARTS, "rest", "total")}


def _module_functions() -> list[tuple[Any, str]]:
    return [(model_runner, name) for name in ("build_input_batch", "accept_drafts", "_to_host")]


def pipelined_step(vocab_size: int, batch: int, params: dict[str, Any], steps: int) -> float:
    """Median seconds of a step, one step ahead on the worker thread; copying the logits not counted."""
    found = Bench(vocab_size, batch, params, asynchronous=True).measure(steps, lambda: {})
    return statistics.median(step["total"] for step in found) - statistics.median(step["model"] for step in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="the small vocabulary, batches of 1 and 64")
    arguments = parser.parse_args()
    rows = []
    columns = (*PARTS, "rest", "total", "pipelined")
    print(f"{'vocabulary':>10} {'params':8} {'batch':>5} " + " ".join(f"{c:>9}" for c in columns))
    for vocab_size in VOCABULARIES[:1] if arguments.quick else VOCABULARIES:
        for name, params in PARAMS.items():
            for batch in BATCHES[::3] if arguments.quick else BATCHES:
                steps = 100 if batch == 1 else 20
                figures = step_parts(vocab_size, batch, params, steps)
                figures["pipelined"] = pipelined_step(vocab_size, batch, params, steps)
                micros = {column: round(1e6 * figures[column], 1) for column in columns}
                rows.append({"vocabulary": vocab_size, "params": name, "batch": batch, **micros})
                print(f"{vocab_size:10} {name:8} {batch:5} " + " ".join(f"{micros[c]:9}" for c in columns), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
