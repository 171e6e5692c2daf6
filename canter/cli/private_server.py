"""A server of one's own: started on a free port of this machine, stopped when the block ends, dead when its parent dies."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

import httpx

from canter.core.errors import EngineDeadError

HOST = "127.0.0.1"
STOP_SECONDS = 15.0
POLL_SECONDS = 0.02
LOG_LINES = 25
ERROR_PREFIX = "canter: error: "
OWN_FLAGS = ("--disable-uvicorn-access-log",)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Server:
    """A running server: its API root, its process, what it has logged, and when its process was started (`perf_counter`)."""

    url: str
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    started: float

    @property
    def root(self) -> str:
        """The address without `/v1`."""
        return self.url.removesuffix("/v1")

    def log_text(self) -> str:
        """Everything that the server has written to stderr and stdout."""
        self.log.flush()
        with open(self.log.name, encoding="utf-8", errors="replace") as file:
            return file.read()


@contextlib.contextmanager
def private_server(
    words: Sequence[str], on_wait: Callable[[float], None] = lambda seconds: None, log_level: str | None = None
) -> Iterator[Server]:
    """Run `canter serve` with the flags `words` and yield once it answers; `on_wait` hears the seconds waited so far.

    `log_level` None leaves the environment's. The log can be read from the server while it runs.
    Raises `EngineDeadError` with the end of the server's log when it does not come up.
    """
    with tempfile.NamedTemporaryFile(prefix="canter-server-", suffix=".log") as log:
        server = start(words, log, log_level)
        try:
            wait_until_ready(server, on_wait)
            yield server
        finally:
            stop(server)


def start(words: Sequence[str], log: IO[bytes], log_level: str | None = None) -> Server:
    """Start the process. A session of its own keeps the terminal's Ctrl-C from it."""
    port = free_port()
    command = [sys.executable, "-m", "canter.cli.main", "serve", *words, *OWN_FLAGS, "--host", HOST, "--port", str(port)]
    environment = os.environ | ({} if log_level is None else {"CANTER_LOG_LEVEL": log_level})
    started = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )
    return Server(f"http://{HOST}:{port}/v1", process, log, started)


def _die_with_parent() -> None:
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(server: Server, on_wait: Callable[[float], None]) -> None:
    """Poll `/health` until it is 200. There is no time limit, since large models load long; a dead process ends the wait."""
    with httpx.Client(timeout=5.0, trust_env=False) as http:
        while not _is_healthy(http, server.root):
            if server.process.poll() is not None:
                raise EngineDeadError(reason_of_end(server.log_text(), server.process.returncode))
            on_wait(time.perf_counter() - server.started)
            time.sleep(POLL_SECONDS)


def reason_of_end(log: str, status: int) -> str:
    """Why a server ended: the sentence that it ended with, or else the last lines of its log."""
    lines = log.splitlines()
    told = [line.removeprefix(ERROR_PREFIX) for line in lines if line.startswith(ERROR_PREFIX)]
    return told[-1] if told else "\n".join([f"The server ended with status {status} before it was ready:", *lines[-LOG_LINES:]])


def _is_healthy(http: httpx.Client, root: str) -> bool:
    try:
        return http.get(f"{root}/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def stop(server: Server) -> None:
    """End the process: politely, then by force."""
    if server.process.poll() is not None:
        return
    server.process.terminate()
    try:
        server.process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
