"""`make demo`: serve the bundled model, stream one answer through the `openai` client, and say what to try next."""

from __future__ import annotations

import sys
import time
from argparse import Namespace

import openai

from canter.cli.api import Piece
from canter.cli.args import Parser, add_engine_flags, engine_args, flag_words
from canter.cli.private_server import Server, private_server
from canter.cli.status import INTERRUPTED
from canter.cli.terminal import Answer, WaitingLine
from canter.core.errors import CanterError

QUESTION = "In two sentences: why is the sky blue?"
MAX_TOKENS = 96

NEXT = """\
Try next, after `source .venv/bin/activate`:
  canter chat --temperature 0.2      talk to the model (a small one: what it says of the world is often invented)
  canter serve                       the OpenAI API on port 8000
  canter serve MODEL                 a directory, a .gguf file, or owner/name of a hub
  canter bench latency               speed beside the machine's limit
  canter --help                      everything else"""


def build_parser() -> Parser:
    parser = Parser("python -m canter.cli.demo", "Serve a model, ask it one question through the openai client, and stop.")
    parser.add_argument("--question", default=QUESTION, help=f"Default: {QUESTION!r}")
    add_engine_flags(parser)
    return parser


def run(namespace: Namespace) -> int:
    """Show one answer. Any failure is one sentence on stderr and status 1."""
    arguments = engine_args(namespace)
    print(f"Starting `canter serve {arguments.model}` on a free port ...", flush=True)
    waiting = WaitingLine("loading", sys.stderr)
    with private_server(flag_words(arguments), waiting.show) as server:
        waiting.clear()
        print(f"Ready after {time.perf_counter() - server.started:.1f} s at {server.url}\n\n> {namespace.question}\n", flush=True)
        answer = ask(server, namespace.question)
    if not answer.text.strip():
        raise CanterError("The model answered with no text.")
    print(f"\n\n{answer.summary()}\n\n{NEXT}")
    return 0


def ask(server: Server, question: str) -> Answer:
    """Stream a chat answer to stdout through the official client."""
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    answer = Answer()
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        max_tokens=MAX_TOKENS,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        text = chunk.choices[0].delta.content or "" if chunk.choices else ""
        counts = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) if chunk.usage is not None else (None, None)
        answer.feed(Piece(text, "", None, *counts))
        print(text, end="", flush=True)
    return answer


def main(argv: list[str] | None = None) -> int:
    try:
        return run(build_parser().parse(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return INTERRUPTED
    except (CanterError, openai.OpenAIError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
