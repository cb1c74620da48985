"""Runs: what was published comes back, is found by number and by key, and damage is noticed."""

from bisect import bisect_right
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.errors import Corruption
from onward.log.memory_disk import MemoryDisk
from onward.message.batch import decode_batch
from onward.schedule.blocks import NUMBERS, UNIQUES, Blocks, BlockWriter
from onward.schedule.counts import Counts
from onward.schedule.layout import BLOCK_ROWS, PAGE_BYTES
from onward.schedule.order import BEFORE_ALL, Order
from onward.schedule.record import encode_fired
from onward.schedule.run import Run

from .scheduled import MESSAGES, TIME_MS, built, content, is_refused, plain, put, unhurried

SOME = MESSAGES.filter(bool)


@unhurried
@given(SOME)
def test_every_column_comes_back_as_it_was_published(messages):
    run, records = built(MemoryDisk(), "run", messages)
    assert list(run.records(0, len(messages))) == records
    assert run.rows_total == run.count == len(messages)
    assert run.first == (records[0].at_ms, records[0].number)
    assert run.last == (records[-1].at_ms, records[-1].number)
    assert (run.number_start, run.number_end) == (0, len(messages))
    run.verify()


@unhurried
@given(SOME)
def test_a_message_is_found_by_its_number(messages):
    run, records = built(MemoryDisk(), "run", messages)
    for record in records:
        assert run.find(record.number) == record
        assert run.place_of(record.number) == (record.number, record.at_ms, record.topic)
    assert run.find(len(messages)) is None
    assert run.place_of(2**60) is None


@unhurried
@given(SOME)
def test_a_business_key_finds_its_numbers_newest_first(messages):
    run, records = built(MemoryDisk(), "run", messages)
    for unique in ("order-7", "order-8", "", "order-9"):
        numbers = [one.number for one in records if one.unique == unique]
        found = list(run.find_unique(unique))
        assert [one.number for one in found] == sorted(numbers, reverse=True)
        assert all(one == run.place_of(one.number) for one in found)


@unhurried
@given(SOME, st.data())
def test_seeking_and_taking_are_as_in_a_sorted_list(messages, data):
    run, records = built(MemoryDisk(), "run", messages)
    keys = [(one.at_ms, one.number) for one in records]
    after = data.draw(st.sampled_from([*keys, BEFORE_ALL, (TIME_MS + 3, 5), (2**62, 0)]))
    position = bisect_right(keys, after)
    assert run.first_after(*after) == position
    run.seek(after)
    assert run.count == len(keys) - position
    assert run.head() == (keys[position] if position < len(keys) else None)
    now_ms = data.draw(st.sampled_from([at for at, _ in keys] + [0, TIME_MS + 5]))
    limit = data.draw(st.integers(1, 50))
    due = [key for key in keys[position:] if key[0] <= now_ms]
    assert run.count_due(now_ms) == len(due)
    due = due[:limit]
    rows = run.take_until(now_ms, limit)
    assert rows.moments() == due
    assert list(run.records_of(rows)) == records[position : position + len(due)]
    assert run.count == len(keys) - position - len(due)


def test_rows_are_taken_across_pages():
    messages = plain(*range(TIME_MS, TIME_MS + 500), body=bytes(1_000))
    run, records = built(MemoryDisk(), "run", messages)
    assert run.page_count > 5
    run.seek((TIME_MS + 9, 10**9))
    rows = run.take_until(TIME_MS + 399, 10_000)
    assert rows.moments() == [(one.at_ms, one.number) for one in records[10:400]]
    assert run.records_of(rows).bodies == [bytes(1_000)] * 390
    assert run.head() == (TIME_MS + 400, 400)


def test_a_run_reads_no_file_for_rows_of_the_page_that_it_read_last():
    messages = plain(*range(TIME_MS, TIME_MS + 500), body=bytes(1_000))
    run, _ = built(MemoryDisk(), "run", messages)
    assert run.is_in_memory(TIME_MS - 1)
    assert not run.is_in_memory(TIME_MS)
    run.take_until(TIME_MS, 10)
    next_page_ms, _ = run.page_key(1)
    assert run.is_in_memory(next_page_ms - 1)
    assert not run.is_in_memory(next_page_ms)
    run.take_until(TIME_MS + 498, 10_000)
    assert run.is_in_memory(2**62)


def test_rows_with_gaps_are_refused():
    run, _ = built(MemoryDisk(), "run", plain(1, 2, 3))
    rows = run.take_until(2**62, 10)
    with pytest.raises(ValueError, match="without gaps"):
        run.records_of(rows.picked([0, 2]))


@unhurried
@given(SOME, SOME)
def test_runs_are_parts_of_an_order(ones, others):
    disk = MemoryDisk()
    run, records = built(disk, "one", ones)
    other, more = built(disk, "other", others, first_number=len(ones), time_ms=TIME_MS + 9)
    order = Order()
    order.add(run)
    order.add(other)
    keys = sorted((one.at_ms, one.number) for one in records + more)
    taken = []
    while rows := order.take(now_ms=2**62, limit=3).rows.moments():
        taken += rows
    assert taken == keys


def test_a_large_message_has_a_page_of_its_own():
    messages = plain(5, 6, 7) + plain(8, body=bytes(3 * PAGE_BYTES)) + plain(9)
    run, records = built(MemoryDisk(), "run", messages)
    assert [run.page_rows(page) for page in range(run.page_count)] == [3, 1, 1]
    assert list(run.records(0, 10)) == records


@unhurried
@given(SOME)
def test_what_fires_is_an_ordinary_batch_with_its_schedule_ids(messages):
    run, records = built(MemoryDisk(), "run", messages)
    for topic, some in run.records(0, len(messages)).by_topic().items():
        batch = decode_batch(encode_fired(some, time_ms=TIME_MS), raw_bytes_max=1 << 20)
        expected = [one for one in records if one.topic == topic]
        assert batch.schedule_ids == [one.number for one in expected]
        assert batch.due_at_ms == [one.due_at_ms for one in expected]
        assert batch.bodies == [one.body for one in expected]
        assert (batch.keys or [None] * batch.count) == [one.key for one in expected]
        assert (batch.headers or [None] * batch.count) == [one.headers for one in expected]
        assert (batch.priorities or [0] * batch.count) == [one.priority for one in expected]
        assert batch.uniques is None
        assert batch.topics is None


@unhurried
@given(SOME)
def test_the_counts_are_those_of_each_hour_and_topic(messages):
    run, records = built(MemoryDisk(), "run", messages)
    counts = run.counts()
    expected = Counter((one.at_ms // counts.step_ms * counts.step_ms, one.topic) for one in records)
    assert {(at, run.topics[topic]): count for at, topic, count in counts} == expected


@unhurried
@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 5)), min_size=1).map(sorted),
    st.integers(1, 10),
)
def test_a_table_of_counts_that_grows_becomes_coarser(rows, size):
    counts = Counts(step_ms=1_000, rows_max=10)
    for start in range(0, len(rows), size):
        counts.add(*zip(*rows[start : start + size], strict=True))
    for table in (counts, Counts.unpack(counts.pack(), step_ms=counts.step_ms)):
        found = list(table)
        expected = Counter((at // counts.step_ms * counts.step_ms, topic) for at, topic in rows)
        assert {(at, topic): count for at, topic, count in found} == expected
        assert len(found) == len(expected)
        assert [at for at, _, _ in found] == sorted(at for at, _, _ in found)


@unhurried
@given(st.integers(0, 3 * BLOCK_ROWS), st.sampled_from([1, 100, BLOCK_ROWS, 2_000]))
def test_an_index_of_many_blocks_finds_every_key(count, size):
    writer = BlockWriter(NUMBERS)
    rows = [(3 * key, key - 5, key % 7) for key in range(count)]
    section = b""
    for start in range(0, count, size):
        section += b"".join(writer.add(list(zip(*rows[start : start + size], strict=True))))
    section += writer.finish()
    blocks = Blocks(
        NUMBERS, writer.fences(), rows=count, read=lambda at, n: section[at : at + n], path="a"
    )
    for row in rows[:: max(1, count // 50)]:
        assert list(blocks.find(row[0])) == [row]
        assert list(blocks.find(row[0] + 1)) == []
    assert list(blocks.find(2**64 - 1)) == []


def test_a_key_that_fills_several_blocks_is_found_whole():
    writer = BlockWriter(UNIQUES)
    keys = [3] * 10 + [7] * (2 * BLOCK_ROWS) + [9] * 10
    columns = [keys, list(range(len(keys))), keys, keys]
    section = b"".join(writer.add(columns)) + writer.finish()
    blocks = Blocks(
        UNIQUES, writer.fences(), rows=len(keys), read=lambda at, n: section[at : at + n], path="a"
    )
    numbers = [number for _, number, _, _ in blocks.find(7)]
    assert numbers == list(range(10, 10 + 2 * BLOCK_ROWS))[::-1]
    assert [number for _, number, _, _ in blocks.find(3)] == list(range(10))[::-1]
    assert list(blocks.find(8)) == []


def small_run(disk: MemoryDisk) -> bytes:
    messages = plain(50, 7) + plain(TIME_MS + 5, topic="bills")
    messages[0] = messages[0]._replace(unique="order-7", key="k")
    built(disk, "run", messages)[0].close()
    return content(disk, "run")


def test_every_flipped_byte_is_found():
    disk = MemoryDisk()
    sound = small_run(disk)
    assert not is_refused(disk, "run")
    for place in range(len(sound)):
        damaged = bytearray(sound)
        damaged[place] ^= 1 << place % 8
        put(disk, "run", bytes(damaged))
        assert is_refused(disk, "run"), f"byte {place} of {len(sound)}"


def test_a_run_that_is_cut_off_or_too_long_is_refused_when_it_is_opened():
    disk = MemoryDisk()
    sound = small_run(disk)
    for size in range(len(sound)):
        put(disk, "run", sound[:size])
        with pytest.raises(Corruption):
            Run.open(disk, "run")
    put(disk, "run", sound + bytes(8))
    with pytest.raises(Corruption):
        Run.open(disk, "run")


def test_a_page_in_the_place_of_another_is_found():
    disk = MemoryDisk()
    run, _ = built(disk, "run", plain(*range(1, 400), body=bytes(1_000)))
    one, other, end = run._positions[0], run._positions[1], run._positions[2]
    assert other - one == end - other
    run.close()
    sound = content(disk, "run")
    put(disk, "run", sound[:one] + sound[other:end] + sound[one:other] + sound[end:])
    with pytest.raises(Corruption, match="page of row 0"):
        Run.open(disk, "run").records(0, 1)
