"""What may be scheduled: each batch of `@schedule` is looked at before it is stored.

A batch says for each message when (`due_at_ms`, or `delays_ms` from now on), where to (`topics`),
and perhaps its business key (`uniques`), and whether it takes the place of what waits under that
key (`replaces`: -1, which the broker turns into the number of what it replaces). Delays become due
times here, once, by the broker's clock: only those are stored, so a repeat finds them. Whatever is
wrong or not permitted is refused here, by the whole batch: later there is nobody to tell. Batches
with business keys are decided one after another (`deciding`); all others are stored at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from onward.broker.deciding import Deciding
from onward.broker.futures import future_of
from onward.delivery.ranges import ranges_of
from onward.delivery.trace import Trace, short_cause
from onward.durations import DURATION_MS_MAX, format_duration
from onward.errors import Forbidden, InvalidName, InvalidRequest, Overloaded, ProtocolError
from onward.log.disk import Buffer
from onward.message.batch import RAW_BYTES_MAX, Batch, decode_batch, with_due_times
from onward.message.columns import NO_INSTANT, Column, unpack_optional
from onward.message.names import check_topic_name
from onward.message.texts import UNIQUE_CHARACTERS_MAX
from onward.schedule.record import OPTIONAL, Records, due_of, topics_of
from onward.schedule.state import SCHEDULE_TOPIC

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.catalogue import Topic
    from onward.broker.publish import Publish
    from onward.broker.scheduling import Scheduling

REPLACE_WAITING = -1
"""In the column `replaces`: take the place of whatever waits under the same business key."""
RECURRING = "@recurring/"
"""Business keys that begin with this are runs of recurring schedules."""


class Accepted:
    """The rows of a batch on its way: what the schedule must know of them."""

    __slots__ = (
        "batch", "bytes", "counted_from_ms", "due_at_ms", "first_number", "replaces", "time_ms",
        "topics", "uniques",
    )  # fmt: skip

    def __init__(
        self, due_at_ms: Sequence[int], topics: list[str], uniques: list[str | None] | None,
        replaces: list[int | None] | None, size: int, *, batch: Buffer = b"",
        counted_from_ms: int | None = None,
    ) -> None:  # fmt: skip
        self.batch = batch
        """The bytes to store: those that came, or with due times instead of delays."""
        self.counted_from_ms = counted_from_ms
        """When delays were turned into due times; None when there were none."""
        self.due_at_ms = due_at_ms
        self.topics = topics
        self.uniques = uniques
        self.replaces = replaces
        self.bytes = size
        self.first_number = 0
        self.time_ms = 0


class ScheduleIntake:
    """Checks scheduled batches and hands them on."""

    def __init__(self, broker: Broker, scheduling: Scheduling) -> None:
        self._broker = broker
        self._scheduling = scheduling
        self._accepted: dict[int, Accepted] = {}
        """By the identity of their batches, which the commit under way holds."""
        self._held: deque[tuple[Publish, Accepted]] = deque()
        """What waits for runs to be built; each session may have so much unanswered only."""
        self.deciding = Deciding(broker, scheduling, self)

    @property
    def is_busy(self) -> bool:
        """Tell whether something is being stored or decided, or waits for that."""
        return bool(self._accepted) or bool(self._held) or self.deciding.is_busy

    # --- publishes ---------------------------------------------------------------------------

    def check(self, packed: Buffer, principal: str) -> Accepted:
        """Return the decoded rows of a batch; raise if it is invalid or not permitted.

        The principal must be allowed to write every topic that a message is for: when a message
        fires, it is published by the broker.
        """
        try:
            batch = decode_batch(packed, raw_bytes_max=RAW_BYTES_MAX)
            accepted = accepted_of(batch, packed, now_ms=self._broker.clock.now_ms())
        except ProtocolError as error:
            raise InvalidRequest(f"the scheduled batch is not understood: {error}") from None
        targets = sorted(set(accepted.topics))
        for name in targets:
            self._broker.policy.require(principal, "write", "topic", name)
        self._check_times(accepted.due_at_ms)
        _check_uniques(accepted)
        self._check_bodies(accepted.topics, batch.body_lengths)
        missing = [name for name in targets if not self._has_target(name)]
        for name in missing:
            # Last: what is refused leaves nothing behind.
            self._broker.publishing.create_on_use(name, lambda error: None)
        return accepted

    def _check_times(self, due_at_ms: Sequence[int]) -> None:
        ahead_ms = self._broker.settings.schedule.ahead_ms_max
        if max(due_at_ms) > self._broker.clock.now_ms() + ahead_ms:
            raise InvalidRequest(
                f"a message is scheduled at most {format_duration(ahead_ms)} ahead "
                f"(schedule.ahead_ms_max)"
            )
        if NO_INSTANT in due_at_ms:
            raise InvalidRequest("each scheduled message has a time")

    def _check_bodies(self, topics: list[str], sizes: Sequence[int]) -> None:
        """Raise when a body is larger than its target takes now; later limits do not matter."""
        publishing, names = self._broker.publishing, set(topics)
        if max(sizes) <= min(map(publishing.body_bytes_max, names)):
            return
        # Rare: one is too large, or the largest goes to a topic that takes more than the others.
        for name, size in zip(topics, sizes, strict=True):
            publishing.check_body(name, size)

    def _has_target(self, name: str) -> bool:
        """Tell whether a topic is there; raise when nothing can ever fire to it."""
        check_topic_name(name)
        topic = self._broker.catalogue.by_name.get(name)
        if topic is None or topic.ending:
            return False
        if not topic.is_open:
            raise Forbidden(f"topic {name!r} is {topic.record.rule}: it cannot be written")
        return True

    def take(self, publish: Publish, accepted: Accepted) -> None:
        """Store a batch that was checked, as soon as there is room for what waits."""
        if self._held or self._scheduling.files.is_behind:
            self._held.append((publish, accepted))
        else:
            self._store(publish, accepted)

    def go_on(self) -> None:
        """Store what was held, now that there is room."""
        while self._held and not self._scheduling.files.is_behind:
            self._store(*self._held.popleft())

    def refuse_held(self, error: Exception) -> None:
        """Say to everybody who waits for room that there will be none soon."""
        while self._held:
            publish, _ = self._held.popleft()
            text = f"too much waits to be sorted: {error}"
            self._broker.publishing.reject(publish, Overloaded(text, retry_after_ms=10_000))

    def _store(self, publish: Publish, accepted: Accepted) -> None:
        """Store a batch; with business keys when it is their turn."""
        if accepted.uniques is None:
            self.accept(publish, accepted)
        else:
            self.deciding.publish(publish, accepted)

    def accept(self, publish: Publish, accepted: Accepted) -> None:
        """Let a batch go to the disk."""
        topic = self.topic()
        self.expect(publish[2], accepted)
        self._broker.publishing.accept(topic, publish, publish[6])

    def expect(self, batch: Buffer, accepted: Accepted) -> None:
        """Remember what a batch says until it is stored."""
        self._accepted[id(batch)] = accepted

    def topic(self) -> Topic:
        """Return the topic of what is scheduled; the first use creates it."""
        topic = self._broker.catalogue.by_name.get(SCHEDULE_TOPIC)
        if topic is None:
            publishing = self._broker.publishing
            topic = publishing.create_topic(
                publishing.new_record(SCHEDULE_TOPIC), done=lambda error: None
            )
        return topic

    def take_accepted(self, batch: Buffer) -> Accepted | None:
        """Return what a stored batch says."""
        return self._accepted.pop(id(batch), None)

    def forget(self, batch: Buffer) -> None:
        """A batch was refused."""
        self._accepted.pop(id(batch), None)

    # --- what fires or never will ------------------------------------------------------------

    def cancel_numbers(self, numbers: Iterable[int], *, cause: str) -> asyncio.Future[None]:
        """Cancel what cannot fire; the future is done when that is durable."""
        row = self.cancelled_row(numbers, cause=cause)
        return future_of(lambda done: self._broker.consuming.record([row], done))

    def cancelled_row(self, numbers: Iterable[int], *, cause: str = "") -> Trace:
        """Return the row that says that numbers will not fire."""
        return Trace(
            did="cancelled", at_ms=self._broker.clock.now_ms(), topic=SCHEDULE_TOPIC,
            ranges=tuple(ranges_of(numbers)), cause=short_cause(cause),
        )  # fmt: skip

    def fired(self, records: Records) -> None:
        """Take note of what has just fired: a recurring schedule has its next run."""
        uniques = records.optional.get(Column.UNIQUES)
        if uniques is not None:
            self.deciding.recurring.fired(uniques)


def accepted_of(batch: Batch, packed: Buffer, *, now_ms: int = 0) -> Accepted:
    """Return what the schedule must know of a batch; delays count from `now_ms` on."""
    topics, due_at_ms = topics_of(batch), due_of(batch)
    counted_from_ms = None
    if batch.delays_ms is not None:
        counted_from_ms = now_ms
        due_at_ms = _resolved(batch.delays_ms, due_at_ms, now_ms=now_ms)
        packed = with_due_times(batch, due_at_ms)
    if due_at_ms is None:
        raise ProtocolError("each scheduled message has a time")
    named = [topic for topic in topics if topic is not None]
    if len(named) != batch.count:
        raise ProtocolError("each scheduled message has a topic")
    if batch.schedule_ids is not None:
        raise ProtocolError("schedule ids are given by the broker")
    # Nothing else is looked at, but that it is whole: later there is nobody to tell.
    _ = batch.body_lengths, batch.priorities
    for kind in OPTIONAL:
        if (column := batch.column(kind)) is not None:
            unpack_optional(column, count=batch.count)
    return Accepted(
        due_at_ms, named, batch.uniques, batch.replaces, len(packed), batch=packed,
        counted_from_ms=counted_from_ms,
    )  # fmt: skip


def _resolved(
    delays_ms: Sequence[int | None], due_at_ms: Sequence[int] | None, *, now_ms: int
) -> list[int]:
    """Return when each message is due: each has a delay or a time, and not both."""
    times = due_at_ms or [NO_INSTANT] * len(delays_ms)
    if any((one is None) == (at == NO_INSTANT) for one, at in zip(delays_ms, times, strict=True)):
        raise ProtocolError("each scheduled message has either a time or a delay")
    given = [one for one in delays_ms if one is not None]
    if not 0 <= min(given) <= max(given) <= DURATION_MS_MAX:
        raise ProtocolError("a delay is 0 to 1000 years")
    # Whole columns as long as there is one kind of time, which is the rule.
    if due_at_ms is None:
        return [now_ms + delay_ms for delay_ms in given]
    pairs = zip(delays_ms, times, strict=True)
    return [at if delay_ms is None else now_ms + delay_ms for delay_ms, at in pairs]


def _check_uniques(accepted: Accepted) -> None:
    uniques = [one for one in accepted.uniques or () if one is not None]
    if len(set(uniques)) < len(uniques):
        raise InvalidRequest("a batch names a unique key twice")
    for unique in uniques:
        if not 1 <= len(unique) <= UNIQUE_CHARACTERS_MAX:
            raise InvalidRequest(f"a unique key has 1 to {UNIQUE_CHARACTERS_MAX} characters")
        if unique.startswith("@"):
            raise InvalidName(f"the unique key {unique[:40]!a} belongs to the system")
    for row, replaced in enumerate(accepted.replaces or ()):
        has_unique = accepted.uniques is not None and accepted.uniques[row] is not None
        if replaced is not None and (replaced != REPLACE_WAITING or not has_unique):
            raise InvalidRequest("a message replaces what waits under its unique key, nothing else")
