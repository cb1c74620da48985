"""A group's settings: as they are (`GroupRecord`), and as somebody wishes them (`GroupWish`).

    wish ──new_record──▶ record ──wish.changed──▶ record ...       each checked before it is stored

A record is the body of an entry of kind GROUP_CHANGED and part of the checkpoint. A wish names only
what its writer cares about: a member that joins with a wish that differs from the record is told
so, instead of being served by other rules than it expects. `start` says where the group begins with
a topic it has not seen: once it has begun, it never differs.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from onward.delivery.filter import Filter, FilterWish
from onward.delivery.retry import RetryPolicy, check_types, format_policy
from onward.durations import format_duration
from onward.errors import InvalidRequest
from onward.message.names import check_group_name, check_member_name, check_topic_name
from onward.message.relative import Relative, resolve_ms

Mode = Literal["shared", "exclusive", "ordered", "broadcast"]

LEASE_MS_MIN: Final = 1_000
LEASE_MS_MAX: Final = 86_400_000
EXPIRES_MS_MIN: Final = 1_000
EXPIRES_MS_MAX: Final = 366 * 86_400_000
TOPICS_MAX: Final = 1_000
TENANTS_MAX: Final = 10_000
MEMBERS_OFFLINE_MAX: Final = 10_000
WEIGHT_MAX: Final = 1e6
KEY_RATE_MAX: Final = 1e9
KEY_CONCURRENCY_MAX: Final = 1_000_000
_NUMBER_MAX: Final = 2**63 - 1


class StartAt(msgspec.Struct, frozen=True, omit_defaults=True):
    """A place to begin: an offset, or the first message published at or after a time."""

    offset: int | None = None
    time_ms: int | Relative | None = None
    """In the record of a group never relative: a wish is resolved when the group is created."""

    def check(self) -> StartAt:
        """Return it when it is one place, else raise `InvalidRequest`."""
        given = [value for value in (self.offset, self.time_ms) if value is not None]
        if len(given) != 1:
            raise InvalidRequest("a start is either an offset or a time")
        if isinstance(given[0], Relative):
            raise InvalidRequest("only a new group has a start that is relative to now")
        if not 0 <= given[0] <= _NUMBER_MAX:
            raise InvalidRequest(f"a start is not before 0, and not {given[0]}")
        return self


Start = Literal["earliest", "latest"] | StartAt


class GroupRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the log and the checkpoint say of a group."""

    name: str
    mode: Mode = "shared"
    topics: tuple[str, ...] = ()
    start: Start = "earliest"
    retry: RetryPolicy = RetryPolicy()
    at_most_once: bool = False
    """Finished when it is handed out: what a member loses is lost."""
    lease_ms: int = 30_000
    filter: Filter = Filter()
    priorities: bool = False
    tenants: dict[str, float] | None = None
    """Weights of tenants, absent ones 1.0; None: no fairness between tenants."""
    key_rate: float = 0
    """Deliveries of one key per second; 0: no limit."""
    key_concurrency: int = 0
    """Deliveries of one key at a time; 0: no limit."""
    expires_idle_ms: int = 0
    """A group that has had no member for so long is deleted; 0: never."""
    paused: bool = False
    offline: tuple[str, ...] = ()
    """Members that an operator has taken out."""
    created_at_ms: int = 0
    deleted: bool = False

    @property
    def is_choosy(self) -> bool:
        """Tell whether keys, tenants or priorities decide what comes next."""
        return bool(
            self.mode == "ordered"
            or self.priorities
            or self.tenants is not None
            or self.key_rate
            or self.key_concurrency
        )

    def check(self) -> GroupRecord:
        """Return the record when it makes sense, else raise `InvalidRequest` with what does not.

        >>> GroupRecord("billing", lease_ms=5).check()
        Traceback (most recent call last):
        onward.errors.InvalidRequest: group 'billing': a lease is 1s to 1d, not 5ms
        """
        check_types(self, f"group {str(self.name)[:128]!a}")
        check_group_name(self.name)
        self._check_names()
        self._check_limits()
        self.retry.check()
        self.filter.check()
        if isinstance(self.start, StartAt):
            self.start.check()
        if self.at_most_once and self.retry.limit > 1:
            raise self._wrong("at most once and a retry policy other than none exclude each other")
        if self.at_most_once and (self.mode == "ordered" or self.key_concurrency):
            what = "order by key" if self.mode == "ordered" else "key_concurrency"
            raise self._wrong(
                f"at most once and {what} exclude each other: what is handed out is finished, "
                "so its key would be free at once"
            )
        if self.mode == "broadcast" and self.is_choosy:
            raise self._wrong("a broadcast group has no priorities, tenants or limits of keys")
        return self

    def _check_names(self) -> None:
        if len(self.topics) > TOPICS_MAX:
            raise self._wrong(f"at most {TOPICS_MAX} topics, not {len(self.topics)}")
        for topic in self.topics:
            check_topic_name(topic, system=True)
            if topic.startswith("@") and self.mode != "broadcast":
                # Its acks would be new messages of this topic, without an end.
                raise self._wrong(f"topic {topic!r} of the system can be read or broadcast")
        if len(set(self.topics)) < len(self.topics):
            raise self._wrong("a topic is named twice")
        if len(self.offline) > MEMBERS_OFFLINE_MAX:
            raise self._wrong(f"at most {MEMBERS_OFFLINE_MAX} members are offline")
        for member in self.offline:
            check_member_name(member)

    def _check_limits(self) -> None:
        if not LEASE_MS_MIN <= self.lease_ms <= LEASE_MS_MAX:
            low, high = format_duration(LEASE_MS_MIN), format_duration(LEASE_MS_MAX)
            raise self._wrong(f"a lease is {low} to {high}, not {self.lease_ms}ms")
        if self.expires_idle_ms and not EXPIRES_MS_MIN <= self.expires_idle_ms <= EXPIRES_MS_MAX:
            low, high = format_duration(EXPIRES_MS_MIN), format_duration(EXPIRES_MS_MAX)
            raise self._wrong(
                f"expires_idle is {low} to {high}, or 0 for never, not {self.expires_idle_ms}ms"
            )
        # Written so that NaN, which compares as false with everything, fails too.
        if not 0 <= self.key_rate <= KEY_RATE_MAX:
            raise self._wrong(f"key_rate is 0 to {KEY_RATE_MAX:g}, not {self.key_rate}")
        if not 0 <= self.key_concurrency <= KEY_CONCURRENCY_MAX:
            raise self._wrong(
                f"key_concurrency is 0 to {KEY_CONCURRENCY_MAX}, not {self.key_concurrency}"
            )
        if len(self.tenants or ()) > TENANTS_MAX:
            raise self._wrong(f"at most {TENANTS_MAX} tenants have a weight")
        for tenant, weight in (self.tenants or {}).items():
            if not 0 < weight <= WEIGHT_MAX:
                raise self._wrong(
                    f"the weight of tenant {tenant[:40]!r} is above 0 and at most "
                    f"{WEIGHT_MAX:g}, not {weight}"
                )

    def _wrong(self, text: str) -> InvalidRequest:
        return InvalidRequest(f"group '{self.name}': {text}")


class _UnnamedRecord(GroupRecord, frozen=True, omit_defaults=True):
    """A record that a wish is tried on before it is known which group it is for."""

    def _wrong(self, text: str) -> InvalidRequest:
        return InvalidRequest(f"group: {text}")


class GroupWish(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a member or an operator asks of a group; None: whatever it is.

    >>> record = GroupWish(lease_ms=60_000).new_record("billing", ("orders",), now_ms=0)
    >>> GroupWish(lease_ms=30_000).differs(record)
    "group 'billing' has lease 1m, not 30s"
    """

    mode: Mode | None = None
    start: Start | None = None
    retry: RetryPolicy | None = None
    at_most_once: bool | None = None
    lease_ms: int | None = None
    filter: FilterWish | None = None
    priorities: bool | None = None
    tenants: dict[str, float] | None = None
    key_rate: float | None = None
    key_concurrency: int | None = None
    expires_idle_ms: int | None = None

    def check(self) -> GroupWish:
        """Return the wish when a group can be made of it, else raise `InvalidRequest`."""
        check_types(self, "group")
        self._onto(_UnnamedRecord("group"), now_ms=0).check()
        return self

    def new_record(self, name: str, topics: tuple[str, ...], now_ms: int) -> GroupRecord:
        """Return the checked record of a new group; a relative start counts from now.

        >>> wish = GroupWish(start=StartAt(time_ms=Relative(-500)))
        >>> wish.new_record("billing", ("orders",), now_ms=700).start
        StartAt(offset=None, time_ms=200)
        """
        first = GroupRecord(name, topics=tuple(topics), created_at_ms=now_ms)
        # Who joins a broadcast wants what is said from now on.
        if self.mode == "broadcast":
            first = msgspec.structs.replace(first, start="latest")
        return self._onto(first, now_ms=now_ms).check()

    def differences(self, record: GroupRecord) -> dict[str, object]:
        """Return the settings that are not as wished, by name, as they are wished."""
        return {
            name: value
            for name, value in self._named(record).items()
            if name != "start" and getattr(record, name) != value
        }

    def differs(self, record: GroupRecord) -> str:
        """Return a sentence about the first setting that is not as wished, or nothing."""
        for name, value in self.differences(record).items():
            shown, wished = _shown(name, getattr(record, name)), _shown(name, value)
            return f"group '{record.name}' has {name.removesuffix('_ms')} {shown}, not {wished}"
        return ""

    def changed(self, record: GroupRecord) -> GroupRecord:
        """Return the checked record as it is after this wish."""
        if self.mode and self.mode != record.mode and "broadcast" in (self.mode, record.mode):
            raise InvalidRequest(
                f"group '{record.name}' is {record.mode} and cannot become {self.mode}: "
                "members of a broadcast have positions of their own"
            )
        return self._onto(record).check()

    def _onto(self, record: GroupRecord, *, now_ms: int | None = None) -> GroupRecord:
        named = self._named(record)
        start_ms = self.start.time_ms if isinstance(self.start, StartAt) else None
        if now_ms is not None and isinstance(start_ms, Relative):
            named["start"] = StartAt(time_ms=resolve_ms(start_ms, now_ms=now_ms))
        if self.at_most_once and self.retry is None:
            named["retry"] = RetryPolicy(kind="none")
        return msgspec.structs.replace(record, **named)

    def _named(self, record: GroupRecord) -> dict[str, object]:
        """Return the settings that are asked for, as a record has them."""
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        named = {name: value for name, value in values if value is not None}
        if self.filter is not None:
            named["filter"] = self.filter.onto(record.filter)
        return named


def _shown(name: str, value: object) -> str:
    """Return a setting as people write it."""
    if isinstance(value, RetryPolicy):
        return format_policy(value)
    if name.endswith("_ms") and isinstance(value, int):
        return format_duration(value)
    if isinstance(value, msgspec.Struct | dict | tuple):
        return msgspec.json.encode(value).decode()[:200]
    return str(value)
