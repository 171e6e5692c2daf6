"""Canter beside other engines: same work, same files, same machine, in turn.

    python benchmarks/compare.py --models DIR --llama-cpp BINDIR --vllm-python PYTHON ...

Nothing is installed here: each engine that is to be compared is given by its place. DIR holds files named
`<model>-<format>.gguf` and, for bfloat16 and int8 against engines that read no GGUF, directories `<model>-bf16`. A row is
work/model/format/rival; `--list` shows the usual ones, `--rows` picks by pattern, and a row written out in full need not be
among them. Works: single, prefill, batch, shared and long (benchmarks/peers/driver.py), start (a server's process start to its first
streamed token, files warm) and memory (a server's most resident memory with 8 requests of 2,048 tokens).

Each turn measures the machine's limits, then one engine, then the other; the order changes from turn to turn. Ratios are of
one turn each; shown are their median and spread. Canter's tokens are compared with those of the same prompts alone.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import json
import math
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from peers import engines
from peers.driver import DECODING, WORKS, make_prompts
from peers.processes import EngineFailed
from peers.servers import HttpServer

from canter.checkpoint.resolve import resolve
from canter.checkpoint.tensors import open_tensors
from canter.cli.bench import limits
from canter.cli.bench.limits import Limit
from canter.cli.bench.report import number
from canter.cli.table import table
from canter.version import __version__

SERVED = ("start", "memory")
FULL_HOUSE = (8, 1920, 128)
"""The memory row: requests, prompt tokens and generated tokens of each."""


class Row(NamedTuple):
    work: str
    model: str
    format: str
    rival: str

    def __str__(self) -> str:
        return "/".join(self)

    @classmethod
    def parse(cls, text: str) -> Row:
        parts = text.split("/")
        if len(parts) != 4 or parts[0] not in (*WORKS, *SERVED) or parts[3] not in RIVALS:
            works, rivals = ", ".join((*WORKS, *SERVED)), ", ".join(RIVALS)
            raise ValueError(f"a row is work/model/format/rival, work among {works}, rival among {rivals}; got {text!r}")
        return cls(*parts)


RIVALS = ("llama.cpp", "llama-server", "ik_llama.cpp", "vllm-cpu", "openvino-genai")
SMALL, MIDDLE, LARGE = "smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"
USUAL = [
    Row.parse(f"{work}/{model}/{form}/{rival}")
    for work, rival, models in (
        ("single", "llama.cpp", ((SMALL, "q4_1 q8_0 bf16"), (MIDDLE, "q4_k_m q8_0 bf16"), (LARGE, "q4_k_m"))),
        ("single", "ik_llama.cpp", ((SMALL, "q4_1 q8_0"), (MIDDLE, "q4_k_m q8_0"))),
        ("single", "vllm-cpu", ((SMALL, "bf16"), (MIDDLE, "bf16"))),
        ("prefill", "llama.cpp", ((MIDDLE, "q4_k_m q8_0"),)),
        ("prefill", "ik_llama.cpp", ((SMALL, "q4_1"), (MIDDLE, "q4_k_m q8_0"))),
        ("prefill", "openvino-genai", ((SMALL, "q8_0"), (MIDDLE, "q8_0"))),
        ("prefill", "vllm-cpu", ((SMALL, "bf16"), (MIDDLE, "bf16 int8"))),
        ("batch", "llama.cpp", ((MIDDLE, "q4_k_m"),)),
        ("batch", "vllm-cpu", ((SMALL, "bf16"), (MIDDLE, "bf16 int8"))),
        ("batch", "openvino-genai", ((SMALL, "q8_0"), (MIDDLE, "q8_0"))),
        ("shared", "vllm-cpu", ((MIDDLE, "bf16"),)),
        ("shared", "llama-server", ((MIDDLE, "q8_0"),)),
        ("long", "llama.cpp", ((MIDDLE, "bf16"),)),
        ("start", "vllm-cpu", ((MIDDLE, "bf16"),)),
        ("start", "llama-server", ((MIDDLE, "q4_k_m"),)),
        ("memory", "llama-server", ((MIDDLE, "q4_k_m"),)),
    )
    for model, forms in models
    for form in forms.split()
]


@dataclass
class Turns:
    """What the turns of a row gave. Speeds in tokens/s (start: seconds, memory: bytes, where less is better)."""

    canter: list[float] = field(default_factory=list)
    rival: dict[str, list[float]] = field(default_factory=dict)
    of_limit: list[float] = field(default_factory=list)
    limits: list[dict[str, float]] = field(default_factory=list)
    less_is_better: bool = False
    tokens_checked: int | None = None
    peak_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def best_variant(self) -> str:
        """The rival's setting with the better median."""
        ordered = sorted(self.rival, key=lambda name: statistics.median(self.rival[name]))
        return ordered[0 if self.less_is_better else -1]

    @property
    def ratios(self) -> list[float]:
        """Canter over the rival, turn by turn; over 1 is better, and for memory and time it is the rival over Canter."""
        pairs = zip(self.canter, self.rival[self.best_variant], strict=True)
        return [theirs / ours if self.less_is_better else ours / theirs for ours, theirs in pairs]

    def as_json(self, row: Row) -> dict[str, Any]:
        ratios = self.ratios
        return {
            **row._asdict(),
            "canter": statistics.median(self.canter),
            "rival_speed": statistics.median(self.rival[self.best_variant]),
            "rival_setting": self.best_variant,
            "ratio": statistics.median(ratios),
            "ratio_least": min(ratios),
            "ratio_most": max(ratios),
            "of_limit": statistics.median(self.of_limit) if self.of_limit else None,
            "turns": dataclasses.asdict(self),
        }


class Comparison:
    """All rows of one command line. A rival that takes minutes to load stays, paused, for the next row that wants it so."""

    def __init__(self, options: argparse.Namespace, rows: Sequence[Row]) -> None:
        self.options = options
        self.rows = rows
        self.threads = options.threads or limits.num_processors()
        self._rival: tuple[tuple[str, str], engines.Contestant] | None = None

    def close(self) -> None:
        if self._rival is not None:
            self._rival[1].close()
            self._rival = None

    # Places

    def model_for(self, row: Row) -> str:
        """The file or directory of a row. Raises `FileNotFoundError` naming what is missing."""
        folder = Path(self.options.models)
        reads_directories = row.rival == "vllm-cpu" or row.format == "int8"
        path = folder / (f"{row.model}-bf16" if reads_directories else f"{row.model}-{row.format}.gguf")
        if not path.exists():
            raise FileNotFoundError(f"{row}: there is no {path}")
        return str(path.resolve() if path.is_dir() else path)

    def place(self, rival: str) -> Path:
        """Where a rival is. Raises `FileNotFoundError` when the command line did not say."""
        found = {
            "llama.cpp": self.options.llama_cpp,
            "llama-server": self.options.llama_cpp,
            "ik_llama.cpp": self.options.ik_llama or self.options.ik_llama_python,
            "vllm-cpu": self.options.vllm_python,
            "openvino-genai": self.options.openvino_python,
        }[rival]
        if found is None:
            raise FileNotFoundError(f"{rival} was not given")
        return Path(found).absolute()

    def canter_arguments(self, row: Row) -> dict[str, Any]:
        """Engine arguments of Canter for a row."""
        arguments: dict[str, Any] = {"model": self.model_for(row), "num_threads": self.threads, "max_num_seqs": 64}
        if row.work in WORKS:
            arguments["max_model_len"] = self.max_len(row)
        if Path(arguments["model"]).is_dir():
            arguments["dtype"] = "bfloat16"
        if row.format == "int8":
            arguments["quantization"] = "int8"
        return arguments | self.options.canter_args

    def max_len(self, row: Row) -> int:
        work = WORKS[row.work]
        return max(2048, work.shared + work.own + work.out + 64)

    def vllm_dtype(self) -> str:
        """The faster one: without an instruction for bfloat16, vllm's products in it run at a crawl."""
        return self.options.vllm_dtype or ("bfloat16" if "bfloat16" in limits.measure_machine(self.threads).peaks else "float32")

    # Measuring

    def rival_for(self, row: Row) -> engines.Contestant:
        key = row.rival, self.model_for(row)
        if self._rival is None or self._rival[0] != key:
            self.close()
            self._rival = key, self.open_rival(row)
        return self._rival[1]

    def open_rival(self, row: Row) -> engines.Contestant:
        place, model = self.place(row.rival), self.model_for(row)
        if row.rival == "llama.cpp":
            return engines.LlamaTools(place, model, self.threads)
        if row.rival == "llama-server":
            return engines.LlamaServer(place, model, self.threads)
        if row.rival == "vllm-cpu":
            longest = max(self.max_len(one) for one in self.rows if one.work in WORKS and (one.rival, one.model) == (row.rival, row.model))
            return engines.open_vllm(place, model, self.threads, longest, self.vllm_dtype())
        if row.rival == "openvino-genai":
            return engines.open_openvino(place, model, self.threads)
        if self.options.ik_llama:
            return engines.LlamaTools(place, model, self.threads, {"plain": [], "repacked": REPACK[WORKS[row.work].requests > 1]})
        return engines.open_ik_bindings(place, model, self.threads)

    def run(self, row: Row) -> Turns:
        if row.work in SERVED:
            self.close()
        if row.work == "start":
            return self.run_starts(row)
        return self.run_memory(row) if row.work == "memory" else self.run_speeds(row)

    def run_speeds(self, row: Row) -> Turns:
        turns, cost = Turns(), None
        rival = self.rival_for(row)
        with contextlib.ExitStack() as stack:
            canter = engines.open_canter(self.canter_arguments(row))
            stack.callback(canter.close)
            cost = row_cost(row, self.model_for(row))
            for turn in range(self.options.repeat):
                machine = limits.measure_machine(self.threads)
                limit = Limit(machine.read_bandwidth, cost.step_bytes, machine.peak_for(kind_of(row.format)), cost)
                seed = 1000 * turn + 17
                order: list[Callable[[], engines.Measured]] = [
                    lambda seed=seed: canter.measure(row.work, seed),  # type: ignore[misc]
                    lambda seed=seed: rival.measure(row.work, seed),  # type: ignore[misc]
                ]
                first = turn % 2
                results = {first: order[first](), 1 - first: order[1 - first]()}
                turns.canter.append(results[0].tok_s[""])
                for name, speed in results[1].tok_s.items():
                    turns.rival.setdefault(name, []).append(speed)
                turns.limits.append(limit.as_json())
                turns.of_limit.append(turns.canter[-1] / limit_speed(row.work, limit))
                theirs = number(max(results[1].tok_s.values()))
                say(f"{row} turn {turn + 1}: canter {number(turns.canter[-1])}, {row.rival} {theirs} tokens/s")
            turns.peak_bytes = {"canter": canter.peak_bytes(), row.rival: rival.peak_bytes()}
            if self.options.check:
                turns.tokens_checked = check_tokens(canter, row.work, seed, results[0].tokens, self.options.check)
        return turns

    # Servers

    def server(self, row: Row, who: str, words: dict[str, list[str]]) -> HttpServer:
        """Start one as a user would; `words` are further flags by engine."""
        model = self.model_for(row)
        extra = words.get(who, [])
        if who == "canter":
            dtype = ["--dtype", "bfloat16"] if Path(model).is_dir() else []
            quantization = ["--quantization", "int8"] if row.format == "int8" else []
            command = [sys.executable, "-m", "canter", "serve", "--model", model, "--port", "{port}", "--num-threads", str(self.threads)]
            return HttpServer([*command, *dtype, *quantization, *extra], engines.canter_env())
        place = self.place(who)
        if who == "llama-server":
            return HttpServer(
                engines.llama_server_command(place, model, ["-t", str(self.threads), "-fa", "on", *extra]), engines.library_path(place)
            )
        if who == "vllm-cpu":
            command = [str(place), "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", "{port}"]
            return HttpServer(
                [*command, "--dtype", self.vllm_dtype(), "--max-model-len", "4096", *extra], engines.vllm_env(place, self.threads)
            )
        raise FileNotFoundError(f"{who} has no server to start")

    def run_starts(self, row: Row) -> Turns:
        """The first start of each is not counted: it warms the files."""
        turns = Turns(less_is_better=True)
        for turn in range(self.options.repeat + 1):
            for who in ("canter", row.rival)[:: -1 if turn % 2 else 1]:
                server = self.server(row, who, {})
                seconds = server.wait_until_ready()
                server.process.close()
                say(f"{row} start {turn}: {who} {seconds:.2f} s")
                if turn > 0:
                    (turns.canter if who == "canter" else turns.rival.setdefault("", [])).append(seconds)
        return turns

    def run_memory(self, row: Row) -> Turns:
        """Both have room for exactly the requests that come."""
        requests, prompt, out = FULL_HOUSE
        length = prompt + out
        room = {
            "canter": [
                "--max-model-len",
                str(length),
                "--max-num-seqs",
                str(requests),
                "--num-gpu-blocks-override",
                str(requests * length // 16 + 1),
            ],
            "llama-server": ["-np", str(requests), "-c", str(requests * length)],
            "vllm-cpu": ["--max-num-seqs", str(requests)],
        }
        turns = Turns(less_is_better=True)
        for turn in range(self.options.repeat):
            for who in ("canter", row.rival)[:: -1 if turn % 2 else 1]:
                server = self.server(row, who, room)
                server.wait_until_ready()
                try:
                    server.complete_all(make_prompts(WORKS["single"]._replace(requests=requests, own=prompt, out=out), turn), out - 1)
                    held = server.process.peak_bytes()
                finally:
                    server.process.close()
                say(f"{row} run {turn + 1}: {who} {held / 1e6:.0f} MB")
                (turns.canter if who == "canter" else turns.rival.setdefault("", [])).append(float(held))
        return turns


REPACK = {False: ["-rtr", "1"], True: ["-rtr"]}
"""How ik_llama.cpp's two tools are told to repack at load: llama-bench takes a value, llama-batched-bench none."""


def kind_of(form: str) -> str:
    """The type of the factors when weights of a format are multiplied."""
    return {"bf16": "bfloat16", "f32": "float32", "f16": "float32"}.get(form, "int8")


def row_cost(row: Row, model: str) -> limits.ModelCost:
    """What the row's model takes: weights as the file stores them (int8: as Q8_0), keys and values in 16 bits."""
    cost = limits.model_cost(model, "bfloat16", cache_dtype="bfloat16")
    if row.format == "int8":
        weights = (cost.token_operations + cost.output_operations) // 2
        return dataclasses.replace(cost, step_bytes=weights // 32 * 34)
    with open_tensors(resolve(model)) as source:
        sizes = {name: source.get(name).nbytes for name in source.names()}
    if "lm_head.weight" in sizes:
        sizes.pop("model.embed_tokens.weight", None)
    return dataclasses.replace(cost, step_bytes=sum(sizes.values()))


def limit_speed(name: str, limit: Limit) -> float:
    """The workload's figure on a machine that wastes nothing."""
    done = WORKS[name]
    work = limits.Work(*done)
    if name in DECODING:
        return (done.out - 1) / limit.decode_seconds(work)
    if name == "prefill":
        return done.own / limit.prefill_seconds(work)
    return done.requests * done.out / (limit.prefill_seconds(work) + limit.decode_seconds(work))


def check_tokens(canter: engines.Driven, work: str, seed: int, tokens: list[list[int]], count: int) -> int:
    """How many requests were compared with the same prompts alone. Raises `EngineFailed` when a token differs."""
    alone = canter.order(do="check", work=work, seed=seed, count=count)["tokens"]
    for request, (found, expected) in enumerate(zip(tokens, alone, strict=False)):
        if found != expected:
            place = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
            raise EngineFailed(
                f"{work}: request {request} differs from the same prompt alone at token {place}: {found[place]}, {expected[place]}"
            )
    return len(alone)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def chosen_rows(patterns: list[str]) -> list[Row]:
    """Usual rows that match a pattern, and rows written out in full. Raises `ValueError` for what is neither."""
    rows: list[Row] = []
    for pattern in patterns or ["*"]:
        matches = [row for row in USUAL if fnmatch.fnmatchcase(str(row), pattern)]
        rows += matches or [Row.parse(pattern)]
    return list(dict.fromkeys(rows))


def show(results: list[dict[str, Any]]) -> str:
    header = ["work", "model", "format", "rival", "canter", "rival's", "ratio", "spread", "of limit", "tokens"]
    lines = []
    for r in results:
        if "error" in r:
            lines.append([r["work"], r["model"], r["format"], r["rival"], "", "", "", r["error"].splitlines()[0][:60], "", ""])
            continue
        scale, unit = {"start": (1.0, " s"), "memory": (1e6, " MB")}.get(r["work"], (1.0, ""))
        rival = r["rival"] + (f" ({r['rival_setting']})" if r["rival_setting"] else "")
        checked = r["turns"]["tokens_checked"]
        lines.append(
            [
                *(r["work"], r["model"], r["format"], rival),
                number(r["canter"] / scale) + unit,
                number(r["rival_speed"] / scale) + unit,
                f"{r['ratio']:.2f}",
                f"{r['ratio_least']:.2f}–{r['ratio_most']:.2f}",
                "" if r["of_limit"] is None else f"{r['of_limit']:.0%}",
                "" if checked is None else f"{checked} alike",
            ]
        )
    return table(header, lines)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=".", metavar="DIR", help="where the model files are; default: here")
    parser.add_argument("--llama-cpp", metavar="BINDIR", help="folder of llama.cpp's tools")
    parser.add_argument("--ik-llama", metavar="BINDIR", help="folder of ik_llama.cpp's tools")
    parser.add_argument("--ik-llama-python", metavar="PYTHON", help="a Python with ik-llama-cpp-python, where the tools can't run")
    parser.add_argument("--vllm-python", metavar="PYTHON", help="a Python with vllm for the CPU")
    parser.add_argument("--vllm-dtype", metavar="TYPE", help="of vllm; default: bfloat16 where the processor has it, else float32")
    parser.add_argument("--openvino-python", metavar="PYTHON", help="a Python with openvino-genai")
    parser.add_argument(
        "--rows", nargs="+", default=[], metavar="PATTERN", help="rows to run, such as 'single/*/*/llama.cpp'; default: all"
    )
    parser.add_argument("--list", action="store_true", help="show the rows and which of them can run, and end")
    parser.add_argument("--repeat", type=int, default=5, help="turns of a row; default: 5")
    parser.add_argument("--threads", type=int, help="threads of every engine; default: all processors")
    parser.add_argument(
        "--check", type=int, default=4, help="requests whose tokens are compared with the prompt alone; 0: none; default: 4"
    )
    parser.add_argument("--canter-args", type=json.loads, default={}, metavar="JSON", help="engine arguments of Canter over the row's own")
    parser.add_argument("--json", "--output-json", metavar="FILE", help="also write everything to this file")
    return parser


def run_rows(comparison: Comparison, rows: list[Row]) -> list[dict[str, Any]]:
    """The rows that can run, one after the other; with `--list` they are only shown."""
    options, results = comparison.options, []
    for row in rows:
        try:
            comparison.place(row.rival), comparison.model_for(row)
        except FileNotFoundError as error:
            if options.list:
                print(f"{row!s:60} can't run: {error}")
            else:
                results.append(row._asdict() | {"error": str(error)})
            continue
        if options.list:
            print(row)
            continue
        try:
            results.append(comparison.run(row).as_json(row))
        except (EngineFailed, OSError) as error:
            say(f"{row}: {error}")
            results.append(row._asdict() | {"error": str(error)})
            comparison.close()  # a rival that failed is not asked again
        if options.json:  # after every row: a long run that is cut short keeps what it has
            Path(options.json).write_text(
                json.dumps({"canter": __version__, "threads": comparison.threads, "rows": results}, indent=2) + "\n"
            )
    return results


def main() -> int:
    parser = build_parser()
    options = parser.parse_args()
    try:
        rows = chosen_rows(options.rows)
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every engine that was started is ended
    rows.sort(key=lambda row: (RIVALS.index(row.rival), row.model, row.work in SERVED))  # few starts of the slow ones
    with contextlib.closing(Comparison(options, rows)) as comparison:
        results = run_rows(comparison, rows)
    if results:
        print(show(results))
        ratios = [r["ratio"] for r in results if "ratio" in r]
        if ratios:
            print(f"\ngeometric mean of {len(ratios)} ratios: {math.exp(statistics.mean(map(math.log, ratios))):.2f}")
    return 1 if any("error" in r for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
