"""Carried messages: found by their offset, wherever they were written last."""

from pathlib import Path

from onward.log.carried import Carried, CarriedRow, TopicCarried
from onward.message.batch import batches_of, decode_batch
from onward.message.entry import CARRIED_TOPIC, Kind, entry_heads, read_entry

GOLDEN = Path(__file__).parents[2] / "golden" / "log-carried.bin"


def row(base_offset: int, count: int = 1, *, index: int = 9, length: int = 100) -> CarriedRow:
    return CarriedRow(base_offset, count, 0, index, 0, length)


def test_a_carried_entry_written_once_is_read_for_ever() -> None:
    unit = GOLDEN.read_bytes()
    entry = read_entry(unit, 0, position=0)
    assert entry is not None
    assert (entry.kind, entry.topic, entry.count) == (Kind.CARRIED, 7 + CARRIED_TOPIC, 2)
    body = unit[entry.body_position : entry.body_position + entry.body_bytes]
    carried = Carried()
    carried.apply(entry, body)
    assert [(one.base_offset, one.index) for one in carried.by_topic[7]] == [
        (17, 1000),
        (940, 1000),
    ]
    for head in entry_heads(body):
        [(start, _)] = batches_of(body, head.body_position, head.body_position + head.body_bytes)
        assert decode_batch(body, start, raw_bytes_max=1_000).bodies == [b"carried"]
    assert Carried.load(carried.save()).save() == carried.save()


def test_what_is_carried_again_takes_the_place_of_what_was_carried_before() -> None:
    topic = TopicCarried()
    for one in (row(5, 3), row(20)):
        topic.add(one)
    topic.add(row(5, 3, index=12, length=90))
    assert (topic.count, topic.bytes, topic.find(7)) == (4, 190, row(5, 3, index=12, length=90))
    topic.remove([row(5, 3), row(20)])
    assert len(topic) == 2, "others of the same offsets are not meant"


def test_an_offset_between_two_rows_is_not_carried() -> None:
    carried = Carried()
    topic = carried.by_topic[1] = TopicCarried()
    for one in (row(5, 3), row(20)):
        topic.add(one)
    assert [carried.has(1, offset) for offset in (4, 5, 7, 8, 20, 21)] == [
        False, True, True, False, True, False,
    ]  # fmt: skip
    assert carried.missing(1, [(0, 6), (7, 30)]) == [(0, 5), (8, 20), (21, 30)]
    assert [one.base_offset for one in carried.rows_from(1, 7)] == [5, 20]
    assert carried.in_indexes(0, 9) == {}
    carried.remove(1, list(topic))
    assert not carried.by_topic
