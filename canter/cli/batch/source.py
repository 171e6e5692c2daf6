"""Where the requests of a batch come from: a file, which is looked through first, or a stream."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from io import FileIO

from canter.cli.batch.lines import Line, custom_id_of, split_lines
from canter.cli.batch.output import fingerprint
from canter.core.errors import ConfigError

STDIN = 0
LINE_EXTRA_BYTES = 1 << 16
"""Room for what is around the body of a request."""


@dataclass(frozen=True)
class Source:
    """A file of requests, or standard input (`-`). `longest_body`: bytes of a body, longer ones are not read."""

    path: str
    longest_body: int

    @property
    def is_stream(self) -> bool:
        """Whether it can be read only once."""
        return self.path == "-" or not os.path.isfile(self.path)

    def verify(self) -> None:
        """Raises `ConfigError` when there is nothing to read: before a model is loaded for it."""
        if self.path != "-" and (os.path.isdir(self.path) or not os.access(self.path, os.R_OK)):
            raise ConfigError(f"Can't read {self.path!r}: {'a directory' if os.path.isdir(self.path) else 'no such file, or no right to'}.")

    def portions(self) -> Iterator[list[Line]]:
        """The lines, in portions. Raises `ConfigError` when the file can't be read."""
        try:
            with self._open() as file:
                yield from split_lines(lambda size: _read(file, size), self.longest_body + LINE_EXTRA_BYTES)
        except (OSError, EOFError) as error:
            raise ConfigError(f"Can't read {self.path!r}: {getattr(error, 'strerror', None) or error}.") from error

    def check(self, done: Mapping[int, int]) -> int:
        """How many lines there are. Raises `ConfigError` when results are not of these lines."""
        count, known = 0, 0
        for portion in self.portions():
            for line in portion:
                count += 1
                if line.number in done:
                    known += 1
                    check_done(line, done)
        if known < len(done):
            raise ConfigError("The output has results of lines that the input does not have. Name another output, or remove it.")
        return count

    def _open(self) -> gzip.GzipFile | FileIO:
        if self.path == "-":
            # Not sys.stdin: a thread that waits in its lock would spoil the interpreter's own exit.
            return FileIO(STDIN, "rb", closefd=False)
        return gzip.GzipFile(self.path) if self.path.endswith(".gz") else FileIO(self.path)


def _read(file: gzip.GzipFile | FileIO, size: int) -> bytes:
    """Some bytes as soon as there are any; none at the end."""
    return file.read1(size) if isinstance(file, gzip.GzipFile) else file.read(size)


def check_done(line: Line, done: Mapping[int, int]) -> None:
    """Raises `ConfigError` when the result of a line bears another custom_id."""
    if fingerprint(None if line.data is None else custom_id_of(line.data)) != done[line.number]:
        raise ConfigError(
            f"The output is not of this input: line {line.number} had another custom_id. Name another output, or remove the file."
        )


@contextlib.asynccontextmanager
async def read_ahead(source: Source) -> AsyncIterator[AsyncIterator[list[Line]]]:
    """The portions, read by a thread, one ahead of who takes them.

    The thread is a daemon: one that waits for a terminal or a pipe can't hold up the end of the program.
    """
    loop = asyncio.get_running_loop()
    portions: asyncio.Queue[list[Line] | Exception | None] = asyncio.Queue(1)

    def hand_over(item: list[Line] | Exception | None) -> None:
        putting = portions.put(item)
        try:
            asyncio.run_coroutine_threadsafe(putting, loop).result()
        except RuntimeError:
            putting.close()
            raise

    def work() -> None:
        # RuntimeError, CancelledError: the loop has ended before the file did.
        with contextlib.suppress(RuntimeError, CancelledError):
            try:
                for portion in source.portions():
                    hand_over(portion)
            except Exception as error:
                hand_over(error)
            else:
                hand_over(None)

    async def taken() -> AsyncIterator[list[Line]]:
        while (item := await portions.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    threading.Thread(target=work, name="batch-reader", daemon=True).start()
    portions_taken = taken()
    try:
        yield portions_taken
    finally:
        await portions_taken.aclose()  # type: ignore[attr-defined]
