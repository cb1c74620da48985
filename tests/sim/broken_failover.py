"""Followers that are wrong on purpose: the checker must notice each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from onward.broker.broker import Broker
from onward.broker.housekeeping import Housekeeping
from onward.delivery.ranges import Ranges
from onward.log.stream import EntryStream
from onward.message.entry import Entry, Kind
from onward.testing.commit import SimulatedCommit


class ApplyBeforeSync(SimulatedCommit):
    """Applies and acknowledges entries when they are only written."""

    def sync(self, write: object) -> None:
        pass


def skip_entries(broker: Broker) -> None:
    """Stores every entry, and applies all but every tenth with messages."""
    apply, numbers = broker.state.apply, count(1)

    def apply_most(entry: Entry, body: memoryview | bytes) -> None:
        if entry.kind != Kind.MESSAGES or next(numbers) % 10:
            apply(entry, body)

    broker.state.apply = apply_most


def forget_producers(broker: Broker) -> None:
    """Leads without what it knows of producers: it stores again what is sent again."""
    _before_lead(broker, broker.producers.windows.clear)


def forget_cursors(broker: Broker) -> None:
    """Leads with groups that begin again."""

    def forget() -> None:
        for group in broker.state.groups.by_name.values():
            for share in group.shares.values():
                share.mark = share.head = 0
                share.open, share.ready = Ranges(), Ranges()

    _before_lead(broker, forget)


def forget_unfinished(broker: Broker) -> None:
    """Leads with groups that believe they have finished everything."""

    def forget() -> None:
        for group in broker.state.groups.by_name.values():
            for topic, share in group.shares.items():
                share.mark = share.head = broker.catalogue.by_name[topic].next_offset
                share.open, share.ready = Ranges(), Ranges()

    _before_lead(broker, forget)


def fire_again(broker: Broker) -> None:
    """Keeps what the leader has fired, and fires it when it leads."""
    scheduling = broker.scheduling

    async def skip_nothing() -> None:
        pass

    scheduling._skip_fired = skip_nothing
    _before_lead(broker, scheduling.state.cursors.clear)


def _before_lead(broker: Broker, forget: Callable[[], None]) -> None:
    lead = broker.lead

    async def lead_without() -> None:
        forget()
        await lead()

    broker.lead = lead_without


@contextmanager
def copying_what_is_not_synced() -> Iterator[None]:
    """Sends entries to the follower that a power cut of the leader may undo.

    The periodic sync is left out: it would make most of them durable before the power goes.
    """

    async def sync(housekeeping: Housekeeping) -> None:
        """Sync nothing."""

    with pytest.MonkeyPatch.context() as patch:
        last_index = property(lambda stream: stream._log.next_index - 1)
        patch.setattr(EntryStream, "_last_index", last_index)
        patch.setattr(Housekeeping, "sync", sync)
        yield
