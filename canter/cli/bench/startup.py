"""`canter bench startup`: process start to the first streamed token over HTTP, with cold and with warm files."""

from __future__ import annotations

import importlib.util
import os
import re
import time
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tqdm.auto import tqdm

from canter.checkpoint.resolve import resolve
from canter.cli.api import ApiClient, ServerError
from canter.cli.args import Parser, add_engine_flags, add_number, engine_args, flag_words
from canter.cli.bench.limits import read_bandwidth
from canter.cli.bench.report import Report, add_report_flags, summary
from canter.cli.private_server import private_server
from canter.core.config import EngineArgs

EXAMPLES = """\
  canter bench startup
  canter bench startup ./model.gguf --num-iters 5 --json startup.json
"""

PHASE_LINE = re.compile(r"engine: (\S+) took ([\d.]+) s$", re.MULTILINE)
LIBRARIES = ("torch", "numpy", "tokenizers", "canter")


def build_parser() -> Parser:
    parser = Parser("canter bench startup", "Time a server from process start to its first streamed token.", EXAMPLES)
    add_number(parser, "--num-iters", default=3, doc="Warm starts.")
    parser.add_argument("--no-cold", action="store_true", help="Leave out the start with files evicted from the page cache.")
    add_report_flags(parser)
    add_engine_flags(parser)
    return parser


@dataclass(frozen=True)
class Start:
    """One start: seconds to /health, seconds to the first token, and each phase of loading."""

    ready: float
    first_token: float
    phases: dict[str, float]


def run(namespace: Namespace) -> int:
    arguments = engine_args(namespace)
    words = flag_words(arguments)
    weights = list(resolve(arguments.model, arguments.revision).weight_files)
    report = Report("startup", {"engine_flags": words})
    if not namespace.no_cold:
        add_cold(report, arguments, words, weights)
    warm = [start_once(words) for _ in tqdm(range(namespace.num_iters), desc="Warm starts", dynamic_ncols=True)]
    if warm:
        median = sorted(warm, key=lambda start: start.first_token)[len(warm) // 2]
        add_start(report, "warm", median)
        report.data["warm_first_token"] = summary([start.first_token for start in warm])
    weight_bytes = sum(path.stat().st_size for path in weights)
    bandwidth = read_bandwidth()
    report.data["weight_file_bytes"] = weight_bytes
    report.add("limit: reading the weights from memory", weight_bytes / bandwidth, "s", "read_weights_s")
    report.finish(namespace.json)
    return 0


def add_cold(report: Report, arguments: EngineArgs, words: list[str], weights: list[Path]) -> None:
    """One start after the files it needs were pushed out of the page cache, where the system does that."""
    evicted = evict([*weights, *library_files()])
    if not evicted:
        report.rows.append(["cold", "", "", "not measured: this system can't evict files from its page cache"])
        return
    report.data["evicted_bytes"] = evicted
    add_start(report, "cold", start_once(words))


def add_start(report: Report, name: str, start: Start) -> None:
    for phase, seconds in start.phases.items():
        report.add(f"{name}: {phase}", seconds, "s", f"{name}_{phase.replace('-', '_')}_s")
    report.add(f"{name}: the server around it", start.ready - sum(start.phases.values()), "s", f"{name}_server_s")
    report.add(f"{name}: process start to /health", start.ready, "s", f"{name}_ready_s")
    report.add(f"{name}: process start to first token", start.first_token, "s", f"{name}_first_token_s")


def start_once(words: list[str]) -> Start:
    """Start a server, stream one token, stop it."""
    with private_server(words, log_level="debug") as server:
        ready = time.perf_counter() - server.started
        with ApiClient(server.url) as client:
            body = {"model": client.first_model(), "prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            stream = client.complete(body)
            if not any(piece.text for piece in stream):
                raise ServerError("The server streamed no token.")
            first = time.perf_counter() - server.started
            for _ in stream:
                pass
        return Start(ready, first, phases(server.log_text()))


def phases(log: str) -> dict[str, float]:
    """Seconds of each phase of loading, from the lines that a server logs at level debug."""
    return {name: float(seconds) for name, seconds in PHASE_LINE.findall(log)}


def library_files() -> Iterable[Path]:
    """The larger files that a server maps: shared libraries of the packages it imports."""
    for name in LIBRARIES:
        spec = importlib.util.find_spec(name)
        for root in (spec.submodule_search_locations or []) if spec else []:
            yield from Path(root).rglob("*.so*")


def evict(files: Iterable[Path]) -> int:
    """Ask the kernel to drop files from its page cache. Returns the bytes asked for; needs no privilege, and 0 means it can't be done.

    Only these files are dropped, so that nothing else on the machine slows down. Pages that a running process has
    mapped stay, so a cold start beside a running server of the same installation is warmer than one after a boot.
    """
    if not hasattr(os, "posix_fadvise"):
        return 0
    total = 0
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_DONTNEED)
            total += size
        finally:
            os.close(descriptor)
    return total
