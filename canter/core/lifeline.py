"""A child process that must not outlive its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """End this process with the one that started it, which holds our stdin open as long as it lives."""
    if sys.platform == "linux":
        # Also while it is stopped and can't read the end of its stdin.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_exit_with_parent, name="canter-parent-watch", daemon=True).start()


def _exit_with_parent() -> None:
    # Not through `sys.stdin`: its lock, held here while waiting, would abort the interpreter's exit.
    while os.read(0, 1 << 16):
        continue
    os._exit(0)
