"""How a member comes into a group.

    CONSUME ──▶ the group exists, or is created ──▶ its topics exist ──▶ it has begun with them
            ──▶ answered ──▶ served

Each step is durable before the next: a group that answered has a place in each of its topics that
survives a crash. Steps of one group go one after another, whoever asks. A client that leaves while
it is joining never was a member.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from onward.broker.broadcast import with_places, with_tasks
from onward.broker.crew import Crew, Member
from onward.broker.futures import future_of
from onward.broker.outcomes import Done
from onward.delivery.change_command import change_command
from onward.delivery.group import Group
from onward.delivery.record import GroupRecord, GroupWish
from onward.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    InvalidRequest,
    OnwardError,
    Overloaded,
    Unavailable,
    UnknownGroup,
)
from onward.message.names import check_group_name, check_member_name, check_topic_name
from onward.protocol.deliveries import Consume, Joined
from onward.protocol.frames import Kind
from onward.protocol.payloads import encode_json

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.consume import Consuming
    from onward.broker.session import Session

logger = logging.getLogger("onward.consume")

CONSUMERS_PER_SESSION_MAX = 1_000
MEMBERS_MAX = 100_000
GROUPS_MAX = 100_000


class Joining:
    """Takes CONSUME frames."""

    def __init__(self, broker: Broker, consuming: Consuming) -> None:
        self._broker = broker
        self._consuming = consuming
        self._under_way: dict[tuple[Session, int], asyncio.Task[None]] = {}
        self._gates: dict[str, _Gate] = {}
        self._serial = 0

    def open(self, session: Session, request_id: int, consume: Consume) -> None:
        """Begin to join a member whose CONSUME is permitted; raise if the request is invalid."""
        self._broker.gate.check_leading()
        wish = self._checked(session, request_id, consume)
        join = self._join(session, request_id, consume, wish)
        task = asyncio.get_running_loop().create_task(join)
        self._under_way[session, request_id] = task
        task.add_done_callback(lambda task: self._ended(session, request_id, task))

    def cancel(self, session: Session, request_id: int) -> bool:
        """Join no more; tell whether somebody was joining."""
        task = self._under_way.get((session, request_id))
        if task is None or task.done():
            # It has just come in: then it is a member, and leaves as one.
            return False
        task.cancel()
        return True

    def is_joining(self, name: str) -> bool:
        """Return True while somebody joins a group."""
        return name in self._gates

    def forget(self, session: Session) -> None:
        """A connection is gone: nobody joins on it."""
        for one, request_id in list(self._under_way):
            if one is session:
                self._under_way[one, request_id].cancel()

    def tell_again(self, crew: Crew) -> None:
        """Tell the members of a broadcast how their group works now; where they are stays theirs.

        What was published after the change comes behind this, on the same connection.
        """
        for member in crew.members.values():
            self._tell(member, tuple(sorted(member.topics)))

    def tell_topics(self, crew: Crew) -> None:
        """Send the members that named no topics the topics that their group has now."""
        topics = self._existing(crew.group)
        for member in crew.members.values():
            if member.follows:
                self._tell(member, topics)

    def _tell(self, member: Member, topics: tuple[str, ...]) -> None:
        joined = self._welcome(member, topics)
        member.session.send(Kind.REPLY, member.consumer_id, encode_json(joined))

    def stop(self) -> None:
        """Let nobody in any more."""
        for task in list(self._under_way.values()):
            task.cancel()

    def _checked(self, session: Session, request_id: int, consume: Consume) -> GroupWish:
        check_group_name(consume.group)
        if consume.member:
            check_member_name(consume.member)
        for topic in consume.topics:
            check_topic_name(topic, system=True)
        if len(set(consume.topics)) < len(consume.topics):
            raise InvalidRequest("a topic is named twice")
        members = self._consuming.members_on(session)
        if request_id in members or (session, request_id) in self._under_way:
            raise InvalidRequest(f"request id {request_id} is a consumer already")
        joining = sum(one is session for one, _ in self._under_way)
        if len(members) + joining >= CONSUMERS_PER_SESSION_MAX:
            raise Overloaded(f"a connection has at most {CONSUMERS_PER_SESSION_MAX} consumers")
        try:
            return msgspec.convert(consume.wish or {}, GroupWish).check()
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"the settings of the group are not understood: {error}") from None

    def _ended(self, session: Session, request_id: int, task: asyncio.Task[None]) -> None:
        self._under_way.pop((session, request_id), None)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, OnwardError):
            session.refuse(request_id, error)
        else:
            logger.error("joining failed", exc_info=error)
            session.refuse(request_id, Unavailable(f"joining failed: {error}"))

    async def _join(
        self, session: Session, request_id: int, consume: Consume, wish: GroupWish
    ) -> None:
        records = self._consuming.records
        gate = self._gates.setdefault(consume.group, _Gate())
        gate.users += 1
        try:
            async with gate.lock:
                await future_of(lambda done: records.when_formed(consume.group, done))
                formed = self._form(consume.group)
                try:
                    group = await self._group(session, consume, wish)
                    self._check_place(session, group, consume)
                    await self._begin(group, self._topics(group, consume))
                finally:
                    formed(None)
                group = self._consuming.find(consume.group)
                self._check_place(session, group, consume)
                self._enter(session, request_id, consume, group)
        finally:
            gate.users -= 1
            if not gate.users:
                del self._gates[consume.group]

    def _form(self, name: str) -> Done:
        """Hide a group that this member creates until it is complete."""
        if name in self._consuming.groups.by_name:
            return _nothing_hidden
        return self._consuming.records.form(name)

    async def _group(self, session: Session, consume: Consume, wish: GroupWish) -> Group:
        """Return the group, with all of the topics; create or change it if need be."""
        if not (consume.create and consume.topics):
            self._consuming.find(consume.group)
        for topic in consume.topics:
            await self._topic(topic)
        record = self._consuming.records.latest(consume.group)
        if record is None or record.deleted:
            await self._change(self._new_record(consume, wish))
            return self._consuming.find(consume.group)
        if consume.if_differs != "keep" and (differs := wish.differs(record)):
            record = self._applied(session, wish, record, differs, consume)
        missing = tuple(one for one in consume.topics if one not in record.topics)
        if missing:
            record = msgspec.structs.replace(record, topics=(*record.topics, *missing)).check()
        group = self._consuming.groups.by_name.get(consume.group)
        if group is None or record != group.record:
            # Also when somebody else is just changing it: behind them it is durable.
            await self._change(record)
        return self._consuming.find(consume.group)

    def _applied(
        self,
        session: Session,
        wish: GroupWish,
        record: GroupRecord,
        differs: str,
        consume: Consume,
    ) -> GroupRecord:
        """Return the record with the settings that a member brings, if they are to be applied."""
        if consume.if_differs == "refuse":
            command = change_command(wish, record)
            raise Conflict(
                f"{differs}: run `{command}`, or join with apply=True, or without these settings",
                command=command,
            )
        self._broker.policy.require(session.principal, "manage", "group", record.name)
        changed = wish.changed(record)
        if changed.mode != record.mode and self._consuming.members_of(record.name):
            raise Conflict(f"group {record.name!r} has members: its mode changes when it has none")
        logger.info("%s: member %r changes it", differs, consume.member)
        return changed

    def _new_record(self, consume: Consume, wish: GroupWish) -> GroupRecord:
        if not (consume.create and consume.topics):
            raise UnknownGroup(f"group {consume.group!r} does not exist")
        if len(self._consuming.groups.by_name) >= GROUPS_MAX:
            raise Overloaded(f"there are {GROUPS_MAX} groups already")
        self._broker.gate.check()
        return wish.new_record(consume.group, consume.topics, self._broker.clock.now_ms())

    def check_topics(self, session: Session, topics: Iterable[str]) -> None:
        """Raise `Forbidden` if a member without topics of its own may not read the group's."""
        for name in topics:
            self._broker.policy.require(session.principal, "read", "topic", name)

    def _topics(self, group: Group, consume: Consume) -> tuple[str, ...]:
        """Return the topics that a member gets: as named, else those of the group that exist."""
        return consume.topics or self._existing(group)

    def _existing(self, group: Group) -> tuple[str, ...]:
        by_name = self._broker.catalogue.by_name
        return tuple(
            name for name in group.record.topics if name in by_name and not by_name[name].ending
        )

    async def _topic(self, name: str) -> None:
        """Make sure that a topic is there and may be read."""
        catalogue, publishing = self._broker.catalogue, self._broker.publishing
        if name in catalogue.by_name:
            topic = catalogue.find_readable(name)
            await future_of(lambda done: publishing.when_created(topic, done))
        else:
            await future_of(lambda done: publishing.create_on_use(name, done))

    async def _change(self, record: GroupRecord) -> None:
        await future_of(lambda done: self._consuming.records.change(record, done))

    async def _begin(self, group: Group, topics: tuple[str, ...]) -> None:
        for topic in topics:
            if group.record.mode != "broadcast":
                await future_of(
                    lambda done: self._consuming.begin_share(group, topic, done)  # noqa: B023
                )

    def _check_place(self, session: Session, group: Group, consume: Consume) -> None:
        record = group.record
        if not consume.topics:
            self.check_topics(session, record.topics)
        self._broker.group_holds.check_free(record.name)
        if consume.member in record.offline:
            raise Forbidden(
                f"member {consume.member!r} of group {record.name!r} is offline: "
                f"an operator has taken it out"
            )
        members = self._consuming.members_of(record.name)
        if len(members) >= MEMBERS_MAX:
            raise Overloaded(f"group {record.name!r} has {MEMBERS_MAX} members already")
        if consume.refuse and record.mode == "exclusive" and members:
            others = [one for one in members if one.name != consume.member]
            if others:
                raise AlreadyExists(
                    f"group {record.name!r} is exclusive, and {others[0].name!r} is active"
                )

    def _enter(self, session: Session, request_id: int, consume: Consume, group: Group) -> None:
        if session not in self._broker.sessions:
            return
        self._serial += 1
        name = consume.member or f"{session.client_name}-{self._serial}"
        crew = self._consuming.crews.get(consume.group) or self._consuming.new_crew(group)
        member = Member(
            name, session, request_id, crew=crew,
            topics=frozenset(consume.topics or group.record.topics),
            follows=not consume.topics,
            joined_at_ms=self._broker.clock.now_ms(), starts=consume.starts,
            recalls=consume.starts and consume.recalls, function=consume.function,
        )  # fmt: skip
        self._consuming.joined(member, credit=consume.credit)
        welcome = self._welcome(member, self._topics(group, consume))
        if consume.claims:
            welcome = self._with_claims(welcome, member, consume)
        if group.record.mode == "broadcast":
            welcome = with_places(self._broker, group, welcome)
        session.send(Kind.REPLY, request_id, encode_json(welcome))

    def _with_claims(self, welcome: Joined, member: Member, consume: Consume) -> Joined:
        claimed = self._consuming.reclaims.claim(member, consume)
        self._consuming.alarms.set(member.crew)
        return msgspec.structs.replace(
            welcome, state=member.state, claimed=tuple(claimed.claimed),
            finished=tuple(claimed.finished),
        )  # fmt: skip

    def _welcome(self, member: Member, topics: tuple[str, ...]) -> Joined:
        record = member.crew.group.record
        joined = Joined(
            member=member.name, mode=record.mode, lease_ms=record.lease_ms, topics=topics,
            state=member.state, at_most_once=record.at_most_once, retry_limit=record.retry.limit,
            starts=member.starts, recalls=member.recalls,
            retry=msgspec.structs.asdict(record.retry),
        )  # fmt: skip
        return with_tasks(joined, record) if record.mode == "broadcast" else joined


def _nothing_hidden(_: OnwardError | None) -> None:
    """The group existed before."""


class _Gate:
    """Lets those who join one group in one after another."""

    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0
