"""Groups that end by themselves: those that no member has used for `expires_idle_ms`.

    used (a member is there, joins or leaves; the group is held, advanced or changed)
      └──▶ idle ── expires_idle_ms ──▶ deleted, as by `group.delete`

Idle time counts while the broker serves: it begins anew at every start, and a process that stood
still has not let it pass. Each such group has one valid entry in a heap: a tick costs nothing while
none is due.
"""

from __future__ import annotations

import heapq
import logging
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from onward.delivery.record import GroupRecord
from onward.durations import format_duration
from onward.errors import OnwardError

if TYPE_CHECKING:
    from onward.broker.broker import Broker

logger = logging.getLogger("onward.consume")

AGAIN_MS: Final = 10_000
"""A group that could not be deleted is tried again after this."""
STALE_MAX: Final = 1_000
"""So many stale entries may lie in the heap before it is built anew."""


class IdleGroups:
    """Deletes groups that were idle for too long."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.served_ms = 0
        """How long this broker has served."""
        self._last_tick_ms: int | None = None
        self._used_at_ms: dict[str, int] = {}
        """When each group that can expire was used last, in served time."""
        self._due: list[tuple[int, str]] = []
        self._valid: dict[str, int] = {}
        """The entry of the heap that counts for each group; others are stale."""

    def note(self, record: GroupRecord) -> None:
        """Follow a group that was created, changed or deleted."""
        name = record.name
        if record.deleted or not record.expires_idle_ms:
            self._used_at_ms.pop(name, None)
            self._valid.pop(name, None)
            return
        self._used_at_ms[name] = self.served_ms
        self._look_after(name, record.expires_idle_ms)

    def touch(self, name: str) -> None:
        """Take note that a group is used now; for one that cannot expire this means nothing."""
        if name in self._used_at_ms:
            self._used_at_ms[name] = self.served_ms

    def tick(self, now_ms: int, *, late_ms: int) -> None:
        """Delete the groups whose time has come. `late_ms` of it this process stood still."""
        if self._last_tick_ms is None:
            for group in self._broker.consuming.groups.by_name.values():
                self.note(group.record)
        else:
            self.served_ms += max(0, now_ms - self._last_tick_ms - late_ms)
        self._last_tick_ms = now_ms
        while self._due and self._due[0][0] <= self.served_ms:
            due_ms, name = heapq.heappop(self._due)
            if self._valid.get(name) == due_ms:
                self._look(name)

    def _look(self, name: str) -> None:
        record = self._broker.consuming.groups.by_name[name].record
        if self._is_used(name):
            self.touch(name)
        idle_ms = self.served_ms - self._used_at_ms[name]
        if idle_ms < record.expires_idle_ms:
            self._look_after(name, record.expires_idle_ms - idle_ms)
        else:
            self._delete(record)

    def _is_used(self, name: str) -> bool:
        consuming = self._broker.consuming
        return bool(
            name in consuming.crews
            or consuming.joining.is_joining(name)
            or consuming.records.is_forming(name)
            or self._broker.group_holds.holder_of(name)
        )

    def _look_after(self, name: str, ms: int) -> None:
        self._valid[name] = self.served_ms + ms
        heapq.heappush(self._due, (self._valid[name], name))
        if len(self._due) > 2 * len(self._valid) + STALE_MAX:
            self._due = sorted((due_ms, name) for name, due_ms in self._valid.items())

    def _delete(self, record: GroupRecord) -> None:
        def done(error: OnwardError | None) -> None:
            if error is None:
                logger.info(
                    "group expired: %r had no member for %s", record.name,
                    format_duration(record.expires_idle_ms),
                )  # fmt: skip
            elif record.name in self._used_at_ms:
                self._look_after(record.name, AGAIN_MS)

        records = self._broker.consuming.records
        try:
            records.change(replace(records.find(record.name), deleted=True), done)
        except OnwardError as error:
            done(error)
