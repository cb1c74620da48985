"""Where a group stands, moved by an operator: reset, skip, purge, replay, fork, peek, positions.

    finished ──replay──▶ unfinished ──skip──▶ finished          reset: all of a topic at once
                              ├──purge──▶ finished, all that nobody holds and no retry waits for
                              └──advance──▶ acked, all below an offset: by a pipeline

A move is a row of the trace like every outcome: answered when durable, told by `explain`. Ranges
are clipped to the topic; a range that is wholly outside of it is a mistake. A dry run counts only.
Replay takes only what is finished, so it never touches what a member holds; what is dead is not
replayed but redriven. What a reset or a skip takes from a member is void: its acks are refused. One
that cannot be written moves nothing, but what it has taken from members by then comes again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec.structs import replace

from onward.broker.choosing import GONE
from onward.broker.group_ranges import (
    GivenRanges,
    Offset,
    clipped,
    finished,
    outside,
    rows_of,
    unfinished,
)
from onward.broker.group_records import GroupRecords
from onward.broker.peek import Peek
from onward.broker.replies import (
    Done,
    Operation,
    ReadReplies,
    and_then,
    reply,
    reply_when_done,
    when_all,
)
from onward.delivery.group import Group
from onward.delivery.lease import Lease
from onward.delivery.ranges import Range, Ranges, count_of, merged, without
from onward.delivery.share import Share
from onward.delivery.trace import Trace
from onward.errors import Conflict, InvalidRequest, OnwardError, Overloaded, TopicEnded
from onward.message.names import check_group_name, check_member_name
from onward.message.relative import Relative, resolve_ms
from onward.protocol.payloads import Start, decode_fields

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.catalogue import Topic
    from onward.broker.session import Session

PEEK_MAX = 10_000
PEEKS_MAX = 100
ADVANCES_MAX = 100
PURGED = "purged by an operator"

Instant = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class GroupReset(msgspec.Struct, frozen=True):
    """`group.reset`: all of a topic, or of all topics, again from a place on."""

    group: str
    to: Literal["earliest", "latest"] | Start
    topic: str = ""
    dry_run: bool = False


class GroupSkip(msgspec.Struct, frozen=True):
    """`group.skip`: finish ranges that were not delivered."""

    group: str
    topic: str
    ranges: GivenRanges
    dry_run: bool = False


class GroupPurge(msgspec.Struct, frozen=True):
    """`group.purge`: finish all that is ready, of a topic or of all topics."""

    group: str
    topic: str = ""
    dry_run: bool = False


class GroupAdvance(msgspec.Struct, frozen=True):
    """`group.advance`: a member has finished all below an offset, by itself."""

    group: str
    topic: str
    to: Offset
    member: str


class GroupReplay(msgspec.Struct, frozen=True):
    """`group.replay`: deliver again what is finished, by offsets or by a window of time."""

    group: str
    topic: str
    ranges: GivenRanges | None = None
    from_ms: Instant | Relative | None = None
    to_ms: Instant | Relative | None = None
    dry_run: bool = False


class GroupFork(msgspec.Struct, frozen=True):
    """`group.fork`: a new group that stands where this one stands."""

    group: str
    to: str


class GroupPeek(msgspec.Struct, frozen=True):
    """`group.peek`: what would be delivered next."""

    group: str
    topic: str
    limit: Annotated[int, msgspec.Meta(ge=1, le=PEEK_MAX)] = 10


class PositionSet(msgspec.Struct, frozen=True):
    """`position.set`: where a member of a broadcast group reads on."""

    group: str
    member: str
    topic: str
    offset: Offset
    number: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] = 0
    """Of the topic that this is a place in; 0: of that which has the name now."""


class GroupMoves:
    """Answers the REQUEST frames that move groups."""

    def __init__(self, broker: Broker, records: GroupRecords) -> None:
        self._broker = broker
        self._records = records
        self._advances: dict[tuple[str, str], deque[Callable[[], None]]] = {}
        """Who moves a group forward in a topic, the one under way first."""
        self._peeks = ReadReplies(limit=PEEKS_MAX)
        self.operations: dict[str, Operation] = {
            "group.reset": self._reset,
            "group.skip": self._skip,
            "group.purge": self._purge,
            "group.advance": self._advance,
            "group.replay": self._replay,
            "group.fork": self._fork,
            "group.peek": self._peek,
            "position.set": self._set_position,
        }

    def _reset(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, GroupReset)
        group = find_sharing(self._broker, wanted.group)
        topics = self._topics(group, wanted.topic)
        offsets = [self._broker.delivering.start_offset(topic, wanted.to) for topic in topics]
        moved = [
            {"topic": topic.name, "offset": offset, "backlog": topic.next_offset - offset}
            for topic, offset in zip(topics, offsets, strict=True)
        ]
        count = sum(topic.next_offset for topic in topics) - sum(offsets)
        rows = [
            self._row("reset", group, topic.name, offset=offset)
            for topic, offset in zip(topics, offsets, strict=True)
        ]
        move = Move(session, request_id, {"count": count, "topics": moved}, wanted.dry_run)
        self._begin(move, group, lambda: self._write_reset(move, group, rows))

    def _write_reset(self, move: Move, group: Group, rows: list[Trace]) -> None:
        """Void what members hold, now and when the group stands anew: no old ack may finish it."""
        held = [] if move.dry_run else [self._void(group, row.topic, None) for row in rows]
        if not move.dry_run:
            # What is granted meanwhile would be acked after the group stands anew.
            self._broker.consuming.hold(group.record.name)

        def settle(error: OnwardError | None) -> None:
            for row, ranges in zip(rows, held, strict=True):
                if error is None:
                    self._broker.consuming.cancel_leases(group.record.name, row.topic)
                else:
                    self._give_back(group, row.topic, ranges)
            move.done(error)

        self._write(move, rows, settle)

    def _skip(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, GroupSkip)
        group = find_sharing(self._broker, wanted.group)
        topic = find_topic(self._broker, group, wanted.topic)
        carried = self._broker.log.carried.count_of(topic.number)
        ranges = clipped(topic, wanted.ranges, first_offset=0 if carried else None)

        def skip() -> None:
            chosen = unfinished(begun(group, topic.name), ranges)
            rows = self._rows("skipped", group, topic.name, chosen, cause="by an operator")
            move.fields["count"] = count_of(chosen)
            if not move.dry_run:
                # If the rows cannot be written, what they name is given back.
                self._void(group, topic.name, Ranges(chosen))
                self._broker.consuming.hold(group.record.name)
            self._write(move, rows, move.done)

        move = Move(session, request_id, {}, wanted.dry_run)
        self._begin(move, group, skip)

    def _purge(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, GroupPurge)
        group = find_sharing(self._broker, wanted.group)
        topics = self._topics(group, wanted.topic)

        def purge() -> None:
            consuming = self._broker.consuming
            ready = {
                topic.name: consuming.untaken(group, begun(group, topic.name), topic)
                for topic in topics
            }
            rows = [
                row
                for name, ranges in ready.items()
                for row in self._rows("skipped", group, name, ranges, cause=PURGED)
            ]
            move.fields["count"] = sum(map(count_of, ready.values()))
            if rows and not move.dry_run:
                # Nobody may be given what is about to be finished.
                consuming.hold(group.record.name)
            self._write(move, rows, move.done)

        self._broker.consuming.wake_idle(group)
        move = Move(session, request_id, {}, wanted.dry_run)
        self._begin(move, group, purge)

    def _advance(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, GroupAdvance)
        check_member_name(wanted.member)
        group = find_sharing(self._broker, wanted.group)
        topic = find_topic(self._broker, group, wanted.topic)
        self._broker.group_holds.check_free(wanted.group, but_for=session, member=wanted.member)
        if wanted.to > topic.next_offset:
            raise outside(topic, wanted.to)
        self._broker.consuming.idle_groups.touch(wanted.group)
        key = wanted.group, wanted.topic
        line = self._advances.setdefault(key, deque())
        if len(line) >= ADVANCES_MAX:
            raise Overloaded(f"group {wanted.group!r} is moved too often", retry_after_ms=100)
        move = Move(session, request_id, {"count": 0})

        def done(error: OnwardError | None) -> None:
            move.done(error)
            line.popleft()
            if line:
                line[0]()
            else:
                del self._advances[key]

        # One after another: none counts what the one before is just finishing.
        line.append(lambda: self._write_advance(move, group, topic, wanted, done))
        if len(line) == 1:
            line[0]()

    def _write_advance(
        self, move: Move, group: Group, topic: Topic, wanted: GroupAdvance, done: Done
    ) -> None:
        """Ack what is unfinished below the offset; what is stored no more is skipped."""

        def advance() -> None:
            share = begun(group, topic.name)
            chosen = share.unfinished(0, wanted.to)
            gone = self._broker.log.carried.missing(
                topic.number, share.unfinished(0, min(wanted.to, topic.first_offset))
            )
            chosen = without(chosen, Ranges(gone))
            rows = self._rows("acked", group, topic.name, chosen, member=wanted.member)
            rows += self._rows("skipped", group, topic.name, gone, cause=GONE)
            if not rows:
                done(None)
                return
            move.fields["count"] = count_of(chosen)
            self._void(group, topic.name, Ranges(merged([*gone, *chosen])))
            self._broker.consuming.hold(group.record.name)
            self._broker.consuming.record(rows, done)

        try:
            self._broker.check_writable(even_when_full=True)
            begin_shares(self._broker, group, and_then(advance, done))
        except OnwardError as error:
            done(error)

    def _replay(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, GroupReplay)
        group = find_sharing(self._broker, wanted.group)
        topic = find_topic(self._broker, group, wanted.topic)
        ranges = clipped(topic, self._window(topic, wanted))

        def replay() -> None:
            chosen = finished(begun(group, topic.name), ranges)
            move.fields["count"] = count_of(chosen)
            self._write(move, self._rows("replayed", group, topic.name, chosen), move.done)

        move = Move(session, request_id, {}, wanted.dry_run)
        self._begin(move, group, replay)

    def _fork(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, GroupFork)
        record = self._records.find(wanted.group)
        check_group_name(wanted.to)
        self._records.check_new(wanted.to)
        now_ms = self._broker.clock.now_ms()
        copy = replace(record, name=wanted.to, created_at_ms=now_ms, offline=())
        row = Trace(did="forked", at_ms=now_ms, group=copy.name, source=record.name)
        done = reply_when_done(session, request_id, lambda: {"group": copy.name})

        # Both with one commit: there is never a copy without the place of what it copies.
        both = when_all(2, done)
        self._records.change(copy, both)
        self._broker.consuming.record([row], both)

    def _peek(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, GroupPeek)
        group = find_sharing(self._broker, wanted.group)
        topic = find_topic(self._broker, group, wanted.topic)
        share = group.shares.get(topic.name)
        if share is None:
            reply(session, request_id, _peeked([]))
            return
        consuming = self._broker.consuming
        consuming.wake_idle(group)
        peek = Peek(
            share, topic, group.record, limit=wanted.limit,
            leased=lambda: consuming.leases_of(wanted.group).ranges_in(topic.name),
        )  # fmt: skip
        if peek.is_plain:
            reply(session, request_id, _peeked(peek.oldest()))
            return
        self._peeks.check_room()
        self._peeks.begin(session, request_id, self._choose(peek))

    async def _choose(self, peek: Peek) -> dict[str, object]:
        look_ahead = self._broker.consuming.look_ahead
        async with look_ahead.answers:
            return _peeked(await peek.chosen(look_ahead))

    def _set_position(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, PositionSet)
        check_member_name(wanted.member)
        group = self._broker.consuming.find(wanted.group)
        topic = find_topic(self._broker, group, wanted.topic)
        if group.record.mode != "broadcast":
            raise InvalidRequest(f"group {wanted.group!r} is not broadcast: it has one position")
        if wanted.number not in (0, topic.number):
            raise TopicEnded(f"topic {topic.name!r} has ended since it was read from last")
        if wanted.offset > topic.next_offset:
            raise outside(topic, wanted.offset)
        row = self._row(
            "moved", group, topic.name, offset=wanted.offset, member=wanted.member,
            number=topic.number,
        )  # fmt: skip
        fields: dict[str, object] = {"offset": wanted.offset}
        self._broker.check_writable(even_when_full=True)
        move = Move(session, request_id, fields)
        self._write(move, [row], move.done)

    # --- how a move goes ---------------------------------------------------------------------

    def _begin(self, move: Move, group: Group, step: Callable[[], None]) -> None:
        """Take a step when the group has begun with all of its topics."""
        if not move.dry_run:
            self._broker.check_writable(even_when_full=True)
        begin_shares(self._broker, group, and_then(step, move.done))

    def _write(self, move: Move, rows: list[Trace], done: Done) -> None:
        """Make rows durable, then call `done`; a move that is only counted is done at once."""
        if move.dry_run or not rows:
            move.done(None)
        else:
            self._broker.consuming.record(rows, done)

    def _row(
        self, did: str, group: Group, topic: str, *, offset: int = -1, member: str = "",
        number: int = 0,
    ) -> Trace:  # fmt: skip
        return Trace(
            did=did, at_ms=self._broker.clock.now_ms(), group=group.record.name, topic=topic,
            offset=offset, member=member, number=number,
        )  # fmt: skip

    def _rows(
        self, did: str, group: Group, topic: str, ranges: list[Range], *, cause: str = "",
        member: str = "",
    ) -> list[Trace]:  # fmt: skip
        return rows_of(
            did, group.record.name, topic, ranges, cause=cause, member=member,
            at_ms=self._broker.clock.now_ms(),
        )  # fmt: skip

    def _void(self, group: Group, topic: str, ranges: Ranges | None) -> list[Range]:
        """Take ranges, or all, of a topic from those who hold them; return what they held."""
        leases = self._broker.consuming.leases_of(group.record.name)
        held = [
            (lease, start, end)
            for lease in self._leases_in(group, topic)
            for one in lease.ranges
            for start, end in ([one] if ranges is None else ranges.overlap(*one))
        ]
        for lease, start, end in held:
            leases.settle(lease.id, start, end, member=lease.member)
        return [(start, end) for _, start, end in held]

    def _leases_in(self, group: Group, topic: str) -> list[Lease]:
        consuming, name = self._broker.consuming, group.record.name
        leases = consuming.leases_of(name)
        return [
            lease
            for member in consuming.members_of(name)
            for lease in leases.of_member(member.name)
            if lease.topic == topic
        ]

    def _give_back(self, group: Group, topic: str, ranges: list[Range]) -> None:
        """Let what was voided be taken again: nothing came of it."""
        crew = self._broker.consuming.crews.get(group.record.name)
        source = None if crew is None else crew.sources.get(topic)
        if crew is not None and source is not None:
            source.give_back(ranges)
            self._broker.consuming.serve_soon(crew)
        elif topic in group.shares:
            group.shares[topic].give_back(ranges)

    def _window(self, topic: Topic, wanted: GroupReplay) -> list[Range]:
        """Return the ranges that are meant, by offsets or by times."""
        by_time = wanted.from_ms is not None or wanted.to_ms is not None
        if by_time == (wanted.ranges is not None):
            raise InvalidRequest("a replay has either ranges, or from_ms and to_ms")
        if wanted.ranges is not None:
            return wanted.ranges
        now_ms = self._broker.clock.now_ms()
        from_ms = resolve_ms(wanted.from_ms or 0, now_ms=now_ms)
        to_ms = None if wanted.to_ms is None else resolve_ms(wanted.to_ms, now_ms=now_ms)
        if to_ms is not None and from_ms >= to_ms:
            raise InvalidRequest(f"no time is from {from_ms} to {to_ms}")
        start = self._offset_at(topic, from_ms)
        end = topic.next_offset if to_ms is None else self._offset_at(topic, to_ms)
        return [(start, end)] if start < end else []

    def _offset_at(self, topic: Topic, time_ms: int) -> int:
        found = self._broker.log.offset_from_time(topic.number, time_ms)
        return topic.next_offset if found is None else max(found, topic.first_offset)

    def _topics(self, group: Group, name: str) -> list[Topic]:
        """Return the named topic of a group, or all of its topics that exist."""
        by_name = self._broker.catalogue.by_name
        names = [name] if name else [one for one in group.record.topics if one in by_name]
        return [find_topic(self._broker, group, one) for one in names]


class Move:
    """A move on its way: who asked for it, what is answered, and whether it is only counted."""

    __slots__ = ("done", "dry_run", "fields")

    def __init__(
        self, session: Session, request_id: int, fields: dict[str, object], dry_run: bool = False
    ) -> None:
        self.fields = fields
        self.dry_run = dry_run
        self.done: Done = reply_when_done(session, request_id, lambda: self.fields)


def _peeked(ranges: list[Range]) -> dict[str, object]:
    return {"ranges": ranges, "count": count_of(ranges)}


# --- what requests are about -------------------------------------------------------------------


def find_sharing(broker: Broker, name: str) -> Group:
    """Return the group if its members share the work: only then does it stand in one place."""
    group = broker.consuming.find(name)
    if group.record.mode == "broadcast":
        raise InvalidRequest(f"group {name!r} is broadcast: each member has its own position")
    return group


def find_topic(broker: Broker, group: Group, name: str) -> Topic:
    """Return a topic that the group consumes."""
    topic = broker.catalogue.find(name)
    if name not in group.record.topics:
        raise InvalidRequest(f"group {group.record.name!r} does not consume topic {name!r}")
    return topic


def begin_shares(broker: Broker, group: Group, done: Done) -> None:
    """Let a group begin with those of its topics that it has not begun with."""
    missing = [
        name
        for name in group.record.topics
        if name not in group.shares and name in broker.catalogue.by_name
    ]
    if group.record.mode == "broadcast" or not missing:
        done(None)
        return
    one = when_all(len(missing), done)
    for name in missing:
        broker.consuming.begin_share(group, name, one)


def begun(group: Group, topic: str) -> Share:
    """Return the share of a topic; its group may have ended while this was under way."""
    share = group.shares.get(topic)
    if share is None:
        raise Conflict(f"group {group.record.name!r} has no place in topic {topic!r} any more")
    return share
