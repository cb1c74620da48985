"""Reading in a thread: the same batches and messages, for `for`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any

from onward.client.reader import ReadBatch, Reader
from onward.errors import NotConnected
from onward.message.message import Message


class SyncReader:
    """A topic being read by a thread. Use it with `for`, or its `batches()`, once."""

    def __init__(self, reader: Reader, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._reader = reader
        self._run = run

    def __iter__(self) -> Iterator[Message]:
        """Give each message."""
        for batch in self.batches():
            yield from self._reader.wanted(batch)

    def batches(self) -> Iterator[ReadBatch]:
        """Give each batch as it was published; the last may reach over the end of the read."""
        batches = self._reader.batches()
        try:
            while (batch := self._run(_next(batches))) is not None:
                yield batch
        finally:
            with contextlib.suppress(NotConnected):
                self._run(_close(batches))


async def _next(batches: AsyncGenerator[ReadBatch]) -> ReadBatch | None:
    return await anext(batches, None)


async def _close(batches: AsyncGenerator[ReadBatch]) -> None:
    await batches.aclose()
