"""`canter complete`: continue a text."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from canter.cli.api import ApiClient, ServerError
from canter.cli.args import Parser
from canter.cli.status import INTERRUPTED
from canter.cli.terminal import Answer, add_terminal_flags, connect, sampling_body, show_answer

EXAMPLES = """\
  canter complete -q "The capital of France is" --max-tokens 8
  echo "Once upon a time" | canter complete --temperature 0
  canter complete --url http://localhost:8000/v1
"""


def build_parser() -> Parser:
    parser = Parser("canter complete", "Continue a text. Without --quick, each line of the input is a text of its own.", EXAMPLES)
    parser.add_argument("--echo", action="store_true", help="Print the text itself before what follows it.")
    add_terminal_flags(parser, "Continue this, print it and leave.")
    return parser


def run(namespace: Namespace) -> int:
    with connect(namespace) as connection:
        body = {"model": connection.model, **sampling_body(namespace)}
        if namespace.quick is not None:
            return INTERRUPTED if complete(connection.client, body, namespace.quick, namespace).interrupted else 0
        return complete_lines(connection.client, body, namespace)


def complete_lines(client: ApiClient, body: dict[str, Any], namespace: Namespace) -> int:
    """Continue each line that is typed or piped in. A line that fails is reported; the exit status is then 1.

    Ctrl-C ends the answer; when lines are piped in, it ends the program.
    """
    status = 0
    for line in typed_lines():
        try:
            answer = complete(client, body, line, namespace)
            if answer.interrupted and not sys.stdin.isatty():
                return INTERRUPTED
        except ServerError as error:
            print(f"! {error}", file=sys.stderr)
            status = 1
    return status


def complete(client: ApiClient, body: dict[str, Any], prompt: str, namespace: Namespace) -> Answer:
    if namespace.echo:
        print(prompt, end="", flush=True)
    answer = show_answer(client.complete(body | {"prompt": prompt}), sys.stdout)
    if namespace.stats:
        print(answer.summary(), flush=True)
    return answer


def typed_lines() -> Iterator[str]:
    """Non-empty lines of the input until it ends. On a terminal there is a prompt, and Ctrl-C clears the line."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return
        except KeyboardInterrupt:
            if not prompt:
                raise
            print("\n(Ctrl-D leaves.)")
            continue
        if line.strip():
            yield line
