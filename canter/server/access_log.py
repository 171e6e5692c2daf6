"""A line for each HTTP request, when its answer has ended: as text, or as a JSON object for machines to read."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
from starlette.types import Scope

from canter.server.auth import OPEN_PATHS
from canter.server.request_ids import request_id_of

_encoder = msgspec.json.Encoder()


class AccessLog:
    """Leaves out health checks, metrics and the paths in `silent`. `form` is text or json; lines are of the level info."""

    def __init__(self, form: str, silent: Sequence[str], level: str) -> None:
        self._silent = OPEN_PATHS.union(silent)
        self._logger = logging.getLogger("canter.access")
        self._logger.setLevel("DEBUG" if level == "trace" else level.upper())
        self._as_json = form == "json"
        # JSON stands alone on its line, without the time and level that other lines begin with.
        self._logger.handlers = [logging.StreamHandler(sys.stderr)] if self._as_json else []
        self._logger.propagate = not self._as_json

    def write(self, scope: Scope, status: int, num_bytes: int, seconds: float) -> None:
        """Log one request."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in self._silent or not self._logger.isEnabledFor(logging.INFO):
            return
        client = scope.get("client")
        fields = {
            "time": datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds"),
            "client": f"{client[0]}:{client[1]}" if client else "",
            "method": scope["method"],
            "path": _target(scope),
            "protocol": f"HTTP/{scope['http_version']}",
            "status": status,
            "bytes": num_bytes,
            "seconds": round(seconds, 6),
            "request_id": request_id_of(scope),
        }
        if self._as_json:
            self._logger.info("%s", _encoder.encode(fields).decode())
        else:
            line = '%(client)s "%(method)s %(path)s %(protocol)s" %(status)d %(bytes)d bytes %(seconds).3f s %(request_id)s'
            self._logger.info("%s", line % fields)


def _target(scope: Scope) -> str:
    """Path and query as they were sent, with nothing in them that could pass for another line."""
    query = scope.get("query_string", b"")
    sent = (scope.get("raw_path") or scope["path"].encode()) + (b"?" + query if query else b"")
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in sent.decode("latin-1"))
