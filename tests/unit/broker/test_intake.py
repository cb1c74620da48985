"""The intake is a shorter way, not another one: it answers and stores what the long way would.

Each example is played twice, to a broker whose sessions get their bytes through the intake, and to
one whose sessions get them directly. Every byte that either of them sends or stores is compared.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from struct import pack
from typing import Any, NamedTuple

import pytest
from crc32c import crc32c
from hypothesis import example, given
from hypothesis import strategies as st

from onward.broker import publish as publish_module
from onward.broker.broker import Broker
from onward.broker.intake import SMALL_BYTES_MAX
from onward.broker.session import Session
from onward.errors import DiskFull
from onward.log.memory_disk import MemoryDisk
from onward.message.batch import encode_batch
from onward.protocol.connection import ClientConnection
from onward.protocol.frames import Kind, frame
from onward.protocol.payloads import (
    Durability,
    Hello,
    Published,
    credit_frame,
    decode_published,
    publish_head,
)

from .speaking import HeldCommit, open_broker, settings_with, turns

SESSIONS = 4
BITS = [1 << bit for bit in range(8)]
LIMITS = settings_with(
    server={"inflight_bytes_max": 65_536, "connection_bytes_max": 65_536},
    topics={"message_bytes_max": 2_000, "count_max": 5},
)


class Say(NamedTuple):
    """One PUBLISH, as it should be or not."""

    topic: str = "orders"
    sizes: tuple[int, ...] = (5,)
    producer_id: int = 7
    sequence: int | None = None
    """None: the next one of this producer."""
    durability: int = Durability.DISK
    options: tuple[tuple[str, Any], ...] = ()
    flip: tuple[int, int] | None = None
    """Which byte of the frame arrives wrong, and which of its bits."""
    lie: tuple[int, int] | None = None
    """Which byte of the batch is wrong, and which of its bits; the checksum is right."""


class Turn(NamedTuple):
    """What one connection receives at once: frames, of which the last bytes come later."""

    session: int
    frames: list[Say | bytes]
    held_back: int = 0


class Round(NamedTuple):
    """What arrives in one turn of the loop, and what then happens on the disk."""

    turns: list[Turn]
    then: str = "release"


# --- two worlds ------------------------------------------------------------------------------


class RecordingTransport(asyncio.Transport):
    """Keeps what is written, and in which state it is."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.events: list[str] = []
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None:
        self.events.append("pause")

    def resume_reading(self) -> None:
        self.events.append("resume")


class CountedSession(Session):
    """Knows how much took the long way."""

    received_count = 0

    def receive(self, received: bytes) -> None:
        self.received_count += 1
        super().receive(received)


class World:
    """One broker and its connections."""

    def __init__(
        self, broker: Broker, disk: MemoryDisk, *, session_count: int, has_intake: bool
    ) -> None:
        self.broker = broker
        self.disk = disk
        self.has_intake = has_intake
        self.sessions = [CountedSession(broker) for _ in range(session_count)]
        self.transports = [RecordingTransport() for _ in range(session_count)]
        for session, transport in zip(self.sessions, self.transports, strict=True):
            session.connection_made(transport)

    @classmethod
    async def open(cls, *, session_count: int, has_intake: bool) -> World:
        disk = MemoryDisk()
        broker = await open_broker(disk, settings=LIMITS, commit=HeldCommit)
        broker.node = "node"
        return cls(broker, disk, session_count=session_count, has_intake=has_intake)

    @property
    def commit(self) -> HeldCommit:
        assert isinstance(self.broker._commit, HeldCommit)
        return self.broker._commit

    async def play(self, pieces: list[tuple[int, bytes]], then: str) -> None:
        for number, piece in pieces:
            if self.transports[number].is_closed:
                continue  # A socket that is closed is no longer read.
            if self.has_intake:
                self.sessions[number].data_received(piece)
            else:
                self.sessions[number].receive(piece)
        self.broker.intake.take()
        await turns(8)
        self.settle(then)
        await turns(8)

    def settle(self, then: str) -> None:
        if then == "full disk" and self.commit.held:
            _, _, done = self.commit.held.pop(0)
            done(DiskFull("the disk is full"))
        elif then == "release":
            self.broker.gate.disk_is_full = False
            if self.commit.held:
                self.commit.release()

    async def end(self) -> None:
        while self.commit.held:
            self.commit.release()
            await turns(8)

    def outcome(self) -> dict[str, object]:
        """Return all that can be seen from outside, and what is remembered for later."""
        broker = self.broker
        stored = {}
        for name in self.disk.list_folder("log"):
            if name.endswith(".log"):
                file = self.disk.open(f"log/{name}")
                stored[name] = file.read(0, file.size())
        return {
            "sent": [bytes(transport.written) for transport in self.transports],
            "events": [transport.events for transport in self.transports],
            "closed": [transport.is_closed for transport in self.transports],
            "stored": stored,
            "producers": broker.producers.save(),
            "inflight": broker.publishing.inflight_bytes,
            "unanswered": [session.unanswered_bytes for session in self.sessions],
            "held": [dict(session.held_sequences) for session in self.sessions],
        }


class Script:
    """Turns what is to be said into bytes, with request ids and sequences."""

    def __init__(self, session_count: int) -> None:
        self._request_id = 0
        self._sequences: Counter[int] = Counter()
        self._pending = [b""] * session_count

    def pieces(self, said: list[Turn]) -> list[tuple[int, bytes]]:
        pieces = []
        for number, frames, held_back in said:
            piece = self._pending[number] + b"".join(map(self._bytes, frames))
            cut = max(len(piece) - held_back, 0)
            self._pending[number] = piece[cut:]
            pieces.append((number, piece[:cut]))
        return [piece for piece in pieces if piece[1]]

    def rest(self) -> list[tuple[int, bytes]]:
        return self.pieces([Turn(number, []) for number in range(len(self._pending))])

    def _bytes(self, said: Say | bytes) -> bytes:
        if isinstance(said, bytes):
            return said
        self._request_id += 1
        sequence = said.sequence
        if sequence is None:
            self._sequences[said.producer_id] += 1
            sequence = self._sequences[said.producer_id]
        batch = bytearray(
            encode_batch(
                [b"x" * size for size in said.sizes],
                producer_id=said.producer_id, sequence=sequence, **columns_of(said),
            )
        )  # fmt: skip
        if said.lie is not None:
            at, mask = said.lie
            batch[at % len(batch)] ^= mask
            batch[8:12] = crc32c(batch[12:]).to_bytes(4, "little")
        head = publish_head(
            self._request_id, said.topic, durability=said.durability, batch_bytes=len(batch)
        )
        whole = bytearray(head + batch)
        if said.flip is not None:
            at, mask = said.flip
            whole[at % len(whole)] ^= mask
        return bytes(whole)


def columns_of(said: Say) -> dict[str, Any]:
    """Return the options, with a column's one value for each message."""
    return {
        name: value if name in ("compression", "time_ms") else [value] * len(said.sizes)
        for name, value in said.options
    }


async def played(
    rounds: list[Round], *, session_count: int, has_intake: bool
) -> tuple[dict[str, object], World]:
    world = await World.open(session_count=session_count, has_intake=has_intake)
    script = Script(session_count)
    hello = ClientConnection().hello(Hello(1, client="test"))
    await world.play([(number, hello) for number in range(session_count)], "release")
    # Producers and topics that are known: only they can take the short way.
    topics = [Say("orders"), Say("bills", producer_id=8)]
    await world.play(script.pieces([Turn(0, [*topics, CREATE_SMALL])]), "release")
    await world.play(script.pieces([Turn(0, [*topics, Say("small")])]), "release")
    for said, then in rounds:
        await world.play(script.pieces(said), then)
    await world.play(script.rest(), "release")
    await world.end()
    outcome = world.outcome()
    await world.broker.stop()
    return outcome, world


async def both(rounds: list[Round], *, session_count: int = SESSIONS) -> World:
    """Play it in both worlds; return the one with the intake."""
    with pytest.MonkeyPatch.context() as patch:
        # When to wait for a crowd is decided once per turn with the intake, else for each publish.
        patch.setattr(publish_module, "CROWD_MIN", 1_000_000)
        expected, _ = await played(rounds, session_count=session_count, has_intake=False)
        outcome, world = await played(rounds, session_count=session_count, has_intake=True)
    for what, value in expected.items():
        assert outcome[what] == value, what
    return world


# --- what is said ----------------------------------------------------------------------------

CREATE_SMALL = frame(
    Kind.REQUEST, 900, b'{"op":"topic.create","topic":"small","message_bytes_max":100}'
)
OTHERS = [
    frame(Kind.PING, 901),
    frame(Kind.READ, 902, b'{"topic":"orders","from":"earliest","credit_bytes":5000}'),
    frame(Kind.READ, 903, b'{"topic":"bills","from":"latest","credit_bytes":900,"follow":true}'),
    frame(Kind.READ, 904, b'{"topic":"nowhere","from":"earliest","credit_bytes":900}'),
    credit_frame(903, 500),
    frame(Kind.CANCEL, 903),
    frame(Kind.REQUEST, 905, b'{"op":"topic.delete","topic":"bills"}'),
    frame(Kind.REQUEST, 906, b'{"op":"topic.change","topic":"orders","message_bytes_max":50}'),
    frame(Kind.REQUEST, 907, b'{"op":"topic.create","topic":"bills","exist_ok":true}'),
    frame(Kind.REQUEST, 908, b'{"op":"status of what"}'),
    frame(Kind.PUBLISH, 909),
    frame(Kind.PUBLISH, 910, bytes(70)),
]
FATAL = [
    frame(Kind.BYE, 0),
    frame(Kind.READ, 911, b"no json"),
    frame(Kind.WELCOME, 912),
    frame(200, 913),
    b"\0\0\0\0 is no length",
    b"\xff\xff\xff\xff is too long",
]


COLUMNS: list[tuple[str, Any]] = [
    ("keys", "k"), ("tags", "t"), ("priorities", 3), ("headers", {"a": "b"}), ("tenants", "acme"),
    ("trace_ids", "0af7651916cd43dd8448eb211c80319c"), ("due_at_ms", 7),
]  # fmt: skip
"""Columns that a plain publish may have beside its bodies."""


def says(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Say]:
    return st.fixed_dictionaries(fields).map(lambda chosen: Say(**chosen))


plain = says(
    topic=st.sampled_from(["orders", "bills", "small"]),
    sizes=st.sampled_from([(5,), (2, 3), (105,)]),
    producer_id=st.sampled_from([7, 8]),
    sequence=st.none() | st.none() | st.integers(1, 6),
    options=st.just(()) | st.sets(st.sampled_from(range(len(COLUMNS)))).map(
        lambda chosen: tuple(COLUMNS[number] for number in chosen)
    ),
)  # fmt: skip
publishes = says(
    topic=st.sampled_from(["orders", "bills", "small", "new", "not a name", "", "n" * 128, "@own"]),
    sizes=st.sampled_from(
        [(0,), (3,), (5, 6, 7), (95,), (1_900,), (1_996,), (2_100,), (1_900,) * 3, (1_500,) * 25]
    ),
    producer_id=st.sampled_from([0, 7, 8, 9]),
    sequence=st.none() | st.integers(0, 6) | st.sampled_from([50, 2**62 - 1, 2**62, 2**63]),
    durability=st.sampled_from([*Durability, 9]),
    options=st.sets(
        st.sampled_from(
            [("keys", "k"), ("tags", "t"), ("priorities", 3), ("compression", "zstd"),
             ("compression", "lz4"), ("time_ms", 9), ("keys", "longer than eight")]
        ),
        max_size=3,
    ).map(tuple),
)  # fmt: skip
places = st.tuples(st.integers(0, 150), st.sampled_from(BITS))
spoiled = st.tuples(plain | publishes, st.sampled_from(["flip", "lie"]), places).map(
    lambda chosen: chosen[0]._replace(**{chosen[1]: chosen[2]})
)
frames = st.one_of(
    plain, plain, plain, publishes, publishes, spoiled, st.sampled_from(OTHERS),
    st.sampled_from(OTHERS + FATAL),
)  # fmt: skip
a_turn = st.tuples(
    st.integers(0, SESSIONS - 1),
    st.lists(frames, min_size=1, max_size=3),
    st.just(0) | st.just(0) | st.integers(1, 150),
).map(lambda chosen: Turn(*chosen))
rounds = st.tuples(
    st.lists(a_turn, max_size=8), st.sampled_from(["release", "release", "hold", "full disk"])
).map(lambda chosen: Round(*chosen))
MUCH = Say(sizes=(1_500,) * 25)


@pytest.mark.slow
@given(st.lists(rounds, max_size=6))
@example([Round([Turn(1, [MUCH, MUCH]), Turn(2, [Say()]), Turn(2, [Say()])], "hold")])
@example([Round([Turn(1, [MUCH, MUCH], 9)], "hold"), Round([Turn(1, []), Turn(2, [Say()])])])
@example([Round([Turn(1, [FATAL[1]]), Turn(1, [Say()])])])
@example([Round([Turn(1, [FATAL[1], Say()])])])
@example([Round([Turn(1, [FATAL[0]]), Turn(1, [Say()]), Turn(2, [Say()])])])
def test_whatever_arrives_is_answered_and_stored_as_by_the_long_way(said: list[Round]) -> None:
    asyncio.run(both(said))


@pytest.mark.parametrize("options", [(), COLUMNS[:1], COLUMNS[1:3], COLUMNS])
async def test_plain_publishes_take_the_short_way(options: list[tuple[str, Any]]) -> None:
    plain = Say(options=tuple(options))
    said = [Round([Turn(number, [plain]) for number in range(SESSIONS)])] * 3
    world = await both(said)
    # Only the hellos, and what made the topics and the producer known.
    assert sum(session.received_count for session in world.sessions) == SESSIONS + 2
    assert len(receipts(world.transports[3])) == 3


def receipts(transport: RecordingTransport) -> list[Published]:
    found, at = [], 0
    while at < len(transport.written):
        length = int.from_bytes(transport.written[at : at + 4], "little")
        if transport.written[at + 4] == Kind.PUBLISHED:
            found.append(decode_published(transport.written[at + 12 : at + 4 + length]))
        at += 4 + length
    return found


async def test_what_arrives_in_one_turn_is_never_more_than_the_limit_allows() -> None:
    """Together they are over it: those that come after it was reached are refused, as alone."""
    small = Say(sizes=(1_900,))
    assert LIMITS.server.inflight_bytes_max < 40 * 1_990
    said = [Round([Turn(number % SESSIONS, [small]) for number in range(40)], "hold")]
    world = await both(said)
    assert sum(len(receipts(transport)) for transport in world.transports) < 4 + 40


async def test_a_piece_that_is_large_comes_after_what_was_gathered() -> None:
    large = Say(sizes=(SMALL_BYTES_MAX // 8,) * 9)
    world = await both([Round([Turn(1, [Say()]), Turn(2, [large]), Turn(3, [Say()])])])
    offsets = [receipts(world.transports[number])[0].base_offset for number in (1, 2, 3)]
    assert offsets == sorted(offsets)


@pytest.mark.parametrize("spoil", ["flip", "lie"])
@pytest.mark.parametrize("mask", BITS)
@pytest.mark.parametrize("options", [(), COLUMNS[:1]], ids=["bodies", "keyed"])
async def test_a_plain_publish_with_any_bit_wrong_is_taken_or_refused_as_by_the_long_way(
    spoil: str, mask: int, options: list[tuple[str, Any]]
) -> None:
    """Each byte of its own connection and producer: nothing hides behind another fault."""
    count = 120 if options else 100
    says = [Say(producer_id=100 + number, options=tuple(options)) for number in range(count)]
    good = [Turn(number, [said]) for number, said in enumerate(says)]
    bad = [
        Turn(number, [said._replace(**{spoil: (number, mask)})]) for number, said in enumerate(says)
    ]
    await both([Round(good), Round(bad), Round(good)], session_count=count)


@pytest.mark.parametrize(("extra", "is_told"), [(1, True), (4, True), (4, False), (8, False)])
async def test_bytes_too_many_are_found_as_by_the_long_way(extra: int, *, is_told: bool) -> None:
    world = await both([Round([Turn(1, [Say()])]), Round([Turn(1, [stretched(extra, is_told)])])])
    assert len(receipts(world.transports[1])) == 1


def stretched(extra: int, is_told: bool) -> bytes:
    """Return a publish with bytes too many; the checksum is right, and perhaps all lengths are."""
    batch = bytearray(encode_batch([b"hello"], producer_id=7, sequence=50) + bytes(extra))
    for at in (4, 20, 52) if is_told else ():  # length, raw bytes, bytes of the column
        batch[at] += extra
    batch[8:12] = crc32c(batch[12:]).to_bytes(4, "little")
    return publish_head(990, "orders", durability=2, batch_bytes=len(batch)) + batch


# --- directories of every form ---------------------------------------------------------------


class Forged(NamedTuple):
    """A batch with a right checksum whose directory was made by hand."""

    rows: list[tuple[int, int, int]]
    """Kind, what should be zero, and bytes of each column."""
    count: int = 1
    columns_more: int = 0
    raw_bytes_more: int = 0
    block_bytes_more: int = 0
    flags: int = 0
    cut: int = 0
    """How many bytes are missing at the end of the frame, which knows of it."""

    def frame(self, number: int) -> bytes:
        """Return the PUBLISH number so and so of producer 7."""
        raw_bytes = sum((size + 7) & ~7 for _, _, size in self.rows)
        front = pack(
            "<BBHIIQQq", 1, self.flags, max(len(self.rows) + self.columns_more, 0), self.count,
            max(raw_bytes + self.raw_bytes_more, 0), 7, 1_000 + number, 0,
        )  # fmt: skip
        directory = b"".join(pack("<HHI", *row) for row in self.rows)
        rest = front + directory + bytes(max(raw_bytes + self.block_bytes_more, 0))
        batch = pack("<4sII", b"OBAT", 12 + len(rest), crc32c(rest)) + rest
        batch = batch[: len(batch) - self.cut]
        head = publish_head(2_000 + number, "orders", durability=2, batch_bytes=len(batch))
        return head + batch


kinds = st.sampled_from([0, 1, 2, 3, 7, 11, 12, 200, 254, 255, 256, 511, 65_535])
sizes = st.integers(0, 40)


def mostly_0(*others: int) -> st.SearchStrategy[int]:
    return st.sampled_from([0] * 20 + list(others))


valid_rows = st.tuples(st.sets(st.integers(1, 254), max_size=4), st.lists(sizes, min_size=5)).map(
    lambda chosen: [
        *((kind, 0, size) for kind, size in zip(sorted(chosen[0]), chosen[1], strict=False)),
        (255, 0, chosen[1][-1]),
    ]
)
any_rows = st.lists(st.tuples(kinds, mostly_0(1, 256), sizes), max_size=5)
forged = st.builds(
    Forged,
    rows=valid_rows | valid_rows | any_rows,
    count=st.integers(0, 11),
    columns_more=mostly_0(-1, 1, 65_530),
    raw_bytes_more=mostly_0(-8, -1, 8),
    block_bytes_more=mostly_0(-8, -1, 1, 8),
    flags=mostly_0(4, 128),
    cut=mostly_0(1, 8, 40),
)


@pytest.mark.slow
@given(st.lists(forged, max_size=12))
@example([Forged([(1, 0, 9), (255, 0, 4)]), Forged([(255, 0, 4)]), Forged([], count=0)])
@example([Forged([(255, 0, 4), (255, 0, 4)]), Forged([(1, 1, 4), (255, 0, 4)])])
@example([Forged([(1, 0, 9), (255, 0, 3)]), Forged([(1, 0, 9), (255, 0, 4)], count=0)])
@example([Forged([(1, 0, 4), (256, 0, 4)]), Forged([(1, 0, 4), (255, 1, 4)])])
def test_a_directory_takes_the_short_way_exactly_when_the_full_rules_accept_it(
    batches: list[Forged],
) -> None:
    said = [
        Round([Turn(number % SESSIONS, [batch.frame(number)])])
        for number, batch in enumerate(batches)
    ]
    world = asyncio.run(both(said))
    stored = sum(len(receipts(transport)) for transport in world.transports)
    long_way = sum(session.received_count for session in world.sessions)
    # Beside these there are the hellos and two pieces, with five publishes, that come before.
    assert long_way - SESSIONS - 2 == len(batches) - (stored - 5)
