"""THE CONSUME PATH: from what a group has not finished to a member's hands.

    join     a member names its group and topics, and gives credit         `joining`
    choose   whose turn is it, how much, of which topic                     here
    lease    the ranges are this member's until a moment                    here
    hand     read, cut, send as one DELIVERY                                `handover`
    settle   ack, retry, reject: rows of the trace, folded when durable     `settle`
    suspect  what died with its member comes again alone                    `suspects`
    recall   what waits at a busy member goes to an idle one                `recalls`

A group is served when there is something new, a member gives credit or leaves, a retry comes due,
or a lease runs out. Each grant is sized by what is ready and who waits, so that nobody grabs all;
retries and fresh messages take turns. The log is the buffer: a group that is far behind costs what
one at the head costs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING

from onward.broker.broadcast import tasks
from onward.broker.choosing import ChosenSource, PlainSource, Source, gone_row
from onward.broker.crew import Crew, Member
from onward.broker.deliver import CROWDED_READ_BYTES_MAX, UNSENT_BYTES_MAX
from onward.broker.group_records import GroupRecords
from onward.broker.handing import Handing
from onward.broker.handover import DELIVERY_BYTES_MAX
from onward.broker.idle_groups import IdleGroups
from onward.broker.joining import Joining
from onward.broker.lease_alarms import LeaseAlarms
from onward.broker.lookahead import LookAhead
from onward.broker.outcomes import Done, Outcomes
from onward.broker.recalls import Recalls
from onward.broker.reclaim import Reclaims
from onward.broker.served import Served
from onward.broker.settle import Settling
from onward.broker.suspects import Suspects
from onward.delivery.group import Group, Groups
from onward.delivery.lease import Leases
from onward.delivery.ranges import Range, count_of
from onward.delivery.record import GroupRecord, StartAt
from onward.delivery.share import Share
from onward.delivery.trace import Trace
from onward.errors import Conflict, Forbidden, OnwardError, TopicEnded, UnknownGroup
from onward.protocol.deliveries import decode_started
from onward.protocol.frames import Kind
from onward.protocol.payloads import End, Start, encode_json

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.catalogue import Topic
    from onward.broker.requester import Requester
    from onward.broker.session import Session

logger = logging.getLogger("onward.consume")

COLD_BYTES_MAX = 64 << 20
"""How much may be read from the disk for members at the same time."""
OUTCOMES = frozenset(
    ("acked", "retried", "expired", "lost", "released", "dead", "filtered", "skipped")
)
LEASES_PER_MEMBER_MAX = 10_000
NO_ROOM_S = 0.05


class Consuming:
    """All groups of a broker that have members, and what they consume."""

    def __init__(self, broker: Broker, groups: Groups) -> None:
        self._broker = broker
        self._loop = asyncio.get_running_loop()
        self._handing = Handing(broker, self)
        self.look_ahead = LookAhead(broker.log, broker.in_thread)
        self._crew_serial = 0
        self._holds: dict[str, int] = {}
        """Groups that wait until what was said of their messages is durable, and how often."""
        self._of_session: dict[Requester, dict[int, Member]] = {}
        self._expired: Counter[str] = Counter()
        """How many leases of each group ran out."""
        self.groups = groups
        self.crews: dict[str, Crew] = {}
        self.outcomes = Outcomes(
            broker.publishing, apply=broker.state.apply_row, give_back=self._refused,
            now_ms=broker.clock.now_ms,
        )  # fmt: skip
        self.reclaims = self._open_reclaims()
        self.records = GroupRecords(broker)
        self.joining = Joining(broker, self)
        self.idle_groups = IdleGroups(broker)
        self.settling = Settling(broker, self)
        self.served = Served(self)
        self._suspects = Suspects(self, self._handing, broker.clock)
        self._recalls = Recalls(self, broker.clock)
        self.alarms = LeaseAlarms(broker.clock, ring=self._expire)
        self.delivered_count = 0

    def _open_reclaims(self) -> Reclaims:
        """Begin the window in which members re-claim what they hold; a follower has none."""
        broker = self._broker
        window_ms = broker.settings.groups.reclaim_ms if broker.gate.is_leading else 0
        return Reclaims(
            self.groups, catalogue=broker.catalogue, node=broker.node, clock=broker.clock,
            window_ms=window_ms, serve=self._serve_group,
        )  # fmt: skip

    def lead(self) -> None:
        """Begin to grant: what is unfinished is ready, or reserved for who may re-claim it."""
        self.groups.restart()
        self.reclaims = self._open_reclaims()

    def follow(self, error: OnwardError) -> None:
        """Grant nothing more: end all memberships with the error that names the leader."""
        self.reclaims.end()
        for crew in list(self.crews.values()):
            for member in list(crew.members.values()):
                self._end(member, error)

    # --- what others ask for -----------------------------------------------------------------

    def find(self, name: str) -> Group:
        """Return the group called `name`, or raise `UnknownGroup`."""
        group = self.groups.by_name.get(name)
        if group is None:
            raise UnknownGroup(f"group {name!r} does not exist")
        return group

    def members_of(self, name: str) -> list[Member]:
        """Return the members that a group has now."""
        crew = self.crews.get(name)
        return [] if crew is None else list(crew.members.values())

    def wake_idle(self, group: Group) -> None:
        """Make ready what is due in a group without members: while it has some, serving does it."""
        if not self.members_of(group.record.name):
            for share in group.shares.values():
                if share.retries:
                    share.wake(self._broker.clock.now_ms())

    def leases_of(self, name: str) -> Leases:
        """Return what the members of a group hold now."""
        crew = self.crews.get(name)
        return Leases() if crew is None else crew.leases

    def expired_of(self, name: str) -> int:
        """Return how many leases of a group ran out since the broker started."""
        return self._expired.get(name, 0)

    def record(self, rows: list[Trace], done: Done) -> None:
        """Publish rows of the trace; when they are durable they are folded, then `done` comes."""
        self.outcomes.add(rows)
        self.outcomes.when_durable(done)

    def change(self, record: GroupRecord, done: Done) -> None:
        """Create, change or delete a group."""
        self._broker.publishing.change_group(record, done=done)

    def begin_share(
        self, group: Group, topic_name: str, done: Done, *, offset: int | None = None
    ) -> None:
        """Make sure that a group has begun with a topic: where its settings say, or at `offset`."""
        if topic_name in group.shares:
            done(None)
            return
        topic = self._broker.catalogue.find(topic_name)
        if topic.ending:
            raise TopicEnded(f"topic {topic_name!r} is ending")
        if offset is None:
            offset = self.start_of(group.record, topic)
        row = Trace(
            did="started", at_ms=self._broker.clock.now_ms(), group=group.record.name,
            topic=topic_name, offset=offset,
        )  # fmt: skip
        self.record([row], done)

    def start_of(self, record: GroupRecord, topic: Topic) -> int:
        """Return the offset at which a group begins with a topic it has not seen."""
        start = record.start
        if isinstance(start, StartAt):
            # A place beyond what there is becomes the nearest that there is.
            if start.offset is not None:
                return min(max(start.offset, topic.first_offset), topic.next_offset)
            return self._broker.delivering.start_offset(topic, Start(time_ms=start.time_ms))
        return self._broker.delivering.start_offset(topic, start)

    def new_crew(self, group: Group) -> Crew:
        """Return the crew of a group that gets its first member."""
        self._crew_serial += 1
        # Ids that no delivery had before, also of an earlier life of this broker.
        return Crew(group, first_lease=(self._broker.started_at_ms + self._crew_serial) << 20)

    def untaken(self, group: Group, share: Share, topic: Topic) -> list[Range]:
        """Return what of a topic no member holds, and what neither waits nor is being settled.

        Sources return what they hold to the share: only then does it tell who has what.
        """
        crew = self.crews.get(group.record.name)
        if crew is not None and topic.name in crew.sources:
            self._choose_anew(crew, topic.name)
            self.serve_soon(crew)
        return share.untaken(topic.next_offset)

    def cancel_leases(self, name: str, topic: str) -> None:
        """Make void what members hold of a topic: its share is about to begin anew."""
        if (crew := self.crews.get(name)) is not None:
            crew.leases.drop_topic(topic)
            self._suspects.give_back(crew, topic)

    def end_member(self, name: str, member_name: str, error: OnwardError) -> bool:
        """End a membership and tell why; what it holds is given back."""
        crew = self.crews.get(name)
        member = None if crew is None else crew.members.get(member_name)
        if member is None:
            return False
        self._end(member, error)
        return True

    # --- what sessions tell ------------------------------------------------------------------

    def members_on(self, requester: Requester) -> dict[int, Member]:
        """Return the members that a connection has, by their consumer ids."""
        return self._of_session.get(requester, {})

    def joined(self, member: Member, *, credit: int) -> None:
        """Take a member in that everything is ready for, and serve it."""
        crew = member.crew
        if (namesake := crew.members.get(member.name)) is not None:
            self._end(namesake, Conflict(f"another member joined as {member.name!r}"), is_lost=True)
        crew = member.crew = self.crews.setdefault(crew.group.record.name, crew)
        crew.join(member, credit=credit)
        self._of_session.setdefault(member.session, {})[member.consumer_id] = member
        self.attach(crew)

    def give(self, session: Session, consumer_id: int, credit: int) -> None:
        """Change the credit of a member; for one that has just ended this means nothing."""
        member = self._of_session.get(session, {}).get(consumer_id)
        if member is not None:
            member.crew.give(member, credit)
            if credit > 0:
                self.serve_soon(member.crew)

    def start(self, session: Session, consumer_id: int, payload: bytes | bytearray) -> None:
        """Take note of what a member starts; for one that has just ended this means nothing."""
        rows = decode_started(payload)
        member = self._of_session.get(session, {}).get(consumer_id)
        if member is None:
            return
        now_ms = self._broker.clock.monotonic_ms()
        for delivery, start, end in rows:
            member.start(delivery, start, end, now_ms=now_ms)

    def cancel(self, session: Session, consumer_id: int) -> bool:
        """End a membership because its client wants no more; tell whether there was one."""
        if self.joining.cancel(session, consumer_id):
            return True
        member = self._of_session.get(session, {}).get(consumer_id)
        if member is None:
            return False
        self._leave(member, is_lost=False)

        def say(error: OnwardError | None = None) -> None:
            self._say_end(member, "cancelled", "cancelled by the client")

        if member.crew.group.record.at_most_once:
            # What is finished for it and on its way comes before the end.
            self.outcomes.when_durable(say)
        else:
            say()
        return True

    def resume(self, session: Session) -> None:
        """The socket of this session takes bytes again."""
        for member in self._of_session.get(session, {}).values():
            self.go_on(member)

    def go_on(self, member: Member) -> None:
        """Serve a member again that was left out, if nothing speaks against it any more."""
        if not member.is_waiting or not member.session.writable:
            return
        limit = 1 if member in member.crew.apart else LEASES_PER_MEMBER_MAX
        if member.crew.leases.held_by(member.name) < limit:
            member.crew.go_on(member)
            self.serve_soon(member.crew)

    def forget(self, session: Session) -> None:
        """A connection is gone: what its members held counts as an attempt, and comes again."""
        self.joining.forget(session)
        # A broker that stops ends the connections itself: that is nobody's death.
        is_lost = not self._broker.gate.is_stopping
        for member in list(self._of_session.get(session, {}).values()):
            self._leave(member, is_lost=is_lost)

    # --- what the broker tells ---------------------------------------------------------------

    def wake(self, topic: Topic) -> None:
        """New messages are there."""
        for crew in topic.crews or ():
            self.serve_soon(crew)

    def end_topic(self, topic: Topic, reason: str) -> None:
        """A topic is no more: who consumes nothing else is told."""
        ended = topic.crews or []
        topic.crews = None
        for crew in ended:
            self._detach(crew, topic.name)
            for member in list(crew.members.values()):
                if not any(name in crew.sources for name in member.topics):
                    self._end(member, TopicEnded(f"topic {topic.name!r} was {reason}"))
            self.joining.tell_topics(crew)

    def tick(self) -> None:
        """Do what an alarm has missed, and take up topics that came back under their names."""
        now_ms = self._broker.clock.monotonic_ms()
        self.reclaims.tick()
        for crew in list(self.crews.values()):
            if crew.alarm is not None and crew.alarm_at_ms <= now_ms:
                self._expire(crew)
            if crew.apart:
                self._suspects.tick(crew)
            if len(crew.sources) < len(crew.group.record.topics):
                self._take_up(crew)

    def _take_up(self, crew: Crew) -> None:
        catalogue = self._broker.catalogue
        if crew.group.record.mode == "broadcast":
            return
        for name in crew.group.record.topics:
            topic = catalogue.by_name.get(name)
            if name in crew.sources or topic is None or topic.ending or not topic.is_durable:
                continue
            # Its members were there all the time: they get it from its beginning.
            self.begin_share(
                crew.group, name, lambda error: self._taken_up(crew), offset=topic.first_offset
            )

    def _taken_up(self, crew: Crew) -> None:
        self.attach(crew)
        self.joining.tell_topics(crew)

    # --- the parts of a crew -----------------------------------------------------------------

    def attach(self, crew: Crew) -> None:
        """Connect a crew with the topics whose shares have begun, and serve it."""
        for name, share in crew.group.shares.items():
            topic = self._broker.catalogue.by_name.get(name)
            if name not in crew.sources and topic is not None and crew.members:
                crew.sources[name] = self._source(crew, share, topic)
                crew.topics[name] = topic
                crew.turn.append(name)
                topic.crews = [*(topic.crews or ()), crew]
                topic.uses += 1
        self.serve_soon(crew)

    def _detach(self, crew: Crew, name: str) -> None:
        self._suspects.give_back(crew, name)
        source = crew.sources.pop(name, None)
        if source is None:
            return
        source.close()
        crew.leases.drop_topic(name)
        crew.turn.remove(name)
        topic = crew.topics.pop(name)
        if topic.crews is not None:
            topic.crews = [one for one in topic.crews if one is not crew] or None

    def _source(self, crew: Crew, share: Share, topic: Topic) -> Source:
        record = crew.group.record
        if not record.is_choosy and not record.filter:
            return PlainSource(share, topic, is_exclusive=record.mode == "exclusive")
        return ChosenSource(
            share, topic, record=record, look_ahead=self.look_ahead,
            wake=lambda: self.serve_soon(crew), settle=self.outcomes.add,
            clock=self._broker.clock, leased=lambda: crew.leases.ranges_in(topic.name),
        )  # fmt: skip

    def group_changed(self, before: GroupRecord | None, record: GroupRecord) -> None:
        """Follow a change of a group's settings, which was applied."""
        if before is not None and (crew := self.crews.get(record.name)) is not None:
            for name in set(before.topics).difference(record.topics):
                self._detach(crew, name)
        self.idle_groups.note(record)
        if record.deleted:
            self._broker.group_holds.forget_group(record.name)
            self._expired.pop(record.name, None)
        crew = self.crews.get(record.name)
        if crew is None:
            return
        if record.deleted:
            for member in list(crew.members.values()):
                self._end(member, UnknownGroup(f"group {record.name!r} was deleted"))
            return
        for name in record.offline:
            if (offline := crew.members.get(name)) is not None:
                self._end(offline, Conflict(f"member {name!r} was taken offline"))
        if before is not None:
            self._end_forbidden(crew, set(record.topics).difference(before.topics))
        if before is None or _rules(before) != _rules(record):
            for name in list(crew.sources):
                self._choose_anew(crew, name)
        if record.mode == "broadcast" and before is not None and tasks(before) != tasks(record):
            self.joining.tell_again(crew)
        if record.mode != "broadcast" and crew.follow(frozenset(record.topics)):
            self.joining.tell_topics(crew)
        self.attach(crew)

    def _end_forbidden(self, crew: Crew, added: set[str]) -> None:
        """End the members that get all topics of their group and may not read a new one."""
        following = [member for member in crew.members.values() if member.follows]
        for member in following if added else ():
            try:
                self.joining.check_topics(member.session, sorted(added))
            except Forbidden as error:
                self._end(member, error)

    def _choose_anew(self, crew: Crew, name: str) -> None:
        """Return to the share what was looked at or set apart and not granted, and begin again."""
        self._suspects.give_back(crew, name)
        source = crew.sources[name]
        source.close()
        crew.sources[name] = self._source(crew, source.share, crew.topics[name])

    # --- choose and lease --------------------------------------------------------------------

    def serve_soon(self, crew: Crew) -> None:
        """Serve a group in the loop's next turn: once, whatever happened how often."""
        if not crew.is_serving:
            crew.is_serving = True
            self._loop.call_soon(self._planned_serve, crew)

    def _serve_group(self, group: Group) -> None:
        if (crew := self.crews.get(group.record.name)) is not None:
            self.serve_soon(crew)

    def _planned_serve(self, crew: Crew) -> None:
        crew.is_serving = False
        self._serve(crew)

    def _serve(self, crew: Crew) -> None:
        """Grant until nobody waits or nothing is left, then set the alarm for what comes later."""
        if not crew.members or crew.group.record.name in self._holds:
            return
        if self._broker.failure is not None or not self._broker.gate.is_leading:
            return
        if self._broker.gate.is_stopping:
            return  # what a stopping broker hands out would only be held over its end
        now_ms = self._broker.clock.now_ms()
        for source in crew.sources.values():
            if source.share.retries:
                source.share.wake(now_ms)
        if not crew.group.record.paused:
            if crew.suspects:
                self._suspects.grant(crew)
            while self._has_room(crew) and self._grant_any(crew):
                pass
            if crew.recall is None and len(crew.members) > 1:
                self._recalls.plan(crew)
        if crew.served_waits:
            self.served.answer(crew)
        self.alarms.set(crew)

    def _has_room(self, crew: Crew) -> bool:
        """Tell whether more may be read; if not, come back in a moment."""
        if self._bytes_max() and self._handing.cold_bytes < COLD_BYTES_MAX:
            return True
        self._broker.delivering.look_at_sockets()
        if self._bytes_max() and self._handing.cold_bytes < COLD_BYTES_MAX:
            return True
        self._loop.call_later(NO_ROOM_S, self.serve_soon, crew)
        return False

    def _bytes_max(self) -> int:
        """Return how large a delivery may be: small ones when sockets hold much already.

        Members that do not read must not keep those from working who do.
        """
        unsent_bytes = self._broker.delivering.unsent_bytes
        if unsent_bytes < UNSENT_BYTES_MAX // 2:
            return DELIVERY_BYTES_MAX
        return CROWDED_READ_BYTES_MAX if unsent_bytes < UNSENT_BYTES_MAX * 4 else 0

    def _grant_any(self, crew: Crew) -> bool:
        """Make one grant of the first topic that has something for someone."""
        for _ in range(len(crew.turn)):
            name = crew.turn[0]
            crew.turn.rotate(-1)
            if self._grant(crew, name):
                return True
        return False

    def _grant(self, crew: Crew, name: str) -> bool:
        source, topic = crew.sources[name], crew.topics[name]
        if source.share.head < topic.first_offset:
            self._skip_retained(crew, source, topic)
        available = source.available()
        if available <= 0:
            return False
        turn = crew.next_grant(name, available)
        if turn is None:
            return False
        member, limit = turn
        if crew.leases.held_by(member.name) >= LEASES_PER_MEMBER_MAX:
            # It takes and never settles: it gets more when it does, or its leases run out.
            crew.pause(member)
            return True
        ranges = source.take(min(limit, crew.fitting(name)))
        if not ranges:
            return False
        if source.share.alone:
            others = self._suspects.set_apart(crew, source.share, ranges)
            if others != ranges:
                self.serve_soon(crew)
            if not others:
                return True
            ranges = others
        member.was_apart = False
        crew.used(member, count_of(ranges))
        self._handing.deliver(crew, member, source, topic, ranges, bytes_max=self._bytes_max())
        return True

    def _skip_retained(self, crew: Crew, source: Source, topic: Topic) -> None:
        """What retention took away before it was consumed is skipped, and the log says so."""
        lost = source.share.forget_below(topic.first_offset)
        if lost:
            logger.warning(
                "group %r lost %d messages of topic %r to retention before it consumed them",
                crew.group.record.name, count_of(lost), topic.name,
            )  # fmt: skip
            name = crew.group.record.name
            self.outcomes.add(
                [gone_row(name, topic.name, lost, now_ms=self._broker.clock.now_ms())]
            )

    # --- end of a membership -----------------------------------------------------------------

    def _end(self, member: Member, error: OnwardError, *, is_lost: bool = False) -> None:
        self._leave(member, is_lost=is_lost)
        self._say_end(member, error.code, str(error))

    def _say_end(self, member: Member, code: str, message: str) -> None:
        end = End(code, message, 0)
        member.session.send(Kind.END, member.consumer_id, encode_json(end))

    def _leave(self, member: Member, *, is_lost: bool) -> None:
        """Let a member go. What it holds is given back; as an attempt, when it died with it."""
        crew = member.crew
        members = self._of_session.get(member.session, {})
        members.pop(member.consumer_id, None)
        if not members:
            self._of_session.pop(member.session, None)
        crew.leave(member)
        self.served.forget(member)
        leases = crew.leases.drop_member(member.name)
        if is_lost:
            self.settling.lose_all(crew, leases)
        else:
            self.settling.release_all(crew, leases)
        # What it leaves behind is delivered in its order.
        is_released = bool(leases) and not is_lost
        keeps_order = crew.group.record.mode in ("exclusive", "ordered") or is_released
        if keeps_order and not self._broker.gate.is_stopping:
            self.hold(crew.group.record.name)
        if crew.members:
            self.serve_soon(crew)
        else:
            self._disband(crew)

    def hold(self, name: str) -> None:
        """Grant nothing of a group until what was said of its messages is durable.

        For groups that keep an order when a member leaves something behind, and for all groups
        while they are moved.
        """
        self._holds[name] = self._holds.get(name, 0) + 1

        def release(error: OnwardError | None) -> None:
            self._holds[name] -= 1
            if not self._holds[name]:
                del self._holds[name]
                if (crew := self.crews.get(name)) is not None:
                    self.serve_soon(crew)

        self.outcomes.when_durable(release)

    def is_granting(self, crew: Crew) -> bool:
        """Tell whether what becomes ready in a group now is delivered at once."""
        record = crew.group.record
        return bool(crew.members) and not record.paused and record.name not in self._holds

    def give_back(self, crew: Crew, topic: str, ranges: list[Range]) -> None:
        """Let ranges that were leased be delivered again; nothing is counted."""
        if (source := crew.sources.get(topic)) is not None:
            source.give_back(ranges)

    def _disband(self, crew: Crew) -> None:
        for name in list(crew.sources):
            self._detach(crew, name)
        if crew.alarm is not None:
            crew.alarm.cancel()
            crew.alarm = None
        self._recalls.cancel(crew)
        self.crews.pop(crew.group.record.name, None)
        self.idle_groups.touch(crew.group.record.name)

    # --- rows --------------------------------------------------------------------------------

    def row_applied(self, row: Trace, *, was_blocked: bool) -> None:
        """Serve the group that a row concerns; the row was applied."""
        crew = self.crews.get(row.group)
        if crew is None:
            return
        source = crew.sources.get(row.topic)
        if source is not None:
            source.applied(row)
        if row.did == "reset":
            crew.suspects.pop(row.topic, None)
        if row.did == "started":
            self.attach(crew)
        # An ack makes way for other messages only in a share that was blocked.
        if row.did != "acked" or crew.group.record.is_choosy or was_blocked:
            self.serve_soon(crew)

    def _refused(self, rows: list[Trace]) -> None:
        """Rows could not be written: what they said of messages did not happen."""
        for row in rows:
            group = self.groups.by_name.get(row.group)
            if group is None or row.topic not in group.shares:
                continue
            if row.did in OUTCOMES:
                crew = self.crews.get(row.group)
                source = None if crew is None else crew.sources.get(row.topic)
                (source or group.shares[row.topic]).give_back(list(row.ranges))
                if crew is not None and source is not None:
                    self._loop.call_later(1, self.serve_soon, crew)

    def stop(self) -> None:
        """Join nobody and read nothing more: the broker has failed, or stops."""
        self.joining.stop()
        self.reclaims.stop()
        self._handing.stop()

    def _expire(self, crew: Crew) -> None:
        for lease in crew.leases.expire(self._broker.clock.monotonic_ms()):
            self._expired[crew.group.record.name] += 1
            self.settling.expire(crew, lease)
            if (member := crew.members.get(lease.member)) is not None:
                self.go_on(member)
        self._serve(crew)


def _rules(record: GroupRecord) -> tuple[object, ...]:
    """Return what decides which messages come next."""
    return (
        record.mode, record.filter, record.priorities, record.tenants, record.key_rate,
        record.key_concurrency,
    )  # fmt: skip
