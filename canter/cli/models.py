"""`canter models`: the architectures that Canter runs."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace

from canter.cli.args import Parser
from canter.cli.table import table
from canter.core.config import DEFAULT_MODEL
from canter.models.registry import list_models

EXAMPLES = """\
  canter models
  canter models --search qwen
  canter models --json
"""


def build_parser() -> Parser:
    parser = Parser("canter models", "List the model architectures that Canter runs: `architectures` of a config.json.", EXAMPLES)
    parser.add_argument("--search", metavar="TEXT", default="", help="Only those that contain this text.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    return parser


def run(namespace: Namespace) -> int:
    wanted = namespace.search.lower()
    rows = [row for row in list_models() if wanted in f"{row.architecture} {row.family}".lower()]
    if namespace.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return 0
    if not rows:
        print(f"No architecture contains {namespace.search!r}. 'canter models' lists all of them.")
        return 1
    lines = [[row.architecture, row.family, ", ".join(row.memory), row.shared_prefixes, row.limits or "-"] for row in rows]
    print(table(["architecture", "models", "memory", "shared prefixes", "refused"], lines))
    print(f"\nBundled and served when no model is named: {DEFAULT_MODEL}")
    return 0
