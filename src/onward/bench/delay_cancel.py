"""delay-cancel: with 1 M messages waiting, how many can be cancelled per second, and is it true?

    schedule 1 M ──▶ cancel in batches ──▶ cancel singly ──▶ cancel while they fire ──▶ read

Batches have 10,000 ids; singly means 64 tasks of one program, each awaiting one cancel after
another. Both take random ids, and end before the first message is due. Then all come due within ten
seconds, and 64 tasks go on cancelling random ones, of which some have fired. In the end the whole
topic is read: what was `cancelled` must not be in it, what had `fired` must be at the offset of the
answer, everything else must be there, and nothing twice. `wrong` counts what is not so: it must be
0. The figure is cancels/s in batches; `singly` is in the details. No peer.
"""

import asyncio
import random
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import uvloop

import onward
from onward.bench.delay_lateness import (
    LATE_S_MAX,
    TOPIC,
    check_in_time,
    schedule_all,
    starts_at_ms,
)
from onward.bench.peers import Server, started
from onward.bench.report import Options, Report, rounded
from onward.protocol.operations.schedule import CancelResult

COUNT = 1_000_000
FILLED_PER_SECOND = 40_000
SEED = 1
BATCH_IDS = 10_000
BATCHED_SHARE = 5
TASKS = 64
SINGLY_S = 5.0
CANCELLING_S = 30
"""Cancelling has so long before the first message is due."""
DUE_WITHIN_MS = 10_000


@dataclass(kw_only=True)
class Answers:
    """What the broker answered, to be compared with what it did."""

    cancelled: set[int] = field(default_factory=set)
    fired: dict[int, int] = field(default_factory=dict)
    """The offset of each that had fired."""
    odd: int = 0
    """Answers that cannot be right, whatever was delivered."""

    def note(self, results: Sequence[CancelResult]) -> None:
        """Take the answers to one call."""
        for one in results:
            if one.state == "cancelled" and one.id not in self.fired:
                self.cancelled.add(one.id)
            elif one.state == "fired" and one.offset is not None and one.id not in self.cancelled:
                self.fired[one.id] = one.offset
            else:
                self.odd += 1

    def wrong(self, delivered: Sequence[int], *, scheduled: int) -> int:
        """Count what does not agree with the ids in the topic, by offset."""
        ids = set(delivered)
        twice = len(delivered) - len(ids)
        lied = len(ids & self.cancelled)
        lost = scheduled - len(ids | self.cancelled)
        misplaced = sum(
            offset >= len(delivered) or delivered[offset] != one
            for one, offset in self.fired.items()
        )
        return self.odd + twice + lied + lost + misplaced


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run saw."""

    batched_per_second: float
    singly_per_second: float
    answers: Answers
    wrong: int
    delivered: int
    is_in_time: bool
    server_mb: float


def run(options: Options) -> Report:
    """Measure cancels per second, and check every answer."""
    count = options.count or COUNT
    with started("onward", folder=options.folder, keep=options.keep) as server:
        found = uvloop.run(_measure(server, count, options))
    return Report(
        name="delay-cancel",
        unit="cancels/s",
        onward=found.batched_per_second,
        durability="disk",
        details={
            "singly": rounded(found.singly_per_second),
            "wrong": found.wrong,
            "cancelled": len(found.answers.cancelled),
            "fired_before": len(found.answers.fired),
            "delivered": found.delivered,
            "messages": count,
            "is_in_time": found.is_in_time,
            "server_mb": rounded(found.server_mb),
        },
    )


async def _measure(server: Server, count: int, options: Options) -> Outcome:
    chosen = random.Random(SEED)  # a seed, so that every run is alike
    start_ms = starts_at_ms(count, per_second=FILLED_PER_SECOND) + CANCELLING_S * 1000
    moments = [start_ms + chosen.randrange(DUE_WITHIN_MS) for _ in range(count)]
    ids = list(range(count))
    chosen.shuffle(ids)
    answers = Answers()
    async with onward.connect(f"127.0.0.1:{server.port}") as mq:
        await mq.create_topic(TOPIC)
        await schedule_all(mq, moments)
        check_in_time(server, start_ms)
        batched, rest = ids[: count // BATCHED_SHARE], ids[count // BATCHED_SHARE :]
        batched_per_second = await _cancel_batched(mq, batched, answers)
        options.say(f"batches of {BATCH_IDS:,}: {batched_per_second:,.0f} cancels/s")
        stop_ms = min(time.time() * 1000 + SINGLY_S * 1000, start_ms)
        singly_per_second = await _cancel_singly(mq, rest, answers, until_ms=stop_ms)
        options.say(f"singly: {singly_per_second:,.0f} cancels/s")
        is_in_time = time.time() * 1000 < start_ms
        await asyncio.sleep(max(0.0, start_ms / 1000 - time.time()))
        # They race with the firing: some answers are that a message has fired.
        await _cancel_singly(mq, rest, answers, until_ms=start_ms + DUE_WITHIN_MS)
        delivered = await _delivered(mq)
    return Outcome(
        batched_per_second=batched_per_second, singly_per_second=singly_per_second,
        answers=answers, wrong=answers.wrong(delivered, scheduled=count),
        delivered=len(delivered), is_in_time=is_in_time, server_mb=server.highest_mb(),
    )  # fmt: skip


async def _cancel_batched(mq: onward.Client, ids: Sequence[int], answers: Answers) -> float:
    started_at = time.perf_counter()
    for start in range(0, len(ids), BATCH_IDS):
        answers.note(await mq.cancel_scheduled(ids[start : start + BATCH_IDS]))
    return len(ids) / (time.perf_counter() - started_at)


async def _cancel_singly(
    mq: onward.Client, ids: list[int], answers: Answers, *, until_ms: float
) -> float:
    """Cancel from the end of `ids`, one id a call, until a moment; return the rate."""
    count = 0

    async def cancel() -> None:
        nonlocal count
        while ids and time.time() * 1000 < until_ms:
            answers.note(await mq.cancel_scheduled([ids.pop()]))
            count += 1

    started_at = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(TASKS):
            group.create_task(cancel())
    return count / (time.perf_counter() - started_at)


async def _delivered(mq: onward.Client) -> Sequence[int]:
    """Return the schedule ids in the topic, by offset, when nothing waits any more."""
    ids = array("q")
    async with asyncio.timeout(LATE_S_MAX):
        while (await mq.status())["scheduled"]:  # noqa: ASYNC110  # the broker tells nobody
            await asyncio.sleep(0.1)
    async for batch in mq.read(TOPIC).batches():
        ids.extend(one if one is not None else -1 for one in batch.columns.schedule_ids or ())
    return ids
