"""Simulated work takes its time: not less, and no whole millisecond more."""

import asyncio
import time

import pytest

from onward.bench.pauses import Pauses


async def test_no_pause_is_too_short_and_they_end_in_order() -> None:
    took: list[float] = []

    async def pause(pauses: Pauses) -> None:
        started_at = time.monotonic()
        await pauses.one()
        took.append(time.monotonic() - started_at)

    async with Pauses(0.002) as pauses:
        ended: list[int] = []
        for number in range(20):
            pauses.one().add_done_callback(lambda _, number=number: ended.append(number))
            await asyncio.sleep(0)
        await asyncio.gather(*(pause(pauses) for _ in range(20)))
        await pause(pauses)
    assert min(took) >= 0.002
    assert ended == list(range(20))


async def test_the_pauses_of_many_are_one_and_not_one_after_another() -> None:
    async with Pauses(0.05) as pauses:
        started_at = time.monotonic()
        await asyncio.gather(*(pauses.one() for _ in range(200)))
    assert time.monotonic() - started_at < 5


async def test_what_waits_at_the_end_is_cancelled() -> None:
    async with Pauses(60) as pauses:
        given_up, waiting = pauses.one(), pauses.one()
        given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
