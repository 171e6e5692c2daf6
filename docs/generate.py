"""Writes the reference pages that are made from code. `--check` writes nothing and fails when a page is out of date."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import typing
from pathlib import Path
from typing import Any

from canter.cli.args import BYTE_FIELDS, COUNT_FIELDS, default_of, value_type
from canter.core.config import EngineArgs
from canter.core.vllm_names import VLLM_ONLY
from canter.models.registry import list_models
from canter.server.args import ServerArgs

REFERENCE = Path(__file__).resolve().parent / "reference"

INTRODUCTION = """\
# Engine and server arguments

<!-- Made by docs/generate.py from EngineArgs and ServerArgs. Don't edit: run `make docs`. -->

Every engine argument is a flag of `canter serve`, `chat`, `complete` and the benchmarks (`--max-num-seqs 64`), and a keyword of
`LLM` (`LLM(max_num_seqs=64)`). Server arguments are flags of `canter serve`. Names follow vLLM's where vLLM has the same thing.
A boolean is switched off with `--no-` before its name. Both `--max-num-seqs` and `--max_num_seqs` are understood, and
`--hf-overrides.rope_theta 1e6` sets one key of a JSON argument.
"""

MODELS_INTRODUCTION = """\
# Models

<!-- Made by docs/generate.py from canter/models/registry.py. Don't edit: run `make docs`. -->

The architectures (`architectures` of a config.json) that Canter runs, as `canter models` lists them. *Memory*: the kinds of memory that
the layers of a family may have (`docs/concepts/memory.md`). *Shared prefixes*: which prefixes the cache keeps for later requests.

| architecture | models | memory | shared prefixes | refused |
| --- | --- | --- | --- | --- |
"""

VLLM_INTRODUCTION = """\
## vLLM's arguments that Canter lacks

Giving one of these is an error that says the same as this table.

| argument | why |
| --- | --- |
"""


def type_text(field: dataclasses.Field[Any], hint: Any) -> str:
    """What a value looks like, for a reader."""
    if field.metadata.get("choices"):
        return " \\| ".join(f"`{choice}`" for choice in field.metadata["choices"])
    if field.name in BYTE_FIELDS:
        return "bytes: `512M`, `2G`"
    if field.name in COUNT_FIELDS:
        return "integer: `4096`, `32k`"
    names = {int: "integer", float: "number", str: "text", bool: "on or off", dict: "JSON object", list: "list of texts"}
    return names[value_type(hint)]


def default_text(field: dataclasses.Field[Any]) -> str:
    value = default_of(field)
    if value is None or value in ("", [], {}):
        return ""
    return "on" if value is True else "off" if value is False else f"`{' '.join(value) if isinstance(value, list) else value}`"


def argument_tables(arguments: type) -> list[str]:
    """A heading and a table for each group of a dataclass's fields."""
    hints = typing.get_type_hints(arguments)
    groups: dict[str, list[str]] = {}
    for field in dataclasses.fields(arguments):
        doc = str(field.metadata["doc"]).replace("|", "\\|")
        row = f"| `--{field.name.replace('_', '-')}` | {type_text(field, hints[field.name])} | {default_text(field)} | {doc} |"
        groups.setdefault(str(field.metadata["group"]), []).append(row)
    head = "| flag | value | default | |\n| --- | --- | --- | --- |\n"
    return [f"## {name.capitalize()}\n\n{head}" + "\n".join(rows) for name, rows in groups.items()]


def engine_arguments() -> str:
    """The page docs/reference/engine-arguments.md."""
    lacking = "\n".join(f"| `{name}` | {reason} |" for name, reason in sorted(VLLM_ONLY.items()))
    parts = [INTRODUCTION.rstrip(), *argument_tables(EngineArgs), *argument_tables(ServerArgs), VLLM_INTRODUCTION + lacking]
    return "\n\n".join(parts) + "\n"


def models() -> str:
    """The page docs/reference/models.md."""
    lines = [
        f"| `{row.architecture}` | {row.family} | {', '.join(kind.replace('_', ' ') for kind in row.memory)} | {row.shared_prefixes} "
        f"| {row.limits} |"
        for row in list_models()
    ]
    return MODELS_INTRODUCTION + "\n".join(lines) + "\n"


PAGES = {"engine-arguments.md": engine_arguments, "models.md": models}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="Only compare.")
    check = parser.parse_args(argv).check
    stale = []
    for name, make in PAGES.items():
        path, text = REFERENCE / name, make()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8")
    if stale:
        print(f"{'out of date, run make docs' if check else 'written'}: {', '.join(stale)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
