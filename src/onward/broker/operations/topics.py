"""Handlers of the operations on topics."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from msgspec.structs import replace

from onward.broker.catalogue import Topic, TopicEnding, TopicRecord
from onward.broker.futures import future_of
from onward.broker.operations.dispatch import answers
from onward.delivery.record import EXPIRES_MS_MAX, EXPIRES_MS_MIN
from onward.durations import format_duration, format_size
from onward.errors import AlreadyExists, Forbidden, InvalidRequest
from onward.message.names import (
    SINK_PREFIX,
    check_group_name,
    check_topic_name,
    is_system_name,
)
from onward.protocol.operations.topics import (
    LIST_PAGE_MAX,
    ChangeTopic,
    CreateTopic,
    DeleteTopic,
    DescribeTopic,
    ListTopics,
    TopicDeleted,
    TopicDescription,
    TopicPage,
)

if TYPE_CHECKING:
    from onward.broker.broker import Broker

LIFETIME_MS_MIN = 10_000
KEPT_AS_GIVEN = ("rule", "retention_ms", "retention_bytes", "retention_group", "keep_unfinished")
"""Settings that a change stores without looking at them further."""


class TopicOperations:
    """Creates, changes, deletes, describes and lists topics."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._catalogue = broker.catalogue
        self._settings = broker.settings

    @answers(CreateTopic)
    async def create(self, request: CreateTopic) -> TopicDescription:
        """Create a topic and return when it is durable."""
        check_topic_name(request.topic)
        publishing = self._broker.publishing
        existing = self._catalogue.by_name.get(request.topic)
        if existing is not None and not existing.ending and request.exist_ok:
            # Another client may be creating it: its existence is a promise only when it is durable.
            await future_of(lambda done: publishing.when_created(existing, done))
            return self._describe(existing)
        if existing is not None:
            state = "is ending" if existing.ending else "exists already"
            raise AlreadyExists(f"topic {request.topic!r} {state}")
        record = replace(
            publishing.new_record(request.topic),
            expires_at_ms=self._expiry(request.expires_at_ms, request.lifetime_ms),
            rule=request.rule,
            message_bytes_max=self._size_of_new(request),
            retention_ms=request.retention_ms,
            retention_bytes=request.retention_bytes,
            retention_group=_group_name(request.retention_group),
            keep_unfinished=request.keep_unfinished,
            expires_idle_ms=_idle_time(request.expires_idle_ms),
        )
        await future_of(lambda done: publishing.create_topic(record, done=done))
        topic = self._catalogue.by_number[record.number]
        self._broker.idle_topics.note(topic)
        return self._describe(topic)

    @answers(ChangeTopic)
    async def change(self, request: ChangeTopic) -> TopicDescription:
        """Change the given settings of a topic and return when they are durable."""
        topic = self._changeable(request.topic)
        changes: dict[str, object] = {
            name: value for name in KEPT_AS_GIVEN if (value := getattr(request, name)) is not None
        }
        _group_name(request.retention_group or "")
        if request.expires_idle_ms is not None:
            changes["expires_idle_ms"] = _idle_time(request.expires_idle_ms)
        if request.message_bytes_max is not None:
            changes["message_bytes_max"] = self._size(request.message_bytes_max)
        if request.expires_at_ms is not None or request.lifetime_ms is not None:
            changes["expires_at_ms"] = self._expiry(request.expires_at_ms, request.lifetime_ms)
        record: TopicRecord = replace(topic.staged_record, **changes)
        publishing = self._broker.publishing
        await future_of(lambda done: publishing.change_topic(record, done=done))
        if not topic.readable:
            self._broker.delivering.end_readers(topic)
        self._broker.idle_topics.note(topic)
        return self._describe(topic)

    @answers(DeleteTopic)
    async def delete(self, request: DeleteTopic) -> TopicDeleted:
        """End a topic and return when that is durable."""
        topic = self._changeable(request.topic)
        await future_of(lambda done: self._broker.end_topic(topic, "deleted", done=done))
        return TopicDeleted(topic.name)

    @answers(DescribeTopic)
    async def describe(self, request: DescribeTopic) -> TopicDescription:
        """Return the settings and the offsets of a topic."""
        return self._describe(self._catalogue.find(request.topic))

    @answers(ListTopics)
    async def list(self, request: ListTopics) -> TopicPage:
        """Return a page of topics in the order of their names."""
        catalogue, names = self._catalogue, self._catalogue.names
        limit = min(request.limit, LIST_PAGE_MAX)
        start = max(bisect_right(names, request.after), bisect_left(names, request.prefix))
        # System topics are listed only for who asks for them by their prefix.
        skipped = "@" if not request.prefix.startswith("@") else " "
        system_count = len(catalogue) - catalogue.user_count
        # One more than the page: it tells whether there is a next one.
        matching = [
            name
            for name in names[start : start + limit + 1 + system_count]
            if name.startswith(request.prefix) and name[0] != skipped
        ]
        page = matching[:limit]
        is_first = not request.after
        return TopicPage(
            topics=[self._describe(catalogue.by_name[name]) for name in page],
            next=page[-1] if len(matching) > limit else "",
            count=catalogue.user_count,
            ended=[
                _describe_ended(ending)
                for ending in (catalogue.ended if request.all and is_first else ())
                if ending.name.startswith(request.prefix)
            ],
        )

    def _describe(self, topic: Topic) -> TopicDescription:
        record = topic.record
        return TopicDescription(
            topic=topic.name,
            number=topic.number,
            state="ending" if topic.ending else "active",
            rule=record.rule,
            first_offset=topic.first_offset,
            next_offset=topic.next_offset,
            messages=topic.next_offset - topic.first_offset,
            created_at_ms=record.created_at_ms,
            expires_at_ms=record.expires_at_ms,
            message_bytes_max=record.message_bytes_max or self._settings.topics.message_bytes_max,
            retention_ms=record.retention_ms or self._settings.log.retention_ms,
            retention_bytes=record.retention_bytes,
            retention_group=record.retention_group,
            keep_unfinished=record.keep_unfinished,
            expires_idle_ms=record.expires_idle_ms,
            carried=self._broker.log.carried.count_of(topic.number),
            readers=self._broker.delivering.readers_of(topic),
        )

    def _changeable(self, name: str) -> Topic:
        topic = self._catalogue.find(name)
        if is_system_name(name):
            raise Forbidden(f"topic {name!r} belongs to the system")
        if topic.ending:
            raise AlreadyExists(f"topic {name!r} is ending")
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

    def _size_of_new(self, request: CreateTopic) -> int:
        if request.topic.startswith(SINK_PREFIX) and not request.message_bytes_max:
            # It holds parts of writes to other topics: those decide how large a message may be.
            return self._largest_message_bytes
        return self._size(request.message_bytes_max)

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
        return self._settings.topics.batch_bytes_max - 1024


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


def _describe_ended(ending: TopicEnding) -> TopicDescription:
    return TopicDescription(
        topic=ending.name,
        number=ending.number,
        state=ending.reason,
        ended_at_ms=ending.ended_at_ms,
    )
