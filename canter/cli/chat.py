"""`canter chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from canter.cli.api import ApiClient, ServerError
from canter.cli.args import Parser
from canter.cli.status import INTERRUPTED
from canter.cli.terminal import Answer, add_terminal_flags, connect, sampling_body, show_answer

try:
    import readline
except ImportError:  # a Python that was built without it: lines can still be typed
    readline = None  # type: ignore[assignment]

EXAMPLES = """\
  canter chat                                     the bundled model, on a private server
  canter chat ./model.gguf --max-model-len 4k
  canter chat --url http://localhost:8000/v1      a running server
  canter chat -q "Name three rivers." --stats     one answer, then leave
"""

HELP = """\
/system TEXT   set the system prompt (without TEXT: show it) and begin anew
/clear         forget the conversation
/stats         show or hide times after each answer
/help          this text
/exit          leave; so does Ctrl-D
Ctrl-C stops an answer."""

HISTORY_LINES = 1000


def build_parser() -> Parser:
    parser = Parser("canter chat", "Talk to a model in the terminal. /help inside lists what you can type.", EXAMPLES)
    parser.add_argument("--system-prompt", metavar="TEXT", help="A system message that every conversation begins with.")
    add_terminal_flags(parser, "Ask this, print the answer and leave.")
    return parser


def run(namespace: Namespace) -> int:
    with connect(namespace) as connection:
        chat = Chat(connection.client, connection.model, sampling_body(namespace), namespace.system_prompt, namespace.stats)
        if namespace.quick is not None:
            return INTERRUPTED if chat.ask(namespace.quick).interrupted else 0
        with line_history():
            chat.loop()
    return 0


@dataclass
class Chat:
    """A conversation with one model: the messages so far, and what is typed into it."""

    client: ApiClient
    model: str
    sampling: dict[str, Any]
    system_prompt: str | None = None
    stats: bool = False
    out: TextIO = field(default_factory=lambda: sys.stdout)
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system prompt."""
        self.messages = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []

    def ask(self, text: str) -> Answer:
        """Send a message and show the answer. An answer that fails leaves no trace in the conversation."""
        turn = [*self.messages, {"role": "user", "content": text}]
        answer = show_answer(self.client.chat({"model": self.model, "messages": turn, **self.sampling}), self.out)
        self.messages = [*turn, {"role": "assistant", "content": answer.text}]
        if self.stats:
            self.say(answer.summary())
        return answer

    def loop(self) -> None:
        """Read lines until /exit or Ctrl-D. Errors of the server are shown, and the conversation goes on."""
        self.say(f"Chatting with {self.model}. /help for commands, Ctrl-D to leave.")
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                self.say("")
                return
            except KeyboardInterrupt:
                self.say("\n(Ctrl-D leaves.)")
                continue
            if line.startswith("/"):
                if not self.command(line):
                    return
            elif line:
                self.try_ask(line)

    def try_ask(self, text: str) -> None:
        try:
            self.ask(text)
        except ServerError as error:
            self.say(f"! {error}")

    def command(self, line: str) -> bool:
        """Do what a line that starts with a slash says. Returns False when it says to leave."""
        name, _, rest = line.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/clear":
            self.clear()
            self.say("Forgotten.")
        elif name == "/system":
            self.set_system_prompt(rest.strip())
        elif name == "/stats":
            self.stats = not self.stats
            self.say("Times are shown." if self.stats else "Times are hidden.")
        else:
            self.say(HELP if name == "/help" else f"No command {name}.\n{HELP}")
        return True

    def set_system_prompt(self, text: str) -> None:
        if text:
            self.system_prompt = text
            self.clear()
        self.say(f"System prompt: {self.system_prompt or '(none)'}")

    def say(self, text: str) -> None:
        print(text, file=self.out, flush=True)


def history_file() -> Path:
    """Where typed lines are kept, by the XDG convention."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "canter" / "chat_history"


@contextlib.contextmanager
def line_history() -> Iterator[None]:
    """Line editing with the lines of earlier conversations, kept for later ones. Without a terminal it does nothing."""
    if readline is None or not sys.stdin.isatty():
        yield
        return
    path = history_file()
    readline.set_history_length(HISTORY_LINES)
    with contextlib.suppress(OSError):  # no history yet, or an unreadable one: nothing that should stop a conversation
        readline.read_history_file(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
