"""The start of an engine process: so little that it can come before everything else, since the engine has the most to load.

`EngineChild` takes it from there.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence

from canter.core.black_box import make_black_box

ENGINE_COMMAND = (sys.executable, "-m", "canter.engine")


class EngineLaunch:
    """A process that loads its modules and waits to be told what to serve. `black_box` is the descriptor that it holds with us.

    Whoever has one sees to it that the process ends: an `EngineChild`, or `discard`. Raises `OSError`.
    """

    def __init__(self, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self.command = tuple(command)
        self.black_box = make_black_box()
        # A session of its own keeps a terminal's Ctrl-C from the engine, so that requests can be drained.
        self.process = subprocess.Popen(self.command, bufsize=0, stdin=subprocess.PIPE, start_new_session=True, pass_fds=(self.black_box,))

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def tell(self, line: bytes) -> None:
        """Write what it waits for. One that has died can't be told: its exit code says more."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line)  # stays open: its end tells the engine that this process is gone

    def close(self) -> None:
        """Give everything back but the process; its stdin closes, so a living one ends. Idempotent."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self.black_box >= 0:
            os.close(self.black_box)
            self.black_box = -1

    def discard(self) -> None:
        """Close, and end the process at once where it still runs: nobody took it over."""
        self.close()
        self.process.kill()
        self.process.wait()
