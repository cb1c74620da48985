"""Tasks of one part of the broker: none fails unseen, and the part ends all of them with itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from onward.errors import OnwardError

T = TypeVar("T")


class Tasks:
    """Starts tasks, reports bugs in them, and ends what is left.

    Errors that are expected belong to whoever awaits the task, if anyone does.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, OnwardError | OSError):
            self._logger.error("a task failed", exc_info=error)

    def cancel(self) -> None:
        """Cancel all tasks, without waiting for their end."""
        for task in self._running:
            task.cancel()

    async def drain(self) -> None:
        """Return when all tasks have ended."""
        if self._running:
            await asyncio.wait(self._running)
