"""Frames that were written once must be written and read the same for ever."""

import runpy
from pathlib import Path

import msgspec
import pytest

from onward.protocol.connection import ClientConnection, ServerConnection
from onward.protocol.deliveries import (
    Consume,
    decode_ack,
    decode_consume,
    decode_delivery,
    decode_more,
    decode_settle,
    decode_settled,
)
from onward.protocol.frames import PREFACE, Kind, frame
from onward.protocol.operations.replicas import (
    Fetch,
    Follow,
    SourceState,
    decode_followed,
    decode_source,
    split_file,
)
from onward.protocol.payloads import Hello, Lineage, Welcome, decode_hello
from onward.protocol.receiver import Frame, Receiver

GOLDEN = Path(__file__).parents[2] / "golden"
MAKE = runpy.run_path(str(GOLDEN / "make.py"))


def frames_in(name: str) -> list[Frame]:
    stream = (GOLDEN / name).read_bytes()
    receiver = Receiver(frame_bytes_max=65_536, preface=PREFACE if "client" in name else b"")
    shared = bytearray(65_536)
    receiver.buffer(shared)[: len(stream)] = stream
    return receiver.received(len(stream))


FILES = [
    "frames_client.bin", "frames_broker.bin", "frames_member.bin", "frames_deliveries.bin",
    "frames_starting.bin", "frames_recalling.bin", "frames_times.bin", "frames_progress.bin",
    "frames_replicas.bin", "frames_histories.bin",
]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_frames_are_written_with_the_same_bytes_as_ever(name: str) -> None:
    today = MAKE[name.removeprefix("frames_").removesuffix(".bin") + "_frames"]()
    assert today.hex(" ", 4) == (GOLDEN / name).read_bytes().hex(" ", 4)


def test_the_golden_files_hold_a_frame_of_every_kind() -> None:
    kinds = {kind for name in FILES for kind, *_ in frames_in(name)}
    assert kinds == set(Kind)


def test_the_golden_frames_of_the_broker_are_a_whole_conversation_for_a_client() -> None:
    client, shared = ClientConnection(), bytearray(65_536)
    client.hello(Hello(version=1))
    stream = b"".join(frame(*one) for one in frames_in("frames_broker.bin"))
    client.buffer(shared)[: len(stream)] = stream
    assert len(client.received(len(stream))) == 8
    assert client.goodbye is not None
    assert client.goodbye.code == "stopping"


def test_the_golden_hello_is_taken_by_a_broker() -> None:
    hello, *_ = frames_in("frames_client.bin")
    server, shared = ServerConnection(), bytearray(1024)
    stream = PREFACE + frame(*hello)
    server.buffer(shared)[: len(stream)] = stream
    server.received(len(stream))
    assert server.hello == Hello(version=1, client="golden", host="example", pid=77, token="secret")


def test_the_golden_deliveries_still_say_what_they_said() -> None:
    delivery, done, refused = [payload for _, _, payload in frames_in("frames_deliveries.bin")]
    front = decode_delivery(delivery)
    assert front == (9, 30_000, "orders", [(100, 103, 1, 1), (107, 109, 2, 2)], 80)
    assert delivery[front.entries_at :] == bytes(range(72))
    assert decode_settled(done) == []
    assert decode_settled(refused) == [(1, 105, 107)]


def test_the_golden_frames_of_a_member_still_say_what_they_said() -> None:
    consume, more, less, ack, acks, settle = [one for _, _, one in frames_in("frames_member.bin")]
    wish = {"mode": "ordered", "lease_ms": 10_000}
    joining = Consume("billing", ("orders", "refunds"), "b-1", 100, wish, refuse=True)
    assert decode_consume(consume) == joining
    assert (decode_more(more), decode_more(less)) == (50, -7)
    assert decode_ack(ack) == (3, [(1, 100, 103)])
    assert decode_ack(acks) == (3, [(1, 105, 107), (2, 0, 1), (2, 7, 2**40)])
    assert [row.do for row in decode_settle(settle).rows] == [
        *("retry", "reject", "release", "renew"),
    ]


def test_the_golden_frames_of_a_replica_still_say_what_they_said() -> None:
    payloads = [payload for _, _, payload in frames_in("frames_replicas.bin")]
    follow, followed, fetch, source, _, file = payloads
    assert msgspec.json.decode(follow, type=Follow) == Follow(
        name="copy-1", node="5e0f3c", next_event_id=42, last_crc=0xDEADBEEF,
        lineage=Lineage(1, "a1b2c3"), credit_bytes=1 << 20,
    )  # fmt: skip
    assert decode_followed(followed) == 41
    assert msgspec.json.decode(fetch, type=Fetch) == Fetch(
        snapshot=1, file=2, position=65_536, bytes=32_768
    )
    assert decode_source(source) == SourceState(42, 1_750_000_000_123, 1)
    assert split_file(file) == (0x3C2FAB81, bytes(range(16)))


def test_the_golden_histories_still_say_what_they_said() -> None:
    hello, welcome = [payload for _, _, payload in frames_in("frames_histories.bin")]
    assert decode_hello(hello).lineage == Lineage(2, "d4e5f6")
    told = msgspec.json.decode(welcome, type=Welcome)
    assert (told.revision, told.lineage) == (3, Lineage(2, "d4e5f6"))
    assert (told.is_leader, told.leader) == (False, "broker-2:7700")
