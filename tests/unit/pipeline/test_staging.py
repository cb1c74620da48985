"""The sink's way to exactly once: staged, decided, copied, whoever dies in between."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import onward
from onward.client.copying import CopyLines
from onward.errors import (
    Conflict,
    Corruption,
    Forbidden,
    InvalidRequest,
    MessageTooLarge,
    NotConnected,
    OffsetOutOfRange,
    OnwardError,
    TopicEnded,
    UnknownTopic,
)
from onward.message.batch import encode_batch
from onward.pipeline.columns import EncodedPiece
from onward.pipeline.ledger import (
    Decision,
    Ledger,
    Stored,
    decode_decision,
    encode_decision,
    query_name,
)
from onward.pipeline.place import Place
from onward.pipeline.staging import (
    IN_FLIGHT_MAX,
    INLINE_BYTES_MAX,
    PIECES_MAX,
    RUN_PIECES_MAX,
    RUNS_IN_FLIGHT_MAX,
    Numbers,
    Piece,
    PieceRun,
    Share,
    _task_numbers,
    each,
    gather,
    in_order,
    runs_of,
    stage,
    stage_pieces,
)
from onward.settings import LogSettings, Settings, TopicSettings

QUERY = query_name("query", "5c7a")
NOWHERE = Place("127.0.0.1:1", None, "1s")


@pytest.fixture
async def mq() -> AsyncIterator[onward.Client]:
    async with onward.connect("memory:") as client:
        yield client


def piece(*bodies: bytes, topic: str = "out") -> EncodedPiece:
    return EncodedPiece(topic, len(bodies), encode_batch(list(bodies)))


def carried(*pieces: EncodedPiece, partition: int = 0) -> Share:
    """Return the share of a task that wrote little."""
    return stage(NOWHERE, QUERY, [list(pieces)], partition=partition)


async def staged(mq: onward.Client, *pieces: EncodedPiece, partition: int = 0) -> Share:
    """Return the share of a task that wrote much."""
    return Share(partition, await stage_pieces(mq, QUERY, iter(pieces)), [])


async def bodies(mq: onward.Client, topic: str = "out") -> list[bytes]:
    if not await mq.has_topic(topic):
        return []
    return [message.body async for message in mq.read(topic)]


async def sink_topics(mq: onward.Client) -> list[str]:
    return [one.topic for one in await mq.topics(prefix="@sink.")]


# --- pieces ----------------------------------------------------------------------------------


def test_what_is_small_needs_no_broker_until_it_is_decided() -> None:
    share = stage(NOWHERE, QUERY, [[piece(b"a")], [], [piece(b"b", b"c")]], partition=3)
    assert share.pieces == [Piece("out", 1, "", 0), Piece("out", 2, "", 1)]
    assert len(share.inline) == 2


def test_what_is_large_needs_one() -> None:
    large = piece(bytes(INLINE_BYTES_MAX))
    with pytest.raises(NotConnected):
        stage(NOWHERE, QUERY, [[large]], partition=0)


def test_pieces_stand_in_the_order_of_their_partitions() -> None:
    second = Share(1, [Piece("b", 1, "@sink.x", 0), Piece("b", 1, "", 0)], [b"2"])
    first = Share(0, [Piece("a", 1, "", 0), Piece("a", 1, "", 1)], [b"0", b"1"])
    pieces, inline = gather([second, first])
    assert [one.target for one in pieces] == ["a", "a", "b", "b"]
    assert [one.offset for one in pieces] == [0, 1, 0, 2]
    assert inline == [b"0", b"1", b"2"]


def test_a_write_of_too_many_pieces_is_refused_by_number() -> None:
    share = Share(0, [Piece("a", 1, "@sink.x", 0)] * (PIECES_MAX + 1), [])
    with pytest.raises(InvalidRequest, match=f"at most {PIECES_MAX}"):
        gather([share])


def test_a_decision_is_read_as_it_was_written() -> None:
    pieces = [Piece("out", 3, "@sink.x", 0), Piece("other", 1, "", 0), Piece("out", 2, "", 1)]
    assert decode_decision(encode_decision(Decision(7, pieces))) == Decision(7, pieces)


def test_a_decision_of_as_many_pieces_as_may_be_is_small_enough_for_a_message() -> None:
    pieces = [Piece("out" * 40, 10_000, "@sink.x", 10_000 * n) for n in range(PIECES_MAX)]
    assert len(encode_decision(Decision(1, pieces))) < 4 << 20


@pytest.mark.parametrize("body", [b"", b"{}", b'{"batch":1,"pieces":[[0,1,1,0]]}', b"\xff"])
def test_a_decision_that_cannot_be_read_says_so(body: bytes) -> None:
    with pytest.raises(Corruption, match="a decision of a sink cannot be read"):
        decode_decision(body)


def runs(*pieces: Piece, without: int = -1) -> list[tuple[int, int]]:
    """Return the first number and the length of each run."""
    numbered = [one for one in enumerate(pieces) if one[0] != without]
    return [(run.number, len(run.pieces)) for run in runs_of(numbered)]


def test_pieces_that_follow_each_other_are_copied_together() -> None:
    pieces = [Piece("out", 10, "@sink.x", 10 * number) for number in range(5)]
    assert runs(*pieces[:4]) == [(0, 4)]
    assert runs() == []
    for place, other in [
        (2, Piece("other", 10, "@sink.x", 20)),
        (2, Piece("out", 10, "@sink.y", 20)),
        (2, Piece("out", 10, "@sink.x", 21)),
    ]:
        assert runs(*pieces[:place], other, *pieces[place + 1 :]) == [(0, 2), (2, 1), (3, 2)]
    assert runs(*pieces, without=2) == [(0, 2), (3, 2)]


def test_runs_have_no_more_pieces_under_way_than_may_be() -> None:
    pieces = [Piece("out", 1, "@sink.x", number) for number in range(2 * RUN_PIECES_MAX + 3)]
    lengths = [length for _, length in runs(*pieces)]
    assert lengths == [RUN_PIECES_MAX, RUN_PIECES_MAX, 3]
    assert RUN_PIECES_MAX * RUNS_IN_FLIGHT_MAX <= IN_FLIGHT_MAX
    (run,) = runs_of(enumerate(pieces[:3]))
    assert list(run.singles()) == [PieceRun(number, [pieces[number]]) for number in range(3)]


# --- one driver ------------------------------------------------------------------------------


async def test_a_batch_is_published_in_the_order_of_its_partitions(mq: onward.Client) -> None:
    shares = [
        carried(piece(b"c"), piece(b"d"), partition=1),
        await staged(mq, piece(b"a"), piece(b"b"), partition=0),
        await staged(mq, piece(b"e"), partition=2),
    ]
    await Ledger(mq, QUERY).commit(0, shares)
    assert await bodies(mq) == [b"a", b"b", b"c", b"d", b"e"]


async def test_nothing_that_was_staged_is_left(mq: onward.Client) -> None:
    ledger = Ledger(mq, QUERY)
    await ledger.commit(0, [await staged(mq, piece(b"a"))])
    assert await sink_topics(mq) == [ledger.topic]


async def test_of_a_write_that_nobody_can_repeat_nothing_at_all_is_left(mq: onward.Client) -> None:
    await Ledger(mq, QUERY, is_once=True).commit(0, [await staged(mq, piece(b"a"))])
    assert await bodies(mq) == [b"a"]
    assert await sink_topics(mq) == []


async def test_a_batch_that_comes_again_stores_nothing_again(mq: onward.Client) -> None:
    for again in range(3):
        share = await staged(mq, piece(b"a" if again == 0 else b"other"))
        await Ledger(mq, QUERY).commit(0, [share])
    await Ledger(mq, QUERY).commit(1, [carried(piece(b"b"))])
    await Ledger(mq, QUERY).commit(1, [carried(piece(b"other"))])
    assert await bodies(mq) == [b"a", b"b"]
    assert len(await sink_topics(mq)) == 1


async def test_a_batch_without_rows_is_decided_too(mq: onward.Client) -> None:
    await Ledger(mq, QUERY).commit(0, [])
    await Ledger(mq, QUERY).commit(0, [carried(piece(b"late"))])
    await Ledger(mq, QUERY).commit(1, [carried(piece(b"b"))])
    assert await bodies(mq) == [b"b"]


async def test_queries_decide_each_for_itself(mq: onward.Client) -> None:
    for query in ("one", "two"):
        await Ledger(mq, query).commit(0, [carried(piece(query.encode()))])
    assert await bodies(mq) == [b"one", b"two"]


async def test_many_small_shares_are_staged_by_the_driver(mq: onward.Client) -> None:
    shares = [
        carried(piece(b"%d" % number + bytes(200 << 10)), partition=number) for number in range(9)
    ]
    await Ledger(mq, QUERY).commit(0, shares)
    assert [body.rstrip(b"\0") for body in await bodies(mq)] == [b"%d" % n for n in range(9)]
    assert len(await sink_topics(mq)) == 1


async def test_more_pieces_than_the_broker_remembers_are_published_once(mq: onward.Client) -> None:
    pieces = [piece(b"%d" % number) for number in range(100)]
    await Ledger(mq, QUERY).commit(0, [await staged(mq, *pieces)])
    assert await bodies(mq) == [b"%d" % number for number in range(100)]


async def test_a_topic_of_decisions_that_was_deleted_begins_anew(mq: onward.Client) -> None:
    ledger = Ledger(mq, QUERY)
    await ledger.commit(0, [carried(piece(b"a"))])
    await mq.delete_topic(ledger.topic)
    await Ledger(mq, QUERY).commit(0, [carried(piece(b"b"))])
    assert await bodies(mq) == [b"a", b"b"]


# --- drivers that die ------------------------------------------------------------------------


async def decided(mq: onward.Client, batch: int, *shares: Share) -> Stored:
    """Be a driver that dies after it has decided."""
    ledger = Ledger(mq, QUERY)
    await ledger.open()
    stored = await ledger.decide(batch, shares)
    assert stored is not None
    return stored


async def copied_in_part(mq: onward.Client, stored: Stored, count: int) -> None:
    """Be a driver that dies while it copies."""
    ledger = Ledger(mq, QUERY)
    await ledger.open()
    part = stored._replace(decision=stored.decision._replace(pieces=stored.decision.pieces[:count]))
    await ledger.copy(part)


@pytest.mark.parametrize("count", [0, 1, 5, 32, 33, 70])
async def test_a_copy_that_was_interrupted_is_finished_by_the_next_driver(
    mq: onward.Client, count: int
) -> None:
    pieces = [piece(b"%d" % number) for number in range(70)]
    stored = await decided(mq, 4, await staged(mq, *pieces))
    await copied_in_part(mq, stored, count)
    # Its tasks gave the same rows in another order this time.
    await Ledger(mq, QUERY).commit(4, [await staged(mq, *reversed(pieces))])
    assert await bodies(mq) == [b"%d" % number for number in range(70)]
    assert len(await sink_topics(mq)) == 1


async def test_a_copy_is_finished_once_even_when_the_broker_has_forgotten_who_began_it(
    mq: onward.Client,
) -> None:
    pieces = [piece(b"%d" % number, topic=f"out{number % 2}") for number in range(20)]
    await mq.publish("out0", "there before")
    stored = await decided(mq, 4, await staged(mq, *pieces))
    await copied_in_part(mq, stored, 7)
    await mq.publish("out0", "between")
    mq._embedded.broker.producers.windows.clear()
    await Ledger(mq, QUERY).commit(4, [])
    odd, even = [b"%d" % n for n in range(1, 20, 2)], [b"%d" % n for n in range(0, 20, 2)]
    assert await bodies(mq, "out1") == odd
    assert await bodies(mq, "out0") == [b"there before", *even[:4], b"between", *even[4:]]


async def test_retention_since_the_decision_hides_nothing_of_what_was_copied(
    mq: onward.Client,
) -> None:
    pieces = [piece(b"%d" % number) for number in range(20)]
    stored = await decided(mq, 4, await staged(mq, *pieces))
    await mq.publish("out", "retained away")
    await copied_in_part(mq, stored, 7)
    broker = mq._embedded.broker
    broker.catalogue.by_name["out"].first_offset = 1
    broker.producers.windows.clear()
    await Ledger(mq, QUERY).commit(4, [])
    assert await bodies(mq) == [b"%d" % number for number in range(20)]


async def test_a_later_batch_first_finishes_the_one_before(mq: onward.Client) -> None:
    await decided(mq, 4, carried(piece(b"four")))
    await Ledger(mq, QUERY).commit(5, [carried(piece(b"five"))])
    assert await bodies(mq) == [b"four", b"five"]


async def test_a_write_can_be_finished_without_its_rows(mq: onward.Client) -> None:
    assert not await Ledger(mq, QUERY).finish()
    await decided(mq, 0, await staged(mq, piece(b"a"), piece(b"b")))
    assert await Ledger(mq, QUERY).finish()
    assert not await Ledger(mq, QUERY).finish()
    assert await bodies(mq) == [b"a", b"b"]


async def test_a_refused_piece_holds_the_batch_until_it_is_taken(mq: onward.Client) -> None:
    await mq.create_topic("out", rule="read-only")
    share = await staged(mq, piece(b"a"), piece(b"b", topic="other"))
    with pytest.raises(Forbidden, match="topic 'out' is read-only"):
        await Ledger(mq, QUERY).commit(0, [share])
    await mq.change_topic("out", rule="read-write")
    await Ledger(mq, QUERY).commit(0, [share])
    assert (await bodies(mq), await bodies(mq, "other")) == ([b"a"], [b"b"])


async def test_what_was_decided_outlives_the_day_of_what_was_staged(mq: onward.Client) -> None:
    share = await staged(mq, piece(b"a"))
    before = (await mq.topic(share.pieces[0].staged)).expires_at_ms
    await decided(mq, 0, share)
    assert (await mq.topic(share.pieces[0].staged)).expires_at_ms > before + 20 * 86_400_000


async def test_pieces_that_are_gone_are_not_forgotten_silently(mq: onward.Client) -> None:
    share = await staged(mq, piece(b"a"))
    await decided(mq, 0, share)
    await mq.delete_topic(share.pieces[0].staged)
    with pytest.raises(Conflict, match=f"delete topic '@sink.{QUERY}' to write the batch anew"):
        await Ledger(mq, QUERY).commit(0, [carried(piece(b"a"))])
    assert await bodies(mq) == []
    await mq.delete_topic(f"@sink.{QUERY}")
    await Ledger(mq, QUERY).commit(0, [carried(piece(b"a"))])
    assert await bodies(mq) == [b"a"]


async def test_a_batch_whose_decision_is_no_longer_kept_stores_nothing_again(
    mq: onward.Client,
) -> None:
    for batch in range(40):
        await Ledger(mq, QUERY).commit(batch, [carried(piece(b"%d" % batch))])
    ledger = Ledger(mq, QUERY)
    await ledger.open()
    assert await ledger.decide(3, [carried(piece(b"zombie"))]) is None
    assert len(await bodies(mq)) == 40


# --- what the broker copies ------------------------------------------------------------------


async def test_what_is_staged_never_comes_to_the_driver(mq: onward.Client) -> None:
    broker = mq._embedded.broker
    share = await staged(mq, *(piece(b"%d" % number + bytes(50_000)) for number in range(20)))
    before = broker.delivering.delivered_bytes
    await Ledger(mq, QUERY).commit(0, [share])
    # Only the decision was read.
    assert broker.delivering.delivered_bytes - before < 50_000
    assert [len(body) for body in await bodies(mq)] == [50_001] * 10 + [50_002] * 10


async def test_all_kinds_of_pieces_keep_the_order_of_the_decision(mq: onward.Client) -> None:
    shares, expected = [], []
    for partition in range(12):
        some = [piece(b"%d.%d" % (partition, n)) for n in range(partition * 3 % 11 + 1)]
        expected += [b"%d.%d" % (partition, n) for n in range(len(some))]
        is_small = partition % 3 == 1
        shares.append(
            carried(*some, partition=partition)
            if is_small
            else await staged(mq, *some, partition=partition)
        )
    await Ledger(mq, QUERY).commit(0, shares)
    assert await bodies(mq) == expected


async def test_pieces_for_several_topics_are_copied_each_to_its_own(mq: onward.Client) -> None:
    pieces = [piece(b"%d" % number, topic=f"out{number // 2 % 3}") for number in range(40)]
    await Ledger(mq, QUERY).commit(0, [await staged(mq, *pieces)])
    for target in range(3):
        expected = [b"%d" % number for number in range(40) if number // 2 % 3 == target]
        assert await bodies(mq, f"out{target}") == expected


async def test_a_run_that_is_older_than_what_is_remembered_is_left_as_it_is(
    mq: onward.Client,
) -> None:
    pieces = [piece(b"%d" % number) for number in range(60)]
    stored = await decided(mq, 4, await staged(mq, *pieces))
    ledger = Ledger(mq, QUERY)
    await ledger.open()
    for _ in range(2):
        await ledger.copy(stored)
    assert await bodies(mq) == [b"%d" % number for number in range(60)]


async def test_of_a_run_that_is_older_in_part_what_is_not_stored_is_stored(
    mq: onward.Client,
) -> None:
    pieces = [piece(b"%d" % number) for number in range(40)]
    stored = await decided(mq, 4, await staged(mq, *pieces))
    ledger = Ledger(mq, QUERY)
    await ledger.open()
    # As no driver does it: the first 5 and the last are stored, and the window ends within a run.
    first = stored.offset * PIECES_MAX
    for number in (*range(5), 36):
        await ledger._copy_run(PieceRun(number, [stored.decision.pieces[number]]), first=first)
    await ledger.copy(stored)
    found = await bodies(mq)
    assert sorted(map(int, found)) == list(range(40))
    assert found[:6] == [b"0", b"1", b"2", b"3", b"4", b"36"]


async def test_a_target_that_is_missing_is_not_taken_for_what_was_staged() -> None:
    settings = Settings(topics=TopicSettings(auto_create=False))
    async with onward.connect("memory:", settings=settings) as mq:
        share = await staged(mq, piece(b"a"))
        with pytest.raises(UnknownTopic, match="topic 'out' does not exist.* batch 0 was decided"):
            await Ledger(mq, QUERY).commit(0, [share])
        await mq.create_topic("out")
        assert await Ledger(mq, QUERY).finish()
        assert await bodies(mq) == [b"a"]


async def test_compressed_pieces_are_copied_as_they_are(mq: onward.Client) -> None:
    packed = encode_batch([b"a" * 1_000] * 10, compression="zstd")
    share = await staged(mq, *[EncodedPiece("out", 10, packed)] * 3)
    await Ledger(mq, QUERY).commit(0, [share])
    copied = [batch.columns.header async for batch in mq.read("out").batches()]
    assert [(one.length, one.flags) for one in copied] == [(len(packed), 1)] * 3


# --- what was for nothing --------------------------------------------------------------------


async def test_an_aborted_batch_leaves_nothing_behind(mq: onward.Client) -> None:
    await Ledger(mq, QUERY).abort([await staged(mq, piece(b"a")), carried(piece(b"b"))])
    assert await sink_topics(mq) == []


async def test_an_abort_keeps_what_was_decided(mq: onward.Client) -> None:
    share, other = await staged(mq, piece(b"a")), await staged(mq, piece(b"b"))
    await decided(mq, 0, share)
    await Ledger(mq, QUERY).abort([share, other])
    assert await Ledger(mq, QUERY).finish()
    assert await bodies(mq) == [b"a"]
    assert len(await sink_topics(mq)) == 1


async def test_a_task_that_fails_deletes_what_it_staged(mq: onward.Client) -> None:
    def pieces() -> Iterator[EncodedPiece]:
        yield piece(b"a")
        raise InvalidRequest("column 'body' is null in 3 rows")

    with pytest.raises(InvalidRequest, match="is null"):
        await stage_pieces(mq, QUERY, pieces())
    assert await sink_topics(mq) == []


async def test_a_staged_topic_that_ends_under_a_task_does_not_begin_anew(
    mq: onward.Client,
) -> None:
    def pieces() -> Iterator[EncodedPiece]:
        yield piece(b"old")
        asyncio.run_coroutine_threadsafe(end(), loop).result(20)
        yield piece(b"new")

    async def end() -> None:
        async with asyncio.timeout(20):
            while not (  # noqa: ASYNC110
                (topics := await sink_topics(mq)) and await bodies(mq, topics[0])
            ):
                await asyncio.sleep(0.001)
        await mq.delete_topic(topics[0])

    loop = asyncio.get_running_loop()
    with pytest.raises(UnknownTopic, match="created before it is used"):
        await stage_pieces(mq, QUERY, pieces())
    assert await sink_topics(mq) == []


@pytest.mark.parametrize("is_once", [False, True])
async def test_what_is_gone_before_the_decision_fails_before_anything_is_written(
    mq: onward.Client, is_once: bool
) -> None:
    shares = [carried(piece(b"a")), await staged(mq, piece(b"b"), partition=1)]
    for topic in await sink_topics(mq):
        await mq.delete_topic(topic)
    with pytest.raises(Conflict, match="nothing of the batch was written"):
        await Ledger(mq, QUERY, is_once=is_once).commit(0, shares)
    assert not await mq.has_topic("out")


async def test_a_decision_into_a_topic_that_was_created_anew_is_not_carried_out(
    mq: onward.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, publish = Ledger(mq, QUERY), Ledger._publish

    async def created_anew(self: Ledger, *given: Any, **named: Any) -> int:
        await mq.delete_topic(self.topic)
        await mq.create_topic(self.topic)
        return await publish(self, *given, **named)

    monkeypatch.setattr(Ledger, "_publish", created_anew)
    with pytest.raises(TopicEnded, match="was created anew while batch 0 was decided"):
        await ledger.commit(0, [carried(piece(b"a"))])
    assert not await mq.has_topic("out")


async def test_what_is_copied_is_on_the_disk_whatever_the_default_of_the_broker() -> None:
    settings = Settings(log=LogSettings(durability="memory"))
    async with onward.connect("memory:", settings=settings) as mq:
        said: list[object] = []
        copy_batches = mq.copy_batches

        async def copy(*given: Any, **named: Any) -> Any:
            said.append(named["durability"])
            return await copy_batches(*given, **named)

        mq.copy_batches = copy  # type: ignore[method-assign]
        await Ledger(mq, QUERY).commit(0, [await staged(mq, piece(b"a"))])
        assert said == ["disk"]


def test_the_tasks_of_one_process_are_one_producer_to_the_broker() -> None:
    first, second = _task_numbers(), _task_numbers()
    assert first is second
    assert (first.next() + 1, first.producer_id) == (second.next(), second.producer_id)
    assert Numbers().producer_id != first.producer_id


async def test_a_checkpoint_that_was_put_back_is_refused_and_not_left_out_silently(
    mq: onward.Client,
) -> None:
    for batch in range(3):
        await Ledger(mq, QUERY).commit(batch, [carried(piece(b"%d" % batch))])
    share = await staged(mq, piece(b"1"), piece(b"and what came since"))
    with pytest.raises(Conflict, match="batch 1 comes again after batch 2 .* new checkpoint"):
        await Ledger(mq, QUERY).commit(1, [share])
    assert await bodies(mq) == [b"0", b"1", b"2"]
    assert await sink_topics(mq) == [f"@sink.{QUERY}"]


async def test_an_abort_sees_a_decision_that_is_still_under_way(tmp_path: Path) -> None:
    async with onward.connect(f"file:{tmp_path}") as mq:
        ledger, share = Ledger(mq, QUERY), await staged(mq, piece(b"a"))
        await ledger.open()
        packed = encode_batch([encode_decision(Decision(0, share.pieces))])
        # A driver that gave up waiting: the broker has its decision and has not answered yet.
        unanswered = asyncio.create_task(ledger._publish("decide", packed, sequence=1))
        while ledger._producer_id("decide") not in mq._embedded.broker.producers.windows:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await Ledger(mq, QUERY).abort([share])
        await unanswered
        assert await Ledger(mq, QUERY).finish()
        assert await bodies(mq) == [b"a"]


async def test_what_is_refused_after_the_decision_says_how_to_go_on(mq: onward.Client) -> None:
    await mq.create_topic("out", message_bytes_max=10)
    with pytest.raises(MessageTooLarge, match=f"batch 0 was decided .* topic '@sink.{QUERY}'"):
        await Ledger(mq, QUERY).commit(0, [carried(piece(bytes(11)))])
    await mq.change_topic("out", message_bytes_max=100)
    assert await Ledger(mq, QUERY).finish()
    assert await bodies(mq) == [bytes(11)]


# --- drivers that race -----------------------------------------------------------------------


async def test_of_two_drivers_one_decides_and_both_follow() -> None:
    async def drive(number: int) -> None:
        async with onward.connect("memory:race") as mine:
            share = await staged(mine, piece(b"%d" % number), piece(b"again %d" % number))
            await Ledger(mine, QUERY).commit(0, [share])

    async with onward.connect("memory:race") as mq:
        await asyncio.gather(drive(0), drive(1))
        assert await bodies(mq) in ([b"0", b"again 0"], [b"1", b"again 1"])
        assert len(await sink_topics(mq)) == 1


async def test_drivers_that_race_over_many_batches_store_each_once() -> None:
    async def drive() -> None:
        # Who is behind is told so, and ends; there is always one in front.
        async with onward.connect("memory:race") as mine:
            with suppress(Conflict):
                for batch in range(5):
                    share = await staged(mine, *(piece(b"%d.%d" % (batch, n)) for n in range(36)))
                    await Ledger(mine, QUERY).commit(batch, [share])

    async with onward.connect("memory:race") as mq:
        await asyncio.gather(*(drive() for _ in range(3)))
        expected = [b"%d.%d" % (batch, n) for batch in range(5) for n in range(36)]
        assert await bodies(mq) == expected
        assert len(await sink_topics(mq)) == 1


async def test_the_driver_that_loses_the_race_leaves_nothing_of_its_own(mq: onward.Client) -> None:
    won = await decided(mq, 0, carried(piece(b"won")))
    many = [carried(piece(bytes(200 << 10)), partition=n) for n in range(9)]
    assert await decided(mq, 0, await staged(mq, piece(b"lost")), *many) == won
    assert await sink_topics(mq) == [f"@sink.{QUERY}"]


async def test_a_driver_that_was_overtaken_stores_nothing(mq: onward.Client) -> None:
    stored = await decided(mq, 0, await staged(mq, piece(b"a")))
    await Ledger(mq, QUERY).commit(1, [carried(piece(b"b"))])
    slow = Ledger(mq, QUERY)
    await slow.open()
    await slow.carry_out(stored)
    with pytest.raises(Conflict, match="another driver has gone on with it"):
        await slow.commit(0, [carried(piece(b"other"))])
    assert await bodies(mq) == [b"a", b"b"]


# --- many calls at a time --------------------------------------------------------------------


@pytest.mark.parametrize("end", ["cancelled", "failed"])
@pytest.mark.parametrize("limit", [2, 3])
async def test_what_is_ended_in_the_middle_lets_nothing_overtake_it(end: str, limit: int) -> None:
    lines, asked = CopyLines(), []
    first_fails = asyncio.Event()

    async def call(number: int) -> None:
        with lines.place(7) as place:
            await place.turn()
            asked.append(number)
            if number == 1:
                await first_fails.wait()
                raise Forbidden("not here")
            place.ask()
            await asyncio.sleep(0)

    copying = asyncio.ensure_future(in_order(each(call(n) for n in range(9)), limit=limit))
    for _ in range(20):
        await asyncio.sleep(0)
    assert asked == [0, 1]
    if end == "cancelled":
        copying.cancel()
    else:
        first_fails.set()
    with pytest.raises((asyncio.CancelledError, Forbidden)):
        await copying
    for _ in range(5):
        await asyncio.sleep(0)
    assert asked == [0, 1]


async def test_calls_are_begun_in_order_and_only_so_many_at_a_time() -> None:
    begun: list[int] = []
    under_way: set[int] = set()

    async def call(number: int) -> int:
        begun.append(number)
        under_way.add(number)
        assert len(under_way) <= 3
        await asyncio.sleep(0)
        under_way.remove(number)
        return number

    answers: Sequence[int] = await in_order(each(call(n) for n in range(10)), limit=3)
    assert begun == list(answers) == list(range(10))


async def test_the_first_failure_is_raised_as_it_is() -> None:
    async def call(number: int) -> int:
        if number == 2:
            raise OffsetOutOfRange("two")
        return number

    with pytest.raises(OnwardError, match="two"):
        await in_order(each(call(n) for n in range(100)), limit=3)
