"""How many functions may run at once, and how many answers may be on their way to the disk.

    begin ──▶ running ──▶ answering (the function is done; its ack is not durable yet) ──▶ free
               └─ at most `running_max`    └─ at most `answering_max`, or nothing new begins

A slot is free for the next message as soon as its function is done, so the disk's time limits
nothing but the number of answers that are under way. When a message is at hand at that moment the
slot goes on with it, and is never free in between.
"""

from __future__ import annotations

import asyncio

ANSWERING_MAX = 1_000


class Slots:
    """The slots of one consumer.

    >>> async def main() -> tuple[int, int]:
    ...     slots = Slots(running_max=2)
    ...     await slots.free()
    ...     slots.begin()
    ...     slots.ran()
    ...     return slots.running, slots.answering
    >>> asyncio.run(main())
    (0, 1)
    """

    def __init__(self, *, running_max: int, answering_max: int = ANSWERING_MAX) -> None:
        self.running = 0
        self.answering = 0
        self._running_max = running_max
        self._answering_max = answering_max
        self._is_closed = False
        self._changed = asyncio.Event()

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing is unanswered."""
        return not self.running and not self.answering

    @property
    def is_free(self) -> bool:
        """Whether something may begin at once."""
        return (
            self.running < self._running_max
            and self.answering < self._answering_max
            and not self._is_closed
        )

    async def free(self) -> int:
        """Wait until something may begin; return how many may: 0 when nothing may any more."""
        while not self.is_free and not self._is_closed:
            await self._change()
        return 0 if self._is_closed else self._running_max - self.running

    def close(self) -> None:
        """Let nothing more begin."""
        self._is_closed = True
        self._changed.set()

    def begin(self) -> None:
        """A function begins to run."""
        self.running += 1

    def ran(self) -> None:
        """The function of a slot is done; its answer is under way."""
        self.running -= 1
        self.answering += 1
        self._changed.set()

    @property
    def may_go_on(self) -> bool:
        """Whether a function that is done may be followed by the next one in its slot."""
        return self.answering < self._answering_max and not self._is_closed

    def went_on(self) -> None:
        """The function of a slot is done, and the next one has begun in it."""
        self.answering += 1

    def answered(self, count: int = 1) -> None:
        """The answer is durable, or will never be."""
        self.answering -= count
        self._changed.set()

    async def idle(self) -> None:
        """Wait until nothing runs and nothing is unanswered."""
        while not self.is_idle:
            await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
