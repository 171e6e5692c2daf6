"""One of several frontend processes: `python -m canter.server.frontend`, started by `canter/server/fleet.py`.

The parent writes one line of JSON to its stdin: {"address": where the exchange listens, "identity": our name there,
"listener": descriptor of the socket that clients connect to, "engine", "server": arguments}. It ends when the exchange says
so, and at once when its stdin closes: then the parent is gone.
"""

from __future__ import annotations

import json
import signal
import socket
import sys

from canter.core.config import EngineArgs
from canter.core.lifeline import end_with_parent
from canter.core.logging import configure_logging
from canter.server.args import ServerArgs
from canter.server.serve import run_frontend


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches the parent, which stops this process
    start = json.loads(sys.stdin.readline())
    configure_logging(f"frontend {start['identity']}")
    end_with_parent()
    listener = socket.socket(fileno=start["listener"])
    listener.setblocking(False)
    return run_frontend(EngineArgs(**start["engine"]), ServerArgs(**start["server"]), listener, start["address"], start["identity"])


if __name__ == "__main__":
    sys.exit(main())
