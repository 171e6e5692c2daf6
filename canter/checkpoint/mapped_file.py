"""Read-only memory maps of checkpoint files."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from canter.core.errors import CheckpointError

Bytes = npt.NDArray[np.uint8]


class MappedFile:
    """A file mapped for reading. Slices of `bytes` cost no memory of their own and keep the map alive.

    Raises `CheckpointError` for files that are missing, unreadable or empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise CheckpointError(f"{path}: the file is empty.") from None
        except OSError as error:
            raise CheckpointError(f"{path}: can't read the file: {error.strerror or error}.") from None
        self.size = len(self.buffer)
        self.bytes: Bytes = np.frombuffer(self.buffer, dtype=np.uint8)

    def release(self, offset: int, nbytes: int) -> None:
        """Give the physical pages of a range that has been used back to the system; a later read maps them again."""
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0:
            self.buffer.madvise(mmap.MADV_DONTNEED, start, length)

    def release_all(self) -> None:
        """Give all physical pages back: also those that the system mapped around the ranges that were read."""
        self.buffer.madvise(mmap.MADV_DONTNEED)
