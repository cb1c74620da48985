"""Exactly once: what tasks write is staged, then decided, then copied.

    task    stage    pieces (encoded batches): in its commit message when they are small, else in
                     a topic of its own, `@sink.<query>.<random>`
    driver  decide   one publish to `@sink.<query>` says which pieces make up this batch
            copy     each piece is published to its target under a sequence of the decision: what is
                     staged by the broker itself, which is only told what to copy
            done     one more message says so; then what was staged is deleted

A task that is tried again may give its rows in another order, so nothing that a task sends counts
before a decision names it. There is one decision per batch, however many drivers try: it has a
producer id and a sequence, and whoever comes second follows the first. A copy may be repeated at
any point: the sequences of its pieces follow from the place of the decision, and the broker answers
a repeat instead of storing it. The broker does not remember every producer for ever: who finishes
what another driver began first looks in the targets for what is there. A decision is made only when
the one before it is done. Spark repeats its last batch only: an earlier one is an error, for a
checkpoint that was put back has planned other rows under its number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from hashlib import blake2b
from itertools import groupby
from typing import NamedTuple

import msgspec

from onward.client.client import Client
from onward.client.reader import ReadBatch
from onward.client.receipt import DurabilityName
from onward.errors import (
    Conflict,
    Corruption,
    Forbidden,
    InvalidRequest,
    OffsetOutOfRange,
    OnwardError,
    TopicEnded,
    UnknownTopic,
)
from onward.loops import run
from onward.message.batch import encode_batch
from onward.message.names import SINK_PREFIX
from onward.pipeline.columns import EncodedPiece
from onward.pipeline.place import Place
from onward.pipeline.staging import (
    KEPT_FOR,
    PIECES_MAX,
    REQUESTS_MAX,
    RUNS_IN_FLIGHT_MAX,
    STAGED_FOR,
    Piece,
    PieceRun,
    Share,
    delete_topics,
    each,
    gather,
    in_order,
    open_place,
    runs_of,
    stage_pieces,
)

INLINE_BYTES_MAX = 1 << 20
"""What all tasks together have at most in the decision; more is staged by the driver."""
DECIDED_FOR = "30d"
"""How long what was decided waits for being copied."""
KEPT_BYTES = 16 << 20
"""So much of the decisions of a query is kept at least."""


class Decision(NamedTuple):
    """What a batch consists of; with `is_done` the mark that all of it is copied."""

    batch: int
    pieces: Sequence[Piece] = ()
    ends: Mapping[str, int] = {}
    """Where each target ended before anything was copied."""
    is_done: bool = False


class Stored(NamedTuple):
    """A decision as it is stored: its place, and the pieces that lie beside it."""

    offset: int
    decision: Decision
    inline: list[bytes]


class _Written(msgspec.Struct, omit_defaults=True):
    """A decision as JSON: names are written once, for there may be many pieces."""

    batch: int
    names: list[str] = []
    pieces: list[tuple[int, int, int, int]] = []
    ends: dict[str, int] = {}
    is_done: bool = False


def encode_decision(decision: Decision) -> bytes:
    """Return a decision as JSON.

    >>> encode_decision(Decision(7, [Piece("orders", 3, "", 0)]))
    b'{"batch":7,"names":["orders",""],"pieces":[[0,3,1,0]]}'
    """
    names: dict[str, int] = {}
    pieces = [
        (names.setdefault(one.target, len(names)), one.rows,
         names.setdefault(one.staged, len(names)), one.offset)
        for one in decision.pieces
    ]  # fmt: skip
    return msgspec.json.encode(
        _Written(decision.batch, list(names), pieces, dict(decision.ends), decision.is_done)
    )


def decode_decision(body: bytes) -> Decision:
    """Return what `encode_decision` wrote.

    >>> decode_decision(b'{"batch":7,"is_done":true}')
    Decision(batch=7, pieces=[], ends={}, is_done=True)
    """
    try:
        found = msgspec.json.decode(body, type=_Written)
        pieces = [
            Piece(found.names[target], count, found.names[staged], offset)
            for target, count, staged, offset in found.pieces
        ]
    except (msgspec.DecodeError, IndexError) as error:
        raise Corruption(f"a decision of a sink cannot be read: {error}") from None
    return Decision(found.batch, pieces, found.ends, found.is_done)


def query_name(kind: str, identity: str) -> str:
    """Return the name under which a query, or a write with an id, decides.

    >>> query_name("write", "load-7")
    'd3346e9e5c472cc1'
    """
    return blake2b(f"{kind}:{identity}".encode(), digest_size=8).hexdigest()


def is_decided(last: Decision | None, batch: int) -> bool:
    """Tell whether a batch was decided before: each decision is of a later batch.

    >>> is_decided(None, 0), is_decided(Decision(3), 3), is_decided(Decision(3), 4)
    (False, True, False)
    """
    return last is not None and batch <= last.batch


# --- at the driver ---------------------------------------------------------------------------


def commit(
    place: Place, query: str, shares: Sequence[Share], *, batch: int,
    durability: DurabilityName | None = None, is_once: bool = False,
) -> None:  # fmt: skip
    """Publish what tasks have staged, exactly once for this query and batch.

    `is_once`: nobody will ever repeat it, so nothing about it is kept.
    """

    async def committed() -> None:
        async with open_place(place) as mq:
            ledger = Ledger(mq, query, durability=durability, is_once=is_once)
            await ledger.commit(batch, shares)

    run(committed())


def abort(place: Place, query: str, shares: Sequence[Share]) -> None:
    """Delete what was staged for nothing; what a decision names stays. Never raises."""

    async def aborted() -> None:
        async with open_place(place) as mq:
            await Ledger(mq, query).abort(shares)

    if any(piece.staged for share in shares for piece in share.pieces):
        with suppress(OnwardError):
            run(aborted())


def finish(place: Place, write_id: str) -> bool:
    """Finish a batch write that was decided and interrupted; return whether there was one."""

    async def finished() -> bool:
        async with open_place(place) as mq:
            return await Ledger(mq, query_name("write", write_id)).finish()

    return run(finished())


class Ledger:
    """The decisions of one query: made here, read here, carried out here."""

    def __init__(
        self, mq: Client, query: str, *, durability: DurabilityName | None = None,
        is_once: bool = False,
    ) -> None:  # fmt: skip
        self._mq = mq
        self._query = query
        # Whatever the broker's default is: what is marked as done must be there after a power cut.
        self._durability: DurabilityName = durability or "disk"
        self._is_once = is_once
        self._number = 0
        self.topic = f"{SINK_PREFIX}{query}"

    async def commit(self, batch: int, shares: Sequence[Share]) -> None:
        """Decide what this batch is, if that was not done before, and carry it out."""
        await self.open()
        last = await self.last()
        if last is not None and not last.decision.is_done:
            await self.carry_out(last, is_begun=True)
        if last is not None and is_decided(last.decision, batch):
            await self._delete_unnamed(last, [piece for share in shares for piece in share.pieces])
            self._check_order(batch, last.decision.batch)
            return
        stored = await self.decide(batch, shares)
        if stored is not None:
            await self.carry_out(stored)

    def _check_order(self, batch: int, last: int) -> None:
        """Refuse a batch from before the last one: Spark repeats the last one only.

        What it has now may be other rows than it had then, so to leave it out would lose some.
        """
        if batch < last:
            raise Conflict(
                f"batch {batch} comes again after batch {last} of its query: another driver has "
                f"gone on with it, or its checkpoint was put back; use a new checkpoint, or delete "
                f"topic {self.topic!r} to write such batches again"
            )

    async def finish(self) -> bool:
        """Carry out the last decision when that was interrupted; return whether it was."""
        try:
            await self._describe()
        except UnknownTopic:
            return False
        last = await self.last()
        if last is None or last.decision.is_done:
            return False
        await self.carry_out(last, is_begun=True)
        return True

    async def abort(self, shares: Sequence[Share]) -> None:
        """Delete what was staged, unless it was decided: then the copy is finished later."""
        try:
            # A decision may be under way that nobody waits for any more: this comes after it.
            await self._mq.change_topic(self.topic, retention=KEPT_FOR)
            last = await self.last()
        except UnknownTopic:
            last = None
        await self._delete_unnamed(last, [piece for share in shares for piece in share.pieces])

    # --- decide ------------------------------------------------------------------------------

    async def last(self) -> Stored | None:
        """Return what was decided last; None when nothing ever was."""
        end = await self._describe()
        try:
            return await self._find(end - 1) if end else None
        except OffsetOutOfRange:
            raise Conflict(
                f"what was decided last in topic {self.topic!r} was retained away: delete the "
                f"topic to go on; a batch that was under way then may come twice, or in part"
            ) from None

    async def decide(self, batch: int, shares: Sequence[Share]) -> Stored | None:
        """Store a decision and return the one that counts, ours or that of who was faster.

        None when it was so long ago that it is no longer kept: then it was carried out as well.
        """
        pieces, inline = gather(shares)
        if sum(map(len, inline)) > INLINE_BYTES_MAX:
            pieces, inline = await self._stage_inline(pieces, inline), []
        await self._prolong({piece.staged for piece in pieces if piece.staged})
        ends = await self._ends({piece.target for piece in pieces})
        packed = encode_batch([encode_decision(Decision(batch, pieces, ends)), *inline])
        stored = await self._decided(packed, batch)
        await self._delete_unnamed(stored, pieces)
        return stored

    async def _decided(self, packed: bytes, batch: int) -> Stored | None:
        number = self._number
        try:
            offset = await self._publish("decide", packed, sequence=batch + 1)
            await self._describe()
            if self._number != number:
                # Its numbers were made for the topic that was there before.
                raise TopicEnded(
                    f"topic {self.topic!r} was created anew while batch {batch} was decided: write "
                    "it again"
                )
            return await self._find(offset, end=offset + 1)
        except Conflict as error:
            if type(error) is Conflict or isinstance(error, OffsetOutOfRange):
                return None
            raise

    async def _stage_inline(self, pieces: list[Piece], inline: list[bytes]) -> list[Piece]:
        """Stage what is too much for one message: many small shares."""
        mine = (
            EncodedPiece(one.target, one.rows, inline[one.offset])
            for one in pieces
            if not one.staged
        )
        staged = iter(await stage_pieces(self._mq, self._query, mine))
        return [piece if piece.staged else next(staged) for piece in pieces]

    async def _prolong(self, topics: set[str]) -> None:
        """Let what is about to be decided live until it is copied."""
        lifetime = STAGED_FOR if self._is_once else DECIDED_FOR
        changes = (self._mq.change_topic(topic, lifetime=lifetime) for topic in topics)
        try:
            await in_order(each(changes), limit=REQUESTS_MAX)
        except (UnknownTopic, TopicEnded) as error:
            raise Conflict(
                f"what a task staged is gone, nothing of the batch was written: {error}; it waits "
                f"for {STAGED_FOR}, or somebody deleted it"
            ) from None

    async def _ends(self, targets: set[str]) -> dict[str, int]:
        async def end(target: str) -> tuple[str, int]:
            try:
                return target, (await self._mq.topic(target)).next_offset
            except UnknownTopic:
                return target, 0

        return dict(await in_order(each(end(target) for target in targets), limit=REQUESTS_MAX))

    # --- copy --------------------------------------------------------------------------------

    async def carry_out(self, stored: Stored, *, is_begun: bool = False) -> None:
        """Publish all pieces of a decision, then say that it is done.

        `is_begun`: another driver may have published some of them, perhaps long ago.
        """
        batch = stored.decision.batch
        known = await self._copied(stored) if is_begun else set()
        try:
            await self.copy(stored, known=known)
        except _StagedGone as error:
            # Another driver may have finished it just now, and deleted what was staged.
            if await self._is_done(batch):
                return
            raise Conflict(
                f"batch {batch} was decided, but {error}: delete topic {self.topic!r} to write the "
                f"batch anew; {len(known)} of its {len(stored.decision.pieces)} pieces were copied"
            ) from None
        except InvalidRequest as error:
            # Other rows would not help: what was decided is what is copied.
            raise type(error)(
                f"{error}; batch {batch} was decided with this and waits for it: change that, or "
                f"delete topic {self.topic!r} to write all of the batch anew"
            ) from None
        mark = encode_batch([encode_decision(Decision(batch, is_done=True))])
        with suppress(Conflict):
            await self._publish("done", mark, sequence=batch + 1)
        staged = {piece.staged for piece in stored.decision.pieces if piece.staged}
        await delete_topics(self._mq, [*staged, self.topic] if self._is_once else [*staged])

    async def _is_done(self, batch: int) -> bool:
        last = await self.last()
        return last is not None and (last.decision.batch > batch or last.decision.is_done)

    async def copy(self, stored: Stored, *, known: Collection[int] = ()) -> None:
        """Publish all pieces of a decision but those that are `known` to be published.

        What lies beside the decision is sent, what is staged the broker copies by itself. A change
        from one to the other waits for what is under way: so the order is that of the decision.
        """
        first = stored.offset * PIECES_MAX
        unknown = (one for one in enumerate(stored.decision.pieces) if one[0] not in known)
        for is_staged, some in groupby(unknown, key=lambda one: bool(one[1].staged)):
            if is_staged:
                copies = (self._copy_run(run, first=first) for run in runs_of(some))
                await in_order(each(copies), limit=RUNS_IN_FLIGHT_MAX)
            else:
                publishes = (
                    self._publish_piece(
                        piece.target, stored.inline[piece.offset], sequence=first + number
                    )
                    for number, piece in some
                )
                await in_order(each(publishes))

    async def _copied(self, stored: Stored) -> set[int]:
        """Return the numbers of the pieces that lie in their targets already."""
        first, copier = stored.offset * PIECES_MAX, self._producer_id("copy")
        found: set[int] = set()
        for target, end in stored.decision.ends.items():
            # What cannot be read is left to the memory of the broker.
            with suppress(UnknownTopic, TopicEnded, Forbidden, OffsetOutOfRange):
                start = max(end, (await self._mq.topic(target)).first_offset)
                async with aclosing(self._mq.read(target, start=start).batches()) as batches:
                    async for batch in batches:
                        header = batch.columns.header
                        if header.producer_id == copier and header.sequence >= first:
                            found.add(header.sequence - first)
        return found

    async def _copy_run(self, run: PieceRun, *, first: int) -> None:
        """Let the broker copy pieces, all but those of which that was done before.

        A plain `Conflict` is about one of them, as in `_publish_piece`: then each is asked for by
        itself, and nothing counts as stored because of what another one is.
        """
        begin = run.pieces[0]
        try:
            await self._mq.copy_batches(
                begin.staged, begin.target, offset=begin.offset, batches=len(run.pieces),
                producer_id=self._producer_id("copy"), sequence=first + run.number,
                durability=self._durability,
            )  # fmt: skip
        except OffsetOutOfRange as error:
            raise _StagedGone(str(error)) from None
        except (UnknownTopic, TopicEnded) as error:
            # It may as well be the target that is not there.
            if await self._mq.has_topic(begin.staged):
                raise
            raise _StagedGone(str(error)) from None
        except Conflict as error:
            if type(error) is not Conflict:
                raise
            if len(run.pieces) > 1:
                for single in run.singles():
                    await self._copy_run(single, first=first)

    async def _publish_piece(self, target: str, packed: bytes, *, sequence: int) -> None:
        """Publish a piece, unless that was done before.

        A plain `Conflict` says that later sequences than the broker remembers are stored: so many
        are never under way, so this one was answered before they were sent.
        """
        try:
            await self._mq.publish_encoded(
                target, packed, producer_id=self._producer_id("copy"), sequence=sequence,
                durability=self._durability,
            )  # fmt: skip
        except Conflict as error:
            if type(error) is not Conflict:
                raise

    # --- the topic of the decisions ----------------------------------------------------------

    async def open(self) -> None:
        """Find the topic of the decisions, or create it."""
        try:
            await self._describe()
        except UnknownTopic:
            described = await self._mq.create_topic(
                self.topic, exist_ok=True, retention=KEPT_FOR, retention_bytes=KEPT_BYTES,
                lifetime=STAGED_FOR if self._is_once else None,
            )  # fmt: skip
            self._number = described.number

    async def _describe(self) -> int:
        """Return where the topic ends, and take note of its number: a new one has another."""
        described = await self._mq.topic(self.topic)
        self._number = described.number
        return described.next_offset

    async def _find(self, start: int, *, end: int | None = None) -> Stored:
        """Return the last that is stored from there on."""
        found: Stored | None = None
        async with aclosing(self._mq.read(self.topic, start=start, end=end).batches()) as batches:
            async for batch in batches:
                bodies = batch.columns.bodies
                decision = decode_decision(bodies[0])
                found = Stored(_first_offset(batch), decision, bodies[1:])
        if found is None:
            raise OffsetOutOfRange(
                f"topic {self.topic!r} no longer has what was decided at {start}"
            )
        return found

    async def _publish(self, role: str, packed: bytes, *, sequence: int) -> int:
        receipt = await self._mq.publish_encoded(
            self.topic, packed, producer_id=self._producer_id(role), sequence=sequence,
            durability="disk",
        )  # fmt: skip
        return receipt.first_offset

    def _producer_id(self, role: str) -> int:
        assert self._number, "the topic was described before anything is published"
        text = f"{self._query}:{self._number}:{role}"
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1 | 1

    async def _delete_unnamed(self, stored: Stored | None, pieces: Iterable[Piece]) -> None:
        """Delete what was staged and the decision does not name."""
        named = {piece.staged for piece in stored.decision.pieces} if stored is not None else set()
        staged = {piece.staged for piece in pieces if piece.staged}
        await delete_topics(self._mq, list(staged - named))


class _StagedGone(Exception):
    """What a decision names is no longer staged."""


def _first_offset(batch: ReadBatch) -> int:
    """Return where a whole batch begins: the reader may have begun in the middle of it."""
    return batch.first_offset + batch.count - batch.columns.count
