"""The life line of one message: who published it, where it is stored, how it went in every group.

    published ── stored ──┬─ group billing: retried, retried, acked by ann after 12 ms
                          ├─ group audit:   leased by bob for another 20 s
                          └─ group mail:    dead after 3 attempts: no such address

History comes from the rows of `@trace` that name the message, the present from the broker. So it
can be told after the message itself is gone: then nothing is said to come that cannot come.
Everything here is pure: it is handed rows and replies and says what they mean.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec.structs import asdict

from onward.delivery.trace import Trace, decode_row
from onward.durations import format_duration, format_instant
from onward.errors import Corruption
from onward.message.message import Message
from onward.protocol.operations.messages import MessageInGroup, Publisher
from onward.protocol.operations.schedule import SCHEDULE_TOPIC, ScheduledDescription

EVENTS_MAX = 1_000
"""Kept of one group, the latest: a message that is retried for ever has a long life line."""

_WITH_RANGES = frozenset(
    {"acked", "filtered", "retried", "expired", "lost", "released", "dead", "skipped",
     "redriven", "purged", "replayed"}
)  # fmt: skip
_ENDS = frozenset({"acked", "filtered", "skipped", "purged", "dead", "started", "reset", "moved"})
"""Events that say how a message ended in a group, or why it had nothing to do with it."""
_UNTRACED_STORED = "acked or left out; the trace no longer reaches back"
_UNTRACED_GONE = (
    "acked, left out, or dropped by retention before it was delivered; "
    "the trace no longer reaches back"
)


class LifeEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened to the message in one group.

    >>> LifeEvent(did="acked", at_ms=0, member="ann", took_ms=12).sentence()
    'acked by ann after 12 ms'
    """

    did: str
    at_ms: int
    member: str = ""
    attempt: int = 0
    counted: bool = True
    """False: it was retried without counting, and the next delivery has its number again."""
    due_at_ms: int = 0
    cause: str = ""
    took_ms: int | None = None
    worked_ms: int | None = None
    """Since the member started it, if it waited there; `took_ms` counts from its delivery."""
    offset: int = -1
    source: str = ""

    def sentence(self) -> str:
        """Return what happened, in words."""
        by = f" by {self.member}" if self.member else ""
        cause = f": {self.cause}" if self.cause else ""
        match self.did:
            case "acked":
                return f"acked{by}{self._took()}"
            case "released":
                return f"released{by}, which counts as no attempt"
            case "retried" if not self.counted:
                return f"attempt {self.attempt + 1}{by} does not count{self._due()}{cause}"
            case "retried":
                return f"attempt {self.attempt}{by} failed{self._due()}{cause}"
            case "expired":
                holder = f" of {self.member}" if self.member else ""
                return f"the lease{holder} ran out in attempt {self.attempt}{self._due()}{cause}"
            case "lost":
                who = self.member or "the member"
                return f"{who} was lost in attempt {self.attempt}{self._due()}{cause}"
            case "dead":
                return f"dead{by} after {_count(self.attempt, 'attempt')}{cause}"
            case "filtered":
                return "filtered: the group does not want it"
            case "forked":
                return f"the group was forked from {self.source}"
            case "started":
                return f"the group began at offset {self.offset}"
            case "reset":
                return f"the group was reset to offset {self.offset}"
            case "moved":
                return f"the position of {self.member or 'a member'} is past it"
            case "moved_back":
                return f"the position of {self.member or 'a member'} is before it again"
            case "redriven":
                return "redriven: to be delivered again"
            case "replayed":
                return "replayed: to be delivered again"
        return f"{self.did}{by}{cause}"

    def _took(self) -> str:
        """Return how long it took; work and waiting at the member are told apart.

        >>> LifeEvent(did="acked", at_ms=0, took_ms=9_000, worked_ms=5_000).sentence()
        'acked after 5000 ms (and 4000 ms in the buffer of its member)'
        """
        if self.took_ms is None:
            return ""
        if self.worked_ms is None:
            return f" after {self.took_ms} ms"
        waited_ms = self.took_ms - self.worked_ms
        return f" after {self.worked_ms} ms (and {waited_ms} ms in the buffer of its member)"

    def _due(self) -> str:
        wait_ms = self.due_at_ms - self.at_ms
        return (
            f", again in {span(wait_ms)}" if self.due_at_ms and wait_ms > 0 else ", again at once"
        )


class GroupLife(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a message went, and is, in one group.

    >>> GroupLife(group="billing", state="leased", member="ann", lease_ms_left=9_000).sentence()
    'leased by ann for another 9 s, attempt 1'
    """

    group: str
    state: str
    """`fresh`, `leased`, `taken` (on its way), `waiting` (for its retry), `ready`, `reserved`
    (for the member that may have had it before a restart of the broker),
    `behind` (another one of its key comes first), `dead`, `finished` (how, says the last event),
    `missed` (gone before the group was done with it), `broadcast`, or `gone`: the group is no
    more."""
    member: str = ""
    lease_ms_left: int = 0
    attempt: int = 1
    due_at_ms: int = 0
    cause: str = ""
    """Why it is dead; or why it is not known how it was finished."""
    died_at_ms: int = 0
    paused: bool = False
    """It is to be delivered, and the group is paused."""
    behind: str = ""
    """The message of its key that must be finished first, in an ordered group: `orders/5`."""
    beyond: bool = False
    """It was too much to find out whether it waits behind another one of its key."""
    expiring: bool = False
    """It was not delivered yet, and retention may drop it soon."""
    expires_at_ms: int = 0
    """From when on it may; 0: when the log or the topic is too large."""
    passed: int = 0
    """Of a broadcast: so many of the `positions` that its members have stored are past it."""
    positions: int = 0
    events: tuple[LifeEvent, ...] = ()

    def sentence(self, *, now_ms: int = 0) -> str:
        """Return how it is now, in words.

        >>> GroupLife(group="billing", state="behind", behind="orders/5", paused=True).sentence()
        'waits behind orders/5 of its key; the group is paused'
        """
        said = self._state(now_ms)
        if self.behind and self.state != "behind":
            said += f"; waits behind {self.behind} of its key"
        if self.beyond:
            said += "; it was too much to find out whether it waits behind one of its key"
        if self.paused and self.state in ("behind", "waiting"):
            said += "; the group is paused"
        if self.expiring:
            at = f"from {format_instant(self.expires_at_ms)} on" if self.expires_at_ms else "soon"
            said += f"; retention may drop it {at}"
        return said

    def _state(self, now_ms: int) -> str:
        why = self.cause or (self.events[-1].cause if self.events else "")
        cause = f": {why}" if why else ""
        attempt = f"attempt {self.attempt}"
        left = span(max(0, self.lease_ms_left))
        match self.state:
            case "leased" | "taken":
                if not self.member:
                    return f"on its way to a member, or its outcome to the disk, {attempt}"
                return f"leased by {self.member} for another {left}, {attempt}"
            case "reserved":
                return f"kept for the member that may have had it before a restart, {attempt}"
            case "waiting":
                wait_ms = max(0, self.due_at_ms - now_ms)
                due = f"due in {span(wait_ms)} ({format_instant(self.due_at_ms)})"
                return f"retry {max(1, self.attempt - 1)} {due}{cause}"
            case "ready" if self.paused:
                return f"waits because the group is paused, {attempt}"
            case "ready":
                return f"ready to be delivered, {attempt}"
            case "fresh" if self.paused:
                return "not delivered yet: waits because the group is paused"
            case "fresh":
                return "not delivered yet"
            case "behind":
                return f"waits behind {self.behind} of its key"
            case "missed":
                has = f"; {self.member} still has it, for another {left}" if self.member else ""
                return f"it was gone before it was consumed{has}"
            case "dead":
                return f"dead{cause}"
            case "gone":
                return "the group is no more"
            case "broadcast":
                return f"each member reads by itself: {self._passed()}"
            case "finished" if self.cause:
                return f"finished{cause}"
        return self.events[-1].sentence() if self.events else self.state

    def _passed(self) -> str:
        if not self.positions:
            return "none has stored a position"
        verb = "is" if self.passed == 1 else "are"
        return f"{self.passed:,} of {_count(self.positions, 'stored position')} {verb} past it"


class ScheduledOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """How a message that has fired came into the schedule, and how long after its time it left it.

    >>> ScheduledOrigin(
    ...     schedule_id=17, due_at_ms=60_000, fired_at_ms=60_003, scheduled_at_ms=1_000,
    ...     scheduled_by=Publisher("shop"),
    ... ).sentence()
    'scheduled by shop at ...01.000Z for ...:01:00.000Z (schedule id 17), fired 3 ms after its time'
    """

    schedule_id: int
    due_at_ms: int
    fired_at_ms: int
    scheduled_at_ms: int | None = None
    """None when the log does not have its entry of the schedule any more."""
    scheduled_by: Publisher | None = None
    recurring: str = ""
    """The recurring schedule of which it is a run."""

    def sentence(self) -> str:
        """Return who scheduled it, when and for when, in words."""
        by = "" if self.scheduled_by is None else f" by {self.scheduled_by}"
        if self.recurring:
            by = f" by the recurring schedule {self.recurring!r}"
        at_ms = self.scheduled_at_ms
        at = "" if at_ms is None else f" at {format_instant(at_ms)}"
        due = f"for {format_instant(self.due_at_ms)} (schedule id {self.schedule_id})"
        if at_ms is not None and self.due_at_ms < at_ms:
            late = span(max(0, self.fired_at_ms - at_ms))
            return f"scheduled{by}{at} {due}, which was past: fired {late} later"
        late = span(max(0, self.fired_at_ms - self.due_at_ms))
        unknown = "; who scheduled it is no longer stored" if at_ms is None else ""
        return f"scheduled{by}{at} {due}, fired {late} after its time{unknown}"


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The life line of one message.

    >>> life = Explanation(topic="orders", offset=7, asked_at_ms=0)
    >>> life.id, life.lines()[-1]
    ('orders/7', '  no group consumes it')
    """

    topic: str
    offset: int
    asked_at_ms: int
    message: Message | None = None
    """None when retention has taken it away."""
    node: str = ""
    durability: Literal["disk", "memory", ""] = ""
    """What holds it on that node: its disk, or so far only its memory."""
    published_by: Publisher | None = None
    producer_id: int = 0
    groups: tuple[GroupLife, ...] = ()
    is_complete: bool = True
    """False when the trace itself reaches back less far than the message."""
    scheduled: ScheduledOrigin | None = None
    """Of a message that waited for its time, as long as the message itself is stored."""
    became: ScheduledDescription | None = None
    """Of an id of the schedule, `@schedule/17`: what became of it."""

    @property
    def id(self) -> str:
        """The name of the message for people: `topic/offset`."""
        return f"{self.topic}/{self.offset}"

    def group(self, group: str) -> GroupLife | None:
        """Return how it went in one group; None when that group has nothing to do with it."""
        return next((one for one in self.groups if one.group == group), None)

    def lines(self) -> list[str]:
        """Return the life line as text, one line per thing; times count from the publish."""
        began_ms = self._began_ms()
        lines = [self.id, *self._origin()]
        for life in self.groups:
            lines.append(f"  group {life.group}: {life.sentence(now_ms=self.asked_at_ms)}")
            lines += [
                f"    {_mark(event.at_ms, began_ms):>10}  {event.sentence()}"
                for event in life.events
            ]
        if self.became is not None:
            lines.append(f"  {_became(self.became, now_ms=self.asked_at_ms)}")
        elif not self.groups:
            lines.append("  no group consumes it")
        if not self.is_complete:
            lines.append("  the oldest part of the trace is gone: more may have happened before")
        return lines

    def _origin(self) -> list[str]:
        by = "" if self.published_by is None else f" by {self.published_by}"
        did = "scheduled" if self.topic == SCHEDULE_TOPIC else "published"
        if self.message is None:
            if self.topic == SCHEDULE_TOPIC:
                return ["  scheduled; who did it is no longer stored"]
            return [
                f"  published{by}, no longer stored: retention took it away, or a repair gave it up"
            ]
        at_ms = self.message.published_at_ms
        ago = span(max(0, self.asked_at_ms - at_ms))
        size = _count(len(self.message.body), "byte")
        waited = [] if self.scheduled is None else [f"  {self.scheduled.sentence()}"]
        return [
            *waited,
            f"  {did}{by} at {format_instant(at_ms)}, {ago} ago",
            f"  stored as event {self.message.event_id}, {size}{self._place()}",
        ]

    def _place(self) -> str:
        held = {"disk": ", on disk", "memory": ", in memory and not yet on disk"}
        node = f", node {self.node}" if self.node else ""
        return held.get(self.durability, "") + node

    def _began_ms(self) -> int | None:
        if self.message is not None:
            return self.message.published_at_ms
        return min((e.at_ms for life in self.groups for e in life.events), default=None)


class LifeStory:
    """Gathers the rows of the trace that are about one message, group by group, in their order."""

    def __init__(self, topic: str, offset: int) -> None:
        self._topic = topic
        self._offset = offset
        self._sought = f'"{topic}"'.encode()
        self._passed: set[tuple[str, str]] = set()
        self._events: defaultdict[str, deque[LifeEvent]] = defaultdict(
            lambda: deque(maxlen=EVENTS_MAX)
        )

    def add(self, bodies: Iterable[bytes]) -> None:
        """Take rows as they are stored; those about other messages are passed over."""
        for body in bodies:
            if self._sought in body or b'"forked"' in body:
                try:
                    self._take(decode_row(body))
                except Corruption:
                    continue  # a row that nobody can read tells nothing

    def lives(
        self, states: Iterable[MessageInGroup], *, is_complete: bool = True, is_stored: bool = True
    ) -> tuple[GroupLife, ...]:
        """Return how it went in every group, from the rows so far and its present states.

        Where the trace is not complete, it may not say how the message was finished.
        """
        untraced = "" if is_complete else _UNTRACED_STORED if is_stored else _UNTRACED_GONE
        by_group = {state.group: state for state in states}
        for name, events in self._events.items():
            if name not in by_group and any(
                event.did not in ("forked", "started") for event in events
            ):
                by_group[name] = MessageInGroup(group=name, state="gone", attempt=1)
        return tuple(self._life(by_group[name], untraced) for name in sorted(by_group))

    def _life(self, state: MessageInGroup, untraced: str) -> GroupLife:
        events = tuple(self._events.get(state.group, ()))
        is_told = state.state != "finished" or any(event.did in _ENDS for event in events)
        known = {name: value for name, value in asdict(state).items() if value is not None}
        if state.behind is not None:
            known["behind"] = f"{self._topic}/{state.behind}"
        if not is_told:
            known["cause"] = untraced
        return GroupLife(**known, events=events)

    def _take(self, row: Trace) -> None:
        took_ms = worked_ms = None
        if row.did in _WITH_RANGES:
            place = self._place(row)
            if place is None:
                return
            took_ms = row.took_ms[place] if place < len(row.took_ms) else None
            worked_ms = row.worked_ms[place] if place < len(row.worked_ms) else None
        elif not self._concerns(row):
            return
        if row.did == "forked":
            # Until then the copy has no rows of its own: what happened, happened to its source.
            self._events[row.group].extend(self._events.get(row.source, ()))
            passed = [member for group, member in self._passed if group == row.source]
            self._passed.update((row.group, member) for member in passed)
        is_back = row.did == "moved" and row.offset <= self._offset
        self._events[row.group].append(
            LifeEvent(
                did="moved_back" if is_back else row.did, at_ms=row.at_ms, member=row.member,
                attempt=row.attempt, counted=row.counted, due_at_ms=row.due_at_ms,
                cause=row.cause, took_ms=took_ms, worked_ms=worked_ms, offset=row.offset,
                source=row.source,
            )
        )  # fmt: skip

    def _place(self, row: Trace) -> int | None:
        """Return which of the row's ranges holds the message."""
        if row.topic != self._topic:
            return None
        for place, (start, end) in enumerate(row.ranges):
            if start <= self._offset < end:
                return place
        return None

    def _concerns(self, row: Trace) -> bool:
        if row.did == "forked":
            return row.source in self._events
        if row.topic != self._topic:
            return False
        if row.did == "moved":
            return self._crosses(row)
        return row.did in ("reset", "started")

    def _crosses(self, row: Trace) -> bool:
        """Tell whether a member's position was on the other side of the message until now."""
        who, is_past = (row.group, row.member), row.offset > self._offset
        if is_past == (who in self._passed):
            return False
        if is_past:
            self._passed.add(who)
        else:
            self._passed.remove(who)
        return True


def span(duration_ms: int) -> str:
    """Write a duration for people: the two largest units are enough.

    >>> span(850), span(12_340), span(9_000), span(3_725_000)
    ('850 ms', '12.3 s', '9 s', '1h2m')
    """
    if duration_ms < 1_000:
        return f"{duration_ms} ms"
    if duration_ms < 60_000:
        return f"{duration_ms / 1_000:.1f}".removesuffix(".0") + " s"
    unit_ms = (
        1_000 if duration_ms < 3_600_000 else 60_000 if duration_ms < 86_400_000 else 3_600_000
    )
    return format_duration(duration_ms // unit_ms * unit_ms)


def _became(one: ScheduledDescription, *, now_ms: int) -> str:
    """Say what became of a message that was scheduled."""
    match one.state:
        case "waiting":
            left = span(max(0, one.at_ms - now_ms))
            return f"waits until {format_instant(one.at_ms)}, another {left}, for topic {one.topic}"
        case "fired":
            if one.offset is not None:
                return f"fired as {one.topic}/{one.offset}"
            where = f" to topic {one.topic}" if one.topic else ""
            return f"fired{where}; at which offset is no longer known"
        case "cancelled":
            return "cancelled: it never fires"
        case "replaced":
            return "replaced: another message, or another time, has its place"
    return "nothing is known of it"


def _mark(at_ms: int, began_ms: int | None) -> str:
    after_ms = at_ms - (at_ms if began_ms is None else began_ms)
    # Clocks can be set back: what happened after the publish may carry an earlier time.
    return f"+{span(after_ms)}" if after_ms >= 0 else f"-{span(-after_ms)}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
