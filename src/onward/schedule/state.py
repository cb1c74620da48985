"""What is durable of the schedule, as a fold of the log: what has fired, what never will.

    batch of `@schedule`    its rows wait; the rows that it replaces will not fire
    fired batch             its topic has fired up to (time of the batch, last schedule id)
    row `cancelled`         these numbers will not fire

Rows fire in the order of (at_ms, number), a step at a time; a step is one commit, but a torn commit
may hold the batches of some topics and not of others. So each topic has a cursor of its own, and
`last` is where the last step ended that is known to be whole: a later step began. What waits itself
is not here: it is in the runs named here, and in `@schedule` from `built_end` on. Its count is: a
message is counted from its batch until it fires, is cancelled or is replaced, of which only one
happens, and once. So the count is exact, whatever rows the parts still hold. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from onward.errors import Corruption
from onward.message.names import SCHEDULE_TOPIC as SCHEDULE_TOPIC
from onward.schedule.marks import Marks
from onward.schedule.order import BEFORE_ALL, Moment
from onward.schedule.recurring import Recurring

FIRED: Final = 1 << 63
"""The producer id of fired batches; no client has it: they choose from 63 bits."""


class _Saved(msgspec.Struct, frozen=True):
    last: Moment
    step: int
    step_last: Moment
    cursors: dict[str, Moment]
    cancelled: bytes
    replaced: bytes
    built_end: int
    runs: list[str]
    serial: int
    recurring: list[Recurring] = []
    last_runs: dict[str, int] = {}
    waiting: int | None = None
    """None in checkpoints of versions that did not count."""


class ScheduleState:
    """The durable part of the schedule.

    >>> state = ScheduleState()
    >>> state.schedule(count=4)
    >>> state.fired("orders", step=1, at_ms=5_000, number=3, count=1)
    >>> state.has_fired("orders", 5_000, 3), state.has_fired("other", 5_000, 3), state.waiting
    (True, False, 3)
    """

    __slots__ = (
        "built_end", "cancelled", "cursors", "is_counted", "last", "last_runs", "recurring",
        "replaced", "runs", "serial", "step", "step_last", "waiting",
    )  # fmt: skip

    def __init__(self) -> None:
        self.last = BEFORE_ALL
        self.step = 0
        self.step_last = BEFORE_ALL
        """Where the latest step ends; it may be torn: some topics have fired up to there."""
        self.cursors: dict[str, Moment] = {}
        self.cancelled = Marks()
        self.replaced = Marks()
        self.built_end = 0
        """Numbers below are in runs, or gone."""
        self.runs: list[str] = []
        self.serial = 0
        """Of the files of runs: none is used twice."""
        self.recurring: dict[str, Recurring] = {}
        self.last_runs: dict[str, int] = {}
        """Of each recurring schedule: for when its latest run was scheduled."""
        self.waiting = 0
        """How many messages wait and will fire."""
        self.is_counted = True
        """False after `load` of a checkpoint without the count: the parts must be counted."""

    def schedule(self, *, count: int) -> None:
        """Fold a batch of `@schedule`: its messages wait."""
        self.waiting += count

    def fired(self, topic: str, *, step: int, at_ms: int, number: int, count: int) -> None:
        """Fold one fired batch: where it ends, and how many messages it has."""
        moment = (at_ms, number)
        if moment > self.cursor_of(topic):
            self.waiting -= count
        if step != self.step:
            # A step begins only when everything up to the end of the one before has fired.
            self.finish_step(self.step_last)
            self.step = step
        self.step_last = max(self.step_last, moment)
        self.cursors[topic] = max(self.cursors.get(topic, BEFORE_ALL), moment)

    def finish_step(self, moment: Moment) -> None:
        """Take note that everything up to a moment has fired, or never will."""
        self.last = max(self.last, moment)
        for topic in [one for one, cursor in self.cursors.items() if cursor <= self.last]:
            del self.cursors[topic]

    def cancel(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fold a `cancelled` row."""
        for start, end in ranges:
            self.waiting -= self.cancelled.add_range(start, end)

    def replace(self, numbers: Iterable[int]) -> None:
        """Fold what a batch of `@schedule` replaces."""
        self.waiting -= self.replaced.add_many(numbers)

    def cursor_of(self, topic: str) -> Moment:
        """Return up to where a topic has fired."""
        return max(self.last, self.cursors.get(topic, BEFORE_ALL))

    def has_fired(self, topic: str, at_ms: int, number: int) -> bool:
        """Tell whether a row of a topic has fired."""
        return (at_ms, number) <= self.cursor_of(topic)

    def is_gone(self, number: int) -> bool:
        """Tell whether a number was cancelled or replaced."""
        return number in self.cancelled or number in self.replaced

    def change_recurring(self, record: Recurring) -> None:
        """Fold a change of a recurring schedule."""
        if record.deleted:
            self.recurring.pop(record.name, None)
            self.last_runs.pop(record.name, None)
        else:
            self.recurring[record.name] = record

    def save(self) -> bytes:
        """Return what a checkpoint keeps."""
        return msgspec.msgpack.encode(
            _Saved(
                self.last, self.step, self.step_last, self.cursors, self.cancelled.save(),
                self.replaced.save(), self.built_end, self.runs, self.serial,
                list(self.recurring.values()), self.last_runs,
                self.waiting if self.is_counted else None,
            )
        )  # fmt: skip

    @classmethod
    def load(cls, saved: bytes) -> ScheduleState:
        """Return what `save` saved; empty bytes give an empty one.

        >>> ScheduleState.load(b"").built_end
        0
        """
        state = cls()
        if not saved:
            return state
        try:
            found = msgspec.msgpack.decode(saved, type=_Saved)
        except msgspec.MsgspecError as error:
            raise Corruption(f"the saved schedule cannot be read: {error}") from None
        state.last, state.step, state.step_last = found.last, found.step, found.step_last
        state.cursors = found.cursors
        state.cancelled = Marks.load(found.cancelled)
        state.replaced = Marks.load(found.replaced)
        state.built_end, state.runs, state.serial = found.built_end, found.runs, found.serial
        state.recurring = {one.name: one for one in found.recurring}
        state.last_runs = found.last_runs
        state.waiting, state.is_counted = found.waiting or 0, found.waiting is not None
        return state
