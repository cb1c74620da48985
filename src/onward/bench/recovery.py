"""recovery: from the start of `onward serve` after kill -9 to its first accepted publish.

The log has 2 GiB when the broker is killed in the middle of publishing. The time includes the
start of Python, the opening of the log and one publish on the disk. The figure is the slowest of
several such restarts; between two of them something is published, and the broker is killed again.
"""

import contextlib
import socket
import tempfile
import threading
import time
from pathlib import Path
from shutil import rmtree

from onward.bench.load import run_load
from onward.bench.peers import running
from onward.bench.publish_bulk import BODY, MESSAGES, onward_speakers
from onward.bench.report import Options, Report
from onward.bench.speakers import OnwardSpeaker, Refused
from onward.errors import Unavailable

LOG_BYTES = 2 << 30
ROUNDS = 3
BETWEEN_BATCHES = 200
KILL_AFTER_S = 0.3
GIVE_UP_S = 120.0


def run(options: Options) -> Report:
    """Measure the restart after a kill."""
    place = Path(tempfile.mkdtemp(prefix="onward-bench-recovery-", dir=options.folder))
    log_bytes = options.log_bytes or LOG_BYTES
    try:
        options.say(f"writing {log_bytes / 2**30:.1f} GiB of log")
        _publish_and_kill(place, batches=log_bytes // (MESSAGES * (len(BODY) + 4)) + 1)
        times = []
        for _ in range(options.repeat or ROUNDS):
            times.append(_restart(place))
            options.say(f"first accepted publish after {times[-1]:.2f} s")
            _publish_and_kill(place, batches=BETWEEN_BATCHES)
        size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    finally:
        if not options.keep:
            rmtree(place, ignore_errors=True)
    return Report(
        name="recovery",
        unit="s",
        onward=max(times),
        durability="disk",
        details={"rounds_s": [round(one, 3) for one in times], "folder_bytes": size},
    )


def _publish_and_kill(place: Path, *, batches: int) -> None:
    """Publish so much, and kill the broker while still more is being published."""
    with running("onward", place=place) as server:
        run_load(server.port, onward_speakers(), in_flight=4, requests=batches, warm_up_s=0)
        killing = threading.Timer(KILL_AFTER_S, server.kill)
        killing.start()
        with contextlib.suppress(OSError, Refused, Unavailable):
            run_load(server.port, onward_speakers(), in_flight=4, seconds=GIVE_UP_S, warm_up_s=0)
        killing.join()


def _restart(place: Path) -> float:
    started_at = time.perf_counter()
    with running("onward", place=place) as server:
        publish_one(server.port)
        elapsed = time.perf_counter() - started_at
        server.kill()
    return elapsed


def publish_one(port: int) -> None:
    """Publish one message, as soon as the broker takes it."""
    speaker = OnwardSpeaker("bench", [BODY], producer_id=time.time_ns())
    with socket.create_connection(("127.0.0.1", port), timeout=GIVE_UP_S) as connection:
        connection.sendall(speaker.greeting())
        received = b""
        while not speaker.is_greeted(received):
            received += _receive(connection)
        connection.sendall(speaker.request())
        while not speaker.answers(_receive(connection)):
            pass


def _receive(connection: socket.socket) -> bytes:
    received = connection.recv(65_536)
    if not received:
        raise Refused("the broker closed the connection")
    return received
