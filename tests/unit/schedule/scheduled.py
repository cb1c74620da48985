"""Scheduled messages that tests make, and what must come back of them."""

from __future__ import annotations

from itertools import islice

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from onward.errors import Corruption
from onward.log.disk import Disk
from onward.message.batch import encode_batch
from onward.schedule.build import ScheduledBatch, build_run
from onward.schedule.gone import Gone
from onward.schedule.record import Record
from onward.schedule.run import Run

# How long an example takes says nothing: the machine may be busy.
unhurried = settings(
    deadline=None, max_examples=60, suppress_health_check=list(HealthCheck), derandomize=True
)

TIME_MS = 1_000_000
TOPICS = ["orders", "müll", "a" * 200]

TEXTS = st.none() | st.text(max_size=10)
MESSAGES = st.lists(
    st.builds(
        Record,
        number=st.just(0),
        at_ms=st.just(0),
        # A few moments, so that many messages share one; before and after their entries.
        due_at_ms=st.integers(TIME_MS - 3, TIME_MS + 12) | st.integers(0, 2**62),
        topic=st.sampled_from(TOPICS),
        body=st.binary(max_size=40),
        key=TEXTS,
        headers=st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=3) | st.binary()),
        tag=TEXTS,
        trace_id=TEXTS,
        priority=st.integers(0, 255),
        tenant=TEXTS,
        unique=st.none() | st.sampled_from(["order-7", "order-8", ""]),
    ),
    max_size=30,
)


def plain(*due_at_ms: int, topic: str = "orders", body: bytes = b"hello") -> list[Record]:
    """Return messages that differ in their times only."""
    return [Record(0, 0, due, topic, body) for due in due_at_ms]


def batch_of(messages: list[Record]) -> bytes:
    """Return the batch that a producer would send to `@schedule`."""
    return encode_batch(
        [one.body for one in messages],
        keys=[one.key for one in messages],
        headers=[one.headers for one in messages],
        tags=[one.tag for one in messages],
        trace_ids=[one.trace_id for one in messages],
        due_at_ms=[one.due_at_ms for one in messages],
        priorities=[one.priority for one in messages],
        tenants=[one.tenant for one in messages],
        topics=[one.topic for one in messages],
        uniques=[one.unique for one in messages],
    )


def batches_of(
    messages: list[Record], *, first_number: int = 0, size: int = 7, time_ms: int = TIME_MS
) -> tuple[list[ScheduledBatch], list[Record]]:
    """Return batches of a few messages each, and the records that they are, in their order."""
    rest = iter(messages)
    batches: list[ScheduledBatch] = []
    records: list[Record] = []
    number = first_number
    while some := list(islice(rest, size)):
        batches.append((number, time_ms, batch_of(some)))
        for one in some:
            at_ms = max(one.due_at_ms, time_ms)
            records.append(one._replace(number=number, at_ms=at_ms))
            number += 1
        time_ms += 1
    return batches, records


def in_order(records: list[Record]) -> list[Record]:
    return sorted(records, key=lambda one: (one.at_ms, one.number))


def built(
    disk: Disk, path: str, messages: list[Record], *, first_number: int = 0, time_ms: int = TIME_MS
) -> tuple[Run, list[Record]]:
    """Build a run of at least one message; return it and its records in their order."""
    batches, records = batches_of(messages, first_number=first_number, time_ms=time_ms)
    assert build_run(disk, path, batches, gone=Gone()).paths == (path,)
    return Run.open(disk, path), in_order(records)


def content(disk: Disk, path: str) -> bytes:
    file = disk.open(path)
    packed = file.read(0, file.size())
    file.close()
    return packed


def put(disk: Disk, path: str, packed: bytes) -> None:
    disk.remove(path)
    file = disk.open(path, create=True)
    assert file.write(0, [packed]) == len(packed)
    file.close()


def is_refused(disk: Disk, path: str) -> bool:
    """Say whether a run is found to be damaged, at the latest when all of it is read."""
    try:
        run = Run.open(disk, path)
        run.verify()
    except Corruption:
        return True
    run.close()
    return False
