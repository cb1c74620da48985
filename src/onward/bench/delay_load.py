"""delay-load: 10 M messages of 200 bytes, each with a time of its own, anywhere in two years.

    plain publishing ──▶ 1 M scheduled ──▶ the rest scheduled ──▶ kill -9 ──▶ ready again

Batches of 1,000, four in flight on each of four connections, on disk before the ack. The peer is
plain publishing of the same bodies in the same way to a broker of its own (`publish-bulk`): the
ratio is what the times cost. `highest_mb` is the most memory that the broker ever had, up to 1 M
and up to all of them, `aside_mb` that of the child which sorts. The broker is killed right after
the last ack, when it has most to do again; `ready_s` runs from its start to its first publish.
"""

import random
import secrets
import struct
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from statistics import harmonic_mean

import uvloop

import onward
from onward.bench.load import run_load
from onward.bench.memory import sampled
from onward.bench.peers import Server, running, started
from onward.bench.publish_bulk import BODY, CONNECTIONS, IN_FLIGHT, MESSAGES, onward_speakers
from onward.bench.recovery import publish_one
from onward.bench.report import Options, Report, rounded
from onward.bench.speakers import OnwardSpeaker, Speaker
from onward.message.batch import HEADER_BYTES, encode_batch

COUNT = 10_000_000
FIRST_COUNT = 1_000_000
PLAIN_COUNT_MAX = 2_000_000
TOPIC = "bench"
AHEAD_MS = 3_600_000
"""Nothing is due while it is measured."""
SPAN_BITS = 36
"""Times lie within 2^36 ms, which is 2.2 years."""
_DUE_AT = HEADER_BYTES + 3 * 8
"""The column of times is the first of three: it begins right after the directory."""


class ScheduleSpeaker(OnwardSpeaker):
    """Schedules the same bodies again and again, each time at other random times."""

    def __init__(self, bodies: list[bytes], *, in_flight: int = 1, seed: int = 0) -> None:
        super().__init__(
            "@schedule", bodies, producer_id=secrets.randbits(63) | 1, in_flight=in_flight
        )
        count = len(bodies)
        # One number of many words: random times for a whole batch cost a few operations.
        self._mask = _repeated((1 << SPAN_BITS) - 1, count)
        self._first = _repeated(time.time_ns() // 1_000_000 + AHEAD_MS, count)
        self._bits = 64 * count
        self._random = random.Random(seed)  # a seed, so that every run is alike
        self._due_at = self._start + _DUE_AT

    def batch(self, bodies: list[bytes], producer_id: int) -> bytes:
        """Return a batch whose times are still to be written."""
        count = len(bodies)
        return encode_batch(
            bodies, producer_id=producer_id, due_at_ms=[0] * count, topics=[TOPIC] * count
        )

    def prepare(self, prepared: bytearray) -> None:
        """Write times into a frame."""
        times = (self._random.getrandbits(self._bits) & self._mask) + self._first
        prepared[self._due_at : self._due_at + self._bits // 8] = times.to_bytes(
            self._bits // 8, "little"
        )


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What was seen while so many were scheduled."""

    count: int
    per_second: float
    highest_mb: float
    aside_mb: float

    def details(self) -> dict[str, object]:
        """Return what goes into the report."""
        return {
            "messages": self.count,
            "per_second": rounded(self.per_second),
            "highest_mb": rounded(self.highest_mb),
            "aside_mb": rounded(self.aside_mb),
        }


def run(options: Options) -> Report:
    """Measure scheduled messages accepted per second, the memory they take, and the restart."""
    count = options.count or COUNT
    plain = _plain(min(count, PLAIN_COUNT_MAX), options)
    place = Path(tempfile.mkdtemp(prefix="onward-bench-delay-", dir=options.folder))
    try:
        with running("onward", place=place) as server:
            stages = [_schedule(server, some) for some in _stage_counts(count)]
            for stage in stages:
                options.say(f"scheduled: {stage.details()}")
            settings = server.settings
            server.kill()
        ready_s, waiting, stored = _restart(place)
        options.say(f"ready {ready_s:.2f} s after the start, {waiting:,} messages wait")
        # Each of them, and none twice: nothing is due yet.
        assert waiting == stored >= count, f"{waiting} messages wait, {stored} were scheduled"
        size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    finally:
        if not options.keep:
            rmtree(place, ignore_errors=True)
    weights = [stage.count for stage in stages]
    return Report(
        name="delay-load",
        unit="messages/s",
        onward=harmonic_mean([stage.per_second for stage in stages], weights),
        peers={"plain publishing": plain},
        durability="disk",
        details={
            "stages": [stage.details() for stage in stages],
            "ready_s": round(ready_s, 3),
            "waiting": waiting,
            "folder_bytes": size,
            "settings": settings,
        },
    )


def _plain(count: int, options: Options) -> float:
    with started("onward", folder=options.folder, keep=options.keep) as server:
        rate = _rate(server, onward_speakers(), count)
    options.say(f"plain publishing: {rate:,.0f} messages/s")
    return rate


def _stage_counts(count: int) -> list[int]:
    """Return how many are scheduled before each look at the memory."""
    return [count] if count <= FIRST_COUNT else [FIRST_COUNT, count - FIRST_COUNT]


def _schedule(server: Server, count: int) -> Stage:
    speakers = [
        ScheduleSpeaker([BODY] * MESSAGES, in_flight=IN_FLIGHT, seed=seed)
        for seed in range(CONNECTIONS)
    ]
    with sampled(server.children_mb) as aside:
        rate = _rate(server, speakers, count)
    return Stage(
        count=count, per_second=rate, highest_mb=server.highest_mb(), aside_mb=max(aside)
    )  # fmt: skip


def _rate(server: Server, speakers: "list[Speaker] | list[ScheduleSpeaker]", count: int) -> float:
    load = run_load(
        server.port, speakers, in_flight=IN_FLIGHT, requests=-(-count // MESSAGES), warm_up_s=0
    )
    return load.per_second * MESSAGES


def _restart(place: Path) -> tuple[float, int, int]:
    """Return how long the start takes, how many messages wait then, and how many were scheduled."""
    started_at = time.perf_counter()
    with running("onward", place=place) as server:
        publish_one(server.port)
        elapsed = time.perf_counter() - started_at
        return elapsed, *uvloop.run(_waiting(server))


async def _waiting(server: Server) -> tuple[int, int]:
    async with onward.connect(f"127.0.0.1:{server.port}") as mq:
        stored = (await mq.topic("@schedule")).next_offset
        return int((await mq.status())["scheduled"]), stored


def _repeated(word: int, count: int) -> int:
    return int.from_bytes(struct.pack("<Q", word) * count, "little")
