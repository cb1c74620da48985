"""What a topic is made of: rows of the index, a page at a time."""

import pytest

from onward.errors import InvalidRequest, OffsetOutOfRange, UnknownTopic

from .asking import Operator
from .speaking import open_broker


async def test_entries_say_where_they_are_and_how_many_they_have() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    for count in (3, 1, 4):
        await operator.publish("orders", count)
    reply = await operator.ask("topic.entries", topic="orders", start=0, end=8)
    assert [entry[:2] for entry in reply["entries"]] == [[0, 3], [3, 1], [4, 4]]
    events = [entry[2] for entry in reply["entries"]]
    assert events == sorted(set(events))
    assert all(size > 0 for *_, size in reply["entries"])
    await broker.stop()


async def test_a_page_begins_with_the_entry_that_holds_the_offset_and_ends_before_the_end() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    for count in (3, 1, 4):
        await operator.publish("orders", count)

    async def bases(**asked: int) -> list[int]:
        reply = await operator.ask("topic.entries", topic="orders", **asked)
        return [entry[0] for entry in reply["entries"]]

    assert await bases(start=2, end=4) == [0, 3]
    assert await bases(start=3, end=5) == [3, 4]
    assert await bases(start=0, end=99, limit=2) == [0, 3]
    assert await bases(start=8, end=99) == []
    await broker.stop()


async def test_what_is_not_there_is_refused() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 3)
    with pytest.raises(UnknownTopic):
        await operator.ask("topic.entries", topic="bills", start=0, end=1)
    with pytest.raises(OffsetOutOfRange):
        await operator.ask("topic.entries", topic="orders", start=4, end=9)
    with pytest.raises(InvalidRequest):
        await operator.ask("topic.entries", topic="orders", start=-1, end=9)
    with pytest.raises(InvalidRequest):
        await operator.ask("topic.entries", topic="orders", start=0, end=9, limit=2_001)
    await broker.stop()
