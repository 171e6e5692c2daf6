"""What every benchmark prints and writes: a table of figures, and the same as JSON."""

from __future__ import annotations

import json
import os
import platform
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from canter.cli.bench.limits import Limit
from canter.cli.table import table
from canter.version import __version__


def add_report_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--json", "--output-json", type=new_file, metavar="FILE", help="Also write the figures to this file, as JSON.")


def new_file(text: str) -> str:
    """The value of a flag that names a file to write. It is checked before the work whose result it is to hold."""
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"expected a file, got the directory {text!r}")
    if not path.parent.is_dir():
        raise ArgumentTypeError(f"there is no directory {str(path.parent)!r} to write {path.name!r} to")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArgumentTypeError(f"{text!r} can't be written")
    return text


@dataclass
class Report:
    """The result of one benchmark. `rows` are shown; `data` (with what is common to all) is written."""

    name: str
    data: dict[str, Any] = field(default_factory=dict)
    rows: list[list[str]] = field(default_factory=list)

    def add(self, label: str, value: float, unit: str, key: str | None = None, of_limit: float | None = None) -> None:
        """One figure; `of_limit` is the fraction of the machine's limit that it reaches."""
        self.rows.append([label, number(value), unit, "" if of_limit is None else f"{of_limit:.0%} of the limit"])
        name = key or label.replace(" ", "_")
        self.data[name] = value
        if of_limit is not None:
            self.data[f"{name}_of_limit"] = of_limit

    def add_limit(self, limit: Limit | None, missing: str = "weights not on this machine: no limit to compare with") -> None:
        """What the fractions refer to."""
        if limit is None:
            self.rows.append(["limit", "", "", missing])
            return
        self.data["limit"] = limit.as_json()
        size = f"{limit.step_bytes / 1e6:.0f} MB a step at {limit.read_bandwidth / 1e9:.1f} GB/s read"
        self.rows.append(["limit", number(limit.steps_per_second), "steps/s", size])
        if limit.cost is not None and limit.peak:
            operations = f"{limit.cost.token_operations / 1e6:,.0f} million operations at {limit.peak / 1e9:,.0f} GOP/s, and attention"
            self.rows.append(["limit of prefill", number(limit.peak / limit.cost.token_operations), "tokens/s", operations])

    def finish(self, path: str | None) -> None:
        """Print the table, and write the file if one is asked for."""
        print(table([self.name, "value", "unit", ""], self.rows))
        if path is not None:
            self.write(Path(path))

    def write(self, path: Path, append: bool = False) -> None:
        """The file of the figures; with `append` one line more of it."""
        machine = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
        content = {"benchmark": self.name, "canter": __version__, "time": time.time(), "machine": machine, **self.data}
        if append:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(content) + "\n")
        else:
            path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def number(value: float) -> str:
    """Three or four significant digits; counts as they are."""
    if value >= 100 or isinstance(value, int):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def summary(values: Sequence[float], percentiles: Sequence[float] = (50, 90, 99)) -> dict[str, float]:
    """Mean and percentiles: `{"mean": ..., "p50": ...}`; zeros for no values."""
    if not values:
        return {"mean": 0.0} | {f"p{p:g}": 0.0 for p in percentiles}
    found = {"mean": float(np.mean(values))}
    return found | {f"p{p:g}": float(np.percentile(values, p)) for p in percentiles}
