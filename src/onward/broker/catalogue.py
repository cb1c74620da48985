"""The topics of a node: a fold of the log.

    created ──▶ active ──▶ ended (deleted, or its lifetime is over): the name is free again

`apply` is the only thing that changes what is durable, and it is called with the same entries in
the same order by a running broker and by recovery. `staged_offset` and `staged_record` run ahead
while a commit is under way; a failed one puts them back. A topic is saved once it is durable.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from typing import TYPE_CHECKING, Literal

import msgspec

from onward.errors import Forbidden, TopicEnded, UnknownTopic
from onward.log.carried import Carried, CarriedRow
from onward.message.entry import CARRIED_TOPIC, Entry, Kind

if TYPE_CHECKING:
    import asyncio

    from onward.broker.crew import Crew
    from onward.broker.deliver import Reading

Rule = Literal["read-write", "write-only", "read-only", "closed"]

ENDED_KEPT = 1_000


class TopicRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the log and the checkpoint say of a topic."""

    number: int
    name: str
    created_at_ms: int = 0
    expires_at_ms: int = 0
    """When its lifetime ends; 0 means never."""
    rule: Rule = "read-write"
    message_bytes_max: int = 0
    """0: as the broker's settings say."""
    retention_ms: int = 0
    retention_bytes: int = 0
    retention_group: str = ""
    """What this group has not finished is kept, however old and large; empty: none."""
    keep_unfinished: bool = False
    """What any group has not finished is kept, however old and large."""
    expires_idle_ms: int = 0
    """A topic that nobody has used for so long ends; 0: never."""


class TopicEnding(msgspec.Struct, frozen=True):
    """What the log says when a topic ends."""

    number: int
    name: str
    reason: Literal["deleted", "expired"]
    ended_at_ms: int


class TopicsRetained(msgspec.Struct, frozen=True):
    """What the log says when retention has moved the first offsets of topics."""

    first_offsets: list[tuple[int, int]]
    """Pairs of topic number and first offset."""


class _SavedTopic(msgspec.Struct, frozen=True, array_like=True):
    record: TopicRecord
    first_offset: int
    next_offset: int


class _Saved(msgspec.Struct, frozen=True):
    next_number: int
    topics: list[_SavedTopic]
    ended: list[TopicEnding]
    carried: dict[int, list[CarriedRow]] = {}


class Topic:
    """One topic in the memory of its broker."""

    __slots__ = (
        "crews", "ending", "first_offset", "is_durable", "is_open", "message_bytes_max", "name",
        "next_offset", "number", "record", "staged_offset", "staged_record", "uses",
        "waiting", "watches",
    )  # fmt: skip

    def __init__(self, record: TopicRecord, *, first_offset: int = 0, next_offset: int = 0) -> None:
        self.number = record.number
        self.name = record.name
        self.first_offset = first_offset
        self.next_offset = next_offset
        self.staged_offset = next_offset
        self.staged_record = record
        self.is_durable = False
        self.ending = False
        self.waiting: dict[Reading, None] | None = None
        self.watches: dict[asyncio.Future[TopicEnded | None], int] | None = None
        """Who waits until it has more than an offset, without reading it."""
        self.crews: list[Crew] | None = None
        """The groups that have members and consume this topic."""
        self.uses = 0
        """How often somebody began to read it, to wait for it or to consume it."""
        self.change(record)

    def change(self, record: TopicRecord) -> None:
        """Take over what an operator changed."""
        self.record = record
        self.message_bytes_max = record.message_bytes_max
        self._note()

    def end(self, *, ending: bool) -> None:
        """Take nothing more, or again when ending it failed."""
        self.ending = ending
        self._note()

    def _note(self) -> None:
        # Looked at for each publish: one flag for everything that would forbid it.
        self.is_open = not self.ending and self.record.rule in ("read-write", "write-only")

    @property
    def readable(self) -> bool:
        """Tell whether its rule allows reading."""
        return self.record.rule in ("read-write", "read-only")


class Catalogue:
    """All topics, by name and by number."""

    def __init__(self) -> None:
        self.by_name: dict[str, Topic] = {}
        self.by_number: dict[int, Topic] = {}
        self.ended: deque[TopicEnding] = deque(maxlen=ENDED_KEPT)
        self.carried = Carried()
        """Messages below the first offset of their topic that groups still need."""
        self.next_number = 1
        self._system_count = 0
        self._names: list[str] | None = None
        """Sorted; made when first asked for, so that a start does not sort name by name."""
        self._lifetimes: list[tuple[int, int]] = []
        """Heap of (expires_at_ms, number); what was changed since is skipped when it comes up."""

    def __len__(self) -> int:
        return len(self.by_name)

    @property
    def user_count(self) -> int:
        """Return how many topics there are that do not belong to the system."""
        return len(self.by_name) - self._system_count

    def find(self, name: str) -> Topic:
        """Return the topic called `name`, or raise `UnknownTopic`."""
        topic = self.by_name.get(name)
        if topic is None:
            raise UnknownTopic(f"topic {name!r} does not exist")
        return topic

    def find_readable(self, name: str) -> Topic:
        """Return the topic if its rule allows reading."""
        topic = self.find(name)
        if not topic.readable:
            raise Forbidden(f"topic {name!r} is {topic.record.rule}: it cannot be read")
        return topic

    @property
    def names(self) -> list[str]:
        """Return all names, sorted. Do not change it."""
        if self._names is None:
            self._names = sorted(self.by_name)
        return self._names

    def add(self, record: TopicRecord) -> Topic:
        """Add a topic that is being created; `apply` says that it is durable, or it is removed."""
        topic = Topic(record)
        if self._names is not None and record.name not in self.by_name:
            insort(self._names, record.name)
        self._system_count += record.name.startswith("@")
        self.by_name[record.name] = topic
        self.by_number[record.number] = topic
        self.next_number = max(self.next_number, record.number + 1)
        self.note_lifetime(record)
        return topic

    def take_expired(self, *, now_ms: int) -> list[Topic]:
        """Return the topics whose lifetime is over; each once."""
        expired = []
        while self._lifetimes and self._lifetimes[0][0] <= now_ms:
            expires_at_ms, number = heapq.heappop(self._lifetimes)
            topic = self.by_number.get(number)
            if topic is not None and topic.record.expires_at_ms == expires_at_ms:
                expired.append(topic)
        return expired

    def note_lifetime(self, record: TopicRecord) -> None:
        """Let `take_expired` return this topic when its time has come; again, if need be."""
        if record.expires_at_ms:
            heapq.heappush(self._lifetimes, (record.expires_at_ms, record.number))

    def remove(self, number: int) -> Topic | None:
        """Forget a topic; its name is free again."""
        topic = self.by_number.pop(number, None)
        if topic is not None and self.by_name.get(topic.name) is topic:
            del self.by_name[topic.name]
            self._system_count -= topic.name.startswith("@")
            if self._names is not None:
                del self._names[bisect_left(self._names, topic.name)]
        return topic

    def apply(self, entry: Entry, body: memoryview | bytes) -> None:
        """Fold one entry."""
        if entry.kind == Kind.MESSAGES:
            # A number is never given twice, also when the entry that gave it was lost to a repair.
            self.next_number = max(self.next_number, entry.topic + 1)
            topic = self.by_number.get(entry.topic)
            if topic is not None:
                topic.next_offset = topic.staged_offset = entry.base_offset + entry.count
        elif entry.kind == Kind.TOPIC_CREATED:
            record = msgspec.json.decode(body, type=TopicRecord)
            created = self.by_number.get(record.number) or self.add(record)
            created.is_durable = True
        elif entry.kind == Kind.TOPIC_CHANGED:
            record = msgspec.json.decode(body, type=TopicRecord)
            if (changed := self.by_number.get(record.number)) is not None:
                if record.expires_at_ms != changed.record.expires_at_ms:
                    self.note_lifetime(record)
                if changed.staged_record == changed.record:
                    changed.staged_record = record
                changed.change(record)
        elif entry.kind == Kind.TOPIC_DELETED:
            ending = msgspec.json.decode(body, type=TopicEnding)
            self.remove(ending.number)
            self.carried.forget_topic(ending.number)
            self.ended.append(ending)
        elif entry.kind == Kind.RETAINED:
            for number, offset in msgspec.json.decode(body, type=TopicsRetained).first_offsets:
                if (retained := self.by_number.get(number)) is not None:
                    retained.first_offset = max(retained.first_offset, offset)
        elif entry.kind == Kind.CARRIED and entry.topic - CARRIED_TOPIC in self.by_number:
            self.carried.apply(entry, body)

    def save(self) -> bytes:
        """Return all of it as bytes, for a checkpoint."""
        topics = [
            _SavedTopic(topic.record, topic.first_offset, topic.next_offset)
            for topic in self.by_number.values()
            if topic.is_durable
        ]
        return msgspec.msgpack.encode(
            _Saved(self.next_number, topics, list(self.ended), self.carried.save())
        )

    @classmethod
    def load(cls, saved: bytes) -> Catalogue:
        """Return what `save` saved; empty bytes give an empty catalogue.

        >>> len(Catalogue.load(b""))
        0
        """
        catalogue = cls()
        if saved:
            state = msgspec.msgpack.decode(saved, type=_Saved)
            for one in state.topics:
                topic = catalogue.add(one.record)
                topic.is_durable = True
                topic.first_offset = one.first_offset
                topic.next_offset = topic.staged_offset = one.next_offset
            catalogue.ended.extend(state.ended)
            catalogue.next_number = state.next_number
            catalogue.carried = Carried.load(state.carried)
        return catalogue
