"""THE STATE: everything that a node knows, folded from the entries of its log.

    entry ──▶ apply ─┬─ topics      names, settings, offsets, what outlives retention  (catalogue)
                     ├─ producers   which publishes are stored already                 (producers)
                     ├─ publishers  who has which producer id                          (publishers)
                     ├─ groups      what they have finished, retries, dead letters     (delivery)
                     ├─ schedule    what has fired, what never will, recurring ones    (schedule)
                     └─ lineage     which history this is, and whether it ended here

Recovery, a running broker, a follower and `onward log` fold the same entries in the same order with
`apply`. A running leader has the facts of its own entries decoded already: it calls the parts of
`apply` that take facts (`apply_row`, `apply_scheduled`, `apply_fired`), and for plain messages it
inlines what `Catalogue.apply` and `Producers.apply` do (`publish`). Tests compare both.

Whatever must follow a change and is not durable itself (readers, members, leases, timers) is told
by the observer, after the change was applied. No clock is read here.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from onward.broker.catalogue import Catalogue, Topic, TopicEnding, TopicRecord
from onward.broker.producers import Producers
from onward.broker.publishers import Publishers
from onward.delivery.group import Groups
from onward.delivery.record import GroupRecord
from onward.delivery.trace import Trace, decode_row
from onward.log.disk import Buffer, Disk
from onward.log.log import LogLimits
from onward.log.recovery import Apply, Opened, open_log
from onward.message.batch import RAW_BYTES_MAX, Batch, batches_of, decode_batch
from onward.message.entry import Entry, Kind
from onward.message.names import RECURRING_PREFIX, SCHEDULE_TOPIC, TRACE_TOPIC
from onward.protocol.payloads import Lineage
from onward.schedule.recurring import Recurring
from onward.schedule.state import FIRED, ScheduleState


class SavedState(msgspec.Struct, frozen=True):
    """The state as a checkpoint saves it."""

    node: str
    catalogue: bytes
    producers: bytes
    groups: bytes = b""
    publishers: bytes = b""
    schedule: bytes = b""
    lineage: Lineage = Lineage()
    is_retired: bool = False
    replicas: dict[str, int] = {}
    lineage_node: str = ""
    lineage_source: str = ""


class LineageRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of an entry of kind LINEAGE: a history begins, or ends because another goes on."""

    epoch: int
    id: str
    node: str = ""
    at_ms: int = 0
    is_retired: bool = False
    successor: str = ""
    source: str = ""
    """The address that a promoted node had followed."""


class Observer(Protocol):
    """Follows what was applied: parts of a broker that are not durable."""

    def topic_changed(self, topic: Topic) -> None:
        """The settings of a topic have changed."""

    def topic_ended(self, topic: Topic, ending: TopicEnding) -> None:
        """A topic was deleted, or its lifetime is over."""

    def group_changed(self, before: GroupRecord | None, record: GroupRecord) -> None:
        """A group was created, changed or deleted."""

    def row_applied(self, row: Trace, *, was_blocked: bool) -> None:
        """A row of the trace was applied. `was_blocked`: its share could grant nothing before."""

    def lineage_changed(self) -> None:
        """A history has begun or ended here."""

    def messages_followed(self, topic: Topic, entry: Entry, body: Buffer) -> None:
        """Messages that another node accepted were applied."""


class State:
    """Everything that a node folds from its log.

    >>> state = State()
    >>> State.load(state.save()).node == state.node
    True
    """

    def __init__(self) -> None:
        self.node = secrets.token_hex(6)
        self.catalogue = Catalogue()
        self.producers = Producers()
        self.groups = Groups()
        self.publishers = Publishers()
        self.schedule = ScheduleState()
        self.lineage = Lineage()
        self.lineage_node = ""
        self.lineage_source = ""
        """The node that began the history: it was promoted. Empty for the first history."""
        self.is_retired = False
        """This node has stepped down: another one continues its history."""
        self.replicas: dict[str, int] = {}
        """By name, the last event that each replica is known to have on its disk. Not a fold."""
        self.entry_count = 0
        """How many entries were applied since the state was made or loaded."""
        self.observer: Observer | None = None

    # --- entries -----------------------------------------------------------------------------

    def apply(self, entry: Entry, body: memoryview | bytes) -> None:
        """Fold one entry."""
        self.entry_count += 1
        match entry.kind:
            case Kind.MESSAGES:
                self._apply_messages(entry, body)
            case Kind.GROUP_CHANGED:
                self._change_group(msgspec.json.decode(body, type=GroupRecord))
            case Kind.TOPIC_DELETED:
                self._end_topic(entry, body)
            case Kind.TOPIC_CHANGED:
                self.catalogue.apply(entry, body)
                changed = msgspec.json.decode(body, type=TopicRecord).number
                topic = self.catalogue.by_number.get(changed)
                if self.observer is not None and topic is not None:
                    self.observer.topic_changed(topic)
            case Kind.RECURRING_CHANGED:
                self.schedule.change_recurring(msgspec.json.decode(body, type=Recurring))
            case Kind.LINEAGE:
                self._change_lineage(entry, msgspec.json.decode(body, type=LineageRecord))
            case _:
                self.catalogue.apply(entry, body)

    def _apply_messages(self, entry: Entry, body: memoryview | bytes) -> None:
        self.catalogue.apply(entry, body)
        self.producers.apply(entry, body)
        topic = self.catalogue.by_number.get(entry.topic)
        if topic is None:
            return
        if topic.name == TRACE_TOPIC:
            for row in _rows_of(body):
                self.apply_row(row)
        elif topic.name == SCHEDULE_TOPIC:
            for batch in _batches_in(body):
                self.apply_scheduled(
                    count=batch.count, replaces=batch.replaces, uniques=batch.uniques,
                    due_at_ms=batch.due_at_ms,
                )  # fmt: skip
        else:
            self._apply_fired_batches(topic.name, body)
        if self.observer is not None:
            self.observer.messages_followed(topic, entry, body)

    def _apply_fired_batches(self, topic: str, body: memoryview | bytes) -> None:
        for start, header in batches_of(body, 0, len(body)):
            if header.producer_id == FIRED:
                ids = decode_batch(body, start, raw_bytes_max=RAW_BYTES_MAX).schedule_ids
                number = ids[-1] if ids else None
                if number is not None:
                    self.schedule.fired(
                        topic, step=header.sequence, at_ms=header.time_ms, number=number,
                        count=header.count,
                    )  # fmt: skip

    def _change_group(self, record: GroupRecord) -> None:
        group = self.groups.by_name.get(record.name)
        before = None if group is None else group.record
        self.groups.change(record)
        if self.observer is not None:
            self.observer.group_changed(before, record)

    def _change_lineage(self, entry: Entry, record: LineageRecord) -> None:
        if record.epoch != self.lineage.epoch:
            self.lineage = Lineage(record.epoch, record.id, since=entry.index - 1)
        self.is_retired = record.is_retired
        if not record.is_retired:
            self.lineage_node, self.lineage_source = record.node, record.source
        if self.observer is not None:
            self.observer.lineage_changed()

    def _end_topic(self, entry: Entry, body: memoryview | bytes) -> None:
        ending = msgspec.json.decode(body, type=TopicEnding)
        topic = self.catalogue.by_number.get(ending.number)
        self.catalogue.apply(entry, body)
        self.groups.drop_topic(ending.name)
        if self.observer is not None and topic is not None:
            self.observer.topic_ended(topic, ending)

    # --- facts that are decoded already ------------------------------------------------------

    def apply_row(self, row: Trace) -> None:
        """Fold one row of the trace."""
        group = self.groups.by_name.get(row.group)
        share = None if group is None else group.shares.get(row.topic)
        was_blocked = share is not None and (share.is_full or bool(share.alone))
        self.groups.apply(row)
        self.publishers.apply(row)
        if row.did == "cancelled":
            self.schedule.cancel(row.ranges)
        if self.observer is not None:
            self.observer.row_applied(row, was_blocked=was_blocked)

    def apply_scheduled(
        self, *, count: int, replaces: Iterable[int | None] | None,
        uniques: Sequence[str | None] | None, due_at_ms: Sequence[int | None] | None,
    ) -> None:  # fmt: skip
        """Fold one batch of `@schedule`."""
        self.schedule.schedule(count=count)
        self.schedule.replace(number for number in replaces or () if number is not None)
        for unique, at_ms in zip(uniques or (), due_at_ms or (), strict=False):
            if unique is not None and unique.startswith(RECURRING_PREFIX) and at_ms is not None:
                self.schedule.last_runs[unique.removeprefix(RECURRING_PREFIX)] = at_ms

    @property
    def was_promoted(self) -> bool:
        """Return True if this node began the newest history and has not stepped down since."""
        return self.lineage_node == self.node and not self.is_retired

    # --- checkpoints -------------------------------------------------------------------------

    def save(self) -> bytes:
        """Return all of it as bytes, for a checkpoint."""
        return msgspec.msgpack.encode(
            SavedState(
                self.node, self.catalogue.save(), self.producers.save(), self.groups.save(),
                self.publishers.save(), self.schedule.save(), self.lineage, self.is_retired,
                self.replicas, self.lineage_node, self.lineage_source,
            )
        )  # fmt: skip

    @classmethod
    def load(cls, saved: bytes) -> State:
        """Return what `save` saved; empty bytes give an empty state."""
        state = cls()
        if saved:
            found = msgspec.msgpack.decode(saved, type=SavedState)
            state.node = found.node
            state.catalogue = Catalogue.load(found.catalogue)
            state.producers = Producers.load(found.producers)
            if found.groups:
                state.groups.load(found.groups)
            state.publishers = Publishers.load(found.publishers)
            state.schedule = ScheduleState.load(found.schedule)
            state.lineage, state.is_retired = found.lineage, found.is_retired
            state.lineage_node = found.lineage_node
            state.lineage_source = found.lineage_source
            state.replicas = found.replicas
        return state


def open_state(disk: Disk, folder: str, *, limits: LogLimits) -> tuple[Opened, State]:
    """Open or create the log in `folder`, and return it with the state folded from it."""
    loaded: list[State] = []

    def load(saved: bytes) -> Apply:
        loaded.append(State.load(saved))
        return loaded[0].apply

    opened = open_log(disk, folder, limits=limits, load=load)
    return opened, loaded[0]


def schedule_runs_in(saved: bytes) -> list[str]:
    """Return the names of the run files that a saved state needs.

    >>> schedule_runs_in(State().save())
    []
    """
    return ScheduleState.load(msgspec.msgpack.decode(saved, type=SavedState).schedule).runs


def adopt_state(saved: bytes, *, node: str, replicas: dict[str, int]) -> bytes:
    """Return the saved state of another node as that of `node`, with its own replicas.

    >>> State.load(adopt_state(State().save(), node="5e0f3c", replicas={})).node
    '5e0f3c'
    """
    state = msgspec.msgpack.decode(saved, type=SavedState)
    return msgspec.msgpack.encode(msgspec.structs.replace(state, node=node, replicas=replicas))


def _batches_in(body: memoryview | bytes) -> Iterable[Batch]:
    for start, _ in batches_of(body, 0, len(body)):
        yield decode_batch(body, start, raw_bytes_max=RAW_BYTES_MAX)


def _rows_of(body: memoryview | bytes) -> Iterable[Trace]:
    for batch in _batches_in(body):
        yield from map(decode_row, batch.bodies)
