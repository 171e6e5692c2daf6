"""Where results go: a file that a later run continues, or a stream."""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from array import array
from collections.abc import Iterator
from io import FileIO
from types import TracebackType

import msgspec

from canter.cli.batch.lines import ID_PREFIX
from canter.core.errors import CanterError, ConfigError

_START = b'{"id":"' + ID_PREFIX.encode()


class _Head(msgspec.Struct):
    """What a result tells of the line that it answers."""

    id: str
    custom_id: str | None


class Output:
    """The results of a batch. `done` has the lines that are answered already: number -> `fingerprint` of the custom_id.

    Every write is whole lines. A file is locked while it is open; the end of one that a killed run left torn is cut off.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.done: dict[int, int] = {}
        try:
            self._file = _standard_output() if path == "-" else FileIO(path, "ab+")
        except OSError as error:
            raise ConfigError(f"Can't write to {path!r}: {error.strerror}.") from error
        self.is_file = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode) and path != "-"
        try:
            if self.is_file:
                self._lock()
                self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def write(self, data: bytes) -> None:
        """Append whole lines."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            raise CanterError(f"Can't write to {self.path!r}: {error.strerror}. What is written stays; run again to go on.") from error

    def put_in_order(self) -> None:
        """Give the results the order of their requests, in a new file that takes the place of the old one."""
        if not self.is_file:
            return
        numbers, offsets = array("Q"), array("Q")
        for offset, line in self._lines():
            numbers.append(_number_of(_head(line).id))
            offsets.append(offset)
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        if order == list(range(len(numbers))):
            return
        beside = f"{self.path}.{os.getpid()}.tmp"
        try:
            with open(self.path, "rb") as old, open(beside, "wb") as new:
                os.fchmod(new.fileno(), stat.S_IMODE(os.fstat(old.fileno()).st_mode))
                for i in order:
                    old.seek(offsets[i])
                    new.write(old.readline())
                new.flush()
                os.fsync(new.fileno())
            os.replace(beside, self.path)
        except OSError as error:
            if os.path.exists(beside):
                os.unlink(beside)
            raise CanterError(f"All results are in {self.path!r}, but could not be put in order: {error.strerror}.") from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"Another run is writing to {self.path!r}.") from error

    def _read(self) -> None:
        """Find what is done; cut off the torn end."""
        for number, (offset, line) in enumerate(self._lines(), 1):
            try:
                if not line.endswith(b"\n"):
                    if not (line.startswith(_START) or _START.startswith(line)):
                        raise ValueError
                    self._file.truncate(offset)
                    return
                head = _head(line)
                self.done[_number_of(head.id)] = fingerprint(head.custom_id)
            except ValueError:
                raise ConfigError(
                    f"Line {number} of {self.path!r} is no result of canter run-batch. Name another output, or remove the file."
                ) from None

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """(offset, line) for each line of the file."""
        offset = 0
        with open(self.path, "rb") as file:
            for line in file:
                yield offset, line
                offset += len(line)


def fingerprint(custom_id: str | None) -> int:
    """What is kept of a custom_id to tell whether it is the same: a number, however long it is."""
    return hash(custom_id)


def _head(line: bytes) -> _Head:
    """Raises `ValueError` for what is no result."""
    try:
        return msgspec.json.decode(line, type=_Head)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None


def _number_of(result_id: str) -> int:
    if not result_id.startswith(ID_PREFIX):
        raise ValueError(result_id)
    return int(result_id.removeprefix(ID_PREFIX))


def _standard_output() -> FileIO:
    """A stream of its own over standard output, so that nothing buffered elsewhere comes between its lines."""
    sys.stdout.flush()
    return FileIO(sys.stdout.fileno(), "wb", closefd=False)
