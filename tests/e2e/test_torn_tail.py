"""A power cut in mid-write: the last entry is there in part."""

from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import MakeBroker
from .folders import copied, embedded, entries_of, opened, segments_of
from .history import read_all

Tear = Callable[[bytes, int, int], bytes]
"""(the segment, where it is torn, where the last entry ends) -> what is left."""

TEARS: dict[str, Tear] = {
    "cut": lambda whole, at, end: whole[:at],
    "zeros": lambda whole, at, end: whole[:at] + bytes(len(whole) - at),
    "garbage": lambda whole, at, end: whole[:at] + b"\xa5" * (end - at) + whole[end:],
}


async def killed(make_broker: MakeBroker, *, messages: int = 6) -> Path:
    broker = make_broker(log_preallocate_bytes=8192)
    await broker.start()
    async with broker.connect() as mq:
        for number in range(messages):
            await mq.publish("orders", f"order {number}", key=str(number))
        await broker.kill()
    return broker.folder


@pytest.mark.parametrize("kind", TEARS)
async def test_a_tail_torn_at_any_byte_costs_only_the_torn_entry(
    make_broker: MakeBroker, kind: str
) -> None:
    folder = await killed(make_broker)
    (path,) = segments_of(folder)
    whole = path.read_bytes()
    last = entries_of(path)[-1]
    intact = whole[last.position : last.end]
    for at in range(last.position, last.end):
        copy = copied(folder, "torn")
        torn = TEARS[kind](whole, at, last.end)
        (copy / path.name).write_bytes(torn)
        left = torn[last.position : last.end]
        found = opened(copy)
        if left == intact:
            assert (found.next_index, found.cut_bytes) == (last.index + 1, 0)
            continue
        assert found.next_index == last.index, f"torn at byte {at - last.position}"
        assert found.indexes == list(range(1, last.index))
        saved = b"".join(one.read_bytes() for one in copy.glob("*.broken-*"))
        assert saved.rstrip(b"\0") == left.rstrip(b"\0")
        assert found.cut_bytes == len(left.rstrip(b"\0"))


async def test_a_broker_starts_on_a_torn_tail_and_goes_on_where_it_ended(
    make_broker: MakeBroker,
) -> None:
    folder = await killed(make_broker)
    (path,) = segments_of(folder)
    last = entries_of(path)[-1]
    for at in range(last.position + 1, last.end - 8, 29):
        copy = copied(folder, "torn")
        (copy / path.name).write_bytes(path.read_bytes()[:at])
        async with embedded(copy) as mq:
            receipt = await mq.publish("orders", "after the power cut")
            assert receipt.offset == 5
            assert receipt.event_id == last.index
            stored = await read_all(mq)
        assert list(stored) == list(range(6))
        async with embedded(copy) as mq:
            assert await read_all(mq) == stored
