"""Changes on their way to the disk: of topics, groups and recurring schedules, and of the trace.

They are collected beside the messages and written with them, each at its place in the commit;
`done` is called once it is durable, or with why it is not. What a change will be is known at once
where others build on it: a topic that is being created can be published to.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable

from onward.broker.catalogue import Catalogue, Topic, TopicEnding, TopicRecord, TopicsRetained
from onward.broker.collected import Change, Collected
from onward.broker.routes import Routes
from onward.broker.state import LineageRecord
from onward.broker.write_gate import WriteGate
from onward.clock import Clock
from onward.delivery.record import GroupRecord
from onward.errors import OnwardError, Overloaded, Stopping
from onward.message.entry import CARRIED_TOPIC, Kind
from onward.message.names import is_system_name
from onward.schedule.recurring import Recurring
from onward.settings import Settings


class Changes(ABC):
    """The half of the write path that is not messages."""

    _catalogue: Catalogue
    _clock: Clock
    _settings: Settings
    _collected: Collected
    _creating: dict[Topic, list[Callable[[OnwardError | None], None]]]
    gate: WriteGate
    _loop: asyncio.AbstractEventLoop
    routes: Routes

    @abstractmethod
    def _commit_soon(self) -> None:
        """Write what is collected with the next commit."""

    def new_record(self, name: str, *, is_limited: bool = True) -> TopicRecord:
        """Return the record of a topic that is about to be created."""
        limit = self._settings.topics.count_max
        # Those of the system are not counted: they come with the first use of what they are for.
        # Those of pipelines count by themselves: users see only their own.
        count = len(self._catalogue) if name.startswith("@") else self._catalogue.user_count
        if is_limited and count >= limit and not is_system_name(name):
            raise Overloaded(f"there are {limit} topics already (topics.count_max)")
        return TopicRecord(
            number=self._catalogue.next_number, name=name, created_at_ms=self._clock.now_ms()
        )

    def create_topic(
        self, record: TopicRecord, *, done: Callable[[OnwardError | None], None]
    ) -> Topic:
        """Create a topic; it can be published to at once, `done` comes when it is durable."""
        topic = self._catalogue.add(record)
        self._creating[topic] = [done]

        def settle(error: OnwardError | None) -> None:
            if error is not None:
                self._catalogue.remove(record.number)
            for tell in self._creating.pop(topic):
                tell(error)

        self._collected.created.append(Change(Kind.TOPIC_CREATED, record, done=settle))
        self._collected.sync = True
        self._commit_soon()
        return topic

    def when_created(self, topic: Topic, done: Callable[[OnwardError | None], None]) -> None:
        """Call `done` when a topic that is there is durable: now, or with who created it."""
        if topic in self._creating:
            self._creating[topic].append(done)
        else:
            done(None)

    def change_topic(
        self, record: TopicRecord, *, done: Callable[[OnwardError | None], None]
    ) -> None:
        """Change a topic's rules."""
        topic = self._catalogue.by_number[record.number]
        topic.staged_record = record

        def settle(error: OnwardError | None) -> None:
            if error is not None:
                topic.staged_record = topic.record
            done(error)

        self._collected.later.append(Change(Kind.TOPIC_CHANGED, record, done=settle))
        self._collected.sync = True
        self._commit_soon()

    def end_topic(
        self, topic: Topic, ending: TopicEnding, *, done: Callable[[OnwardError | None], None]
    ) -> None:
        """End a topic: from now on nothing more is written to it."""
        topic.end(ending=True)
        self.routes.forget()

        def settle(error: OnwardError | None) -> None:
            topic.end(ending=error is None)
            done(error)

        self._collected.later.append(Change(Kind.TOPIC_DELETED, ending, done=settle))
        self._collected.sync = True
        self._commit_soon()

    def retain_topics(
        self, retained: TopicsRetained, *, done: Callable[[OnwardError | None], None]
    ) -> None:
        """Move the first offsets of topics; they are moved, and told, once that is durable."""
        if self.gate.is_closed:
            self._loop.call_soon(done, Stopping("the broker is stopping"))
            return
        self._collected.later.append(Change(Kind.RETAINED, retained, done=done))
        self._collected.sync = True
        self._commit_soon()

    def carry(
        self, topic: int, entries: bytes, *, base_offset: int, count: int,
        done: Callable[[OnwardError | None], None],
    ) -> None:  # fmt: skip
        """Write whole entries of a topic again, as one that outlives its retention."""
        if self.gate.is_closed:
            self._loop.call_soon(done, Stopping("the broker is stopping"))
            return
        self._collected.later.append(
            Change(
                Kind.CARRIED, entries, done=done, topic=topic + CARRIED_TOPIC,
                base_offset=base_offset, count=count,
            )
        )  # fmt: skip
        self._collected.sync = True
        self._commit_soon()

    def change_group(
        self, record: GroupRecord, *, done: Callable[[OnwardError | None], None]
    ) -> None:
        """Create, change or delete a group; it stands before the rows of the same commit."""
        if self.gate.is_closed:
            self._loop.call_soon(done, Stopping("the broker is stopping"))
            return
        self._collected.created.append(Change(Kind.GROUP_CHANGED, record, done=done))
        self._collected.sync = True
        self._commit_soon()

    def change_lineage(
        self, record: LineageRecord, *, done: Callable[[OnwardError | None], None]
    ) -> None:
        """Begin a new history, or end the one of this node."""
        self._collected.created.append(Change(Kind.LINEAGE, record, done=done))
        self._collected.sync = True
        self._commit_soon()

    def change_recurring(
        self, record: Recurring, *, done: Callable[[OnwardError | None], None]
    ) -> None:
        """Create, change or delete a recurring schedule."""
        if self.gate.is_closed:
            self._loop.call_soon(done, Stopping("the broker is stopping"))
            return
        self._collected.later.append(Change(Kind.RECURRING_CHANGED, record, done=done))
        self._collected.sync = True
        self._commit_soon()

    def record(
        self, rows: Callable[[], list[bytes]], *, done: Callable[[OnwardError | None], None]
    ) -> None:
        """Publish rows of the trace with the next commit; they are asked for when it begins."""
        if self.gate.is_closed:
            self._loop.call_soon(done, Stopping("the broker is stopping"))
            return
        self._collected.rows.append((rows, done, False))
        self._collected.sync = True
        self._commit_soon()
