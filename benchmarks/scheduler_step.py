"""What a decode step costs in the scheduler: `python benchmarks/scheduler_step.py [--json FILE]`.

Times `schedule` and `update` together, medians over steps, for several batch sizes and cache layouts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from canter.core.messages import AddRequest
from canter.core.plan import SchedulePlan, StepOutput
from canter.core.sampling_params import SamplingParams
from canter.core.state_specs import attention_spec, plan_layout
from canter.scheduler.scheduler import Scheduler

LAYOUTS: dict[str, list[int | None]] = {"full": [None], "full and 5 windows": [None, 512, 512, 512, 512, 512]}
STEPS = 200


def step_seconds(windows: list[int | None], num_requests: int) -> float:
    """Median seconds of `schedule` and `update` of a decode step, one step ahead."""
    layout = plan_layout({i: attention_spec(2, 16, "float32", 16, window) for i, window in enumerate(windows)})
    scheduler = Scheduler(layout, [20000], max_model_len=4096, max_num_seqs=256, max_num_batched_tokens=8192)
    for i in range(num_requests):
        params = SamplingParams(max_tokens=None, stop_token_ids=[9])
        scheduler.add(AddRequest(f"r{i}", [i] * (20 + i % 16), params), 0.0)
    last: SchedulePlan | None = None
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        plan = scheduler.schedule(0.0)
        if last is not None:
            count = len(last.rows)
            scheduler.update(last, StepOutput(last.step_id, [[5]] * count, [None] * count), 0.0)
        seconds.append(time.perf_counter() - start)
        last = plan
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    rows = [
        {"layout": name, "requests": count, "step_us": round(1e6 * step_seconds(windows, count), 1)}
        for name, windows in LAYOUTS.items()
        for count in (1, 8, 32, 128)
    ]
    print(f"{'layout':20} {'requests':>8} {'step us':>10}")
    for row in rows:
        print(f"{row['layout']:20} {row['requests']:8} {row['step_us']:10}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
