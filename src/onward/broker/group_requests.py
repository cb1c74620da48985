"""Groups for people and programs: what they are, and what they are told to be.

    group.create ──▶ group.change, group.pause / resume, group.member ──▶ group.delete

What changes something answers when it is durable. What lists something answers in pages, and no
page is so long that others wait for it. Where a group stands is moved by `group_moves`, its dead
letters by `dead_requests`; how one message stands is told by `message_states`.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec.structs import replace

from onward.broker.broadcast import looked_at
from onward.broker.dead_requests import DeadRequests
from onward.broker.describe import describe_group
from onward.broker.group_counts import GroupCounts
from onward.broker.group_moves import GroupMoves, begin_shares
from onward.broker.message_states import MessageStates
from onward.broker.replies import Done, Operation, and_then, reply, reply_when_done, when_all
from onward.delivery.group import Group
from onward.delivery.record import GroupRecord, GroupWish
from onward.errors import AlreadyExists, Conflict, InvalidRequest, OnwardError, Overloaded
from onward.message.names import check_member_name
from onward.protocol.payloads import decode_fields

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.session import Session

TOPICS_MAX = 1_000
GROUPS_MAX = 100_000
LIMIT_MAX = 10_000
PAGE_MAX = 1_000
PAGE_SHARES_MAX = 1_000
"""A page ends before it has more topics of groups than this: each costs a look into the index."""
POSITIONS_PER_LOOK = 10
"""So many positions of a broadcast are counted while one look is made."""
LISTED_MEMBERS_MAX = 100

TopicNames = Annotated[list[str], msgspec.Meta(max_length=TOPICS_MAX)]


class GroupCreate(msgspec.Struct, frozen=True):
    """`group.create`: create a group that consumes these topics.

    With `exist_ok` a group that exists with all of these topics and settings is a success.
    """

    group: str
    topics: TopicNames
    wish: GroupWish | None = None
    exist_ok: bool = False


class GroupChange(msgspec.Struct, frozen=True):
    """`group.change`: change what the wish names, leave the rest; add and remove topics."""

    group: str
    wish: GroupWish | None = None
    topics_add: TopicNames = []
    topics_remove: TopicNames = []


class GroupName(msgspec.Struct, frozen=True):
    """`group.describe`, `group.delete`, `group.pause` and `group.resume`: which one."""

    group: str


class GroupList(msgspec.Struct, frozen=True):
    """`group.list`: names after `after`, at most `limit` a page; of one topic, when it is given."""

    after: str = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX)] = PAGE_MAX
    topic: str = ""


class GroupMember(msgspec.Struct, frozen=True):
    """`group.member`: take one member offline, or let it come again."""

    group: str
    member: str
    offline: bool


class GroupRequests:
    """Answers the REQUEST frames about groups."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._records = broker.consuming.records
        self.operations: dict[str, Operation] = {
            "group.create": self._create,
            "group.change": self._change,
            "group.delete": self._delete,
            "group.describe": self._describe,
            "group.list": self._list,
            "group.pause": self._pause,
            "group.resume": self._resume,
            "group.member": self._member,
            **MessageStates(broker).operations,
            **GroupCounts(broker).operations,
            **GroupMoves(broker, self._records).operations,
            **broker.group_holds.operations,
            **DeadRequests(broker).operations,
            **broker.consuming.served.operations,
        }

    # --- what a group is ---------------------------------------------------------------------

    def _create(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, GroupCreate)
        if self._records.is_forming(wanted.group):
            # Two programs create it at once: the second is answered when the first is done.
            again = partial(self._create, session, request_id, payload)
            refuse = partial(_refuse, session, request_id)
            self._records.when_formed(wanted.group, and_then(again, refuse))
            return
        if wanted.exist_ok and self._answer_existing(session, request_id, wanted):
            return
        self._records.check_new(wanted.group)
        if not wanted.topics:
            raise InvalidRequest(f"group {wanted.group!r} needs at least one topic")
        if len(self._broker.consuming.groups.by_name) >= GROUPS_MAX:
            raise Overloaded(f"there are {GROUPS_MAX} groups already")
        topics = tuple(dict.fromkeys(wanted.topics))
        wish = wanted.wish or GroupWish()
        record = wish.new_record(wanted.group, topics, self._broker.clock.now_ms())
        formed = self._records.form(record.name)
        answer = _both(formed, self._answer(session, request_id, record.name))
        try:
            self._with_topics(topics, and_then(lambda: self._commit(record, answer), answer))
        except OnwardError:
            formed(None)
            raise

    def _answer_existing(self, session: Session, request_id: int, wanted: GroupCreate) -> bool:
        """Answer for a group that exists as it is wanted; raise if it differs."""
        record = self._records.latest(wanted.group)
        if record is None or record.deleted:
            return False
        differs = (wanted.wish or GroupWish()).differs(record)
        if differs or not set(wanted.topics) <= set(record.topics):
            missing = sorted(set(wanted.topics) - set(record.topics))
            reason = differs or f"it does not consume {missing[0]!r}"
            raise AlreadyExists(
                f"group {wanted.group!r} exists already, and is different: {reason}"
            )
        begun = self._answer(session, request_id, record.name)
        begin_shares(self._broker, self._broker.consuming.find(record.name), begun)
        return True

    def _change(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, GroupChange)
        self._changed(wanted, self._records.find(wanted.group))
        answer = self._answer(session, request_id, wanted.group)

        def change() -> None:
            self._commit(self._changed(wanted, self._records.find(wanted.group)), answer)

        self._with_topics(tuple(wanted.topics_add), and_then(change, answer))

    def _changed(self, wanted: GroupChange, old: GroupRecord) -> GroupRecord:
        """Return the record as it is wanted, checked."""
        record = (wanted.wish or GroupWish()).changed(old)
        if record.mode != old.mode and self._broker.consuming.members_of(old.name):
            raise Conflict(f"group {old.name!r} has members: its mode changes when it has none")
        topics = dict.fromkeys((*old.topics, *wanted.topics_add))
        for name in wanted.topics_remove:
            if name not in old.topics or name in wanted.topics_add:
                raise InvalidRequest(f"group {old.name!r} cannot remove {name!r}: not its topic")
            topics.pop(name, None)
        if not topics:
            raise InvalidRequest(f"group {old.name!r} needs at least one topic: delete the group")
        return replace(record, topics=tuple(topics)).check()

    def _delete(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        record = self._records.find(decode_fields(payload, GroupName).group)
        done = reply_when_done(session, request_id, lambda: {"group": record.name})
        self._records.change(replace(record, deleted=True), done)

    def _pause(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        self._set_paused(session, request_id, payload, paused=True)

    def _resume(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        self._set_paused(session, request_id, payload, paused=False)

    def _set_paused(
        self, session: Session, request_id: int, payload: bytes | bytearray, *, paused: bool
    ) -> None:
        record = self._records.find(decode_fields(payload, GroupName).group)
        if record.mode == "broadcast":
            raise InvalidRequest(
                f"group {record.name!r} is broadcast and cannot be paused or resumed: its members "
                "read by themselves; stop them, or take them offline one by one"
            )
        answer = self._answer(session, request_id, record.name)
        self._commit(replace(record, paused=paused), answer)

    def _member(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, GroupMember)
        check_member_name(wanted.member)
        record = self._records.find(wanted.group)
        offline = {*record.offline} - {wanted.member}
        if wanted.offline:
            offline.add(wanted.member)
        answer = self._answer(session, request_id, record.name)
        self._commit(replace(record, offline=tuple(sorted(offline))).check(), answer)

    def _with_topics(self, names: tuple[str, ...], done: Done) -> None:
        """Make sure that topics are there and may be read; one that nobody used comes to be."""
        catalogue, publishing = self._broker.catalogue, self._broker.publishing
        existing = [catalogue.find_readable(name) for name in names if name in catalogue.by_name]
        missing = [name for name in names if name not in catalogue.by_name]
        if not names:
            done(None)
            return
        one = when_all(len(existing) + len(missing), done)
        for name in missing:
            publishing.create_on_use(name, one)
        for topic in existing:
            publishing.when_created(topic, one)

    def _commit(self, record: GroupRecord, done: Done) -> None:
        """Make a record durable, and let its group begin with its topics."""

        def begin() -> None:
            begin_shares(self._broker, self._broker.consuming.find(record.name), done)

        self._records.change(record, and_then(begin, done))

    def _answer(self, session: Session, request_id: int, name: str) -> Done:
        def described() -> dict[str, object]:
            # It may have been deleted since.
            group = self._broker.consuming.groups.by_name.get(name)
            return {"group": name} if group is None else describe_group(self._broker, group)

        return reply_when_done(session, request_id, described)

    # --- what there is -----------------------------------------------------------------------

    def describe(self, name: str) -> dict[str, object]:
        """Return what there is to know of a group."""
        return describe_group(self._broker, self._broker.consuming.find(name))

    def _describe(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        name = decode_fields(payload, GroupName).group
        answer = partial(self._reply_described, session, request_id, name)
        refuse = partial(_refuse, session, request_id)
        self._records.when_formed(name, and_then(answer, refuse))

    def _reply_described(self, session: Session, request_id: int, name: str) -> None:
        reply(session, request_id, self.describe(name))

    def _list(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, GroupList)
        groups = self._broker.consuming.groups
        if wanted.topic:
            self._broker.catalogue.find(wanted.topic)
            names = sorted(group.record.name for group in groups.of_topic(wanted.topic))
        else:
            names = sorted(groups.by_name)
        names = [name for name in names if not self._records.is_forming(name)]
        rest = names[bisect_right(names, wanted.after) :]
        page = self._page([groups.by_name[name] for name in rest[: min(wanted.limit, PAGE_MAX)]])
        described = [
            describe_group(self._broker, group, members_max=LISTED_MEMBERS_MAX) for group in page
        ]
        more = len(rest) > len(page)
        following = page[-1].record.name if more else ""
        reply(session, request_id, {"groups": described, "next": following, "count": len(names)})

    def _page(self, groups: list[Group]) -> list[Group]:
        """Return the first of them that do not cost too much together; at least one."""
        costs = accumulate(self._cost_of(group) for group in groups)
        fitting = sum(1 for cost in takewhile(lambda cost: cost <= PAGE_SHARES_MAX, costs))
        return groups[: max(fitting, 1)]

    def _cost_of(self, group: Group) -> int:
        """Return how many looks into the index a group in a list is worth."""
        positions = looked_at(self._broker, group)
        looks = min(positions, LISTED_MEMBERS_MAX)
        return len(group.shares) + looks + positions // POSITIONS_PER_LOOK


def _both(first: Done, second: Done) -> Done:
    """Return what tells both of them."""

    def done(error: OnwardError | None) -> None:
        first(error)
        second(error)

    return done


def _refuse(session: Session, request_id: int, error: OnwardError | None) -> None:
    if error is not None:
        session.refuse(request_id, error)
