"""A slot between the task that receives outputs and the one that reads them."""

from __future__ import annotations

import asyncio

from canter.client.outputs import RequestOutput, merge_outputs
from canter.core.sampling_params import OutputKind


class Mailbox:
    """Holds at most one output: for a slow reader new ones are merged into it, so that no queue can grow.

    One writer, one reader, one event loop.
    """

    def __init__(self, kind: OutputKind) -> None:
        self._kind = kind
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None
        self._reader: asyncio.Future[None] | None = None

    @property
    def has_failed(self) -> bool:
        """Whether an error waits for the reader: then nothing more is of use to it."""
        return self._error is not None

    def put(self, output: RequestOutput) -> None:
        self._output = output if self._output is None else merge_outputs(self._output, output, self._kind)
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Raise `error` in the reader, once it has read what is there. The first error counts."""
        self._error = self._error or error
        self._wake()

    async def get(self) -> RequestOutput:
        """Wait for an output, or raise what `fail` was given."""
        while self._output is None:
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        output, self._output = self._output, None
        return output

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)
