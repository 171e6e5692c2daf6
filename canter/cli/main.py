"""`canter COMMAND`: dispatch. Nothing is imported for `canter --help` but this file's own needs."""

from __future__ import annotations

import difflib
import importlib
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Protocol, cast

from canter.cli.status import INTERRUPTED, USAGE_ERROR
from canter.core.errors import CanterError
from canter.version import __version__

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("canter.cli.serve", "serve a model over HTTP, with the OpenAI API"),
    "chat": ("canter.cli.chat", "talk to a model in the terminal"),
    "complete": ("canter.cli.complete", "continue a text"),
    "run-batch": ("canter.cli.run_batch", "answer a file of requests, and go on where a run before stopped"),
    "models": ("canter.cli.models", "list the architectures that Canter runs"),
    "kernels": ("canter.cli.kernels", "list the ops and what serves each here"),
    "bench latency": ("canter.cli.bench.latency", "time of one batch, offline"),
    "bench throughput": ("canter.cli.bench.throughput", "tokens a second of many requests, offline"),
    "bench startup": ("canter.cli.bench.startup", "process start to first streamed token"),
    "bench serve": ("canter.cli.bench.serve", "load on a running server: TTFT, TPOT, ITL, E2EL"),
    "bench prefix": ("canter.cli.bench.prefix", "what a shared prefix saves"),
    "bench structured": ("canter.cli.bench.structured", "what outputs that obey a schema cost, and cost others"),
    "bench kernels": ("canter.cli.bench.kernels", "each op beside bandwidth and peak"),
    "bench step": ("canter.cli.bench.step", "which ops the time of a step goes to"),
    "bench perplexity": ("canter.cli.bench.perplexity", "how well a text is predicted, under two settings"),
    "collect-env": ("canter.cli.collect_env", "facts of this machine for a bug report"),
}
"""Command -> the module that has it, and what it does."""

EXAMPLES = """\
  canter serve                                    the bundled model on port 8000
  canter serve ./Qwen3-0.6B --max-model-len 8k    a directory, a .gguf file, or owner/name of a hub
  canter chat                                     talk to the bundled model; no server needed
  canter chat --url http://localhost:8000/v1      talk to a running server
  canter complete -q "The capital of France is"
  canter run-batch -i requests.jsonl -o results.jsonl
  canter bench serve --url http://localhost:8000/v1 --num-prompts 64
"""


class CommandParser(Protocol):
    """What `canter.cli.args.Parser` offers, which this file does not import."""

    def parse(self, argv: Sequence[str]) -> Namespace: ...


class Command(Protocol):
    """What a command's module offers: its parser, and what to do with what was parsed. Returns an exit status."""

    def build_parser(self) -> CommandParser: ...

    def run(self, namespace: Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; `argv` leaves the program's name out. Returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] in ("-v", "-V", "--version"):
        print(f"canter {__version__}")
        return 0
    name, rest = split_command(words)
    if name is None:
        return unknown_command(words)
    return run_command(name, rest)


def split_command(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The command that the first one or two words name, and what follows it."""
    for length in (2, 1):
        name = " ".join(words[:length]).replace("_", "-")
        if name in COMMANDS:
            return name, list(words[length:])
    return None, list(words)


def run_command(name: str, words: Sequence[str]) -> int:
    """Load a command and run it; a user's mistake is one line on stderr and status 1, Ctrl-C is status 130."""
    try:
        command = load_command(COMMANDS[name][0])
        return command.run(command.build_parser().parse(words))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`canter models | head`): nobody is left to tell.
        sys.stderr.close()
        return 0
    except CanterError as error:
        print(f"canter {name}: {error}", file=sys.stderr)
        return 1


def load_command(module: str) -> Command:
    """A command's module. The one place where the command line imports late: each command brings only what it needs."""
    return cast(Command, importlib.import_module(module))


def overview() -> str:
    """What `canter --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {does}" for name, (_, does) in COMMANDS.items()]
    return "\n".join(
        [
            f"canter {__version__}: an LLM inference and serving engine",
            "",
            "usage: canter COMMAND [arguments]     canter COMMAND --help     canter --version",
            "",
            *lines,
            "",
            "examples:",
            EXAMPLES.rstrip(),
        ]
    )


def bench_overview(words: Sequence[str]) -> int:
    """`canter bench` with no benchmark after it: list them. Help is what was asked for; anything else is a mistake."""
    benches = [name for name in COMMANDS if name.startswith("bench ")]
    is_help = words[:1] in (["-h"], ["--help"], ["help"])
    problem = []
    if words and not is_help:
        near = difflib.get_close_matches(f"bench {words[0]}", benches, 1, 0.75)
        problem = [f"canter: unknown benchmark {words[0]!r}." + (f" Did you mean '{near[0]}'?" if near else "")]
    lines = [f"  canter {name:<17} {COMMANDS[name][1]}" for name in benches]
    print(
        "\n".join([*problem, "usage: canter bench NAME [flags]     canter bench NAME --help", "", *lines]),
        file=sys.stdout if is_help else sys.stderr,
    )
    return 0 if is_help else USAGE_ERROR


def unknown_command(words: Sequence[str]) -> int:
    """Name the nearest command."""
    if words[0] == "bench":
        return bench_overview(words[1:])
    near = difflib.get_close_matches(words[0], [name.split()[0] for name in COMMANDS], 1)
    hint = f"Did you mean '{near[0]}'?" if near else f"Commands: {', '.join(dict.fromkeys(name.split()[0] for name in COMMANDS))}."
    print(f"canter: unknown command {words[0]!r}. {hint}", file=sys.stderr)
    return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
