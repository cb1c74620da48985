"""Bits that turned over on the disk: never served, never cut, and said clearly.

sealed segments      found when they are read: the reader gets `Corruption`, others go on
the open segment     above the checkpoint: the broker does not start; below: as if sealed
derived files        index files, runs and checkpoints are built again
"""

import random
from pathlib import Path

import pytest

from onward.errors import Corruption

from .conftest import MakeBroker
from .folders import copied, embedded, entries_of, files_of, flip, opened, segments_of
from .history import read_all

MESSAGES = 400
SMALL = {"log_segment_bytes_max": 1 << 16, "log_preallocate_bytes": 4096}
FILLER = "x" * 600


@pytest.fixture
async def folder(make_broker: MakeBroker) -> Path:
    """A log of several segments with a checkpoint in the middle, left by kill -9."""
    broker = make_broker(**SMALL, log_checkpoint_rows=37)
    await broker.start()
    async with broker.connect() as mq:
        for number in range(MESSAGES):
            await mq.publish("orders" if number % 4 else "other", f"{number} {FILLER}")
        await broker.kill()
    # Until housekeeping has sealed what is full.
    async with embedded(broker.folder, segment_bytes_max=1 << 16, checkpoint_rows=37) as mq:
        await mq.publish("other", "last")
    await broker.start()
    async with broker.connect() as mq:
        for number in range(40):
            await mq.publish("orders", f"{MESSAGES + number} {FILLER}")
        await broker.kill()
    return broker.folder


async def contents(folder: Path) -> dict[str, dict[int, str]]:
    async with embedded(folder, segment_bytes_max=1 << 16) as mq:
        return {topic.topic: await read_all(mq, topic.topic) for topic in await mq.topics()}


async def numbers_of(folder: Path) -> dict[int, str]:
    """Return the topics of users by their numbers: the log has system topics as well."""
    async with embedded(copied(folder, "asked"), segment_bytes_max=1 << 16) as mq:
        return {topic.number: topic.topic for topic in await mq.topics()}


async def read_until_damage(folder: Path, topic: str) -> tuple[dict[int, str], bool]:
    """Return what a reader got, and whether it ended with `Corruption`."""
    got: dict[int, str] = {}
    async with embedded(folder, segment_bytes_max=1 << 16) as mq:
        try:
            async for message in mq.read(topic):
                got[message.offset] = message.text.split(" ")[0]
        except Corruption as error:
            return got, "is damaged: run 'onward log check'" in str(error)
    return got, False


async def test_a_flipped_bit_in_a_sealed_segment_is_never_served_and_never_cut(
    folder: Path,
) -> None:
    true = await contents(copied(folder, "true"))
    numbers = await numbers_of(folder)
    sealed = segments_of(folder)[:-1]
    assert len(sealed) >= 4
    places = random.Random(7)
    for path in (sealed[0], sealed[len(sealed) // 2]):
        entries = entries_of(path)
        for _ in range(10):
            entry = places.choice([one for one in entries if one.topic in numbers])
            copy = copied(folder, "damaged")
            place = places.randrange(entry.position, entry.end)
            flip(copy / path.name, place, bit=places.randrange(8))
            before = (copy / path.name).read_bytes()
            damaged = 0
            for topic in true:
                got, failed = await read_until_damage(copy, topic)
                assert got.items() <= true[topic].items()
                assert failed == (len(got) < len(true[topic]))
                damaged += failed
            assert damaged == 1, "only who reads the damaged entry is told"
            assert (copy / path.name).read_bytes() == before
            assert not list(copy.glob("*.broken-*"))


async def test_a_reader_goes_on_behind_a_damaged_entry_when_it_asks_to(folder: Path) -> None:
    path = segments_of(folder)[1]
    true = await contents(copied(folder, "true"))
    numbers = await numbers_of(folder)
    entry = [one for one in entries_of(path) if numbers.get(one.topic) == "orders"][3]
    flip(path, entry.position + 100)
    async with embedded(folder, segment_bytes_max=1 << 16) as mq:
        after = {
            message.offset: message.text.split(" ")[0]
            async for message in mq.read("orders", start=entry.base_offset + entry.count)
        }
    offsets = range(entry.base_offset + entry.count, len(true["orders"]))
    assert after == {offset: true["orders"][offset] for offset in offsets}


async def test_damage_in_the_open_segment_that_was_durable_stops_the_start(folder: Path) -> None:
    path = segments_of(folder)[-1]
    entries = entries_of(path)
    mark = int(files_of(folder, "checkpoint-*")[-1].name.removeprefix("checkpoint-")[:20])
    # Each entry was synced by itself, so the last one proves all before it.
    above = [entry for entry in entries if entry.index > mark][:-1]
    assert above, "the fixture leaves something above its checkpoint"
    for entry in above[:: max(1, len(above) // 6)]:
        for place in (entry.position, entry.position + 5, entry.position + 40, entry.end - 9):
            copy = copied(folder, "damaged")
            flip(copy / path.name, place, bit=2)
            before = (copy / path.name).read_bytes()
            with pytest.raises(Corruption, match="nothing was cut"):
                opened(copy)
            assert (copy / path.name).read_bytes() == before
            assert not list(copy.glob("*.broken-*"))


async def test_a_broker_that_finds_corruption_leaves_with_its_own_exit_code(
    make_broker: MakeBroker, folder: Path
) -> None:
    path = segments_of(folder)[-1]
    flip(path, entries_of(path)[-2].position + 80)
    broker = make_broker(folder, **SMALL)
    broker.launch()
    assert await broker.ended() == 5
    assert "onward log check" in broker.output
    assert "Traceback" not in broker.output


async def test_damage_below_the_checkpoint_in_the_open_segment_is_found_by_its_reader(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker()
    await broker.start()
    async with broker.connect() as mq:
        for number in range(20):
            await mq.publish("orders", f"{number} {FILLER}")
        await mq.publish("other", "0")
        number = (await mq.topic("orders")).number
    assert await broker.stop() == 0
    (path,) = segments_of(broker.folder)
    entries = [one for one in entries_of(path) if one.topic == number]
    flip(path, entries[6].position + 200)
    await broker.start()
    async with broker.connect() as mq:
        with pytest.raises(Corruption):
            await read_all(mq)
        assert await read_all(mq, "other") == {0: "0"}
        assert (await mq.publish("orders", "20")).offset == 20
        with pytest.raises(Corruption):
            await mq.get("orders", 6)
        assert (await mq.get("orders", 20)).text == "20"


DERIVED = ["*.idx", "*.run-*", "checkpoint-*"]


@pytest.mark.parametrize("pattern", DERIVED)
async def test_derived_files_that_are_damaged_or_missing_are_built_again(
    folder: Path, pattern: str
) -> None:
    true = await contents(copied(folder, "true"))
    paths = files_of(folder, pattern)
    assert paths
    places = random.Random(7)
    for path in (paths[0], paths[-1]):
        size = path.stat().st_size
        flips = [places.randrange(size) for _ in range(6)]
        for place in (*flips, "missing", "empty", "half"):
            copy = copied(folder, "damaged")
            if place == "missing":
                (copy / path.name).unlink()
            elif isinstance(place, str):
                (copy / path.name).write_bytes(path.read_bytes()[: size // 2 * (place == "half")])
            else:
                flip(copy / path.name, place, bit=places.randrange(8))
            assert await contents(copy) == true, f"{path.name}: {place}"


async def test_all_derived_files_can_be_lost_at_once(folder: Path) -> None:
    true = await contents(copied(folder, "true"))
    for pattern in DERIVED:
        for path in files_of(folder, pattern):
            path.unlink()
    assert await contents(folder) == true


@pytest.mark.parametrize("kind", ["emptied", "zeros", "removed"])
async def test_a_sealed_segment_that_is_gone_is_not_passed_over_in_silence(
    folder: Path, kind: str
) -> None:
    true = await contents(copied(folder, "true"))
    path = segments_of(folder)[2]
    if kind == "emptied":
        path.write_bytes(b"")
    elif kind == "zeros":
        path.write_bytes(bytes(path.stat().st_size))
    else:
        path.unlink()
    kept = path.with_suffix(".idx").read_bytes()
    try:
        got, failed = await read_until_damage(folder, "orders")
    except Corruption:
        return
    assert failed
    assert got.items() <= true["orders"].items()
    assert kind == "removed" or path.exists()
    assert path.with_suffix(".idx").read_bytes() == kept
