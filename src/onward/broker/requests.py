"""Topics for people and programs: the REQUEST frames, each an operation with a JSON answer.

What changes something answers when it is durable. What lists something answers in pages.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec.structs import replace

from onward.broker.catalogue import Rule, Topic, TopicEnding, TopicRecord
from onward.broker.group_requests import GroupRequests
from onward.broker.replies import Operation, reply, reply_when_done
from onward.broker.schedule_requests import ScheduleRequests
from onward.broker.topic_entries import TopicEntries
from onward.delivery.record import EXPIRES_MS_MAX, EXPIRES_MS_MIN
from onward.durations import format_duration, format_size
from onward.errors import AlreadyExists, Forbidden, InvalidRequest, OnwardError
from onward.message.names import (
    SINK_PREFIX,
    check_group_name,
    check_topic_name,
    is_system_name,
)
from onward.protocol.payloads import decode_fields, decode_request

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.session import Session

LIFETIME_MS_MIN = 10_000
LIMIT_MAX = 10_000
PAGE_MAX = 1_000
"""A page never has more topics, whatever limit is asked for: one answer must not hold others up."""

# Bounded by `Requests._size`, whose error names the setting that decides.
Size = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Time = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class TopicCreate(msgspec.Struct, frozen=True):
    """`topic.create`: create a topic; `exist_ok` makes a second call harmless."""

    topic: str
    exist_ok: bool = False
    expires_at_ms: Time | None = None
    lifetime_ms: Time | None = None
    rule: Rule = "read-write"
    message_bytes_max: Size = 0
    retention_ms: Time = 0
    retention_bytes: Time = 0
    retention_group: str = ""
    keep_unfinished: bool = False
    expires_idle_ms: Time = 0


class TopicChange(msgspec.Struct, frozen=True):
    """`topic.change`: change what is given, leave the rest."""

    topic: str
    expires_at_ms: Time | None = None
    lifetime_ms: Time | None = None
    rule: Rule | None = None
    message_bytes_max: Size | None = None
    retention_ms: Time | None = None
    retention_bytes: Time | None = None
    retention_group: str | None = None
    keep_unfinished: bool | None = None
    expires_idle_ms: Time | None = None


class TopicName(msgspec.Struct, frozen=True):
    """`topic.describe` and `topic.delete`: which one."""

    topic: str


class TopicList(msgspec.Struct, frozen=True):
    """`topic.list`: names after `after`, at most `limit` a page; `all` adds what has ended."""

    after: str = ""
    prefix: str = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX)] = PAGE_MAX
    all: bool = False


class Requests:
    """Answers the REQUEST frames of one broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.operations: dict[str, Operation] = {
            "topic.create": self._create,
            "topic.change": self._change,
            "topic.delete": self._delete,
            "topic.describe": self._describe,
            "topic.list": self._list,
            "status": self._status,
            **broker.topic_waits.operations,
            **broker.topic_copies.operations,
            **TopicEntries(broker).operations,
            **ScheduleRequests(broker).operations,
            **GroupRequests(broker).operations,
        }

    def take(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        """Answer one REQUEST; raises when it cannot be done."""
        operation = self.operations.get(decode_request(payload).op)
        if operation is None:
            known = ", ".join(sorted(self.operations))
            raise InvalidRequest(f"there is no such operation; there are: {known}")
        operation(session, request_id, payload)

    def _create(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, TopicCreate)
        check_topic_name(wanted.topic)
        existing = self._broker.catalogue.by_name.get(wanted.topic)
        if existing is not None and not existing.ending and wanted.exist_ok:
            # Another client may be creating it: its existence is a promise only when it is durable.
            done = reply_when_done(session, request_id, lambda: self.describe(existing))
            self._broker.publishing.when_created(existing, done)
            return
        if existing is not None:
            state = "is ending" if existing.ending else "exists already"
            raise AlreadyExists(f"topic {wanted.topic!r} {state}")
        record = replace(
            self._broker.publishing.new_record(wanted.topic),
            expires_at_ms=self._expiry(wanted.expires_at_ms, wanted.lifetime_ms),
            rule=wanted.rule,
            message_bytes_max=self._size_of_new(wanted),
            retention_ms=wanted.retention_ms,
            retention_bytes=wanted.retention_bytes,
            retention_group=_group_name(wanted.retention_group),
            keep_unfinished=wanted.keep_unfinished,
            expires_idle_ms=_idle_time(wanted.expires_idle_ms),
        )
        self._broker.check_writable()
        settle = reply_when_done(session, request_id, lambda: self.describe(topic))

        def created(error: OnwardError | None) -> None:
            if error is None:
                self._broker.idle_topics.note(topic)
            settle(error)

        topic = self._broker.publishing.create_topic(record, done=created)

    def _change(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, TopicChange)
        topic = self._changeable(wanted.topic)
        changes: dict[str, object] = {
            name: value
            for name in (
                "rule",
                "retention_ms",
                "retention_bytes",
                "retention_group",
                "keep_unfinished",
            )
            if (value := getattr(wanted, name)) is not None
        }
        _group_name(wanted.retention_group or "")
        if wanted.expires_idle_ms is not None:
            changes["expires_idle_ms"] = _idle_time(wanted.expires_idle_ms)
        if wanted.message_bytes_max is not None:
            changes["message_bytes_max"] = self._size(wanted.message_bytes_max)
        if wanted.expires_at_ms is not None or wanted.lifetime_ms is not None:
            changes["expires_at_ms"] = self._expiry(wanted.expires_at_ms, wanted.lifetime_ms)
        record: TopicRecord = replace(topic.staged_record, **changes)
        settle = reply_when_done(session, request_id, lambda: self.describe(topic))

        def done(error: OnwardError | None) -> None:
            if not topic.readable:
                self._broker.delivering.end_readers(topic)
            if error is None:
                self._broker.idle_topics.note(topic)
            settle(error)

        self._broker.publishing.change_topic(record, done=done)

    def _delete(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        topic = self._changeable(decode_fields(payload, TopicName).topic)
        self._broker.end_topic(
            topic,
            "deleted",
            done=reply_when_done(session, request_id, lambda: {"topic": topic.name}),
        )

    def _describe(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        topic = self._broker.catalogue.find(decode_fields(payload, TopicName).topic)
        reply(session, request_id, self.describe(topic))

    def _list(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, TopicList)
        catalogue = self._broker.catalogue
        names = catalogue.names
        limit = min(wanted.limit, PAGE_MAX)
        start = max(bisect_right(names, wanted.after), bisect_left(names, wanted.prefix))
        # Those of the system are shown to who asks for them.
        skipped = "@" if not wanted.prefix.startswith("@") else " "
        few = len(catalogue) - catalogue.user_count
        # One more than the page: it tells whether there is a next one.
        found = [
            name
            for name in names[start : start + limit + 1 + few]
            if name.startswith(wanted.prefix) and name[0] != skipped
        ]
        page = found[:limit]
        fields: dict[str, object] = {
            "topics": [self.describe(catalogue.by_name[name]) for name in page],
            "next": page[-1] if len(found) > limit else "",
            "count": catalogue.user_count,
        }
        if wanted.all and not wanted.after:
            fields["ended"] = [
                _ended(e) for e in catalogue.ended if e.name.startswith(wanted.prefix)
            ]
        reply(session, request_id, fields)

    def _status(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        reply(session, request_id, self._broker.status())

    def describe(self, topic: Topic) -> dict[str, object]:
        """Return what there is to know of a topic."""
        record = topic.record
        return {
            "topic": topic.name,
            "number": topic.number,
            "state": "ending" if topic.ending else "active",
            "rule": record.rule,
            "first_offset": topic.first_offset,
            "next_offset": topic.next_offset,
            "messages": topic.next_offset - topic.first_offset,
            "created_at_ms": record.created_at_ms,
            "expires_at_ms": record.expires_at_ms,
            "message_bytes_max": record.message_bytes_max
            or self._broker.settings.topics.message_bytes_max,
            "retention_ms": record.retention_ms or self._broker.settings.log.retention_ms,
            "retention_bytes": record.retention_bytes,
            "retention_group": record.retention_group,
            "keep_unfinished": record.keep_unfinished,
            "expires_idle_ms": record.expires_idle_ms,
            "carried": self._broker.log.carried.count_of(topic.number),
            "readers": self._broker.delivering.readers_of(topic),
        }

    def _changeable(self, name: str) -> Topic:
        topic = self._broker.catalogue.find(name)
        if is_system_name(name):
            raise Forbidden(f"topic {name!r} belongs to the system")
        if topic.ending:
            raise AlreadyExists(f"topic {name!r} is ending")
        self._broker.check_writable(even_when_full=True)
        return topic

    def _expiry(self, expires_at_ms: int | None, lifetime_ms: int | None) -> int:
        """Return when a topic ends; 0 is never."""
        now_ms = self._broker.clock.now_ms()
        if lifetime_ms is not None and expires_at_ms is not None:
            raise InvalidRequest("a topic has a lifetime or a time when it expires, not both")
        if lifetime_ms is not None:
            expires_at_ms = now_ms + lifetime_ms
        if expires_at_ms and expires_at_ms < now_ms + LIFETIME_MS_MIN:
            raise InvalidRequest(
                f"a topic lives at least {format_duration(LIFETIME_MS_MIN)}; without a lifetime it "
                "lives for ever"
            )
        return expires_at_ms or 0

    def _size_of_new(self, wanted: TopicCreate) -> int:
        if wanted.topic.startswith(SINK_PREFIX) and not wanted.message_bytes_max:
            # It holds pieces on their way to other topics: those say how large a message may be.
            return self._largest_message_bytes
        return self._size(wanted.message_bytes_max)

    def _size(self, message_bytes_max: int) -> int:
        limit = self._largest_message_bytes
        if message_bytes_max > limit:
            raise InvalidRequest(
                f"message_bytes_max is at most {limit} bytes (topics.batch_bytes_max, "
                f"{format_size(limit + 1024)}, less 1KiB), not {format_size(message_bytes_max)}"
            )
        return message_bytes_max

    @property
    def _largest_message_bytes(self) -> int:
        return self._broker.settings.topics.batch_bytes_max - 1024


def _idle_time(expires_idle_ms: int) -> int:
    """Return the time if a topic may expire after it; 0 is never."""
    if expires_idle_ms and not EXPIRES_MS_MIN <= expires_idle_ms <= EXPIRES_MS_MAX:
        low, high = format_duration(EXPIRES_MS_MIN), format_duration(EXPIRES_MS_MAX)
        raise InvalidRequest(
            f"expires_idle is {low} to {high}, or 0 for never, not {expires_idle_ms}ms"
        )
    return expires_idle_ms


def _group_name(name: str) -> str:
    """Return the name of a group that need not exist yet; none is empty."""
    return check_group_name(name) if name else ""


def _ended(ending: TopicEnding) -> dict[str, object]:
    return {
        "topic": ending.name,
        "number": ending.number,
        "state": ending.reason,
        "ended_at_ms": ending.ended_at_ms,
    }
