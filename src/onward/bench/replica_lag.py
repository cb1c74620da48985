"""replica-lag: how far a replica is behind its source, what it costs there, how it catches up.

    lag        5,000 messages/s to the source, each when it is due: until a reader of the replica
               has it. The 99th percentile is the figure; less is better
    cost       publish-sync at a source without and with a replica, in alternating rounds: rate
               and processor time of the source for each request
    catch-up   an empty replica of a source with 2 GiB of log (batches of 1,000 x 200 bytes),
               beside a copy of the same bytes over one TCP connection to the same disk

Source, replica and load share one machine and one disk: on two machines all of it is faster.
"""

import asyncio
import contextlib
import os
import socket
import tempfile
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from shutil import rmtree

import uvloop

import onward
from onward.bench import publish_bulk, publish_sync
from onward.bench.clients import STREAM
from onward.bench.latency import (
    DUE_AT,
    LATE_S_MAX,
    PER_SECOND,
    WARM_UP_S,
    Percentiles,
    publish_on_time,
)
from onward.bench.load import Load, run_load
from onward.bench.peers import Server, started
from onward.bench.report import Options, Report, percentiles_ms, typical
from onward.client.client import Client
from onward.client.sync import connect_sync

SECONDS = 10.0
LOAD_SECONDS = 2.0
ROUNDS = 3
LOG_BYTES = 2 << 30
CATCH_UP_S_MAX = 1_800.0
PART_BYTES = 1 << 20


def run(options: Options) -> Report:
    """Measure the 99th percentile from publish at the source to a reader of the replica, in ms."""
    lags = [_lag(options) for _ in range(options.repeat or ROUNDS)]
    return Report(
        name="replica-lag",
        unit="ms (p99)",
        less_is_better=True,
        onward=typical([lag["p99"] for lag in lags]),
        durability="disk",
        details={
            "p50_ms": typical([lag["p50"] for lag in lags]),
            "rounds": lags,
            "messages_per_second": PER_SECOND,
            "cost": _cost(options),
            "catch_up": _catch_up(options),
        },
    )


@contextlib.contextmanager
def _replica_of(source: Server, options: Options) -> Iterator[Server]:
    """Start a replica with an empty folder."""
    settings = {"replica.of": _address(source), "replica.name": "bench"}
    with started("onward", folder=options.folder, keep=options.keep, options=settings) as replica:
        yield replica


def _address(server: Server) -> str:
    return f"127.0.0.1:{server.port}"


# --- lag -----------------------------------------------------------------------------------------


def _lag(options: Options) -> Percentiles:
    with (
        started("onward", folder=options.folder, keep=options.keep) as source,
        _replica_of(source, options) as replica,
    ):
        latencies_ns = uvloop.run(_latencies_ns(source, replica, options.seconds or SECONDS))
    lag = percentiles_ms(latencies_ns)
    options.say(f"lag at {PER_SECOND:,} messages/s: p50 {lag['p50']} ms, p99 {lag['p99']} ms")
    return lag


async def _latencies_ns(source: Server, replica: Server, seconds: float) -> Sequence[int]:
    expected = int((WARM_UP_S + seconds) * PER_SECOND)
    latencies = array("Q")
    async with (
        onward.connect(_address(source)) as mq,
        onward.connect(_address(replica)) as copy,
        asyncio.timeout(WARM_UP_S + seconds + LATE_S_MAX),
        asyncio.TaskGroup() as group,
    ):
        await mq.create_topic(STREAM)
        await _reached(copy, (await mq.replication()).event_id)
        group.create_task(_read(copy, latencies, expected))
        await publish_on_time(lambda body: mq.publish(STREAM, body, durability="disk"), expected)
    return latencies[int(WARM_UP_S * PER_SECOND) :]


async def _read(copy: Client, latencies: "array[int]", expected: int) -> None:
    async for batch in copy.read(STREAM, follow=True).batches():
        now_ns = time.perf_counter_ns()
        latencies.extend(now_ns - DUE_AT.unpack_from(body)[0] for body in batch.bodies)
        if len(latencies) >= expected:
            return


async def _reached(copy: Client, event_id: int) -> None:
    """Return when the replica has everything up to an event."""
    while (await copy.replication()).event_id < event_id:  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.01)


# --- cost ----------------------------------------------------------------------------------------


def _cost(options: Options) -> dict[str, object]:
    alone, followed = [], []
    for _ in range(options.repeat or ROUNDS):
        alone.append(_publish_sync(options, has_replica=False))
        followed.append(_publish_sync(options, has_replica=True))
    rates = [typical([load.per_second for load in loads]) for loads in (alone, followed)]
    cpu_us = [typical([_cpu_us(load) for load in loads]) for loads in (alone, followed)]
    return {
        "without_replica": {"per_second": round(rates[0]), "cpu_us_per_request": cpu_us[0]},
        "with_replica": {"per_second": round(rates[1]), "cpu_us_per_request": cpu_us[1]},
        "rate_ratio": round(rates[1] / rates[0], 3),
        "cpu_ratio": round(cpu_us[1] / cpu_us[0], 3),
    }


def _cpu_us(load: Load) -> float:
    return round(load.server_cpu_seconds / load.requests * 1e6, 2)


def _publish_sync(options: Options, *, has_replica: bool) -> Load:
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(
            started("onward", folder=options.folder, keep=options.keep)
        )  # fmt: skip
        if has_replica:
            replica = stack.enter_context(_replica_of(source, options))
            _wait_connected(source)
        load = run_load(
            source.port, publish_sync.onward_speakers(),
            seconds=options.seconds or LOAD_SECONDS, server_cpu=source.cpu_seconds,
        )  # fmt: skip
        if has_replica:
            _wait_equal(source, replica)
    name = "with" if has_replica else "without"
    options.say(
        f"publish-sync {name} a replica: {load.per_second:,.0f}/s, "
        f"{_cpu_us(load)} us of the source's processor for each"
    )
    return load


def _wait_connected(source: Server) -> None:
    with connect_sync(_address(source)) as mq:
        while not any(replica.connected for replica in mq.replication().replicas):
            time.sleep(0.01)


def _wait_equal(source: Server, replica: Server) -> None:
    """Return when a replica has all that its source has."""
    give_up_at = time.monotonic() + CATCH_UP_S_MAX
    with connect_sync(_address(source)) as mq, connect_sync(_address(replica)) as copy:
        event_id = mq.replication().event_id
        while copy.replication().event_id < event_id:
            assert time.monotonic() < give_up_at, "the replica does not catch up"
            time.sleep(0.02)


# --- catch-up ------------------------------------------------------------------------------------


def _catch_up(options: Options) -> dict[str, object]:
    with started("onward", folder=options.folder, keep=options.keep) as source:
        log_bytes = _fill(source, options.log_bytes or LOG_BYTES, options)
        catch_up_s, copy_s = [], []
        for _ in range(options.repeat or ROUNDS):
            catch_up_s.append(_follow_s(source, options))
            copy_s.append(_copy_s(source, log_bytes, options.folder))
            options.say(
                f"{log_bytes / 2**30:.2f} GiB: the replica took {catch_up_s[-1]:.2f} s, "
                f"a copy {copy_s[-1]:.2f} s"
            )
    followed, copied = typical(catch_up_s), typical(copy_s)
    return {
        "log_bytes": log_bytes,
        "replica_s": [round(one, 3) for one in catch_up_s],
        "copy_s": [round(one, 3) for one in copy_s],
        "replica_mb_per_second": round(log_bytes / followed / 1e6, 1),
        "copy_mb_per_second": round(log_bytes / copied / 1e6, 1),
        "ratio": round(copied / followed, 3),
    }


def _fill(source: Server, log_bytes: int, options: Options) -> int:
    """Publish batches until the log has so many bytes; return how many it has."""
    options.say(f"writing {log_bytes / 2**30:.2f} GiB of log")
    batch_bytes = publish_bulk.MESSAGES * (len(publish_bulk.BODY) + 4)
    run_load(
        source.port, publish_bulk.onward_speakers(), in_flight=publish_bulk.IN_FLIGHT,
        requests=log_bytes // batch_bytes + 1, warm_up_s=0,
    )  # fmt: skip
    with connect_sync(_address(source)) as mq:
        return int(mq.status()["log_bytes"])


def _follow_s(source: Server, options: Options) -> float:
    with _replica_of(source, options) as replica:
        started_at = time.perf_counter()
        _wait_equal(source, replica)
        return time.perf_counter() - started_at


def _copy_s(source: Server, log_bytes: int, folder: Path) -> float:
    """Return how long it takes to send the segments over TCP and to sync them where they arrive."""
    place = Path(tempfile.mkdtemp(prefix="onward-bench-copy-", dir=folder))
    paths = sorted((source.folder / "log").glob("[0-9]*.log"))
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            sending = threading.Thread(target=_send, args=(server, paths, log_bytes))
            started_at = time.perf_counter()
            sending.start()
            _receive(server.getsockname()[1], place / "copied.log", log_bytes)
            elapsed = time.perf_counter() - started_at
            sending.join()
        return elapsed
    finally:
        rmtree(place, ignore_errors=True)
        os.sync()


def _send(server: socket.socket, paths: Sequence[Path], log_bytes: int) -> None:
    connection, _ = server.accept()
    left = log_bytes
    with connection:
        for path in paths:
            with path.open("rb") as file:
                # What is behind the last entry of the open segment is space taken ahead.
                left -= connection.sendfile(file, count=min(left, path.stat().st_size))


def _receive(port: int, path: Path, log_bytes: int) -> None:
    part, left = memoryview(bytearray(PART_BYTES)), log_bytes
    with (
        socket.create_connection(("127.0.0.1", port)) as connection,
        path.open("wb", buffering=0) as file,
    ):
        while left:
            received = connection.recv_into(part)
            assert received, "the other end closed early"
            file.write(part[:received])
            left -= received
        os.fsync(file.fileno())
