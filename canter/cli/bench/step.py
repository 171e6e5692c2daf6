"""`canter bench step`: which ops the time of a step goes to, for a prompt and for decoding, beside this machine's limits."""

from __future__ import annotations

import dataclasses
import statistics
from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from canter.cli.args import Parser, add_engine_flags, add_number, engine_args, flag_words
from canter.cli.bench.limits import Machine, kind_of, measure_machine
from canter.cli.bench.offline import load
from canter.cli.bench.prompts import random_prompts
from canter.cli.bench.report import Report, add_report_flags, number
from canter.cli.table import table
from canter.core.errors import ConfigError
from canter.core.sampling_params import SamplingParams
from canter.kernels import num_threads
from canter.kernels.native.program import Described, NativeProgram, observed
from canter.kernels.packed import PackedMatrix

EXAMPLES = """\
  canter bench step
  canter bench step ./model.gguf --input-len 1024 --batch-size 8 --json step.json
"""


@dataclass(frozen=True)
class Line:
    """The calls of one op on one shape in a step: medians over steps. `of_limit`: 0 where nothing bounds it but caches."""

    op: str
    shape: str
    weights: str
    calls: int
    seconds: float
    share: float
    gb_s: float
    gop_s: float
    of_limit: float


@dataclass
class Runs:
    """Timed runs of one program with one number of rows."""

    instructions: Sequence[Described]
    seconds: list[list[float]] = field(default_factory=list)


class Observer:
    """Collects timed runs: the forwards by their rows, and the logits."""

    def __init__(self) -> None:
        self.forwards: dict[int, Runs] = {}
        self.logits: dict[int, Runs] = {}

    def __call__(self, program: NativeProgram, rows: int, seconds: list[float]) -> None:
        # A model of recurrent layers alone has no attention, but every forward begins with the tokens' embeddings.
        kind = self.forwards if any(one.op == "embedding" for one in program.instructions) else self.logits
        kind.setdefault(rows, Runs(program.instructions)).seconds.append(seconds)


def build_parser() -> Parser:
    text = "Time every op of a model's steps, prompt and decoding, in the engine. Shares are of the model alone, without sampling."
    parser = Parser("canter bench step", text, EXAMPLES)
    add_number(parser, "--input-len", default=512, doc="Prompt tokens of a request.", least=1)
    add_number(parser, "--output-len", default=64, doc="Tokens generated for a request.", least=2)
    add_number(parser, "--batch-size", default=1, doc="Requests at once.", least=1)
    add_number(parser, "--num-iters", default=3, doc="Times that the batch is run.", least=1)
    add_report_flags(parser)
    add_engine_flags(parser)
    return parser


def run(namespace: Namespace) -> int:
    arguments = engine_args(namespace)
    observer = Observer()
    with load(namespace, enable_prefix_caching=False) as llm:
        if llm.info.eager_reason is not None:
            raise ConfigError(f"Steps of this model are not programs that can be timed: {llm.info.eager_reason}.")
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=namespace.output_len, detokenize=False)
        before = measure_machine(num_threads())
        for i in range(namespace.num_iters):
            ids = random_prompts(namespace.batch_size, namespace.input_len, arguments.seed + i, vocab_size=llm.info.vocab_size)
            with observed(observer):
                llm.generate([{"prompt_token_ids": one} for one in ids], sampling, use_tqdm=False)
        # Other load on the machine disturbs the limits as well: the better of two measurements is nearer to the truth.
        machine = before.best_with(measure_machine(num_threads()))
    report = Report("step", {"engine_flags": flag_words(arguments), "threads": num_threads(), "steps": []})
    for rows, lines in sorted(steps(observer, machine).items(), reverse=True):
        seconds = sum(line.seconds for line in lines)
        print(f"{rows} tokens a step: {number(seconds * 1e6)} us\n{shown(lines)}\n")
        report.data["steps"].append({"rows": rows, "seconds": seconds, "lines": [dataclasses.asdict(line) for line in lines]})
        report.add(f"step of {rows} tokens", seconds * 1e6, "us", f"step_{rows}_us")
    report.add("read bandwidth", machine.read_bandwidth / 1e9, "GB/s", "read_bandwidth_gb_s")
    for kind, peak in machine.peaks.items():
        report.add(f"peak, {kind}", peak / 1e9, "GOP/s", f"peak_{kind}_gop_s")
    report.finish(namespace.json)
    return 0


def steps(observer: Observer, machine: Machine) -> dict[int, list[Line]]:
    """Tokens of a step -> its lines, those that take longest first. Each step has the logits of all its requests."""
    heads = max(observer.logits, default=0)
    found: dict[int, list[Line]] = {}
    for rows, runs in observer.forwards.items():
        seconds = totals(runs, rows, machine)
        if heads:
            seconds |= totals(observer.logits[heads], heads, machine)
        whole = sum(line.seconds for line in seconds.values())
        lines = [dataclasses.replace(line, share=line.seconds / whole) for line in seconds.values()]
        found[rows] = sorted(lines, key=lambda line: -line.seconds)
    return found


def totals(runs: Runs, rows: int, machine: Machine) -> dict[tuple[str, str, str], Line]:
    """Lines of a program's instructions, alike ones together."""
    places: Mapping[tuple[str, str, str], list[int]] = defaultdict(list)
    for i, one in enumerate(runs.instructions):
        places[one.op, shape_of(one), "+".join(dict.fromkeys(formats_of(one.weights)))].append(i)
    lines = {}
    for key, indices in places.items():
        seconds = statistics.median(sum(run[i] for i in indices) for run in runs.seconds)
        weights = [runs.instructions[i].weights for i in indices]
        given = [matrix for matrix in weights if matrix is not None]
        num_bytes = sum(matrix.nbytes for matrix in given)
        operations = sum(2 * rows * matrix.num_elements for matrix in given)
        least = sum(least_seconds(matrix, rows, machine) for matrix in given)
        lines[key] = Line(*key, len(indices), seconds, 0.0, num_bytes / seconds / 1e9, operations / seconds / 1e9, least / seconds)
    return lines


def shape_of(one: Described) -> str:
    """Outputs by width of a matrix; elsewhere the elements that a row gives."""
    return "x".join(map(str, one.weights.shape)) if one.weights is not None else str(one.writes or one.reads or "")


def formats_of(weights: PackedMatrix | None) -> list[str]:
    return [part.format for part in weights.parts] if weights is not None else []


def least_seconds(matrix: PackedMatrix, rows: int, machine: Machine) -> float:
    """What a product takes on a machine that wastes nothing and has no weights in its caches."""
    arithmetic = sum(2 * rows * part.outputs * part.width / machine.peak_for(kind_of(part.format)) for part in matrix.parts)
    return max(matrix.nbytes / machine.read_bandwidth, arithmetic)


def shown(lines: Sequence[Line]) -> str:
    header = ["op", "shape", "weights", "calls", "us", "us each", "share", "GB/s", "GOP/s", "of limit"]
    rows = [
        [
            *(line.op, line.shape, line.weights, str(line.calls), number(line.seconds * 1e6), number(line.seconds / line.calls * 1e6)),
            f"{line.share:.1%}",
            *([number(line.gb_s), number(line.gop_s), f"{line.of_limit:.0%}"] if line.of_limit else ["", "", ""]),
        ]
        for line in lines
    ]
    return table(header, rows)
