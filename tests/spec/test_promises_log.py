"""Promises of the log: what was answered is there, also after everything was closed."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from onward import Corruption, InvalidRequest, Unavailable
from onward.settings import Settings

from .engines import BOTH, KEPT, SMALL, Engine


@KEPT
async def test_an_answered_message_is_there_after_a_restart(engine: Engine) -> None:
    for number in range(3):
        async with engine.connect() as mq:
            assert (await mq.publish("orders", str(number))).offset == number
            assert [message.text async for message in mq.read("orders")] == [
                str(one) for one in range(number + 1)
            ]


@KEPT
async def test_event_ids_only_grow_also_over_restarts(engine: Engine) -> None:
    seen: list[int] = []
    for _ in range(3):
        async with engine.connect() as mq:
            seen += [(await mq.publish(topic, b"x")).event_id for topic in ("a", "b")]
    assert seen == sorted(set(seen))


@KEPT
async def test_a_folder_has_one_broker_at_a_time(engine: Engine) -> None:
    async with engine.connect():
        with pytest.raises(Unavailable, match="in use"):
            async with engine.connect():
                pass
    async with engine.connect():
        pass


@KEPT
async def test_derived_files_may_be_deleted_while_the_broker_is_down(
    engine: Engine, tmp_path: Path
) -> None:
    async with engine.connect() as mq:
        for _ in range(30):
            await mq.publish("orders", bytes(10_000))
        before = await mq.topic("orders")
    for path in (tmp_path / "log").iterdir():
        if path.suffix != ".log":
            path.unlink()
    async with engine.connect() as mq:
        assert await mq.topic("orders") == before
        assert len([message async for message in mq.read("orders")]) == 30


@KEPT
async def test_damage_of_what_was_durable_stops_the_broker_and_cuts_nothing(
    engine: Engine, tmp_path: Path
) -> None:
    async with engine.connect() as mq:
        for number in range(5):
            await mq.publish("orders", str(number) * 1_000)
    (segment,) = (tmp_path / "log").glob("*.log")
    for path in (tmp_path / "log").glob("checkpoint-*"):
        path.unlink()
    content = bytearray(segment.read_bytes())
    content[1_500] ^= 0xFF
    segment.write_bytes(content)
    with pytest.raises(Corruption, match="onward log check"):
        async with engine.connect():
            pass
    assert segment.read_bytes() == content


@KEPT
async def test_damage_that_appears_later_is_told_to_its_readers_and_to_nobody_else(
    engine: Engine, tmp_path: Path
) -> None:
    async with engine.connect() as mq:
        await mq.publish("good", b"fine")
        await mq.publish("bad", b"x" * 1_000)
    (segment,) = (tmp_path / "log").glob("*.log")
    content = bytearray(segment.read_bytes())
    content[content.index(b"x" * 100) + 50] ^= 0xFF
    segment.write_bytes(content)
    async with engine.connect() as mq:
        assert [message.body async for message in mq.read("good")] == [b"fine"]
        with pytest.raises(Corruption):
            [message async for message in mq.read("bad")]


@KEPT
async def test_a_torn_tail_is_cut_and_everything_before_it_is_there(
    engine: Engine, tmp_path: Path
) -> None:
    async with engine.connect() as mq:
        for number in range(3):
            await mq.publish("orders", str(number))
    for path in (tmp_path / "log").glob("checkpoint-*"):
        path.unlink()
    (segment,) = (tmp_path / "log").glob("*.log")
    segment.write_bytes(segment.read_bytes()[:-5])
    async with engine.connect() as mq:
        assert [message.text async for message in mq.read("orders")] == ["0", "1"]
        assert (await mq.publish("orders", "2")).offset == 2


@BOTH
async def test_thousands_of_topics_need_no_files_of_their_own(
    engine: Engine, tmp_path: Path
) -> None:
    async with engine.connect() as mq:
        futures = [mq.publish_soon(f"topic-{number}", str(number)) for number in range(2_000)]
        for future in futures:
            await future
        assert len(await mq.topics()) == 2_000
        message = await mq.get("topic-1234", 0)
        assert message.text == "1234"
    if engine.is_kept:
        assert len(list((tmp_path / "log").iterdir())) < 100


@BOTH
async def test_a_broker_that_stands_alone_says_that_quorum_needs_a_cluster(engine: Engine) -> None:
    log = replace(SMALL, durability="quorum")
    with pytest.raises(InvalidRequest, match="needs a cluster"):
        async with engine.connect(Settings(log=log)):
            pass
