"""Where tasks leave what they write, until the driver decides: pieces, which are encoded batches.

    small   the pieces of a task travel in its message to the driver
    large   they are published to a topic of the task's own, `@sink.<query>.<random>`

Nothing that a task sends counts before a decision names it (`ledger`): a task that fails or is
tried again leaves a topic behind that nobody reads, and which ends by itself.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from onward.client.client import Client, connect
from onward.errors import InvalidRequest, OnwardError
from onward.loops import run
from onward.message.names import SINK_PREFIX
from onward.pipeline.columns import EncodedPiece
from onward.pipeline.place import Place

INLINE_BYTES_MAX = 256 << 10
"""What a task has at most in its message; more is staged."""
IN_FLIGHT_MAX = 16
"""Half of the window in which the broker recognises repeats: see `Ledger`."""
RUNS_IN_FLIGHT_MAX = 2
RUN_PIECES_MAX = 4
"""About 4 MiB: what one request makes the broker hold. No more sequences are unanswered than of
single pieces."""
PIECES_MAX = 1 << 17
"""Pieces of one write."""
REQUESTS_MAX = 32
STAGED_FOR = "1d"
"""How long what was staged waits for its decision."""
KEPT_FOR = "3650d"

T = TypeVar("T")


class Piece(NamedTuple):
    """One encoded batch: for which topic, how many messages, and where it is staged.

    A piece with `staged=""` lies beside the list that names it, with the number `offset`.
    """

    target: str
    rows: int
    staged: str
    offset: int


class Share(NamedTuple):
    """What one task has written: its pieces in order, and those that it carries along."""

    partition: int
    pieces: list[Piece]
    inline: list[bytes]


def gather(shares: Iterable[Share]) -> tuple[list[Piece], list[bytes]]:
    """Return the pieces of all tasks in the order of their partitions, and what lies beside them.

    >>> shares = [Share(n, [Piece("ab"[n], 1, "", 0)], [b"xy"[n : n + 1]]) for n in (1, 0)]
    >>> [piece.target for piece in gather(shares)[0]], gather(shares)[1]
    (['a', 'b'], [b'x', b'y'])
    """
    pieces: list[Piece] = []
    inline: list[bytes] = []
    for share in sorted(shares, key=lambda share: share.partition):
        for piece in share.pieces:
            if not piece.staged:
                inline.append(share.inline[piece.offset])
                piece = piece._replace(offset=len(inline) - 1)
            pieces.append(piece)
    if len(pieces) > PIECES_MAX:
        raise InvalidRequest(
            f"a write of {len(pieces)} pieces is too large: at most {PIECES_MAX}, of about 1 MiB "
            f"each; write fewer rows at once"
        )
    return pieces, inline


class PieceRun(NamedTuple):
    """Pieces of a decision that are copied with one request: neighbours in one staged topic.

    `number` is that of the first piece in its decision.
    """

    number: int
    pieces: list[Piece]

    def singles(self) -> Iterator[PieceRun]:
        """Give each piece by itself."""
        for number, piece in enumerate(self.pieces, self.number):
            yield PieceRun(number, [piece])


def runs_of(numbered: Iterable[tuple[int, Piece]]) -> Iterator[PieceRun]:
    """Gather staged pieces that follow each other: by number, by offset, for one target.

    >>> staged = [("a", 0), ("a", 5), ("b", 10)]
    >>> pieces = [Piece(target, 5, "@sink.x", offset) for target, offset in staged]
    >>> [(run.number, len(run.pieces)) for run in runs_of(enumerate(pieces))]
    [(0, 2), (2, 1)]
    """
    run: PieceRun | None = None
    for number, piece in numbered:
        if run is not None and _follows(run, number, piece):
            run.pieces.append(piece)
            continue
        if run is not None:
            yield run
        run = PieceRun(number, [piece])
    if run is not None:
        yield run


def _follows(run: PieceRun, number: int, piece: Piece) -> bool:
    last = run.pieces[-1]
    expected = Piece(last.target, piece.rows, last.staged, last.offset + last.rows)
    is_next = number == run.number + len(run.pieces) and piece == expected
    return is_next and len(run.pieces) < RUN_PIECES_MAX


# --- in a task -------------------------------------------------------------------------------


def stage(
    place: Place, query: str, encoded: Iterable[list[EncodedPiece]], *, partition: int
) -> Share:
    """Keep all pieces where the driver finds them: in the share itself when they are small."""
    pieces = chain.from_iterable(encoded)
    held: list[EncodedPiece] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece.packed)
        if size > INLINE_BYTES_MAX:
            return run(_stage_all(place, query, chain(held, pieces), partition))
    inline = [Piece(one.topic, one.count, "", number) for number, one in enumerate(held)]
    return Share(partition, inline, [one.packed for one in held])


async def _stage_all(
    place: Place, query: str, pieces: Iterator[EncodedPiece], partition: int
) -> Share:
    async with open_place(place) as mq:
        return Share(partition, await stage_pieces(mq, query, pieces, numbers=_task_numbers()), [])


class Numbers:
    """The numbers of what one producer sends, one after another."""

    def __init__(self) -> None:
        self.producer_id = secrets.randbits(63) | 1
        self.sequence = 0

    def next(self) -> int:
        """Return the next sequence."""
        self.sequence += 1
        return self.sequence


_numbers_by_process: dict[int, Numbers] = {}


def _task_numbers() -> Numbers:
    """Return the numbers of this process, which does one task after another.

    A producer for each task would push others out of the memory of the broker, and that of the
    copies is needed. By process: a worker of Spark is a fork of one that may have its own already.
    """
    return _numbers_by_process.setdefault(os.getpid(), Numbers())


async def stage_pieces(
    mq: Client, query: str, pieces: Iterator[EncodedPiece], *, numbers: Numbers | None = None
) -> list[Piece]:
    """Publish pieces to a new topic, and return where they are."""
    topic = f"{SINK_PREFIX}{query}.{secrets.token_hex(6)}"
    numbers = numbers or Numbers()
    await mq.create_topic(topic, lifetime=STAGED_FOR, retention=KEPT_FOR)

    async def publish(piece: EncodedPiece, sequence: int) -> Piece:
        receipt = await mq.publish_encoded(
            topic, piece.packed, producer_id=numbers.producer_id, sequence=sequence,
            durability="disk",
        )  # fmt: skip
        return Piece(piece.topic, piece.count, topic, receipt.first_offset)

    async def publishes() -> AsyncGenerator[Coroutine[Any, Any, Piece]]:
        # In a thread: Spark may take its time with the next rows, and the connection lives on.
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield publish(piece, numbers.next())

    try:
        return await in_order(publishes())
    except BaseException:
        await delete_topics(mq, [topic])
        raise


def open_place(place: Place) -> Client:
    """Return a client of that broker, to use with `async with`."""
    return connect(
        place.servers, token=place.token, name=f"spark-sink-{os.getpid()}", timeout=place.timeout
    )


# --- many calls at a time -------------------------------------------------------------------


async def delete_topics(mq: Client, topics: Sequence[str]) -> None:
    """Delete topics as well as possible: those that stay end by themselves."""

    async def delete(topic: str) -> None:
        with suppress(OnwardError):
            await mq.delete_topic(topic)

    await in_order(each(delete(topic) for topic in topics), limit=REQUESTS_MAX)


async def each(calls: Iterable[Coroutine[Any, Any, T]]) -> AsyncGenerator[Coroutine[Any, Any, T]]:
    """Give calls one after another; each is made when it is its turn."""
    for call in calls:
        yield call


async def in_order(
    calls: AsyncGenerator[Coroutine[Any, Any, T]], *, limit: int = IN_FLIGHT_MAX
) -> list[T]:
    """Begin calls one after another, with at most `limit` unanswered; raise what fails first."""
    answers: list[T] = []
    under_way: deque[asyncio.Task[T]] = deque()
    try:
        async with asyncio.TaskGroup() as tasks, aclosing(calls):
            # A call that was made is begun at once: else nobody would wait for it.
            while (call := await anext(calls, None)) is not None:
                under_way.append(tasks.create_task(call))
                if len(under_way) >= limit:
                    # Not the task itself: who is cancelled here would cancel it before the others,
                    # and those behind it would go on without it.
                    await asyncio.wait([under_way[0]])
                    answers.append(under_way.popleft().result())
    except BaseExceptionGroup as failed:
        raise _first(failed) from None
    return answers + [task.result() for task in under_way]


def _first(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    one = failed.exceptions[0]
    return _first(one) if isinstance(one, BaseExceptionGroup) else one
