"""A real server, in its own processes, for end-to-end tests."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

START_SECONDS = 120


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes]

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        values = [float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith((name + "{", name + " "))]
        assert values, f"no metric {name}"
        return sum(values)

    def is_idle(self) -> bool:
        """No request alive and every block free."""
        alive = self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting")
        return alive == 0 and self.metric("canter:num_free_blocks") == self.metric("canter:num_blocks")

    def wait_idle(self, seconds: float = 30) -> None:
        wait_for(self.is_idle, seconds, "the server to be idle")


def wait_for(condition, seconds: float, what: str) -> None:
    """Poll until `condition()` holds; fails with what was awaited."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def serve(*arguments: str, ready: bool = True) -> Iterator[Server]:
    """Run `canter serve` with these arguments; stops it with SIGTERM at the end."""
    port = free_port()
    command = [sys.executable, "-m", "canter.cli.main", "serve", *arguments, "--port", str(port), "--host", "127.0.0.1"]
    process = subprocess.Popen(command, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    server = Server(f"http://127.0.0.1:{port}", process)
    try:
        if ready:
            wait_for(lambda: answers(server), START_SECONDS, "the server to be ready")
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def answers(server: Server) -> bool:
    assert server.process.poll() is None, f"the server ended with {server.process.returncode}"
    try:
        return httpx.get(f"{server.url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="session")
def bundled_server() -> Iterator[Server]:
    """The default model, with a cache that several tests share."""
    with serve("--max-model-len", "2048", "--kv-cache-memory-bytes", "1G", "--served-model-name", "smol") as server:
        yield server
