"""Processes of the engines that are compared: drivers that take orders, servers, and what they hold in memory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.driver import PREFIX


class EngineFailed(RuntimeError):
    """An engine ended or answered nonsense; the message holds the end of what it said."""


class EngineProcess:
    """A process group of its own, whose output goes to a file and, with `orders`, whose answers are read line by line.

    While another engine is measured it is stopped by a signal, so that a loaded engine costs the other nothing but memory.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None, orders: bool = False) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self.started = time.perf_counter()
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE} if orders else {"stdin": subprocess.DEVNULL}
        pipes.setdefault("stdout", self.log)
        self._process = subprocess.Popen(command, env=dict(os.environ) | dict(env or {}), stderr=self.log, start_new_session=True, **pipes)
        self.command = list(command)

    def ask(self, order: Mapping[str, Any] | None) -> dict[str, Any]:
        """Send an order (None: only wait) and return the answer."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        if order is not None:
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
        for line in process.stdout:
            text = line.decode(errors="replace")
            if text.startswith(PREFIX):
                return dict(json.loads(text[len(PREFIX) :]))
            self.log.write(line)
        raise self.failure()

    def failure(self) -> EngineFailed:
        return EngineFailed(f"{' '.join(self.command)} ended with status {self._process.wait()}:\n{self.tail()}")

    def tail(self, num_bytes: int = 2000) -> str:
        """The end of what the process wrote."""
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - num_bytes))
        return self.log.read().decode(errors="replace")

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def pause(self) -> None:
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def peak_bytes(self) -> int:
        """The most memory that was ever resident, of each process of the tree that still runs, added."""
        return sum(_status_bytes(pid, "VmHWM") for pid in _tree(self._process.pid))

    def close(self) -> None:
        """End the whole group: politely, then not."""
        pid = self._process.pid
        for number, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)
                os.killpg(pid, signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout, self.log):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def run_tool(command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """The output of a command that ends by itself. Raises `EngineFailed` with its last words when it fails."""
    result = subprocess.run(command, env=dict(os.environ) | dict(env or {}), capture_output=True, text=True, errors="replace")
    if result.returncode != 0:
        raise EngineFailed(f"{' '.join(command)} ended with status {result.returncode}:\n{result.stderr[-2000:]}")
    return result.stdout


def _tree(root: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def _status_bytes(pid: int, key: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return 0
