"""Read-only memory maps of checkpoint files."""

from __future__ import annotations

import mmap
from pathlib import Path

from canter.core.errors import CheckpointError


class MappedFile:
    """A file mapped for reading. What `slice` gives costs no memory of its own and keeps the map alive.

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
        self._bytes = memoryview(self.buffer)

    def slice(self, offset: int, nbytes: int) -> memoryview:
        """A range of the file."""
        return self._bytes[offset : offset + nbytes]

    def release(self, offset: int, nbytes: int) -> None:
        """Give the physical pages of a range that has been used back to the system; a later read maps them again."""
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0:
            self.buffer.madvise(mmap.MADV_DONTNEED, start, length)

    def release_all(self) -> None:
        """Give all physical pages back: also those that the system mapped around the ranges that were read."""
        self.buffer.madvise(mmap.MADV_DONTNEED)
