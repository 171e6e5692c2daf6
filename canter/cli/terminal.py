"""What `chat` and `complete` share: where the model is, how an answer is shown, and how fast it came."""

from __future__ import annotations

import contextlib
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TextIO

from canter.cli.api import ApiClient, Piece
from canter.cli.args import add_engine_flags, engine_args, flag_words
from canter.cli.private_server import private_server
from canter.core.errors import ConfigError

THOUGHT_START = "<think>\n"
THOUGHT_END = "\n</think>\n"


def add_terminal_flags(parser: ArgumentParser, quick_help: str) -> None:
    """Flags of both commands, and the engine's for a server of one's own."""
    group = parser.add_argument_group("server")
    group.add_argument("--url", help="API root of a running server (http://localhost:8000/v1). Without it a private server is started.")
    group.add_argument("--api-key", help="Key for --url. Default: the environment variable OPENAI_API_KEY.")
    group.add_argument("--model-name", help="Which of the server's models to use. Default: the first.")
    group = parser.add_argument_group("answer")
    group.add_argument("-q", "--quick", metavar="TEXT", help=quick_help)
    group.add_argument("--stats", action="store_true", help="Print the time to the first token and the speed after each answer.")
    group.add_argument("--max-tokens", type=int, metavar="N", help="Most tokens of an answer. Default: what the server allows.")
    group.add_argument("--temperature", type=float, metavar="X", help="Randomness; 0 always takes the likeliest token.")
    group.add_argument("--top-p", type=float, metavar="X", help="Draw from the likeliest tokens that hold this share.")
    add_engine_flags(parser)


def sampling_body(namespace: Namespace) -> dict[str, float | int]:
    """The sampling fields of a request, those that were given."""
    values = {"max_tokens": namespace.max_tokens, "temperature": namespace.temperature, "top_p": namespace.top_p}
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Connection:
    """An API client and the model to ask for."""

    client: ApiClient
    model: str


@contextlib.contextmanager
def connect(namespace: Namespace) -> Iterator[Connection]:
    """Reach the server of `--url`, or start a private one with the engine flags that were given."""
    arguments = engine_args(namespace)
    words = flag_words(arguments)
    with contextlib.ExitStack() as stack:
        if namespace.url:
            if words:
                raise ConfigError(f"With --url the server already has its model; leave out {words[0]}.")
            url, key = namespace.url, namespace.api_key
        else:
            waiting = WaitingLine(f"Loading {arguments.model}", sys.stderr)
            url, key = stack.enter_context(private_server(words, waiting.show)).url, None
            waiting.clear()
        client = stack.enter_context(ApiClient(url, key))
        yield Connection(client, namespace.model_name or client.first_model())


@dataclass
class WaitingLine:
    """A line that counts seconds, redrawn in place, and only on a terminal."""

    text: str
    out: TextIO
    _shown: str = ""

    def show(self, seconds: float) -> None:
        line = f"{self.text} … {seconds:.1f} s"
        if self.out.isatty() and line != self._shown:
            self.out.write(f"\r{line}")
            self.out.flush()
            self._shown = line

    def clear(self) -> None:
        if self._shown:
            self.out.write("\r" + " " * len(self._shown) + "\r")
            self.out.flush()


@dataclass
class Answer:
    """An answer as it comes in: its text, and when its tokens came."""

    started: float = field(default_factory=time.perf_counter)
    text: str = ""
    first: float | None = None
    last: float = 0.0
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    finish_reason: str | None = None
    interrupted: bool = False

    def feed(self, piece: Piece) -> None:
        if piece.text or piece.thought:
            self.last = time.perf_counter()
            self.first = self.first or self.last
        self.text += piece.text
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.num_prompt_tokens = self.num_prompt_tokens if piece.num_prompt_tokens is None else piece.num_prompt_tokens
        self.num_output_tokens = self.num_output_tokens if piece.num_output_tokens is None else piece.num_output_tokens

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first is None else self.first - self.started

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of decoding: tokens after the first, over the time since it."""
        if self.first is None or not self.num_output_tokens or self.num_output_tokens < 2 or self.last <= self.first:
            return None
        return (self.num_output_tokens - 1) / (self.last - self.first)

    def summary(self) -> str:
        """One line: TTFT, speed, counts."""
        parts = [] if self.ttft is None else [f"TTFT {self.ttft * 1000:.0f} ms"]
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        if self.num_prompt_tokens is not None:
            parts.append(f"{self.num_prompt_tokens} prompt tokens")
        if self.num_output_tokens is not None:
            parts.append(f"{self.num_output_tokens} output tokens")
        return "[" + ", ".join(parts or ["no tokens"]) + "]"


def show_answer(pieces: Iterator[Piece], out: TextIO) -> Answer:
    """Print an answer as it comes, thoughts between marks. Ctrl-C ends the answer, and the request with it."""
    answer, thinking = Answer(), False
    try:
        for piece in pieces:
            answer.feed(piece)
            shown = ""
            if piece.thought:
                shown += piece.thought if thinking else THOUGHT_START + piece.thought
                thinking = True
            if piece.text:
                shown += THOUGHT_END + piece.text if thinking else piece.text
                thinking = False
            out.write(shown)
            out.flush()
    except KeyboardInterrupt:
        answer.interrupted = True
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()
    out.write("\n")
    return answer
