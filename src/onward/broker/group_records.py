"""Changes of groups on their way to the disk: each builds on those before it.

A record is stored as a whole, so two changes at the same time would undo each other if both began
with what is durable. Whoever changes a group begins with `find` and ends with `change`. When a
change cannot be written, the later ones that built on it still say what their writers asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onward.broker.futures import Done
from onward.delivery.record import GroupRecord
from onward.errors import AlreadyExists, OnwardError, UnknownGroup

if TYPE_CHECKING:
    from onward.broker.broker import Broker


class GroupRecords:
    """The records of all groups, as they are about to be."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._staged: dict[str, GroupRecord] = {}
        """The latest change of each group that has one under way."""
        self._forming: dict[str, list[Done]] = {}
        """Groups that are being created, with whoever waits until they are complete."""

    # --- a group is visible when it is complete ----------------------------------------------

    def form(self, name: str) -> Done:
        """Hide a new group until the returned function is called: it has begun with its topics."""
        self._forming.setdefault(name, [])

        def formed(_: OnwardError | None) -> None:
            for done in self._forming.pop(name, []):
                done(None)

        return formed

    def is_forming(self, name: str) -> bool:
        """Return True while a group is being created."""
        return name in self._forming

    def when_formed(self, name: str, done: Done) -> None:
        """Call `done` when the creation of the group has ended, well or not; else at once."""
        if name in self._forming:
            self._forming[name].append(done)
        else:
            done(None)

    # --- changes -----------------------------------------------------------------------------

    def find(self, name: str) -> GroupRecord:
        """Return what a group is, or is about to be; `UnknownGroup` when it is not."""
        record = self._staged.get(name) or self._broker.consuming.find(name).record
        if record.deleted:
            raise UnknownGroup(f"group {name!r} is being deleted")
        return record

    def latest(self, name: str) -> GroupRecord | None:
        """Return what a group is or is about to be, deleted perhaps; None when there is none."""
        group = self._broker.consuming.groups.by_name.get(name)
        return self._staged.get(name) or (None if group is None else group.record)

    def check_new(self, name: str) -> None:
        """Raise when there is a group of this name, or about to be one."""
        if name in self._staged or name in self._broker.consuming.groups.by_name:
            raise AlreadyExists(f"group {name!r} exists already")

    def change(self, record: GroupRecord, done: Done) -> None:
        """Make a record durable: create, change or delete its group."""
        self._broker.gate.check(even_when_full=True)

        def settle(error: OnwardError | None) -> None:
            if self._staged.get(record.name) is record:
                del self._staged[record.name]
            done(error)

        self._staged[record.name] = record
        self._broker.consuming.change(record, settle)
