"""Install the clients into an environment of their own, and run each, unmodified, against a server with the bundled model.

python tests/clients/run.py [NAME...]

Names are those of the scripts (`openai`, `ai`, ...). The environment lies in `.clients`, or where CANTER_CLIENTS says. The last thing
that is printed is a table: client, version, checks, result. The exit code is 1 if a check failed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from canter.checkpoint.resolve import resolve
from canter.core.config import DEFAULT_MODEL
from canter.text.tokenizer import load_tokenizer

HERE = Path(__file__).resolve().parent
HOME = Path(os.environ.get("CANTER_CLIENTS", HERE.parents[1] / ".clients"))
PYTHON = HOME / "venv" / "bin" / "python"
KEY = "a key of the clients"
MODEL = "smol"
START_SECONDS = 180
CLIENT_SECONDS = 600
NAMES = {"openai": "openai", "anthropic": "anthropic", "langchain": "langchain-openai", "litellm": "litellm", "ai": "ai (npm)",
         "ollama": "ollama", "lm_eval": "lm-eval", "shutdown": "errors in mid-stream"}  # fmt: skip
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "DO_NOT_TRACK": "1", "AI_SDK_LOG_WARNINGS": "false"}


@dataclass
class Outcome:
    """What one client's script has told."""

    name: str
    version: str = "?"
    checks: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)

    def row(self) -> tuple[str, str, str, str]:
        result = "ok" if not self.problems else "FAILED: " + ", ".join(self.problems)
        return NAMES[self.name], self.version, f"{len(self.checks) - len(self.problems)}/{len(self.checks)}", result


def install() -> None:
    """Bring the environment up to what `requirements.txt` and `package.json` ask for; done once for each state of theirs."""
    HOME.mkdir(parents=True, exist_ok=True)
    with once("requirements.txt") as needed:
        if needed:
            if not PYTHON.exists():
                subprocess.run([sys.executable, "-m", "venv", str(HOME / "venv")], check=True)
            subprocess.run([str(PYTHON), "-m", "pip", "install", "-q", "-r", str(HERE / "requirements.txt")], check=True)
    with once("package.json") as needed:
        if needed:
            (HOME / "node").mkdir(exist_ok=True)
            shutil.copy(HERE / "package.json", HOME / "node")
            command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
            subprocess.run(command, cwd=HOME / "node", check=True)


@contextlib.contextmanager
def once(name: str) -> Iterator[bool]:
    """Whether something is to be done for the state of a file; remembered if it was."""
    stamp, state = HOME / f"{name}.stamp", hashlib.sha256((HERE / name).read_bytes()).hexdigest()
    needed = not stamp.exists() or stamp.read_text() != state
    yield needed
    stamp.write_text(state)


def write_tokenizer() -> Path:
    """The bundled model's tokenizer as files that `transformers` reads: lm-eval tokenizes for itself."""
    folder = HOME / "tokenizer"
    folder.mkdir(exist_ok=True)
    tokenizer = load_tokenizer(resolve(DEFAULT_MODEL))
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.eos_token, "model_max_length": 2048}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@contextlib.contextmanager
def server() -> Iterator[dict[str, str]]:
    """A server with the bundled model; yields what the scripts need to know of it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--api-key", KEY, "--served-model-name", MODEL, "--max-model-len", "2048",
                 "--kv-cache-memory-bytes", "512M", "--tool-call-parser", "hermes", "--disable-uvicorn-access-log"]  # fmt: skip
    process = subprocess.Popen([sys.executable, "-m", "canter.cli.main", "serve", *arguments])
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + START_SECONDS
        while not healthy(url):
            if process.poll() is not None or time.monotonic() > end:
                sys.exit("The server did not start.")
            time.sleep(0.2)
        yield {"CANTER_URL": url, "CANTER_KEY": KEY, "CANTER_MODEL": MODEL, "CANTER_PID": str(process.pid)}
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(60)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def run_client(name: str, environment: dict[str, str]) -> Outcome:
    """Run a client's script and read what it tells; what it writes to stderr is passed on."""
    script = HERE / ("check_ai.mjs" if name == "ai" else f"check_{name}.py")
    command = ["node", str(script)] if name == "ai" else [str(PYTHON), str(script)]
    outcome = Outcome(name)
    more = {"CANTER_NODE": str(HOME / "node"), "CANTER_TOKENIZER": str(HOME / "tokenizer")}
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OPENAI_", "ANTHROPIC_", "OLLAMA_", "PYTHONPATH"))}
    try:
        done = subprocess.run(
            command, env={**clean, **OFFLINE, **environment, **more}, stdout=subprocess.PIPE, text=True, timeout=CLIENT_SECONDS
        )
        output, ended = done.stdout, f"the script ended with {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output, ended = (error.stdout or b"").decode(), f"the script ran for more than {CLIENT_SECONDS} s"
    for line in output.splitlines():
        if not line.startswith(('{"version"', '{"check"')):
            continue
        told = json.loads(line)
        outcome.version = told.get("version", outcome.version)
        if "check" in told:
            outcome.checks.append(told["check"])
            print(f"{name}: {told['check']}: {'FAILED' if told['problem'] else 'ok'}", flush=True)
            if told["problem"]:
                outcome.problems[told["check"]] = told["problem"]
                print(told["problem"], flush=True)
    if not outcome.problems and not ended.endswith(" 0"):
        outcome.problems[ended] = ended
    return outcome


def print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def main(names: list[str]) -> int:
    unknown = set(names) - set(NAMES)
    if unknown:
        sys.exit(f"There are no clients {', '.join(sorted(unknown))}; known: {', '.join(NAMES)}.")
    chosen = names or list(NAMES)
    install()
    write_tokenizer()
    outcomes = []
    with server() as environment:
        outcomes += [run_client(name, environment) for name in chosen if name != "shutdown"]
    if "shutdown" in chosen:
        with server() as environment:
            outcomes.append(run_client("shutdown", environment))
    print()
    print_table([("client", "version", "checks", "result"), *(outcome.row() for outcome in outcomes)])
    return int(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
