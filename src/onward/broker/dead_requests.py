"""Dead letters for people and programs: list, redrive to their own group, purge.

Dead letters belong to one group and one topic. A redriven one is delivered again to that group
only, and its attempts start again; a purged one is forgotten. Chosen ones are named by ranges, and
what of a range is not dead is left alone; all of them are named by `all`, never by leaving
something out. A dry run counts only.
"""

from __future__ import annotations

from bisect import bisect_left
from heapq import nsmallest
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from onward.broker.group_moves import find_sharing, find_topic
from onward.broker.group_ranges import GivenRanges, rows_of
from onward.broker.replies import Operation, reply, reply_when_done
from onward.delivery.group import Group
from onward.delivery.ranges import merged, ranges_of
from onward.delivery.share import DeadLetter, Share
from onward.errors import InvalidRequest
from onward.protocol.payloads import decode_fields

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.session import Session

LIMIT_MAX = 10_000
PAGE_MAX = 1_000


class DeadList(msgspec.Struct, frozen=True):
    """`dead.list`: in the order of topics and offsets, after `after`, at most `limit` a page."""

    group: str
    topic: str = ""
    after: tuple[str, int] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX)] = PAGE_MAX


class DeadChoice(msgspec.Struct, frozen=True):
    """`dead.redrive` and `dead.purge`: which ones."""

    group: str
    topic: str = ""
    ranges: GivenRanges | None = None
    all: bool = False
    dry_run: bool = False


class DeadRequests:
    """Answers the REQUEST frames about dead letters."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.operations: dict[str, Operation] = {
            "dead.list": self._list,
            "dead.redrive": self._redrive,
            "dead.purge": self._purge,
        }

    def _list(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, DeadList)
        shares = self._shares(wanted.group, wanted.topic)
        limit = min(wanted.limit, PAGE_MAX)
        after = wanted.after or ("", -1)
        letters = chain.from_iterable(
            ((share.topic, letter) for letter in _letters_after(share, after, limit + 1))
            for share in shares
        )
        # One more than the page: it tells whether there is a next one.
        found = list(islice(letters, limit + 1))
        page = found[:limit]
        last = page[-1] if len(found) > limit else None
        reply(session, request_id, {
            "dead": [_described(topic, letter) for topic, letter in page],
            "next": None if last is None else [last[0], last[1].offset],
            "count": sum(share.dead_count for share in shares),
        })  # fmt: skip

    def _redrive(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        self._end(session, request_id, decode_fields(payload, DeadChoice), did="redriven")

    def _purge(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        self._end(session, request_id, decode_fields(payload, DeadChoice), did="purged")

    def _end(
        self, session: Session, request_id: int, wanted: DeadChoice, *,
        did: Literal["redriven", "purged"],
    ) -> None:  # fmt: skip
        if (wanted.ranges is not None) == wanted.all:
            raise InvalidRequest("say which dead letters: either ranges, or all")
        if wanted.ranges is not None and not wanted.topic:
            raise InvalidRequest("ranges of dead letters need a topic")
        chosen = [
            (share.topic, self._chosen(share, wanted))
            for share in self._shares(wanted.group, wanted.topic)
        ]
        asked = sum(len(offsets) for _, offsets in chosen)
        if did == "redriven":
            chosen = [(topic, self._stored(topic, offsets)) for topic, offsets in chosen]
        count = sum(len(offsets) for _, offsets in chosen)
        fields = {"count": count, "gone": asked - count}
        done = reply_when_done(session, request_id, lambda: fields)
        if wanted.dry_run or not count:
            done(None)
            return
        self._broker.check_writable(even_when_full=True)
        now_ms = self._broker.clock.now_ms()
        rows = [
            row
            for topic, offsets in chosen
            for row in rows_of(did, wanted.group, topic, ranges_of(offsets), at_ms=now_ms)
        ]
        self._broker.consuming.record(rows, done)

    def _shares(self, name: str, topic: str) -> list[Share]:
        """Return the shares that are meant, in the order of their topics."""
        group: Group = find_sharing(self._broker, name)
        if topic:
            find_topic(self._broker, group, topic)
            return [group.shares[topic]] if topic in group.shares else []
        return [share for _, share in sorted(group.shares.items())]

    def _stored(self, name: str, offsets: list[int]) -> list[int]:
        """Return the offsets whose messages can still be read."""
        topic = self._broker.catalogue.by_name.get(name)
        if topic is None:
            return offsets
        first = bisect_left(offsets, topic.first_offset)
        carried = self._broker.log.carried
        return [one for one in offsets[:first] if carried.has(topic.number, one)] + offsets[first:]

    def _chosen(self, share: Share, wanted: DeadChoice) -> list[int]:
        """Return the dead offsets that are meant."""
        offsets = sorted(share.dead)
        if wanted.ranges is None:
            return offsets
        return [
            offset
            for start, end in merged(wanted.ranges)
            for offset in offsets[bisect_left(offsets, start) : bisect_left(offsets, end)]
        ]


def _letters_after(share: Share, after: tuple[str, int], limit: int) -> list[DeadLetter]:
    topic, offset = after
    if share.topic < topic:
        return []
    first = offset if share.topic == topic else -1
    later = (one for one in share.dead if one > first)
    return [share.dead[one] for one in nsmallest(limit, later)]


def _described(topic: str, letter: DeadLetter) -> dict[str, object]:
    return {
        "topic": topic,
        "offset": letter.offset,
        "cause": letter.cause,
        "attempts": letter.attempts,
        "member": letter.member,
        "died_at_ms": letter.died_at_ms,
    }
