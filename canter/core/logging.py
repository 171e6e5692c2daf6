"""One logger, to stderr: `CANTER_LOG_LEVEL` (debug, info, warning, error) is its only switch."""

from __future__ import annotations

import logging
import os
import sys

_FORMAT = "%(asctime)s %(levelname).1s %(message)s"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module: pass `__name__`."""
    return logging.getLogger(name)


def configure_logging(process: str = "") -> None:
    """Send Canter's log lines to stderr, marked with the process they come from. Idempotent."""
    root = logging.getLogger("canter")
    level = os.environ.get("CANTER_LOG_LEVEL", "info").upper()
    root.setLevel(level if level in logging.getLevelNamesMapping() else "INFO")
    root.propagate = False
    root.handlers.clear()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT.replace("%(message)s", f"{process}: %(message)s") if process else _FORMAT, "%H:%M:%S"))
    root.addHandler(handler)
