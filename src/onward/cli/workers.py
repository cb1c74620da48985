"""Processes that are started again when they die, until they are told to stop.

    starting ──▶ running ──▶ dead ──▶ a pause, longer each time ──▶ starting ...
                                 └──▶ exit code 2 or 7: another one would end the same way, so all
                                      stop

    first signal    SIGTERM to all of them; each ends what it does
    second signal   SIGKILL to all of them

They are in sessions of their own, so ctrl-C reaches only this process, which tells them once. Each
has a pipe as stdin whose other end is here: it ends when this process does, however that came.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence

from onward.client.signals import on_signals

logger = logging.getLogger("onward.run")

WORKER_VARIABLE = "ONWARD_WORKER"
PAUSE_S_MIN = 0.5
PAUSE_S_MAX = 30.0
EXIT_WRONG = 2
"""How a worker ends when a request of its App is wrong: only a change of the program helps."""
EXIT_CONFLICT = 7
"""How a worker ends when a group has other settings than its App: only an operator helps."""
EXITS_FOR_GOOD = (EXIT_WRONG, EXIT_CONFLICT)
STEADY_S = 60.0
"""One that lived so long did not die of how it starts."""


def next_pause_s(pause_s: float, *, lived_s: float) -> float:
    """Return how long to wait before the next start.

    >>> [next_pause_s(pause_s, lived_s=1) for pause_s in (0, 0.5, 16, 30)]
    [0.5, 1.0, 30.0, 30.0]
    >>> next_pause_s(30, lived_s=3600)
    0.5
    """
    if lived_s >= STEADY_S:
        return PAUSE_S_MIN
    return min(max(2 * pause_s, PAUSE_S_MIN), PAUSE_S_MAX)


async def supervise(command: Sequence[str], count: int) -> int:
    """Keep `count` processes alive until a signal; return 0 when all of them ended well.

    2 or 7 when one of them said that its App cannot run: then none is started again.
    """
    workers = Workers(command)
    with on_signals(workers.stop, workers.kill):
        async with asyncio.TaskGroup() as group:
            for number in range(1, count + 1):
                group.create_task(workers.keep_alive(number))
    if workers.gave_up_with:
        return workers.gave_up_with
    return 0 if workers.ended_well else 1


class Workers:
    """All processes of one parent."""

    def __init__(self, command: Sequence[str]) -> None:
        self.ended_well = True
        self.gave_up_with = 0
        """The exit code of the worker after which no other one was started."""
        self._command = command
        self._alive: set[Process] = set()
        self._is_stopping = asyncio.Event()

    def stop(self) -> None:
        """Tell all of them to end."""
        if not self._is_stopping.is_set():
            count = len(self._alive)
            words = "1 worker ends" if count == 1 else f"{count} workers end"
            logger.info("stopping: %s what runs; press again to leave at once", words)
        self._is_stopping.set()
        for process in self._alive:
            process.terminate()

    def kill(self) -> None:
        """End all of them."""
        for process in self._alive:
            process.kill()

    async def keep_alive(self, number: int) -> None:
        """Start a process, and another one whenever it has died, until told to stop."""
        loop = asyncio.get_running_loop()
        pause_s = 0.0
        while not self._is_stopping.is_set():
            started_at = loop.time()
            code = await self._run_one(number)
            if self._is_stopping.is_set():
                self.ended_well &= code == 0
                return
            if code in EXITS_FOR_GOOD:
                self._give_up(number, code)
                return
            pause_s = next_pause_s(pause_s, lived_s=loop.time() - started_at)
            logger.warning(
                "worker %d ended with %s; the next one starts in %.1f s",
                number, _ending(code), pause_s,
            )  # fmt: skip
            await self._pause(pause_s)

    def _give_up(self, number: int, code: int) -> None:
        logger.error(
            "worker %d ended with exit code %d: its app cannot run as it is (it says why above), "
            "and another worker could not either; stopping", number, code,
        )  # fmt: skip
        self.gave_up_with, self.ended_well = self.gave_up_with or code, False
        self.stop()

    async def _run_one(self, number: int) -> int:
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, start_new_session=True,
            env={**os.environ, WORKER_VARIABLE: str(number)},
        )  # fmt: skip
        self._alive.add(process)
        if self._is_stopping.is_set():
            process.terminate()
        logger.info("worker %d started: pid %d", number, process.pid)
        try:
            return await process.wait()
        finally:
            self._alive.discard(process)

    async def _pause(self, pause_s: float) -> None:
        try:
            async with asyncio.timeout(pause_s):
                await self._is_stopping.wait()
        except TimeoutError:
            return


def _ending(code: int) -> str:
    """Say how a process ended.

    >>> _ending(1), _ending(-9)
    ('exit code 1', 'signal SIGKILL')
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
