"""What an engine process leaves behind when it dies: which requests it ran.

A message would be lost with the process. This is a file without a name that both processes hold open: what was written
to it is there for the reader, however the writer ended.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable

import msgspec


def make_black_box() -> int:
    """The descriptor of a new black box, in memory where the system can. The caller closes it."""
    if sys.platform == "linux":
        return os.memfd_create("canter-black-box")
    with tempfile.TemporaryFile(prefix="canter-") as file:
        return os.dup(file.fileno())


def write_running(fd: int, request_ids: Iterable[str]) -> None:
    """Replace what is recorded."""
    data = msgspec.msgpack.encode(list(request_ids))
    os.pwrite(fd, len(data).to_bytes(8, "little") + data, 0)


def read_running(fd: int) -> frozenset[str] | None:
    """The ids that were written last, or None when none ever were: then nothing is known."""
    size = int.from_bytes(os.pread(fd, 8, 0), "little")
    return frozenset(msgspec.msgpack.decode(os.pread(fd, size, 8), type=list[str])) if size else None
