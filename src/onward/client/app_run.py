"""One run of an App: all its consumers, from joining their groups to leaving them.

    joining ──▶ running ──▶ stopping ──▶ left

What each of them does is `work_run`. An error of a consumer (its group was deleted, its topic
ended) stops the run, and is raised when all others have left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from types import CodeType

from onward.client.blocked import THRESHOLD_MS, LoopWatch, code_of
from onward.client.client import Client
from onward.client.work import Middleware, Work
from onward.client.work_run import Settled, WorkRun
from onward.durations import either_ms
from onward.errors import OnwardError

logger = logging.getLogger("onward.app")

STOP = "30s"


class AppRun:
    """Everything that lives from the start of an App to its end."""

    def __init__(
        self, works: Sequence[Work], *, client: Client, middleware: Sequence[Middleware] = (),
        stop_ms: int, blocked_ms: int | None = None, on_settled: Settled | None = None,
        apply: bool = False,
    ) -> None:  # fmt: skip
        self.works = works
        self._runs = [
            WorkRun(
                work, client=client, middleware=middleware, stop_ms=stop_ms, on_settled=on_settled,
                on_joined=self._note_joined, apply=apply,
            )
            for work in works
        ]  # fmt: skip
        self._watch = LoopWatch(
            _names(works),
            threshold_ms=_threshold_ms(works) if blocked_ms is None else blocked_ms,
        )
        self._error: OnwardError | None = None
        self._joined_count = 0
        self._has_joined = asyncio.Event()
        self._is_stopping = asyncio.Event()

    async def run(self) -> None:
        """Consume until told to stop; raise what ended a consumer."""
        self._watch.start()
        try:
            async with asyncio.TaskGroup() as group:
                for run in self._runs:
                    group.create_task(self._run_one(run))
                await self._is_stopping.wait()
        finally:
            self._has_joined.set()
            self._watch.stop()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Take nothing new; let what runs end, and leave."""
        self._is_stopping.set()
        for run in self._runs:
            run.stop()

    @property
    def running_count(self) -> int:
        """How many calls of functions run now."""
        return sum(run.slots.running for run in self._runs)

    async def joined(self) -> None:
        """Wait until every consumer is a member of its group, or the run is over."""
        await self._has_joined.wait()

    async def ended(self) -> None:
        """Wait until the run is told to stop, or has to."""
        await self._is_stopping.wait()

    @property
    def is_idle(self) -> bool:
        """Whether no function runs and no answer is under way."""
        return all(run.slots.is_idle for run in self._runs)

    async def _run_one(self, run: WorkRun) -> None:
        try:
            await run.run()
        except OnwardError as error:
            work = run.work
            logger.error("%r of group %r ended: %s (%s)", work.name, work.group, error, error.code)
            self._error = self._error or error
            self.stop()

    def _note_joined(self) -> None:
        self._joined_count += 1
        if self._joined_count == len(self._runs):
            self._has_joined.set()


def _names(works: Sequence[Work]) -> dict[CodeType, str]:
    """Return by which code each function is found on a stack. Those in threads block no loop."""
    codes = [(code_of(work.function), work.name) for work in works if work.is_async]
    return {code: name for code, name in codes if code is not None}


def _threshold_ms(works: Sequence[Work]) -> int:
    """Return after how long a blocked loop is worth a warning: before the first lease runs out."""
    options = [work.options for work in works]
    leases_ms = [either_ms("lease", one.get("lease"), one.get("lease_ms")) for one in options]
    return min([THRESHOLD_MS, *(lease_ms // 3 for lease_ms in leases_ms if lease_ms is not None)])
