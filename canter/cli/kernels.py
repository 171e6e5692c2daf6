"""`canter kernels`: every op, and which implementation serves it on this machine, or why a better one does not."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace

import torch

from canter.cli.args import Parser
from canter.cli.table import table
from canter.core.config import DEVICES, DTYPES
from canter.kernels import default_num_threads
from canter.kernels.dispatch import bind, bindings
from canter.kernels.native import isa, isas
from canter.kernels.ops import OPS, implementations

EXAMPLES = """\
  canter kernels
  canter kernels --dtype bfloat16
  CANTER_ISA=scalar canter kernels
"""


def build_parser() -> Parser:
    parser = Parser("canter kernels", "List the ops, the implementation of each that a model would be given here, and why.", EXAMPLES)
    parser.add_argument("--device", choices=DEVICES[1:], default="cpu", help="Where a model would run. Default: cpu.")
    parser.add_argument("--dtype", choices=DTYPES[1:], default="float32", help="Type of weights and activations. Default: float32.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    return parser


MEASURED_ISAS = ("scalar", "avx2")
"""Instruction sets whose kernels have run on a machine that has them."""


def run(namespace: Namespace) -> int:
    for name in OPS:
        bind(name, namespace.device, getattr(torch, namespace.dtype))
    rows = bindings()
    if namespace.json:
        facts = {"isa": isa(), "isas": isas(), "threads": default_num_threads()}
        print(json.dumps({**facts, "ops": [dataclasses.asdict(row) for row in rows]}, indent=2))
        return 0
    others = {name: ", ".join(impl.provider for impl in implementations(name)) for name in OPS}
    lines = [[row.op, row.provider, others[row.op], "program" if row.recorded else "eager", row.reason] for row in rows]
    print(table(["op", "implementation", "of", "step", "why"], lines))
    print(f"\nNative code: {isa()} (this build and machine have {', '.join(isas())}); {default_num_threads()} threads.")
    if isa() not in MEASURED_ISAS:
        print(f"Of the kernels, those for {isa()} have been tested in emulation only.")
    return 0
