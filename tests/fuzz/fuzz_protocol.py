"""The fuzz target for everything that decodes bytes of a peer: connection, payloads, batches.

    python tests/fuzz/fuzz_protocol.py -runs=1000000          with atheris
    python tests/fuzz/fuzz_protocol.py --seeded 20000 7       without: runs and seed

Whatever the bytes are, only an error of ours may come out. `fuzz_one` takes one input; its first
byte chooses what decodes the rest.
"""

import contextlib
import random
import runpy
import struct
import sys
from collections.abc import Callable

from crc32c import crc32c

from onward.errors import OnwardError, ProtocolError
from onward.message.batch import Batch, check_batch, decode_batch, encode_batch, largest_body_bytes
from onward.protocol.connection import ClientConnection, Connection, ServerConnection, State
from onward.protocol.deliveries import (
    Consume,
    Outcome,
    Settle,
    ack_frame,
    decode_ack,
    decode_consume,
    decode_delivery,
    decode_joined,
    decode_more,
    decode_settle,
    decode_settled,
    delivery_head,
)
from onward.protocol.frames import PREFACE, Kind, frame
from onward.protocol.operations import decode_reply, decode_request
from onward.protocol.operations.topics import DescribeTopic
from onward.protocol.payloads import (
    Hello,
    Read,
    Start,
    Welcome,
    decode_credit,
    decode_end,
    decode_error,
    decode_goodbye,
    decode_hello,
    decode_publish,
    decode_published,
    decode_read,
    decode_welcome,
    encode_json,
    publish_head,
)

RAW_BYTES_MAX = 1 << 16
SHARED = bytearray(1024)
HELLO = Hello(version=1, client="fuzz")
WELCOME = Welcome(1, "n1", 5000, 4096, 4096, 4096, 16)
DECODERS: tuple[Callable[[bytes], object], ...] = (
    decode_hello,
    decode_welcome,
    decode_goodbye,
    decode_read,
    decode_end,
    decode_error,
    decode_request,
    lambda payload: decode_reply(payload, DescribeTopic(topic="orders")),
    decode_publish,
    decode_published,
    decode_credit,
    decode_consume,
    decode_joined,
    decode_more,
    decode_ack,
    decode_settle,
    decode_delivery,
    decode_settled,
)


def fuzz_one(given: bytes) -> None:
    """Decode one input; raise when anything but an error of ours comes out."""
    if len(given) < 2:
        return
    target, step, rest = given[0] % 5, given[1] + 1, given[2:]
    with contextlib.suppress(OnwardError):
        (_connection_before, _connection_open, _payload, _batch, _signed_batch)[target](rest, step)


def _connection_before(stream: bytes, step: int) -> None:
    _feed(ServerConnection() if step % 2 else ClientConnection(), stream, step)


def _connection_open(stream: bytes, step: int) -> None:
    server, client = ServerConnection(), ClientConnection(frame_bytes_max=4096)
    _feed(server, client.hello(HELLO), 4096)
    _feed(client, server.welcome(WELCOME), 4096)
    _feed(server if step % 2 else client, stream, step)


def _feed(connection: Connection, stream: bytes, step: int) -> None:
    while stream:
        buffer = connection.buffer(SHARED)
        n = min(step, len(stream), len(buffer))
        buffer[:n] = stream[:n]
        stream = stream[n:]
        try:
            connection.received(n)
        except ProtocolError:
            assert connection.state is State.CLOSED
            raise
        assert connection.pending_bytes <= 1 << 16


def _payload(payload: bytes, step: int) -> None:
    DECODERS[step % len(DECODERS)](payload)


def _batch(packed: bytes, step: int) -> None:
    check_batch(packed, step % 3)
    _open(packed, decode_batch(packed, step % 3, raw_bytes_max=RAW_BYTES_MAX), step % 3)


def _signed_batch(packed: bytes, _step: int) -> None:
    """Put the right magic, length and checksum on it, so that what lies behind them is reached."""
    whole = bytearray(packed + bytes(-len(packed) % 8))
    if len(whole) >= 64:
        struct.pack_into("<4sI", whole, 0, b"OBAT", len(whole))
        struct.pack_into("<I", whole, 8, crc32c(bytes(whole[12:])))
    _open(bytes(whole), decode_batch(whole, raw_bytes_max=RAW_BYTES_MAX), 0)


def _open(packed: bytes, batch: Batch, start: int) -> None:
    for ask in (
        lambda: batch.bodies,
        lambda: batch.keys,
        lambda: batch.headers,
        lambda: batch.tags,
        lambda: batch.trace_ids,
        lambda: batch.due_at_ms,
        lambda: batch.priorities,
        lambda: batch.tenants,
        lambda: batch.body_lengths,
        lambda: largest_body_bytes(packed, start, batch.header, raw_bytes_max=RAW_BYTES_MAX),
    ):
        with contextlib.suppress(ProtocolError):
            ask()


def seeds() -> list[bytes]:
    """Sound inputs, from which damaged ones are made."""
    batch = encode_batch([b"hello", b"world"], keys=["a", None], headers=[{"a": "b"}, None])
    packed = [
        batch,
        encode_batch([b"x" * 50]),
        encode_batch([b"y" * 90, b"z"], compression="zstd", due_at_ms=[1, None]),
        encode_batch([b"y" * 90, b"z"], compression="lz4", priorities=[1, 2]),
    ]
    publish = publish_head(7, "orders", durability=2, batch_bytes=len(batch)) + batch
    read = encode_json(Read("orders", Start(offset=5), 65_536))
    ack = ack_frame(4, 3, [(1, 0, 7), (2, 9, 10)])
    given = delivery_head(3, "orders", [(0, 7, 1, 1)], delivery=1, lease_ms=5, entries_bytes=16)
    settle = encode_json(Settle(3, (Outcome("retry", 1, ((0, 7),), after_ms=5, cause="x"),)))
    consume = encode_json(Consume("g", ("orders",), "m", 9, {"mode": "ordered"}))
    streams = [
        ack + frame(Kind.SETTLE, 5, settle) + frame(Kind.CONSUME, 3, consume),
        given + bytes(16) + frame(Kind.SETTLED, 4),
        PREFACE + frame(Kind.HELLO, 0, encode_json(HELLO)),
        frame(Kind.PING, 1) + publish + frame(Kind.READ, 2, read) + frame(Kind.BYE, 0),
        frame(Kind.PONG, 1) + frame(Kind.ENTRIES, 2, bytes(2000)),
    ]
    payloads = [encode_json(HELLO), encode_json(WELCOME), read, publish[12:]]
    payloads += [ack[12:], given[12:] + bytes(16), settle, consume]
    return (
        [bytes((target, n)) + one for target in (0, 1) for one in streams for n in (0, 1, 6)]
        + [bytes((2, n)) + one for one in payloads for n in range(len(DECODERS))]
        + [bytes((target, 2)) + one for target in (3, 4) for one in packed]
    )


def damaged(seed: bytes, chance: random.Random) -> bytes:
    """Return the seed with a few random changes."""
    changed = bytearray(seed)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(4):
            case 0:
                changed[at : at + 1] = chance.randbytes(1)
            case 1:
                changed[at : at + 4] = chance.choice((b"\xff\xff\xff\xff", bytes(4), b"[[[["))
            case 2:
                changed[at:at] = chance.randbytes(chance.randint(1, 20))
            case _:
                del changed[at : at + chance.randint(1, 20)]
    return bytes(changed)


def run_seeded(runs: int, seed: int) -> None:
    """Give `runs` damaged inputs to `fuzz_one`; the same seed gives the same inputs."""
    chance, sound = random.Random(seed), seeds()
    for one in sound:
        fuzz_one(one)
    for run in range(runs):
        given = damaged(chance.choice(sound), chance)
        try:
            fuzz_one(given)
        except Exception as error:
            raise AssertionError(f"run {run} of seed {seed}: {given.hex()}") from error


def main() -> None:
    """Run atheris, or the seeded run."""
    if sys.argv[1:2] == ["--seeded"]:
        run_seeded(int(sys.argv[2]), int(sys.argv[3]))
        return
    import atheris

    # Import our modules again, instrumented; instrumenting everything takes half a minute.
    for name in [name for name in sys.modules if name.partition(".")[0] == "onward"]:
        del sys.modules[name]
    with atheris.instrument_imports(include=["onward"]):
        instrumented = runpy.run_path(__file__)["fuzz_one"]
    atheris.Setup(sys.argv, instrumented)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
