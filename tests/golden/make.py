"""The golden files: bytes that Onward wrote once and must be able to read for ever.

`python tests/golden/make.py` writes those that are missing. An existing file is never changed: a
format that changes gets a new version number and new files beside the old ones.
"""

from pathlib import Path
from typing import Any

from onward.log.index import NewRows, write_rows
from onward.log.memory_disk import MemoryDisk
from onward.message.batch import encode_batch
from onward.message.entry import CARRIED_TOPIC, Draft, Entry, encode_entry
from onward.message.entry import Kind as EntryKind
from onward.protocol.connection import ClientConnection
from onward.protocol.deliveries import (
    FINISHED,
    STARTS,
    Consume,
    Outcome,
    Settle,
    ack_frame,
    delivery_head,
    more_frame,
    progress_frame,
    recall_frame,
    settled_frame,
    settled_steps_frame,
    started_frame,
)
from onward.protocol.frames import Kind, frame
from onward.protocol.operations.replicas import (
    Fetch,
    Follow,
    SourceState,
    encode_followed,
    encode_source,
    file_head,
)
from onward.protocol.payloads import (
    Durability,
    End,
    Goodbye,
    Hello,
    Lineage,
    Read,
    Start,
    Welcome,
    counted_from_frame,
    credit_frame,
    encode_json,
    publish_head,
    published_frame,
)

FOLDER = Path(__file__).parent

PLAIN: dict[str, Any] = {
    "bodies": [b"hello", b"", b"world"],
    "producer_id": 0x0123456789ABCDEF,
    "sequence": 42,
    "time_ms": 1_750_000_000_123,
}
ALL_COLUMNS: dict[str, Any] = PLAIN | {
    "keys": ["customer-7", None, "ключ"],
    "headers": [{"content-type": "application/json", "raw": b"\x00\xff"}, None, {}],
    "tags": ["eu,paid", None, "us"],
    "trace_ids": [None, "4bf92f3577b34da6a3ce929d0e0e4736", None],
    "due_at_ms": [1_750_000_060_000, None, -1],
    "priorities": [0, 9, 255],
    "tenants": ["acme", "acme", None],
}
SCHEDULED: dict[str, Any] = PLAIN | {
    "due_at_ms": [1_750_000_060_000, None, 2**62],
    "topics": ["orders", "reminders", "заказы"],
    "uniques": ["order-7", None, ""],
    "replaces": [41, -1, None],
}
DELAYED: dict[str, Any] = PLAIN | {
    "due_at_ms": [None, 1_750_000_060_000, None],
    "topics": ["orders", "reminders", "orders"],
    "delays_ms": [0, None, 2_700_000],
}
FIRED: dict[str, Any] = PLAIN | {
    "due_at_ms": [1_750_000_060_000, 1_750_000_060_000, 1_750_000_060_001],
    "schedule_ids": [41, 2**40, None],
}

# name -> what encode_batch was called with
BATCHES: dict[str, dict[str, Any]] = {
    "batch_plain.bin": PLAIN,
    "batch_all_columns.bin": ALL_COLUMNS,
    "batch_scheduled.bin": SCHEDULED,
    "batch_fired.bin": FIRED,
    "batch_delayed.bin": DELAYED,
    "batch_zstd.bin": ALL_COLUMNS | {"compression": "zstd"},
    "batch_lz4.bin": ALL_COLUMNS | {"compression": "lz4"},
}


def client_frames() -> bytes:
    """What a client sends, one frame of each kind."""
    batch = encode_batch([b"hello"], producer_id=7, sequence=1, time_ms=1_750_000_000_000)
    hello = Hello(version=1, client="golden", host="example", pid=77, token="secret")
    return b"".join(
        (
            ClientConnection().hello(hello),
            frame(Kind.PING, 1),
            publish_head(2, "orders", durability=Durability.DISK, batch_bytes=len(batch)) + batch,
            frame(Kind.READ, 3, encode_json(Read("orders", Start(offset=5), 65_536, follow=True))),
            credit_frame(3, 32_768),
            frame(Kind.CANCEL, 3),
            frame(Kind.REQUEST, 4, encode_json({"op": "topic.describe", "topic": "orders"})),
            frame(Kind.BYE, 0),
        )
    )


def broker_frames() -> bytes:
    """What a broker sends, one frame of each kind."""
    welcome = Welcome(1, "n1", 5_000, 17 << 20, 16 << 20, 4 << 20, 1_024)
    error = {"code": "overloaded", "message": "come back later", "retry_after_ms": 50}
    return b"".join(
        (
            frame(Kind.WELCOME, 0, encode_json(welcome)),
            frame(Kind.PONG, 1),
            published_frame(2, 100, 12, Durability.DISK, repeat=True),
            frame(Kind.ENTRIES, 3, bytes(range(72))),
            frame(Kind.END, 3, encode_json(End("topic_ended", "topic 'orders' ended", 101))),
            frame(Kind.REPLY, 4, encode_json({"topic": "orders"})),
            frame(Kind.ERROR, 5, encode_json(error)),
            frame(Kind.GOODBYE, 0, encode_json(Goodbye("stopping", "the broker stops"))),
        )
    )


def times_frames() -> bytes:
    """What a broker sends to say how it resolved relative times."""
    return counted_from_frame(1, 1_750_000_000_000)


def member_frames() -> bytes:
    """What a member of a group sends beside the frames of any client."""
    wish = {"mode": "ordered", "lease_ms": 10_000}
    consume = Consume("billing", ("orders", "refunds"), "b-1", 100, wish, refuse=True)
    rows = (
        Outcome("retry", 1, ((103, 104),), after_ms=10_000, cause="the bank is closed"),
        Outcome("reject", 1, ((104, 105), (107, 109)), cause="no such customer"),
        Outcome("release", 2, at_ms=1_750_000_060_000, count=False),
        Outcome("renew", 2),
    )
    return b"".join(
        (
            frame(Kind.CONSUME, 3, encode_json(consume)),
            more_frame(3, 50),
            more_frame(3, -7),
            ack_frame(4, 3, [(1, 100, 103)]),
            ack_frame(5, 3, [(1, 105, 107), (2, 0, 1), (2, 7, 2**40)]),
            frame(Kind.SETTLE, 6, encode_json(Settle(3, rows))),
        )
    )


def starting_frames() -> bytes:
    """What a member sends that reports what it starts."""
    consume = Consume("billing", ("orders",), "b-1", starts=True)
    rows = [(9, 100, 103), (9, 107, 108)]
    return frame(Kind.CONSUME, 3, encode_json(consume)) + started_frame(3, rows)


def progress_frames() -> bytes:
    """What members of one connection report together, and what a broker refuses of it."""
    finished, starts = (3, FINISHED, 9, 100, 101), (3, STARTS, 9, 101, 102)
    return progress_frame(5, [finished, starts]) + settled_steps_frame(5, [finished])


def replicas_frames() -> bytes:
    """What a replica sends to follow and to fetch a file, and what its source sends."""
    follow = Follow(
        name="copy-1", node="5e0f3c", next_event_id=42, last_crc=0xDEADBEEF,
        lineage=Lineage(1, "a1b2c3"), credit_bytes=1 << 20,
    )  # fmt: skip
    source = SourceState(durable_event_id=42, time_ms=1_750_000_000_123, epoch=1)
    fetch = Fetch(snapshot=1, file=2, position=65_536, bytes=32_768)
    return b"".join(
        (
            frame(Kind.FOLLOW, 1, encode_json(follow)),
            frame(Kind.FOLLOWED, 1, encode_followed(41)),
            frame(Kind.FETCH, 2, encode_json(fetch)),
            frame(Kind.SOURCE, 1, encode_source(source)),
            frame(Kind.EVENTS, 1, log_entry()),
            frame(Kind.FILE, 2, file_head(0x3C2FAB81) + bytes(range(16))),
        )
    )


def histories_frames() -> bytes:
    """How a client and a broker tell each other which history they know."""
    hello = Hello(version=1, client="golden", lineage=Lineage(2, "d4e5f6"))
    welcome = Welcome(
        1, "n1", 5_000, 17 << 20, 16 << 20, 4 << 20, 1_024, revision=3,
        lineage=Lineage(2, "d4e5f6"), is_leader=False, leader="broker-2:7700",
    )  # fmt: skip
    return frame(Kind.HELLO, 0, encode_json(hello)) + frame(Kind.WELCOME, 0, encode_json(welcome))


def recalling_frames() -> bytes:
    """What a broker sends to a member that can be asked for what it has not started."""
    return recall_frame(3, 5)


def deliveries_frames() -> bytes:
    """What a broker sends to a member of a group beside the frames for any client."""
    grants = [(100, 103, 1, 1), (107, 109, 2, 2)]
    entries = bytes(range(72))
    head = delivery_head(
        3, "orders", grants, delivery=9, lease_ms=30_000, entries_bytes=len(entries)
    )
    return b"".join((head, entries, settled_frame(4), settled_frame(5, [(1, 105, 107)])))


def log_entry() -> bytes:
    """One entry of a log."""
    parts = [b"first, ", b"second"]
    draft = Draft(EntryKind.MESSAGES, 1_750_000_000_123, 7, 100, 3, parts)
    buffers, _, _ = encode_entry(draft, index=42, term=2, previous_crc=0xDEADBEEF, synced_index=40)
    return b"".join(buffers)


def log_carried() -> bytes:
    """An entry of messages that outlive retention: two entries in its body."""
    parts = []
    for base_offset, index in ((17, 5), (940, 90)):
        body = encode_batch([b"carried"], producer_id=7, sequence=1, time_ms=1_750_000_000_000)
        draft = Draft(EntryKind.MESSAGES, 1_750_000_000_123, 7, base_offset, 1, [body])
        buffers, _, _ = encode_entry(draft, index=index, term=2, previous_crc=1, synced_index=4)
        parts += buffers
    carried = Draft(EntryKind.CARRIED, 1_750_000_900_000, 7 + CARRIED_TOPIC, 17, 2, parts)
    buffers, _, _ = encode_entry(carried, index=1_000, term=2, previous_crc=2, synced_index=998)
    return b"".join(buffers)


def log_index() -> bytes:
    """The index file of a segment with four entries of three topics."""
    rows = NewRows(10)
    places = [
        (1, 2, 0, 5, 0, 96),
        (0, 1, 0, 5, 96, 88),
        (3, 1, 7, 6, 184, 88),
        (1, 4, 2, 15, 272, 112),
    ]
    rows.add_all(
        [
            Entry(position, length, 0, 0, 10 + number, 0, time_ms, base, 0, topic, count, 1, 0)
            for number, (topic, count, base, time_ms, position, length) in enumerate(places)
        ]
    )
    disk = MemoryDisk()
    write_rows(disk, "log.idx", first_index=10, sources=[rows])
    return disk.open("log.idx").map()


def golden_files() -> dict[str, bytes]:
    """Every golden file, as the code of today would write it."""
    files = {name: encode_batch(**arguments) for name, arguments in BATCHES.items()}
    frames = {"frames_client.bin": client_frames(), "frames_broker.bin": broker_frames()}
    frames |= {"frames_times.bin": times_frames()}
    frames |= {"frames_member.bin": member_frames(), "frames_deliveries.bin": deliveries_frames()}
    frames["frames_starting.bin"] = starting_frames()
    frames["frames_recalling.bin"] = recalling_frames()
    frames["frames_progress.bin"] = progress_frames()
    frames["frames_replicas.bin"] = replicas_frames()
    frames["frames_histories.bin"] = histories_frames()
    logs = {
        "log-entry.bin": log_entry(), "log-index.bin": log_index(),
        "log-carried.bin": log_carried(),
    }  # fmt: skip
    return files | frames | logs


if __name__ == "__main__":
    for name, content in golden_files().items():
        if not (FOLDER / name).exists():
            (FOLDER / name).write_bytes(content)
            print(f"wrote {name}: {len(content)} bytes")
