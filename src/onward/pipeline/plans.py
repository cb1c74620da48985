"""What a named run of a replay is to write: decided by its first try, followed by every other one.

    topic `@sink.plan-<hash of the run id>`
        offset 0    the plan: what goes where, in pieces, which are ranges of offsets
        then        one message for each piece that is written, with its rows

So a run that is repeated means the same messages as before, however many came since, and knows what
is left to do. A piece that was written and not noted is written again under the same id: the sink
stores nothing twice. What it knows of a piece stays for a while after the note: of two tries at the
same time one may be late.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b

import msgspec

from onward.client.sync import SyncClient
from onward.errors import Conflict, InvalidRequest, OnwardError
from onward.pipeline.ledger import query_name

KEPT_FOR = "3650d"
LATE = "6h"
"""How long a try may work at a piece that another one has written by then."""

RUN_ID_CHARACTERS_MAX = 128

Piece = tuple[int, int]
"""Offsets, from the first to before the second."""


def check_run_id(run_id: str | None) -> None:
    """Raise unless a run may have this id; None is none.

    >>> check_run_id("fix-17")
    """
    if run_id is not None and not 1 <= len(run_id) <= RUN_ID_CHARACTERS_MAX:
        raise InvalidRequest(f"a run id has 1 to {RUN_ID_CHARACTERS_MAX} characters")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is to write, and where.

    >>> plan = Plan(topic="orders", to_topic="again", where="offset > 7", pieces=[(8, 20)])
    >>> plan.words
    "'orders' where offset > 7 to 'again'"
    """

    topic: str
    to_topic: str
    where: str | None = None
    pieces: list[Piece] = []

    @property
    def words(self) -> str:
        """What is meant, without the offsets."""
        where = f" where {self.where}" if self.where else ""
        return f"{self.topic!r}{where} to {self.to_topic!r}"


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """A piece that is in its topic."""

    piece: Piece
    rows: int


class Book:
    """The plan of one run and what is done of it, kept by the broker.

    >>> from onward import connect_sync
    >>> plan = Plan(topic="orders", to_topic="again", pieces=[(0, 5), (5, 9)])
    >>> with connect_sync("memory:") as mq:
    ...     book = Book(mq, "fix-17")
    ...     book.decide(plan, lambda: [(0, 5), (5, 9)]) == plan
    ...     book.note((0, 5), rows=3)
    ...     book.written()
    True
    {(0, 5): 3}
    """

    def __init__(self, mq: SyncClient, run_id: str) -> None:
        self._mq = mq
        self._run_id = run_id
        self._topic = f"@sink.plan-{blake2b(run_id.encode(), digest_size=8).hexdigest()}"
        self._written: dict[Piece, int] = {}
        self._read_to = 1

    def decide(self, wanted: Plan, cut: Callable[[], list[Piece]]) -> Plan:
        """Return the plan that counts: the one that is there, or else the wanted one, cut now."""
        mq = self._mq
        if not mq.has_topic(self._topic) or not mq.topic(self._topic).next_offset:
            plan = msgspec.structs.replace(wanted, pieces=cut())
            if not plan.pieces:
                return plan
            mq.create_topic(self._topic, retention=KEPT_FOR, exist_ok=True)
            mq.publish(self._topic, msgspec.json.encode(plan), durability="disk")
        # Of two that begin at once, both follow what came first.
        decided = msgspec.json.decode(mq.get(self._topic, 0).body, type=Plan)
        if decided.words != wanted.words:
            raise Conflict(
                f"run {self._run_id!r} was a replay of {decided.words}, not of {wanted.words}: "
                "take another run id"
            )
        return decided

    def written(self) -> dict[Piece, int]:
        """Return the pieces that are written by now, by whoever, and how many rows each has."""
        if not self._mq.has_topic(self._topic):
            return {}
        for message in self._mq.read(self._topic, start=self._read_to):
            self._read_to = message.offset + 1
            with suppress(msgspec.DecodeError):  # Of two that began at once: the other's plan.
                one = msgspec.json.decode(message.body, type=Written)
                self._written[one.piece] = one.rows
        return dict(self._written)

    def write_id(self, piece: Piece) -> str:
        """Return the id under which the sink knows a piece."""
        return f"{self._run_id}/{piece[0]}-{piece[1]}"

    def note(self, piece: Piece, *, rows: int) -> None:
        """Write down that a piece is written; the sink need not remember it for long."""
        body = msgspec.json.encode(Written(piece=piece, rows=rows))
        self._mq.publish(self._topic, body, durability="disk")
        with suppress(OnwardError):
            ledger = f"@sink.{query_name('write', self.write_id(piece))}"
            self._mq.change_topic(ledger, lifetime=LATE)
