"""Exit statuses of the command line, besides 0 for success and 1 for failure."""

from __future__ import annotations

import signal

USAGE_ERROR = 2
INTERRUPTED = 128 + signal.SIGINT
